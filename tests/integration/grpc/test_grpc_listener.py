"""The gRPC listener as a process: TLS, compression, drain, ports, and a server without it."""

import contextlib
import http.server
import json
import re
import shutil
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from shmserve.cli import client
from shmserve.ipc import endpoints
from tests.support import certificates, repositories
from tests.support.sequence_models import CONTROL_INPUTS, IDLE_TIME
from tests.support.servers import Server, Start, refuses_connections, run_command, running
from tests.support.waiting import until
from tests.support.wire.grpc_calls import is_right, refusal, request_of, simple_request, stub
from tests.support.wire.http2 import (
    CLIENT_OPENING,
    DATA,
    END_HEADERS,
    END_STREAM,
    GO_AWAY,
    HEADERS,
    SERVICE,
    WINDOW,
    frame,
    message,
    post,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("door") / "models"
    repositories.add(repository, "simple", "gated")
    return repository


@pytest.fixture(scope="module")
def tls_server(keys: Path, models: Path, start: Start) -> Server:
    flags = (
        "--grpc-use-ssl-mutual",
        f"--grpc-server-cert={keys}/server.pem",
        f"--grpc-server-key={keys}/server.key",
        f"--grpc-root-cert={keys}/ca.pem",
        "--grpc-infer-response-compression-level=high",
        "--grpc-keepalive-time=10000",
    )
    return start(models, *flags, grpc=True)


def credentials(keys: Path, name: str = "") -> grpc.ChannelCredentials:
    key, chain = (
        ((keys / f"{name}.{end}").read_bytes() for end in ("key", "pem")) if name else [None] * 2
    )
    return grpc.ssl_channel_credentials((keys / "ca.pem").read_bytes(), key, chain)


def infer_simple(server: Server, channel_credentials: grpc.ChannelCredentials | None) -> Any:
    url = server.grpc_url
    with (
        grpc.secure_channel(url, channel_credentials)
        if channel_credentials
        else grpc.insecure_channel(url)
    ) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return call.ModelInfer(simple_request(), timeout=5)


def test_mutual_tls(tls_server: Server, keys: Path) -> None:
    assert is_right(infer_simple(tls_server, credentials(keys, "client")))
    for wrong_credentials in (None, credentials(keys), credentials(keys, "stranger")):
        with pytest.raises(grpc.RpcError):
            infer_simple(tls_server, wrong_credentials)
    assert is_right(infer_simple(tls_server, credentials(keys, "client")))


def test_the_shells_client_with_tls(
    tls_server: Server, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, root = f"--url=grpcs://localhost:{tls_server.grpc_port}", f"--root-cert={keys}/ca.pem"
    certificate = (f"--client-cert={keys}/client.pem", f"--client-key={keys}/client.key")
    assert client.run(["ready", url, root, *certificate]) == 0
    assert capsys.readouterr().out == '{"ready": true}\n'
    # Without --url the command reads the server's addresses; only gRPC remains here.
    endpoints.addresses(tls_server.run_dir).write_text(
        f"grpcs://localhost:{tls_server.grpc_port}\n"
    )
    run_dir = f"--run-dir={tls_server.run_dir}"
    assert client.run(["config", "simple", run_dir, root, *certificate]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "simple"
    assert client.run(["ready", url, root]) == 1
    assert f"ready: {url.removeprefix('--url=')}: " in capsys.readouterr().err


def test_the_shells_client_with_https(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As through a proxy that ends TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(keys / "ca.pem"))
    context.load_cert_chain(keys / "server.pem", keys / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as proxy:
        proxy.socket = context.wrap_socket(proxy.socket, server_side=True)
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url, root = f"--url=https://localhost:{proxy.server_port}", f"--root-cert={keys}/ca.pem"
        certificate = (f"--client-cert={keys}/client.pem", f"--client-key={keys}/client.key")
        statuses = [
            client.run(["ready", url, *files])
            for files in ((root, *certificate), (root,), certificate)
        ]
        proxy.shutdown()
        thread.join()
    assert statuses == [0, 1, 1]


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def test_keys_that_do_not_fit(models: Path, keys: Path) -> None:
    """The error is reported at the start, not in each replaced gateway."""
    cert, key = f"{keys}/server.pem", f"{keys}/client.key"
    flags = [f"--grpc-server-cert={cert}", f"--grpc-server-key={key}"]
    run = run_command("serve", str(models), "--grpc-use-ssl", *flags)
    assert (run.returncode, run.stderr) == (
        2,
        f"shmserve: --grpc-server-cert, --grpc-server-key: '{cert}' and '{key}' are not a "
        "certificate and its private key in PEM\n",
    )
    run = run_command("serve", str(models), "--grpc-use-ssl")
    assert run.stderr == "shmserve: --grpc-server-cert: not set, but TLS requires this file\n"
    flags = [f"--grpc-server-cert={cert}", f"--grpc-server-key={keys}/server.key"]
    run = run_command(
        "serve", str(models), "--grpc-use-ssl-mutual", *flags, f"--grpc-root-cert={key}"
    )
    assert run.returncode == 2
    assert run.stderr == f"shmserve: --grpc-root-cert: '{key}' contains no PEM certificate\n"


def test_keys_that_no_client_takes(models: Path, tmp_path: Path) -> None:
    """Keys on a curve that OpenSSL supports and clients do not are refused at the start, too."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:secp256k1", "-nodes", "-subj", "/CN=x")
    certificates.openssl(tmp_path, "req", "-x509", *curve, "-keyout", "key", "-out", "cert")
    cert, key = tmp_path / "cert", tmp_path / "key"
    flags = [f"--grpc-server-cert={cert}", f"--grpc-server-key={key}"]
    run = run_command("serve", str(models), "--grpc-use-ssl", *flags)
    assert (run.returncode, run.stderr) == (
        2,
        f"shmserve: --grpc-server-cert, --grpc-server-key: '{cert}' and '{key}' have a type of "
        "key that clients reject (allowed: RSA, P-256, P-384)\n",
    )


def test_files_that_change(keys: Path, models: Path, tmp_path: Path) -> None:
    """The next gateway reads the files; it serves as soon as they are valid."""
    cert, key = tmp_path / "cert", tmp_path / "key"

    def install(name: str) -> None:
        shutil.copy(keys / f"{name}.pem", cert)
        shutil.copy(keys / f"{name}.key", key)

    tls = ssl.create_default_context(cafile=str(keys / "ca.pem"))
    tls.set_alpn_protocols(["h2"])

    def server_certificate(server: Server) -> bytes | None:
        with (
            socket.create_connection(("127.0.0.1", server.grpc_port), timeout=20) as plain_socket,
            tls.wrap_socket(plain_socket, server_hostname="localhost") as sock,
        ):
            return sock.getpeercert(binary_form=True)

    def certificate(name: str) -> bytes:
        return ssl.PEM_cert_to_DER_cert((keys / f"{name}.pem").read_text())

    def check_spoiled(server: Server, spoil_file: Callable[[], object], text: str) -> None:
        spoil_file()
        server.find_one("gateway grpc").kill()
        server.wait_log(f"cannot start: {text}")
        install("client")
        server.wait_listening()
        assert server_certificate(server) == certificate("client")

    install("server")
    flags = (f"--grpc-server-cert={cert}", f"--grpc-server-key={key}")
    with running(models, "--grpc-use-ssl", *flags, grpc=True) as server:
        assert server_certificate(server) == certificate("server")
        pair = f"--grpc-server-cert, --grpc-server-key: '{cert}' and '{key}' are not a certificate"
        check_spoiled(server, lambda: shutil.copy(keys / "client.key", key), pair)
        missing_text = f"--grpc-server-key: '{key}' is not a file that can be read"
        check_spoiled(server, key.unlink, missing_text)
        assert is_right(infer_simple(server, credentials(keys)))
        assert "Traceback" not in server.log()


def test_a_server_without_grpcio(models: Path, tmp_path: Path) -> None:
    """Only its clients need it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'grpc' else found(name, *rest)\n"
    )
    server = Server([models], environment={"PYTHONPATH": str(tmp_path)}, grpc=True)
    try:
        server.wait_ready()
        with stub(server) as call:
            assert is_right(call.ModelInfer(simple_request()))
    finally:
        server.stop()


def test_a_drain_answers_pending_calls(models: Path) -> None:
    """Calls and streams in flight finish. A new call on the same channel cannot connect."""
    with (
        running(models, grpc=True) as server,
        stub(server) as call,
        grpc.insecure_channel(server.grpc_url) as channel,
    ):
        health = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=30)
        assert next(health) == b"\x08\x01"
        array = np.full((1, 4), 7, np.int32)
        pending = call.ModelInfer.future(request_of("gated", array, "INT32"), timeout=20)
        wait = threading.Event()

        def requests() -> Iterator[Any]:
            yield simple_request("in a stream")
            wait.wait(20)
            yield simple_request("late")

        idle_sock = socket.create_connection(("127.0.0.1", server.grpc_port), timeout=10)
        idle_sock.sendall(CLIENT_OPENING)
        idle = call.ModelStreamInfer(requests(), timeout=30)
        assert next(idle).infer_response.id == "in a stream"
        visit = server.gate.next()
        server.process.send_signal(signal.SIGTERM)
        assert next(health) == b"\x08\x02"
        until("nobody is let in", lambda: refuses_connections(server.grpc_port))
        with idle_sock:  # the gateway is draining, and no new connection arrives
            received_bytes = b""
            while frame(GO_AWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4)) not in received_bytes:
                piece = idle_sock.recv(65536)
                assert piece, received_bytes
                received_bytes += piece
            while idle_sock.recv(65536):
                pass
        text = (
            "Server is stopping, scheduler for model has stopped accepting new inference requests"
        )
        for method, request in (
            *((call.ModelInfer, simple_request()), (call.ModelInfer, simple_request("x"))),
            (call.ServerLive, pb.ServerLiveRequest()),
        ):
            code, reason = refusal(method, request)
            assert code == "UNAVAILABLE"
            assert re.match("failed to connect to all addresses; .*Connection refused", reason), (
                reason
            )
        wait.set()
        assert next(idle).error_message == f"[request id: late] {text}"
        visit.release()
        assert pending.result().raw_output_contents == [array.tobytes()]
        assert server.wait_exit(10) == 0


def test_an_open_sequence_ends_in_its_stream_and_the_channel_finds_the_next_server(
    tmp_path: Path,
) -> None:
    batching = f"sequence_batching {{ {CONTROL_INPUTS} {IDLE_TIME} direct {{ }} }}"
    repositories.add(tmp_path, "sequencer", config=batching)
    wait = threading.Event()

    def requests() -> Iterator[Any]:
        for number, name in enumerate(("sequence_start", "sequence_end"), 1):
            request = request_of("sequencer", np.full((1, 1), number, np.int32), "INT32")
            request.parameters["sequence_id"].int64_param = 7
            request.parameters[name].bool_param = True
            yield request
            wait.wait(20)

    with running(tmp_path, grpc=True) as server, contextlib.ExitStack() as stack:
        call = stack.enter_context(stub(server))
        server.gate.close()
        answers = call.ModelStreamInfer(requests(), timeout=30)
        assert next(answers).infer_response.raw_output_contents == [np.int32(1).tobytes()]
        server.process.send_signal(signal.SIGTERM)
        until("nobody is let in", lambda: refuses_connections(server.grpc_port))
        assert not refuses_connections(server.http_port)  # HTTP waits for the sequence
        code, reason = refusal(call.ServerLive, pb.ServerLiveRequest())
        assert code == "UNAVAILABLE" and reason.startswith("failed to connect to all addresses; ")
        wait.set()
        assert next(answers).infer_response.raw_output_contents == [np.int32(3).tobytes()]
        assert server.wait_exit(10) == 0
        flags = ("--allow-grpc=true", "--grpc-address=127.0.0.1", f"--grpc-port={server.grpc_port}")
        stack.enter_context(running(tmp_path, *flags))
        assert call.ServerLive(pb.ServerLiveRequest(), wait_for_ready=True, timeout=20).live


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_drain_waits_for_a_slow_reader(models: Path, method: str) -> None:
    """The answer was given, and most of it is still to be sent."""
    request = request_of("gated", np.zeros((1, 40_000), np.int32), "INT32")
    del request.raw_input_contents[:]
    request.inputs[0].contents.int_contents.extend([7] * 40_000)  # a byte each, until they are read
    with (
        running(models, grpc=True) as server,
        socket.create_connection(("127.0.0.1", server.grpc_port), timeout=20) as sock,
    ):
        server.gate.close()
        sock.sendall(CLIENT_OPENING + frame(HEADERS, END_HEADERS, 1, post(SERVICE + method)))
        body = message(request.SerializeToString())
        for begin in range(0, len(body), 16384):
            sock.sendall(frame(DATA, 0, 1, body[begin : begin + 16384]))
        sock.sendall(frame(DATA, END_STREAM, 1))
        answer = b""
        while len(answer) < 65535:  # as much as HTTP/2 has a sender send at first
            answer += sock.recv(65536)
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("stopping")
        assert server.wait_exit(1.0) is None
        window_bytes = (2**20).to_bytes(4, "big")
        sock.sendall(frame(WINDOW, 0, 0, window_bytes) + frame(WINDOW, 0, 1, window_bytes))
        while b"grpc-status" not in answer:
            piece = sock.recv(65536)
            assert piece, "the connection ended"
            answer += piece
        assert len(answer) > 160_000 and answer.partition(b"grpc-status")[2][:2] == b"\x010"
        assert server.wait_exit(10) == 0


def test_a_drain_waits_for_a_load(tmp_path: Path) -> None:
    repositories.add_slow(tmp_path, "slow")
    with running(tmp_path, "--model-control-mode=explicit", grpc=True) as server:
        with stub(server) as call:
            load = call.RepositoryModelLoad.future(
                pb.RepositoryModelLoadRequest(model_name="slow"), timeout=30
            )
            visit = server.gate.next()
            server.process.send_signal(signal.SIGTERM)
            server.wait_log("stopping")
            assert server.wait_exit(1.0) is None
            visit.release()
            load.result()
        assert server.wait_exit(10) == 0


def test_two_servers_do_not_share_a_port(tls_server: Server, models: Path) -> None:
    flags = ("--http-port=0", "--metrics-port=0")
    run = run_command("serve", str(models), f"--grpc-port={tls_server.grpc_port}", *flags)
    assert run.returncode == 2
    assert "--grpc-port: cannot listen on 127.0.0.1" in run.stderr
    assert "Address already in use" in run.stderr
