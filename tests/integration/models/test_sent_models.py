"""Files in a load request are executed as code; only permitted clients may send them."""

import base64
import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.support import repositories
from tests.support.servers import Server, running
from tests.support.users import ALICE, FRIENDS_GID, as_user, needs_users, tunnel
from tests.support.wire.grpc_calls import stub
from tests.support.wire.raw_http import Http, UnixHttp, json_request

TOKEN, INFERENCE_TOKEN = "0123456789abcdef-models", "0123456789abcdef-inference"
MODEL_CODE = (repositories.MODELS / "constant" / "1" / "model.py").read_bytes()
REQUEST_BODY = json_request(INPUT0=np.array([1], np.int32))
TEXT = (
    "the configuration or files of a model are accepted only from the user who runs the "
    "server, or with a token (--auth-token-file)"
)
ROW = {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [1]}
CONFIG = json.dumps({"backend": "python", "input": [ROW], "output": [{**ROW, "name": "OUTPUT0"}]})


def load_parameters_of(config: str) -> dict[str, str]:
    changed_code = MODEL_CODE.replace(b"ANSWER = 1", b"ANSWER = 2")
    return {"config": config, "file:1/model.py": base64.b64encode(changed_code).decode()}


def over_grpc(config: str) -> pb.RepositoryModelLoadRequest:
    request = pb.RepositoryModelLoadRequest(model_name="constant")
    request.parameters["config"].string_param = config
    request.parameters["file:1/model.py"].bytes_param = MODEL_CODE.replace(b"= 1", b"= 2")
    return request


@pytest.mark.parametrize("guarded", [False, True], ids=["insecure", "tokens"])
def test_which_clients_may_send_a_model(tmp_path: Path, guarded: bool) -> None:
    """Without tokens and with other hosts: no client. With tokens: clients with the scope."""
    repositories.add(tmp_path / "models", "constant")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN} model-repository,inference\n{INFERENCE_TOKEN} inference,metadata\n")
    tokens.chmod(0o600)
    flags = ["--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--model-control-mode=explicit"]
    flags += ["--load-model=constant"]
    flags += [f"--auth-token-file={tokens}"] if guarded else ["--insecure"]
    with (
        running(tmp_path / "models", *flags, grpc=True) as server,
        server.http() as http,
        stub(server) as call,
    ):
        config = json.dumps({"backend": "python", "input": [], "output": []})
        admin, other = ({"Authorization": f"Bearer {token}"} for token in (TOKEN, INFERENCE_TOKEN))
        path, load = "/v2/repository/models/constant/load", call.RepositoryModelLoad
        for headers in (other, {}):
            metadata = tuple((key.lower(), value) for key, value in headers.items())
            for parameters in (load_parameters_of(config), {"config": config}):
                refused_reply = http.post(path, {"parameters": parameters}, headers)
                assert refused_reply.status == (403 if headers or not guarded else 401)
                assert guarded or refused_reply.error == TEXT
            with pytest.raises(grpc.RpcError) as caught:
                load(over_grpc(config), metadata=metadata, timeout=20)
            assert caught.value.code() in (
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNAUTHENTICATED,
            )
            assert guarded or caught.value.details() == TEXT
        if not guarded:
            # With --insecure, any client may load the models of the repository.
            http.post(path).ok()
            assert http.infer("constant", REQUEST_BODY).ok().tensors()["OUTPUT0"][0] == 1
            return
        assert http.infer("constant", REQUEST_BODY, admin).ok().tensors()["OUTPUT0"][0] == 1
        http.post(path, {"parameters": load_parameters_of(CONFIG)}, admin).ok()
        assert http.infer("constant", REQUEST_BODY, admin).ok().tensors()["OUTPUT0"][0] == 2


def load_over_http(http: Http, parameters: dict[str, str]) -> str:
    body = {"parameters": parameters} if parameters else None
    reply = http.post("/v2/repository/models/constant/load", body)
    if reply.status == 403:
        return reply.error
    reply.ok()
    return ""


def load_over_grpc(call: Any, parameters: dict[str, str]) -> str:
    request = pb.RepositoryModelLoadRequest(model_name="constant")
    try:
        call.RepositoryModelLoad(over_grpc(CONFIG) if parameters else request, timeout=20)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
            raise
        return str(error.details())
    return ""


@contextlib.contextmanager
def loads_of(
    server: Server, socket: Path, listener: str, uid: int
) -> Iterator[Callable[[dict[str, str]], str]]:
    """Yield a function that sends a load request as user `uid`, a member of the server's group."""
    with contextlib.ExitStack() as stack:
        if listener == "unix":
            http: Http = stack.enter_context(contextlib.closing(UnixHttp(socket)))
            as_user(uid, lambda: http.get("/v2/health/live").ok(), (FRIENDS_GID,))
            yield partial(load_over_http, http)
        elif listener == "http":
            port = stack.enter_context(tunnel(server.http_port, uid))
            http = stack.enter_context(contextlib.closing(Http(port)))
            yield partial(load_over_http, http)
        else:
            port = stack.enter_context(tunnel(server.grpc_port, uid))
            call = stack.enter_context(stub(server, f"127.0.0.1:{port}"))
            yield partial(load_over_grpc, call)


@pytest.fixture(scope="module")
def server_and_socket() -> Iterator[tuple[Server, Path]]:
    """Yield a server that other users can connect to, and its Unix socket."""
    with tempfile.TemporaryDirectory() as temporary_directory:
        folder = Path(temporary_directory)
        folder.chmod(0o711)
        repositories.add(folder / "models", "constant")
        socket = folder / "socket"
        flags = ["--model-control-mode=explicit", "--load-model=constant"]
        flags += [f"--http-unix-socket={socket}", f"--shm-group={FRIENDS_GID}"]
        with running(folder / "models", *flags, grpc=True) as running_server:
            yield running_server, socket


@needs_users
@pytest.mark.parametrize("listener", ["http", "unix", "grpc"])
def test_which_users_may_send_models(server_and_socket: tuple[Server, Path], listener: str) -> None:
    """Only the server's user may send a model; others load those of the repository."""
    server, socket = server_and_socket
    with server.http() as http:

        def answer() -> int:
            return int(http.infer("constant", REQUEST_BODY).ok().tensors()["OUTPUT0"][0])

        with loads_of(server, socket, listener, ALICE) as load:
            assert load(load_parameters_of(CONFIG)) == TEXT
            if listener != "grpc":
                assert load({"config": CONFIG}) == TEXT
            assert load({}) == ""
            assert answer() == 1
        with loads_of(server, socket, listener, os.geteuid()) as load:
            assert load(load_parameters_of(CONFIG)) == ""
            assert answer() == 2
