"""Listeners and their access rules: Unix socket, other hosts, tokens, restricted APIs."""

import contextlib
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.cli import client
from tests.support import repositories
from tests.support.servers import Server, run_command, running, write_tokens
from tests.support.users import ALICE, FRIENDS_GID, as_user, needs_users
from tests.support.wire.raw_http import Http, Reply, UnixHttp, json_input

TOKEN, PROGRAM, SCRAPER = ("0123456789abcdef-all", "0123456789abcdef-program", "0123456789abcdef-m")
ROW = {"inputs": [json_input("INPUT0", np.ones(4, np.float32))]}


@pytest.fixture(scope="module")
def guarded_server(folder: Path) -> Iterator[Server]:
    """Start a server on all addresses that admits clients with a token."""
    repository = folder / "models"
    repositories.add(repository, "identity")
    tokens = write_tokens(
        folder / "tokens", TOKEN, f"{PROGRAM} inference,metadata", f"{SCRAPER} metrics"
    )
    flags = [
        "--http-address=0.0.0.0",
        f"--http-unix-socket={folder / 'socket'}",
        f"--shm-group={FRIENDS_GID}",
        f"--auth-token-file={tokens}",
        "--http-restricted-api=model-repository,model-config:admin-key=let-me",
        "--model-control-mode=explicit",
        "--load-model=identity",
        "--log-verbose=1",
    ]
    with running(repository, *flags, grpc=True) as running_server:
        yield running_server
    assert not (folder / "socket").exists()


@pytest.fixture
def http(guarded_server: Server) -> Iterator[Http]:
    with guarded_server.http() as connection:
        yield connection


@contextlib.contextmanager
def unix(path: Path) -> Iterator[UnixHttp]:
    with contextlib.closing(UnixHttp(path)) as connection:
        yield connection


def bearer(token: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **headers}


def test_without_a_token_there_is_only_health(http: Http) -> None:
    assert http.get("/v2/health/ready").status == 200
    for headers in ({}, bearer("0123456789abcdef-wrong"), {"Authorization": f"Basic {TOKEN}"}):
        for reply in (
            http.get("/v2", headers),
            http.infer("identity", ROW, headers),
            http.get("/v2/systemsharedmemory/status", headers),
            http.post("/v2/repository/index", None, headers),
            http.get("/v2/models/stats", headers),
        ):
            assert reply.status == 401 and reply.headers["WWW-Authenticate"] == "Bearer"
            assert "token" in reply.error


