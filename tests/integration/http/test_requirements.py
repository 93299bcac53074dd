"""Requirements for servers with untrusted clients, as far as no other test covers them."""

import base64
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.support import repositories
from tests.support.servers import Server, Start, running, write_tokens
from tests.support.wire.grpc_calls import request_of, stub
from tests.support.wire.raw_http import Http, json_input

TOKEN, WRONG = "0123456789abcdef-all", "0123456789abcdef-wrong"
SCRAPER = "0123456789abcdef-metrics"
ADMIN_KEY, GRPC_ADMIN = "let-me-over-http", "let-me-over-grpc"
ROW = np.array([1], np.int32)
CONSTANT_BODY = {"inputs": [json_input("INPUT0", ROW)]}


# The headers that this server forwards to its models.
FORWARDED_HEADERS = "^(x-|sequence_|priority|timeout|binary_|triton_)"


@pytest.fixture(scope="module")
def server(folder: Path, start: Start) -> Server:
    """Explicit mode, every listener, verbose; what Triton forwards to models is asked for."""
    repository = folder / "models"
    repositories.add(repository, "echo_request", "constant")
    repositories.add_as(folder / "elsewhere", "secret", "constant")
    (repository / "link").symlink_to(folder / "elsewhere" / "secret")
    flags = [
        "--model-control-mode=explicit",
        "--load-model=echo_request",
        "--load-model=constant",
        f"--http-unix-socket={folder / 'socket'}",
        f"--http-header-forward-pattern={FORWARDED_HEADERS}",
        "--grpc-header-forward-pattern",
        FORWARDED_HEADERS,
        "--log-verbose=2",
    ]
    return start(repository, *flags, grpc=True)


@pytest.fixture(scope="module")
def call(server: Server) -> Iterator[Any]:
    with stub(server) as grpc_stub:
        yield grpc_stub


