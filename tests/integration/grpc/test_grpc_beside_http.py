"""gRPC beside HTTP, with tritonclient: the same models, the same regions, the same rules."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from shmserve.gateway.grpc.service import RPCS
from tests.support import repositories
from tests.support.regions import SharedObject
from tests.support.servers import Server, Start, write_tokens
from tests.support.users import ALICE, BOB, needs_users, tunnel
from tests.support.wire.grpc_calls import request_of, set_region_range, stub
from tests.support.wire.raw_http import Http, region_request
from tests.support.wire.triton import infer_inputs

TOKEN, PROGRAM = "0123456789abcdef-all", "0123456789abcdef-program"
VALUES = np.arange(1024, dtype=np.float32)
SIZE = VALUES.nbytes
DISABLED_TEXT = "Client shared memory is disabled"


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, "identity", "simple", "text", "gated")
    flags = ["--model-control-mode=explicit", "--shm-overlap=error"]
    flags += [f"--load-model={name}" for name in ("identity", "simple", "text", "gated")]
    return start(models, *flags, grpc=True)


@pytest.fixture(scope="module")
def shared_client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with connected(server.grpc_port) as client:
        assert client.is_server_live()
        yield client


@pytest.fixture
def client(
    server: Server, shared_client: triton.InferenceServerClient
) -> Iterator[triton.InferenceServerClient]:
    yield shared_client
    shared_client.unregister_system_shared_memory()


@pytest.fixture
def http(server: Server) -> Iterator[Http]:
    with server.http() as connection:
        yield connection
        connection.unregister().ok()


@contextlib.contextmanager
def connected(port: int) -> Iterator[triton.InferenceServerClient]:
    options = [
        ("grpc.use_local_subchannel_pool", 1),  # a connection that no other client shares
        ("grpc.max_receive_message_length", 2**31 - 1),
    ]
    with contextlib.closing(
        triton.InferenceServerClient(f"127.0.0.1:{port}", channel_args=options)
    ) as client:
        yield client


def from_region(name: str) -> tuple[list[Any], list[Any]]:
    tensor = triton.InferInput("INPUT0", [VALUES.size], "FP32")
    tensor.set_shared_memory(name, SIZE)
    requested_outputs = triton.InferRequestedOutput("OUTPUT0")
    requested_outputs.set_shared_memory(name, SIZE, SIZE)
    return [tensor], [requested_outputs]


def infer_in(client: triton.InferenceServerClient, name: str, headers: Any = None) -> None:
    inputs, outputs = from_region(name)
    client.infer("identity", inputs, outputs=outputs, headers=headers)


def refused(action: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as error_info:
        action()
    return error_info.value.status(), error_info.value.message()


def test_an_overlap_names_its_request(server: Server, client: triton.InferenceServerClient) -> None:
    """Also where the same request was understood before."""
    request = request_of("gated", np.zeros((1, 4), np.int32), "INT32", "again")
    set_region_range(request.outputs.add(name="OUTPUT0"), "twice", 16)
    with SharedObject(SIZE) as shared_object, stub(server) as call:
        client.register_system_shared_memory("twice", shared_object.key, SIZE)
        valid_call = call.ModelInfer.future(request, timeout=20)
        running_visit = server.gate.next()
        (refusal,) = call.ModelStreamInfer(iter([request]), timeout=20)
        running_visit.release()
        assert valid_call.result().id == "again"
    assert "overlaps an output of a request in flight" in refusal.error_message
    assert refusal.infer_response.id == "again"


# --- regions


def test_a_region_of_http_is_one_of_grpc_and_the_reverse(
    client: triton.InferenceServerClient, http: Http
) -> None:
    """A region is usable over the other listener in the next call, and removed there, too."""
    with SharedObject(2 * SIZE) as shared_object:
        shared_object.write(VALUES)
        for _ in range(5):
            shared_object.write(bytes(SIZE), SIZE)
            http.register("over", shared_object.key, 2 * SIZE).ok()
            for _ in range(2):  # the second request uses the schema of the first
                infer_in(client, "over")
            assert (shared_object.read(np.float32, VALUES.size, SIZE) == VALUES).all()
            regions = client.get_system_shared_memory_status().regions
            assert (regions["over"].key, regions["over"].byte_size) == (shared_object.key, 2 * SIZE)
            client.unregister_system_shared_memory("over")
            assert http.regions().json() == []
            code, text = refused(lambda: infer_in(client, "over"))
            assert code == "StatusCode.NOT_FOUND"
            assert "Unable to find shared memory region: 'over'" in text

            shared_object.write(bytes(SIZE), SIZE)
            client.register_system_shared_memory("over", shared_object.key, 2 * SIZE)
            http.infer("identity", region_request("over", SIZE)).ok()
            assert (shared_object.read(np.float32, VALUES.size, SIZE) == VALUES).all()
            http.unregister("over").ok()
            assert not client.get_system_shared_memory_status().regions
            assert refused(lambda: infer_in(client, "over"))[0] == "StatusCode.NOT_FOUND"


@needs_users
def test_users(server: Server, client: triton.InferenceServerClient) -> None:
    """Over gRPC on loopback a user sees and uses only its own regions."""
    with contextlib.ExitStack() as stack:
        alice, bob = (
            stack.enter_context(connected(stack.enter_context(tunnel(server.grpc_port, uid))))
            for uid in (ALICE, BOB)
        )
        her_object, ours = (stack.enter_context(SharedObject(2 * SIZE)) for _ in range(2))
        her_object.write(VALUES)
        os.fchown(her_object.fd, ALICE, -1)
        code, text = refused(
            lambda: alice.register_system_shared_memory("ours", ours.key, 2 * SIZE)
        )
        assert code == "StatusCode.PERMISSION_DENIED"
        assert f"the client is uid {ALICE}" in text
        alice.register_system_shared_memory("hers", her_object.key, 2 * SIZE)
        for _ in range(2):
            infer_in(alice, "hers")
        assert (her_object.read(np.float32, VALUES.size, SIZE) == VALUES).all()
        for other_client in (bob, client):
            for _ in range(2):
                code, text = refused(partial(infer_in, other_client, "hers"))
                assert (code, "another user" in text) == ("StatusCode.NOT_FOUND", True)
            assert not other_client.get_system_shared_memory_status().regions
            other_client.unregister_system_shared_memory("hers")
        assert list(alice.get_system_shared_memory_status().regions) == ["hers"]
        alice.unregister_system_shared_memory()
        assert not alice.get_system_shared_memory_status().regions


# --- permissions


@pytest.fixture(scope="module")
def guarded(folder: Path, start: Start) -> Server:
    """Start a server on all addresses that admits clients with a token."""
    repositories.add(folder / "models", "identity")
    tokens = write_tokens(folder / "tokens", TOKEN, f"{PROGRAM} inference,metadata")
    flags = [
        "--grpc-address=0.0.0.0",
        f"--auth-token-file={tokens}",
        "--grpc-restricted-protocol=model-repository,model-config:admin-key=let-me",
    ]
    return start(folder / "models", *flags, grpc=True)


@pytest.fixture(scope="module")
def tokenless(guarded: Server) -> Iterator[triton.InferenceServerClient]:
    with connected(guarded.grpc_port) as client:
        assert client.is_server_live()
        yield client


def bearer(token: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", **headers}


def test_requests_of_unauthorised_clients_are_refused_unread(guarded: Server) -> None:
    """The connection is refused before its requests are read, which may have 2 GB each."""
    never_set = threading.Event()

    def silent() -> Iterator[bytes]:
        never_set.wait(60)
        yield from ()

    try:
        with grpc.insecure_channel(guarded.grpc_url) as channel:
            for path, rpc in RPCS.items():
                if rpc.scope == "health":
                    continue
                # Some calls use gRPC's general code path, and most use the fast one.
                calls = [channel.stream_stream(path)(silent(), timeout=15) for _ in range(70)]
                for call in calls:
                    with pytest.raises(grpc.RpcError):
                        next(call)
                    assert call.code() is grpc.StatusCode.UNAUTHENTICATED, path
    finally:
        never_set.set()


def test_a_token_opens_its_scopes(tokenless: triton.InferenceServerClient) -> None:
    headers = bearer(PROGRAM)
    inputs = infer_inputs(triton, INPUT0=VALUES)
    result = tokenless.infer("identity", inputs, headers=headers)
    assert (result.as_numpy("OUTPUT0") == VALUES).all()
    assert tokenless.get_server_metadata(headers).name == "triton"
    code, text = refused(lambda: tokenless.get_inference_statistics(headers=headers))
    assert code == "StatusCode.PERMISSION_DENIED"
    assert text == "this token has no access to the statistics API"


def test_a_restricted_protocol_needs_its_header(tokenless: triton.InferenceServerClient) -> None:
    expected = (
        "StatusCode.UNAVAILABLE",
        "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'",
    )
    for headers in (
        bearer(TOKEN),
        bearer(TOKEN, **{"triton-grpc-protocol-admin-key": "let-us"}),
        bearer(TOKEN, **{"admin-key": "let-me"}),
    ):
        send_call = partial(tokenless.get_model_config, "identity", "", headers)
        assert refused(send_call) == expected
    headers = bearer(TOKEN, **{"triton-grpc-protocol-admin-key": "let-me"})
    assert tokenless.get_model_config("identity", "", headers).config.name == "identity"
    assert tokenless.get_model_repository_index(headers).models[0].name == "identity"


def test_other_hosts_own_no_regions(
    guarded: Server, tokenless: triton.InferenceServerClient
) -> None:
    """There are no regions even for a client that has some over HTTP."""
    headers = bearer(TOKEN)
    with SharedObject(2 * SIZE) as shared_object, guarded.http() as http:
        code, text = refused(
            lambda: tokenless.register_system_shared_memory(
                "one", shared_object.key, 2 * SIZE, headers=headers
            )
        )
        assert (code, text[: len(DISABLED_TEXT)]) == ("StatusCode.UNIMPLEMENTED", DISABLED_TEXT)
        register = {"key": shared_object.key, "byte_size": 2 * SIZE}
        path = "/v2/systemsharedmemory/region/one/register"
        http.post(path, register, {"Authorization": f"Bearer {TOKEN}"}).ok()
        assert not tokenless.get_system_shared_memory_status(headers=headers).regions
        code, text = refused(lambda: infer_in(tokenless, "one", headers))
        assert (code, text[: len(DISABLED_TEXT)]) == ("StatusCode.UNIMPLEMENTED", DISABLED_TEXT)
        path = "/v2/systemsharedmemory/unregister"
        http.post(path, None, {"Authorization": f"Bearer {TOKEN}"}).ok()