def test_the_shells_client_shows_a_token_and_a_header(
    guarded_server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token, header = f"--token-file={folder / 'tokens'}", "--header=admin-key: let-me"
    run_dir_flag = f"--run-dir={guarded_server.run_dir}"  # the HTTP address is known, too
    assert client.run(["config", "identity", run_dir_flag, token, header]) == 0
    assert '"name": "identity"' in capsys.readouterr().out
    for f, text in (
        ((header,), "requires a known token"),
        ((token,), "expecting header 'admin-key'"),
    ):
        assert client.run(["config", "identity", run_dir_flag, *f]) == 1
        assert f"http://0.0.0.0:{guarded_server.http_port}: " in (stderr := capsys.readouterr().err)
        assert text in stderr
    assert client.run(["config", "identity", f"--url=grpc://{guarded_server.grpc_url}"]) == 1
    error = "requires a known token: 'Authorization: Bearer TOKEN'; choose the file of a token with"
    assert f"{error} --token-file\n" in capsys.readouterr().err


def test_a_token_opens_its_scopes(http: Http) -> None:
    headers = bearer(PROGRAM)
    assert (http.infer("identity", ROW, headers).tensors()["OUTPUT0"] == 1).all()
    assert http.get("/v2", headers).status == 200
    for reply in (
        http.get("/v2/models/stats", headers),
        http.post("/v2/repository/index", None, headers),
        http.get("/v2/systemsharedmemory/status", headers),
    ):
        assert reply.status == 403 and "this token has no access to the" in reply.error
    assert http.get("/v2/models/stats", bearer(TOKEN)).status == 200


def test_restricted_apis_are_tritons(http: Http) -> None:
    expected = "This API is restricted, expecting header 'admin-key'"
    wrong = [bearer(TOKEN), bearer(TOKEN, **{"admin-key": "let"}), bearer(TOKEN, other="let-me")]
    for headers in wrong:
        for reply in (
            http.post("/v2/repository/index", None, headers),
            http.get("/v2/repository/index", headers),
            http.post("/v2/repository/models/identity/load", None, headers),
            http.get("/v2/models/identity/config", headers),
        ):
            assert (reply.status, reply.error) == (403, expected)
    right_headers = bearer(TOKEN, **{"Admin-Key": "let-me"})
    assert http.post("/v2/repository/index", None, right_headers).json()[0]["name"] == "identity"
    assert http.get("/v2/repository/index", right_headers).status == 405
    assert http.get("/v2/models/identity", bearer(TOKEN)).status == 200


def test_metrics_have_their_own_scope(guarded_server: Server) -> None:
    with contextlib.closing(Http(guarded_server.metrics_port)) as scraper:
        assert scraper.get("/metrics").status == 401
        assert scraper.get("/metrics", bearer(PROGRAM)).status == 403
        assert b"nv_inference_count" in scraper.get("/metrics", bearer(SCRAPER)).ok().body


def test_shared_memory_is_off_on_listeners_for_other_hosts(http: Http) -> None:
    """Register and unregister respond with Triton's text, and no region is listed or usable."""
    headers = bearer(TOKEN)
    text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to"
    body = {"key": "/nothing", "byte_size": 64}
    path = "/v2/systemsharedmemory/region/r"
    for reply in (
        http.post(f"{path}/register", body, headers),
        http.post(f"{path}/unregister", None, headers),
        http.post("/v2/systemsharedmemory/unregister", None, headers),
        http.post("/v2/cudasharedmemory/region/r/register", body, headers),
    ):
        assert reply.status == 501 and reply.error.startswith(text)
    assert http.get("/v2/systemsharedmemory/status", headers).ok().json() == []
    assert http.get(f"{path}/status", headers).status == 404


def test_the_unix_socket_is_for_the_servers_group(guarded_server: Server, folder: Path) -> None:
    path = folder / "socket"
    status = path.stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, FRIENDS_GID)
    with unix(path) as unix_client:
        assert unix_client.get("/v2").status == 200, "who runs the server needs no token there"
        assert unix_client.get("/v2/systemsharedmemory/status").ok().json() == []
        assert unix_client.get("/v2", {"Host": "any.name"}).status == 200
    assert "unix socket" in guarded_server.log()


@needs_users
def test_the_unix_socket_admits_groups_with_tokens(folder: Path, guarded_server: Server) -> None:
    path = folder / "socket"

    def get_metadata(headers: dict[str, str]) -> Reply:
        with unix(path) as connection:
            return connection.get("/v2", headers)

    assert as_user(ALICE, lambda: get_metadata({}), (FRIENDS_GID,)).status == 401
    assert as_user(ALICE, lambda: get_metadata(bearer(PROGRAM)), (FRIENDS_GID,)).status == 200
    with pytest.raises(PermissionError):
        as_user(ALICE, lambda: get_metadata(bearer(TOKEN)))


@pytest.mark.parametrize(
    ("flags", "expected_error"),
    [
        (("--http-address=0.0.0.0",), "--http-address: other hosts reach '0.0.0.0'"),
        (("--http-address=a..b",), "--http-address: cannot resolve 'a..b': it is not a host name"),
        (("--grpc-address=0.0.0.0",), "--grpc-address: other hosts reach '0.0.0.0'"),
        (("--metrics-address=0.0.0.0",), "--metrics-address: other hosts reach '0.0.0.0'"),
        (("--auth-token-file=/nowhere",), "--auth-token-file: cannot read '/nowhere'"),
        (("--shm-group=no-such-group",), "--shm-group: this host has no group 'no-such-group'"),
        (("--grpc-restricted-protocol=x:k=v",), "unknown restricted protocol 'x'"),
        (("--http-unix-socket=/nowhere/s",), "--http-unix-socket: cannot listen on '/nowhere/s'"),
        (("--http-unix-socket=/" + "x" * 200,), "a socket's path may have at most 107 bytes"),
        (("--http-unix-socket=/etc/hostname",), "--http-unix-socket: cannot listen on"),
    ],
)
def test_refused_at_the_start(tmp_path: Path, flags: tuple[str, ...], expected_error: str) -> None:
    """An address that other hosts reach needs tokens or --insecure: one line, exit status 2."""
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    completed = run_command("serve", f"--model-repository={tmp_path}", *ports, *flags)
    assert completed.returncode == 2
    assert expected_error in completed.stderr
    assert len(completed.stderr.splitlines()) == 1