def refusal(send_call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error_info:
        send_call()
    return error_info.value.code(), error_info.value.details()


def test_sockets_are_in_the_run_directory(server: Server, folder: Path) -> None:
    """Processes communicate over sockets in the run directory, and not over abstract names."""
    names = {
        str(connection.laddr)
        for process in server.tree()
        for connection in process.net_connections("unix")
        if connection.laddr
    }
    assert str(folder / "socket") in names
    other_names = names - {str(folder / "socket")}
    assert other_names
    assert all(name.startswith(f"{server.run_dir}/") for name in other_names), other_names
    assert os.stat(server.run_dir).st_mode & 0o777 == 0o700


def test_only_configured_listeners_exist(server: Server) -> None:
    """Holds for a server that listens on loopback only."""
    listening = {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in server.tree()
        for connection in process.net_connections("inet")
        if connection.status == "LISTEN" or connection.type == socket.SOCK_DGRAM
    }
    ports = (server.http_port, server.grpc_port, server.metrics_port)
    assert listening == {("127.0.0.1", port) for port in ports}


# Names that a client must not set, as a parameter or as a forwarded header.
HEADERS = {
    "sequence_id": "7", "sequence_start": "true", "priority": "3", "timeout": "1",
    "binary_data_output": "true", "headers": "x", "triton_enable_empty_final_response": "true",
    "shared_memory_region": "r", "x-other": "y",
}  # fmt: skip


def test_headers_only_become_parameters(http: Http, call: Any) -> None:
    """A matching header becomes a parameter; reserved names are refused, others ignored."""
    request = request_of("echo_request", ROW, "INT32")
    request.parameters["mine"].int64_param = 1
    body = {**CONSTANT_BODY, "parameters": {"mine": 1}}
    plain_headers = {"x-other": "y", "headers": "x", "shared_memory_region": "r"}
    reply = http.infer("echo_request", body, plain_headers).ok()
    over_http = json.loads(reply.tensors()["OUTPUT0"][0])
    response = call.ModelInfer(request, metadata=[*plain_headers.items()], timeout=20)
    for answer in (over_http, json.loads(response.raw_output_contents[0][4:])):
        assert answer["parameters"] == {"mine": 1, "x-other": "y"}
        assert (answer["correlation_id"], answer["flags"], answer["timeout"]) == (0, 0, 0)
    for name in HEADERS.keys() - plain_headers.keys():
        text = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
        refused_reply = http.infer("echo_request", body, {name: HEADERS[name]})
        assert (refused_reply.status, refused_reply.error.lower()) == (400, text.lower())
        if name != "timeout":  # gRPC's own
            metadata = [(name, HEADERS[name])]
            code, message = refusal(lambda: call.ModelInfer(request, metadata=metadata, timeout=20))  # noqa: B023
            assert (code, message) == (grpc.StatusCode.INVALID_ARGUMENT, text)


NAMES = ["..", ".", "../elsewhere/secret", "/etc", "a/b", "a\\b", "\x00", "constant\x00"]
LOADABLE_NAMES = ["link", "a\u2024b", "CONSTANT", "constant ", "\uff43onstant", "x" * 129]
UNKNOWN_NAMES = [*LOADABLE_NAMES, "constant\n", "", "x" * 256]


@pytest.mark.parametrize("name", NAMES + UNKNOWN_NAMES)
def test_a_model_name_cannot_leave_the_repository(
    server: Server, http: Http, call: Any, folder: Path, name: str
) -> None:
    """Any model name, in any encoding, names only a folder of the repository."""
    titles_before = server.titles()
    escaped = "".join(f"%{byte:02x}" for byte in name.encode())
    config = {"name": name, "backend": "python"}
    override = {"config": json.dumps(config), "file:1/model.py": base64.b64encode(b"x").decode()}
    # A valid name may be that of a model whose files are in the request, but not of a folder
    # elsewhere.
    for parameters in ({},) if name in LOADABLE_NAMES else ({}, override):
        reply = http.post(f"/v2/repository/models/{escaped}/load", {"parameters": parameters})
        assert reply.status in (400, 404, 500), reply.body
        assert str(folder) not in reply.error
    for path in (f"/v2/models/{escaped}/config", f"/v2/models/{escaped}/versions/1/config"):
        assert http.get(path).status in (400, 404)
    request = pb.RepositoryModelLoadRequest(model_name=name)
    code, text = refusal(lambda: call.RepositoryModelLoad(request, timeout=20))
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    assert str(folder) not in text
    infer_request = request_of(name, ROW, "INT32")
    assert refusal(lambda: call.ModelInfer(infer_request, timeout=20))[0] in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
    )
    assert server.titles() == titles_before


@pytest.mark.parametrize(
    "version", ["..", "../1", "1/..", "-1", "0x1", "1e0", " 1", "1\x00", "9" * 30]
)
def test_a_version_is_a_number(http: Http, call: Any, version: str) -> None:
    escaped_version = "".join(f"%{byte:02x}" for byte in version.encode())
    for path in ("config", "infer", "ready"):
        for version_text in (escaped_version, version if version.isalnum() else escaped_version):
            method = "POST" if path == "infer" else "GET"
            body = CONSTANT_BODY if path == "infer" else None
            reply = http.call(method, f"/v2/models/constant/versions/{version_text}/{path}", body)
            assert reply.status in (400, 404), (path, reply.body)
    request = request_of("constant", ROW, "INT32")
    request.model_version = version
    assert refusal(lambda: call.ModelInfer(request, timeout=20))[0] in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
    )


@pytest.mark.parametrize(
    "path",
    ["../x", "/x", "1/../../x", "1/./../x", "..", "", "1/a\\..\\x", "1/x\x00", "1/" + "x" * 256],
)
def test_files_of_a_load_stay_in_a_folder(http: Http, call: Any, folder: Path, path: str) -> None:
    """Holds for both listeners; the files that a configuration names must be in the folder, too."""
    names_before = {name for _, _, names in os.walk(folder) for name in names}
    config = http.get("/v2/models/constant/config").ok().json()
    sent = {"config": json.dumps(config), f"file:{path}": base64.b64encode(b"x").decode()}
    reply = http.post("/v2/repository/models/constant/load", {"parameters": sent})
    assert reply.status in (400, 500), reply.body
    request = pb.RepositoryModelLoadRequest(model_name="constant")
    request.parameters["config"].string_param = json.dumps(config)
    request.parameters[f"file:{path}"].bytes_param = b"x"
    code, _ = refusal(lambda: call.RepositoryModelLoad(request, timeout=20))
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    parameters = {"config": json.dumps({**config, "default_model_filename": f"../{path}"})}
    reply = http.post("/v2/repository/models/constant/load", {"parameters": parameters})
    assert reply.status in (400, 500), reply.body
    assert {name for _, _, names in os.walk(folder) for name in names} == names_before
    assert http.infer("constant", CONSTANT_BODY).ok().tensors()["OUTPUT0"][0] == 1


def test_foreign_host_headers_are_refused_at_every_port(server: Server) -> None:
    """Holds for the metrics port, too."""
    for port, path in ((server.http_port, "/v2"), (server.metrics_port, "/metrics")):
        with contextlib.closing(Http(port)) as http:
            assert http.get(path, {"Host": f"evil.example:{port}"}).status == 421
            assert http.get(path, {"Host": f"127.0.0.1:{port}"}).status == 200
            headers = http.get(path).headers
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert not {"Server", "X-Powered-By", "Access-Control-Allow-Origin"} & set(headers)


def test_no_secret_is_seen_anywhere(folder: Path) -> None:
    """Logs, command lines, environments, the run directory and answers, also after a restart."""
    repositories.add(folder / "guarded", "constant")
    tokens = write_tokens(folder / "tokens", TOKEN, f"{SCRAPER} metrics")
    flags = [
        f"--auth-token-file={tokens}",
        f"--http-restricted-api=statistics,logging:admin-key={ADMIN_KEY}",
        f"--grpc-restricted-protocol=statistics,logging:admin-key={GRPC_ADMIN}",
        "--log-verbose=2",
    ]
    answers: list[str] = []
    with running(folder / "guarded", *flags, grpc=True) as server:

        def send_requests() -> None:
            with server.http() as http, stub(server) as call:
                credentials = (
                    (TOKEN, ADMIN_KEY),
                    (TOKEN, "x"),
                    (WRONG, ADMIN_KEY),
                    (SCRAPER, ADMIN_KEY),
                )
                for token, admin in credentials:
                    headers = {"Authorization": f"Bearer {token}", "admin-key": admin}
                    paths = ("/v2", "/v2/logging", "/v2/models/stats", "/nothing")
                    answers.extend(repr(http.get(path, headers)) for path in paths)
                    metadata = [
                        ("authorization", f"Bearer {token}"),
                        (
                            "triton-grpc-protocol-admin-key",
                            GRPC_ADMIN if admin == ADMIN_KEY else "x",
                        ),
                    ]
                    for method, request in (
                        (call.ModelStatistics, pb.ModelStatisticsRequest()),
                        (call.LogSettings, pb.LogSettingsRequest()),
                        (call.ModelConfig, pb.ModelConfigRequest(name="nothing")),
                    ):
                        try:
                            answers.append(str(method(request, metadata=metadata, timeout=20)))
                        except grpc.RpcError as error:
                            answers.append(f"{error.details()} {error.trailing_metadata()}")

        def visible_texts() -> Iterator[str]:
            yield server.log()
            yield from answers
            for process in server.tree():
                for name in ("cmdline", "environ"):
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                        raw = Path(f"/proc/{process.pid}/{name}").read_bytes()
                        yield raw.decode(errors="replace")
            for path, names, files in os.walk(server.run_dir):
                yield from (path, *names, *files)
                for file in files:
                    if Path(path, file).is_file():
                        yield Path(path, file).read_bytes().decode(errors="replace")

        send_requests()
        for title in ("gateway http 0", "scheduler constant", "worker constant.0"):
            server.find_one(title).kill()
        server.wait_ready()
        send_requests()
        secrets = (TOKEN, WRONG, SCRAPER, ADMIN_KEY, GRPC_ADMIN)
        found = [text for text in visible_texts() if any(secret in text for secret in secrets)]
        assert found == []
        assert "log_verbose_level" in "".join(answers)