def test_insecure_listeners_and_no_port(folder: Path, tmp_path: Path) -> None:
    """Only configured listeners exist; a socket left by a killed server is replaced."""
    repositories.add(tmp_path / "models", "identity")
    path = folder / "other"
    with socket.socket(socket.AF_UNIX) as stale_socket:
        stale_socket.bind(str(path))
    flags = ("--allow-http=false", f"--http-unix-socket={path}", "--metrics-address=0.0.0.0")
    server = Server([tmp_path / "models"], (*flags, "--insecure"))
    try:
        server.wait_log("the server is ready")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with unix(path) as http:
            assert (http.infer("identity", ROW).tensors()["OUTPUT0"] == 1).all()
        listening = [
            connection.laddr.port
            for process in server.tree()
            for connection in process.net_connections("tcp")
            if connection.status == "LISTEN"
        ]
        assert set(listening) == {server.metrics_port}
        with contextlib.closing(Http(server.metrics_port)) as scraper:
            assert scraper.get("/metrics").status == 200
        second = run_command("serve", f"--model-repository={tmp_path / 'models'}", *flags[:2])
        assert second.returncode == 2
        assert "Address already in use" in second.stderr
        assert path.exists()
    finally:
        server.stop()
    assert not path.exists()


def test_a_grpc_client_on_the_http_port_receives_the_grpc_port(guarded_server: Server) -> None:
    with socket.create_connection(
        ("127.0.0.1", guarded_server.http_port), timeout=10
    ) as client_socket:
        client_socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        with client_socket.makefile("rb") as file:
            assert f"the gRPC port is {guarded_server.grpc_port})" in file.read().decode()


PAGE = "https://app.example.com"
PREFLIGHT_HEADERS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_pages_and_proxies_that_the_operator_names(folder: Path) -> None:
    repositories.add(folder / "named", "identity")
    tokens = write_tokens(folder / "named-tokens", TOKEN)
    flags = [f"--cors-allow-origin={PAGE}", "--allowed-host=*.example.com"]
    unix_socket = folder / "named-socket"
    flags += [f"--auth-token-file={tokens}", f"--http-unix-socket={unix_socket}"]
    with running(folder / "named", *flags) as server, server.http() as http:
        assert http.get("/health", {"Host": "inference.example.com"}).status == 200
        assert http.get("/version", {"Host": "example.com"}).status == 421
        for path in ("/v1/chat/completions", "/v2/models/identity/infer", "/nowhere"):
            allowed = http.call("OPTIONS", path, None, PREFLIGHT_HEADERS)
            assert (allowed.status, allowed.body) == (200, b"")
            assert allowed.headers["Access-Control-Allow-Origin"] == PAGE
            assert allowed.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        response = http.call(
            "OPTIONS", "/v1/models", None, {**PREFLIGHT_HEADERS, "Origin": "https://b.c"}
        )
        assert response.status == 403 and "Access-Control-Allow-Origin" not in response.headers
        page = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}
        path = "/v2/models/identity/infer"
        for _ in range(3):  # later ones are repeated requests
            reply = http.post(path, ROW, {**bearer(TOKEN), **page}).ok()
            assert reply.headers["Access-Control-Allow-Origin"] == PAGE
        refused_reply = http.post("/v1/completions", {}, page)
        assert refused_reply.status == 401 and refused_reply.headers["Vary"] == "Origin"
        assert refused_reply.headers["Access-Control-Allow-Origin"] == PAGE
        assert refused_reply.json()["error"]["type"] == "authentication_error"
        with unix(unix_socket) as local:
            assert local.call("OPTIONS", path, None, PREFLIGHT_HEADERS).status == 403
