"""HTTP as hostile or clumsy clients speak it: framing, size, time, and what others notice."""

import contextlib
import gzip
import http.client
import json
import os
import random
import re
import select
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inference, Inferred
from tests.rigs.gateway_rig import (
    SIMPLE_CONFIG,
    Rig,
    add_sub,
    identity_config,
    model_config,
    rig,
    simple_body,
    tensor_config,
)
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, Reply, binary_request, raw_connection, read_reply

MIB = 1024 * 1024
HEALTH_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
SECONDS = 0.4


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("run"), max_input_size=2 * MIB) as started:
        started.serve(SIMPLE_CONFIG, add_sub)
        started.serve(identity_config("id", "FP32", [-1]), answer_one_byte)
        started.publish(identity_config("text", "BYTES", [-1]), started.scheduler(answer_one_byte))
        started.open()
        yield started


@pytest.fixture(scope="module")
def impatient_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One whose clients have little time: what it is to answer is sent to it at one go."""
    limits: dict[str, Any] = {"header_timeout_s": SECONDS, "body_timeout_s": SECONDS}
    with rig(tmp_path_factory.mktemp("hasty"), **limits) as model_rig:
        model_rig.serve(SIMPLE_CONFIG, add_sub)
        model_rig.open()
        yield model_rig


@pytest.fixture(scope="module")
def patient_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Yield a gateway with long time limits and few connections."""
    with rig(tmp_path_factory.mktemp("patient"), max_connections=60) as model_rig:
        model_rig.serve(SIMPLE_CONFIG, add_sub)
        model_rig.open()
        yield model_rig


def answer_one_byte(request: Inference) -> Inferred:
    return Inferred((TensorRef("OUT", "INT8", (1,), b"\x01"),))


@pytest.fixture(autouse=True)
def is_responsive(gateway: Rig, impatient_gateway: Rig) -> Iterator[None]:
    yield
    gateway.http.infer("simple", simple_body()).ok()
    body = simple_body()
    send_parts(impatient_gateway, head(len(body)) + body).ok()
    for rig_of_gateway in (gateway, impatient_gateway):
        assert "Traceback" not in rig_of_gateway.log


@pytest.fixture
def connection(gateway: Rig) -> Iterator[socket.socket]:
    with raw_connection(gateway.port) as connection:
        yield connection


def head(length: int, *lines: str, version: str = "1.1", method: str = "POST") -> bytes:
    start = f"{method} /v2/models/simple/infer HTTP/{version}"
    return "\r\n".join(
        [start, "Host: localhost", f"Content-Length: {length}", *lines, "", ""]
    ).encode()


def send_parts(gateway: Rig, *parts: bytes) -> Reply:
    """Return the reply to bytes that are sent in parts."""
    with raw_connection(gateway.port) as connection:
        for part in parts:
            connection.sendall(part)
        return read_reply(connection)


CHUNKED_HEAD = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


def send_slowly(connection: socket.socket, data: bytes) -> None:
    """Send bytes, and wait until the server has read them."""
    connection.sendall(data)
    port = f":{connection.getsockname()[1]:04X}"

    def is_read() -> bool:
        rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        return all(int(row[4].partition(":")[2], 16) == 0 for row in rows if port in row[2])

    until("the server has read it", is_read)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def read_statuses(connection: socket.socket) -> list[bytes]:
    """Return the statuses of the responses until the connection is closed."""
    received = b"".join(iter(partial(connection.recv, MIB), b""))
    return re.findall(rb"HTTP/1.1 (\d+) ", received)


# --- framing


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1e3\r\n\r\n",
        *(b"POST /v2 HTTP/%b\r\nHost: localhost\r\n%b\r\n\r\n0\r\n\r\n" % (version,
            framing) for version,
            framing in ((b"1.0", b"Content-Length: 5\r\nTransfer-Encoding: chunked"),
            (b"1.1", b"Content-Length: +5\r\nTransfer-Encoding: chunked"),
            (b"1.1", b"Content-Length: 5\r\nTransfer-Encoding: xchunked"),
            (b"1.1", b"Content-Length: 5\r\nTransfer-Encoding: gzip, chunked"),
            (b"1.1", b"Content-Length: 5\r\nTransfer-Encoding : chunked"),
            (b"1.1", b"Content-Length: 5\r\nTransfer-Encoding:\r\n chunked"),
            (b"1.1", b"Content-Length: 5\r\nContent-Length: 5\r\nTransfer-Encoding: chunked"),
            (b"1.1", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x"))),
        b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: \x0bchunked\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)  # fmt: skip
def test_malformed_http_is_refused(connection: socket.socket, raw: bytes) -> None:
    """Repeated or malformed lengths are refused, so that they smuggle no second request."""
    connection.sendall(raw)
    reply = read_reply(connection)
    assert reply.status == 400 and reply.error.startswith("malformed HTTP request: ")
    assert reply.headers["Connection"] == "close"
    assert is_closed(connection)


@pytest.mark.parametrize("rest", [b"garbage\r\n\r\n", b"GET / HTTP/9.9\r\nHost"])
def test_requests_before_malformed_http_are_answered(
    connection: socket.socket, rest: bytes
) -> None:
    """The requests of one packet are answered in order (RFC 9112, 9.3.2)."""
    body = simple_body().replace(b"{", b"{\r\n\r\n", 1)
    connection.sendall(HEALTH_REQUEST + head(len(body)) + body + rest)
    assert read_statuses(connection) == [b"200", b"200", b"400"]


@pytest.mark.parametrize("refused", [head(100 * MIB), b"garbage\r\n\r\n"])
def test_responses_before_the_last_one_are_not_lost(
    connection: socket.socket, refused: bytes
) -> None:
    """Bytes that the server never reads would reset the connection when it is closed."""
    connection.sendall(HEALTH_REQUEST + refused + bytes(100 * MIB) + HEALTH_REQUEST * 20_000)
    assert read_statuses(connection) == [b"200", b"400"]


def test_a_malformed_body_in_a_pipeline_is_refused(connection: socket.socket) -> None:
    connection.sendall(HEALTH_REQUEST + CHUNKED_HEAD + b"zz\r\n")
    assert read_statuses(connection) == [b"200", b"400"]


def test_other_transfer_codings_are_refused(connection: socket.socket) -> None:
    framing = b"Host: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"
    connection.sendall(b"POST /v2 HTTP/1.1\r\n" + framing)
    reply = read_reply(connection)
    assert reply.status == 501 and "unsupported Transfer-Encoding" in reply.error
    assert is_closed(connection)


@pytest.mark.parametrize(
    "rest", [b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"Content-Length: a\r\n\r\n"]
)
def test_malformed_http_under_v1_has_an_error_of_openais_form(
    connection: socket.socket, rest: bytes
) -> None:
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n" + rest)
    reply = read_reply(connection)
    assert json.loads(reply.body)["error"]["type"] == "invalid_request_error"
    assert reply.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"GET /v2 HTTP/1.1\r\n", "Missing 'Host' header in request."),
        (b"GET /v2 HTTP/1.9\r\nHost: localhost\r\n", "Bad status line: Invalid HTTP version"),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 9000 + b"\r\n",
         "the request line or a header has more than 8190 bytes"),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 200,
         "Too many headers received (allowed: 128)"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n",
         "this port supports HTTP/1.1, not HTTP/2 or gRPC (gRPC has no TCP port)"),
    ],
)  # fmt: skip
def test_malformed_http_is_explained(connection: socket.socket, head: bytes, reason: str) -> None:
    connection.sendall(head + b"\r\n")
    assert read_reply(connection).error == f"malformed HTTP request: {reason}"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /v2/models/%FF/config HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (head(0).replace(b"\r\n\r\n", b"\r\nInference-Header-Content-Length: \xff\r\n\r\n"), 400),
    ],
)
def test_heads_that_are_not_utf8_receive_a_response(
    connection: socket.socket, raw: bytes, status: int
) -> None:
    """The error quotes the bytes, and the connection stays open."""
    for _ in range(2):
        connection.sendall(raw)
        reply = read_reply(connection)
        assert reply.status == status and reply.error


@pytest.mark.parametrize("size", [2**63, 2**64 - 1])
def test_a_huge_content_length_smuggles_nothing(connection: socket.socket, size: int) -> None:
    """The bytes that follow are taken as a body, and not as another request."""
    connection.sendall(head(size) + head(0))
    reply = read_reply(connection)
    assert (reply.status, reply.headers["Connection"]) == (400, "close")
    assert is_closed(connection)


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_bodies_may_be_chunked(gateway: Rig, size: int) -> None:
    body = simple_body()
    pieces = [body[offset : offset + size] for offset in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    send_parts(gateway, CHUNKED_HEAD, chunks, b"0\r\n\r\n").ok()


@pytest.mark.parametrize("cut", [0, 1, 40, 110, 150])
@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: {}\r\nTransfer-Encoding: chunked",
        "transfer-encoding: Chunked\r\nX: y\r\ncontent-length:{} ",
    ],
)
def test_chunks_and_a_length_end_the_connection(gateway: Rig, framing: str, cut: int) -> None:
    """RFC 9112, 6.3: the chunks count, and nothing behind them is read as a request."""
    body = simple_body()
    lines = framing.format(len(body) + 5).encode()
    request = head(0).replace(b"Content-Length: 0", lines) + b"%x\r\n%b\r\n" % (len(body), body)
    with raw_connection(gateway.port) as connection:
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        for second in (HEALTH_REQUEST, CHUNKED_HEAD + chunks):
            connection.sendall(second)
            read_reply(connection).ok()
        for part in (request[:cut], request[cut:], b"0\r\n\r\n" + HEALTH_REQUEST):
            send_slowly(connection, part)
        reply = read_reply(connection)
        assert reply.ok().tensors()["OUTPUT0"][0][0] == 2
        assert reply.headers["Connection"] == "close"
        assert is_closed(connection)


def test_too_many_chunks_are_refused(patient_gateway: Rig) -> None:
    reply = send_parts(patient_gateway, CHUNKED_HEAD, b"1\r\n \r\n" * 70_000)
    assert reply.status == 400
    assert reply.error.startswith("Chunked request body exceeds maximum of 65536 non-empty chunks")


def test_a_broken_chunk_is_refused(connection: socket.socket) -> None:
    send_slowly(connection, CHUNKED_HEAD + b"5\r\nabc")
    connection.sendall(b"\r\nxyz\r\n")
    assert read_reply(connection).status == 400
    assert is_closed(connection)


def test_a_client_may_await_100_continue(connection: socket.socket) -> None:
    body = simple_body()
    connection.sendall(head(len(body), "Expect: 100-continue"))
    assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    read_reply(connection).ok()


def test_a_refused_request_receives_no_100_continue(gateway: Rig) -> None:
    with raw_connection(gateway.port) as connection:
        connection.sendall(head(100 * MIB, "Expect: 100-continue"))
        reply = read_reply(connection)
    assert reply.status == 400 and "Use --http-max-input-size" in reply.error


def test_http_1_0_is_supported(connection: socket.socket) -> None:
    body = simple_body()
    for _ in range(2):
        connection.sendall(head(len(body), "Connection: keep-alive", version="1.0") + body)
        assert read_reply(connection).ok().headers["Connection"] == "keep-alive"
    # A client of HTTP/1.0 does not know interim responses.
    send_slowly(connection, head(len(body), "Expect: 100-continue", version="1.0"))
    connection.sendall(body)
    assert read_reply(connection).ok().headers["Connection"] == "close"
    assert is_closed(connection)


def test_connection_close_is_obeyed(connection: socket.socket) -> None:
    body = simple_body()
    connection.sendall(head(len(body), "Connection: close") + body)
    assert read_reply(connection).ok().headers["Connection"] == "close"
    assert is_closed(connection)


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0"])
def test_an_offer_of_another_protocol_is_ignored(connection: socket.socket, protocol: str) -> None:
    body = simple_body()
    headers = (f"Upgrade: {protocol}", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AA")
    for _ in range(3):
        connection.sendall(head(len(body), *headers) + body)
        assert "Connection" not in read_reply(connection).ok().headers
        connection.sendall(head(len(body), *headers))
        connection.sendall(body)
        assert "Connection" not in read_reply(connection).ok().headers
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: a.localhost\r\nConnection: upgrade\r\n"
                           b"Upgrade: %b\r\n\r\n" % protocol.encode())  # fmt: skip
        assert "Connection" not in read_reply(connection).ok().headers


def test_a_response_to_head_has_no_body(gateway: Rig) -> None:
    with raw_connection(gateway.port) as connection:
        for path in (b"/v2", b"/v2/models/simple/infer"):
            connection.sendall(b"HEAD %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        received = b""
        while received.count(b"\r\n\r\n") < 2:
            received += connection.recv(1000)
    assert received.startswith(b"HTTP/1.1 200 OK\r\nContent-Length: ")
    assert b"Content-Length: 0\r\n" not in received and b"{" not in received
    assert b"\r\n\r\nHTTP/1.1 405 Method Not Allowed\r\n" in received


def test_an_unread_body_ends_the_connection(connection: socket.socket) -> None:
    start = head(3 * MIB).replace(b"/v2/models/simple/infer", b"/nowhere")
    connection.sendall(start + bytes(MIB))
    reply = read_reply(connection)
    assert (reply.status, reply.error) == (404, "Not Found")
    assert reply.headers["Connection"] == "close"
    connection.sendall(bytes(2 * MIB))
    assert is_closed(connection)


# --- time


@pytest.mark.parametrize(
    "partial_head",
    [b"", b"POST /v2/mod", b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: localhost\r\nA:"],
)
def test_a_partial_head_ends_the_connection(impatient_gateway: Rig, partial_head: bytes) -> None:
    with raw_connection(impatient_gateway.port) as connection:
        connection.sendall(partial_head)
        if partial_head:
            connection.settimeout(20 * SECONDS)
            assert is_closed(connection)
        else:  # a connection that has sent nothing may wait
            connection.settimeout(2 * SECONDS)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            body = simple_body()
            connection.sendall(head(len(body)) + body)
            read_reply(connection).ok()


def test_a_slow_head_ends_the_connection(impatient_gateway: Rig) -> None:
    """Headers have a deadline, which further pieces do not extend."""
    with raw_connection(impatient_gateway.port) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n")

        def is_refused() -> bool:
            try:
                connection.sendall(b"A: b\r\n")
            except ConnectionError:
                return True
            return False

        until("the connection is closed", is_refused)


@pytest.mark.parametrize("size", [500, 100_000, 1_500_000])
@pytest.mark.parametrize("sent_size", [0, 100])
def test_an_incomplete_body_times_out(impatient_gateway: Rig, size: int, sent_size: int) -> None:
    with raw_connection(impatient_gateway.port) as connection:
        connection.sendall(head(size) + b" " * sent_size)
        reply = read_reply(connection)
        assert reply.status == 408 and "did not arrive in time (limit: " in reply.error
        assert is_closed(connection)


def test_a_slow_body_times_out(impatient_gateway: Rig) -> None:
    """Bodies have a deadline, which further pieces do not extend."""
    with raw_connection(impatient_gateway.port) as connection:
        connection.sendall(head(1_000_000))

        def is_answered() -> bool:
            connection.sendall(b" ")
            return bool(select.select([connection], [], [], 0)[0])

        until("the request is refused", is_answered)
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("read_size", [0, 1, 1000])
def test_a_client_that_does_not_read_is_disconnected(
    impatient_gateway: Rig, read_size: int
) -> None:
    """Responses have a deadline, also for a client that reads a few bytes at times."""
    large_output = bytes(64 * MIB)
    config = model_config(
        "big", 0, [tensor_config("IN", "INT8", [1])], [tensor_config("OUT", "INT8", [-1])]
    )
    impatient_gateway.publish(
        config,
        impatient_gateway.scheduler(
            lambda r: Inferred((TensorRef("OUT", "INT8", (len(large_output),), large_output),))
        ),
    )
    inputs = [{"name": "IN", "datatype": "INT8", "shape": [1], "data": [0]}]
    body = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", impatient_gateway.port))
        port = connection.getsockname()[1]
        until("the gateway has accepted", lambda: port in client_ports(impatient_gateway))
        connection.sendall(head(len(body)).replace(b"/simple/", b"/big/") + body)
        connection.setblocking(False)
        received = 0

        def is_cut_off() -> bool:
            nonlocal received
            with contextlib.suppress(BlockingIOError, ConnectionError):
                received += len(connection.recv(read_size)) if read_size else 0
            return port not in client_ports(impatient_gateway)

        until("the client is cut off", is_cut_off)
        connection.setblocking(True)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(MIB):
                received += len(piece)
    assert received < len(large_output)


def client_ports(gateway: Rig) -> set[int]:
    connections = psutil.Process(gateway.process.pid).net_connections("tcp")
    return {connection.raddr.port for connection in connections if connection.raddr}


# --- size


def test_json_bodies_have_a_size_limit(gateway: Rig) -> None:
    for headers in ({}, {"Inference-Header-Content-Length": str(2 * MIB + 1)}):
        reply = gateway.http.infer("simple", b" " * (2 * MIB + 1), headers)
        assert reply.status == 400
        assert reply.error == (
            f"request JSON size of {2 * MIB + 1} bytes exceeds the maximum allowed input size of "
            f"{2 * MIB} bytes. Use --http-max-input-size to increase the limit."
        )


def test_a_form_is_refused_with_the_remedy(gateway: Rig) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    reply = gateway.http.infer("text", b"--x\r\n\r\na\r\n--x--\r\n", form)
    assert reply.status == 500
    assert "the body is a form; send only the file: curl --data-binary @FILE" in reply.error


def test_chunked_json_bodies_have_a_size_limit(gateway: Rig) -> None:
    pieces = iter([b" " * MIB] * 3)
    assert "exceeds the maximum allowed input size" in gateway.http.infer("simple", pieces).error


def test_raw_inputs_have_a_size_limit(gateway: Rig) -> None:
    headers = {"Inference-Header-Content-Length": "0"}
    reply = gateway.http.infer("id", bytes(2 * MIB + 4), headers)
    assert reply.error == (
        f"Raw input has a byte_size ({2 * MIB + 4} bytes) that exceeds the maximum allowed value "
        f"of {2 * MIB} bytes. Use --http-max-input-size to increase the limit."
    )
    gateway.http.infer("id", bytes(2 * MIB), headers).ok()


def test_binary_tensors_have_no_json_limit(gateway: Rig) -> None:
    gateway.http.infer_binary("id", [("IN", "FP32", [2 * MIB], bytes(8 * MIB))]).ok()


def memory_of(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def make_bomb(name: str) -> bytes:
    """Return 10 GiB of spaces, compressed to 10 MB, without a checksum at the end."""
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    # After a full flush the same compressed bytes mean the same at any position.
    block = packer.compress(b" " * (64 * MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    head = b"\x1f\x8b\x08\0\0\0\0\0\x02\xff" if name == "gzip" else b"\x78\xda"
    return head + block * 160


@pytest.mark.parametrize("name", ["gzip", "deflate"])
def test_decompression_bombs_are_refused(gateway: Rig, name: str) -> None:
    """Inflating a body stops at the size limit."""
    body = make_bomb(name)
    assert 10_000_000 < len(body) < 11_000_000
    memory_before = memory_of(gateway.process.pid)
    for _ in range(5):
        reply = gateway.http.infer("simple", body, {"Content-Encoding": name})
        assert reply.status == 400
        assert reply.error.startswith("Decompressed data size exceeds the maximum allowed value")
    assert memory_of(gateway.process.pid) - memory_before < 20 * MIB


def test_failures_leak_no_memory(gateway: Rig) -> None:
    """Memory of a refused body, received or inflated, is released."""
    truncated = gzip.compress(random.Random(1).randbytes(200_000) + bytes(800_000))[:-20]
    wrong_cases: list[tuple[bytes, dict[str, str]]] = [
        (truncated, {"Content-Encoding": "gzip"}),
        (zlib.compress(b"x" * 800_000)[:-5], {"Content-Encoding": "deflate"}),
        (b"x" * 200_000, {"Content-Encoding": "gzip"}),
        (b"x" * 200_000, {"Inference-Header-Content-Length": "-1"}),
        (b"x" * 200_000, {"Inference-Header-Content-Length": "200001"}),
        (b"x" * 200_000, {"Inference-Header-Content-Length": "100"}),
    ]

    def fail(count: int) -> None:
        for _ in range(count):
            for body, headers in wrong_cases:
                assert gateway.http.infer("simple", body, headers).status in (400, 500)

    fail(20)
    memory_before = memory_of(gateway.process.pid)
    fail(1000 // len(wrong_cases))
    assert memory_of(gateway.process.pid) - memory_before < 10 * MIB


def test_huge_numbers_of_strings_are_refused(gateway: Rig) -> None:
    """Element counts are checked before memory is taken."""
    data = (2**31).to_bytes(4, "little")
    reply = gateway.http.infer_binary("text", [("IN", "BYTES", [2**40], data)])
    assert reply.status in (200, 400)  # the worker counts; nothing here is allocated for it
    assert memory_of(gateway.process.pid) < 400 * MIB


# --- other behaviour


def test_health_responds_while_megabytes_of_json_are_parsed(tmp_path: Path) -> None:
    values = np.random.default_rng(2).standard_normal(1_500_000)
    data = values.tolist()
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [len(data)], "data": data}]
    body = json.dumps({"inputs": inputs}).encode()
    with rig(tmp_path) as gateway:
        parsed_data: list[Any] = []

        def compute(request: Inference) -> Inferred:
            parsed_data.append(request.inputs[0].data)
            return answer_one_byte(request)

        gateway.serve(identity_config("id", "FP32", [-1]), compute)
        gateway.open()
        gateway.http.get("/v2/health/live").ok()
        answered_count = 0  # counted from the end of the body
        body_sent, all_received = threading.Event(), threading.Event()

        def parts() -> Iterator[bytes]:
            yield body
            body_sent.set()

        def probe() -> None:
            nonlocal answered_count
            http = Http(gateway.port)
            while not all_received.is_set():
                was_sent = body_sent.is_set()
                http.get("/v2/health/live").ok()
                answered_count += was_sent
            http.close()

        prober = threading.Thread(target=probe)
        prober.start()
        length = {"Content-Length": str(len(body))}
        gateway.http.infer("id", parts(), length).ok()
        all_received.set()
        prober.join()
        memory_range = parsed_data[0]
        fd = os.open(f"/proc/{memory_range.memory.pid}/fd/{memory_range.memory.fd}", os.O_RDONLY)
        raw = os.pread(fd, memory_range.byte_size, memory_range.offset)
        os.close(fd)
    assert np.array_equal(np.frombuffer(raw, np.float32), values.astype(np.float32))
    assert len(body) > 25 * MIB
    assert answered_count > 20  # parsed in one piece, hardly any request would be answered


@pytest.mark.parametrize("known_head", [False, True])
def test_idle_connections_are_evicted(patient_gateway: Rig, known_head: bool) -> None:
    """Idle connections keep no client out, and no active connection is closed."""
    body = simple_body()
    with contextlib.ExitStack() as stack:
        sending = stack.enter_context(raw_connection(patient_gateway.port))
        if known_head:
            sending.sendall(head(len(body)) + body)
            read_reply(sending).ok()
        sending.sendall(head(len(body)) + body[:10])
        idle = [stack.enter_context(raw_connection(patient_gateway.port)) for _ in range(100)]
        for connection in idle[::2]:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET /v2 HT")
        with raw_connection(patient_gateway.port) as connection:
            connection.sendall(HEALTH_REQUEST)
            assert read_reply(connection).status == 200
        sending.sendall(body[10:])
        assert read_reply(sending).status == 200


def test_connections_have_a_limit(patient_gateway: Rig) -> None:
    """Some of more than 60 connections are closed."""

    def is_alive(connection: socket.socket) -> bool:
        try:
            connection.sendall(HEALTH_REQUEST)
            return read_reply(connection).status == 200
        except (ConnectionError, http.client.HTTPException):
            return False

    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(raw_connection(patient_gateway.port)) for _ in range(70)]
        # An idle connection may be closed for one that is accepted later.
        live_connections = [connection for connection in connections if is_alive(connection)]
        assert 55 <= sum(map(is_alive, live_connections)) <= 60
    with raw_connection(patient_gateway.port) as connection:
        connection.sendall(HEALTH_REQUEST)
        assert read_reply(connection).status == 200


# --- a head that comes again


def numbered_body(number: int) -> bytes:
    return simple_body(id=f"{number:04}")


def test_a_similar_head_is_parsed(connection: socket.socket) -> None:
    body = numbered_body(3)
    connection.sendall(head(len(body), "X-One: 1") + body)
    assert read_reply(connection).status == 200
    other_head = head(len(body), "X-One: 1").replace(b"models/simple", b"models/nobody")
    connection.sendall(other_head + body)
    assert read_reply(connection).status == 404
    # As long as the known one, but the last byte belongs to another message.
    connection.sendall(head(len(body) - 1, "X-One: 1") + body)
    assert read_statuses(connection) == [b"500", b"400"]


@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_endless_bodies_do_not_exhaust_memory(tmp_path: Path, encoding: str) -> None:
    """Each may be 64 MiB, and there may be thousands of connections that wait in the middle."""
    first_piece = b" " * (700 << 10)
    lines = [f"Content-Encoding: {encoding}"] if encoding else []
    if encoding:
        stream = zlib.compressobj(wbits=31)
        first_piece = stream.compress(first_piece) + stream.flush(zlib.Z_SYNC_FLUSH)
    limits: Any = {"max_input_size": MIB, "arena_byte_size": MIB, "body_timeout_s": 300.0}
    with rig(tmp_path, **limits) as model_rig:
        model_rig.serve(SIMPLE_CONFIG, add_sub)
        model_rig.open()
        infer = "/v2/models/simple/infer"

        def send() -> Reply:
            return model_rig.http.post(infer, b" " * (700 << 10))

        with raw_connection(model_rig.port) as connection:
            send_slowly(connection, head(MIB, *lines) + first_piece)
            until("the memory is full", lambda: send().status == 503)
            assert send().error == "server memory for request bodies (1048576 bytes) is full"
            model_rig.http.infer("simple", numbered_body(1)).ok()
        until("it is free again", lambda: send().status == 500)
        assert model_rig.http.post(infer, b" " * (2 * MIB)).status == 400


def test_headers_without_their_tensors_do_not_exhaust_memory(tmp_path: Path) -> None:
    """Bytes before a tensor are kept only while that tensor is awaited."""
    tensor = ("IN", "FP32", [5000], bytes(20_000))
    body, headers = binary_request([tensor], id="i" * (700 << 10))
    lines = [f"{name}: {value}" for name, value in headers.items()]
    start = head(len(body), *lines).replace(b"/simple/", b"/id/")
    limits: dict[str, Any] = {"max_input_size": MIB, "arena_byte_size": MIB}
    with rig(tmp_path, body_timeout_s=300.0, **limits) as model_rig:
        model_rig.serve(identity_config("id", "FP32", [-1]), answer_one_byte)
        model_rig.open()

        def send_request() -> int:
            return model_rig.http.post("/v2/models/id/infer", b" " * (700 << 10)).status

        with raw_connection(model_rig.port) as connection:
            send_slowly(connection, start + body[:-1])
            until("the memory is full", lambda: send_request() == 503)
            connection.sendall(body[-1:])
            read_reply(connection).ok()
            assert send_request() == 500
            send_slowly(connection, start + body[:-1])
            until("the memory is full again", lambda: send_request() == 503)
        until("it is free again", lambda: send_request() == 500)


@pytest.mark.parametrize("kind", ["json", "gzip", "start", "binary"])
def test_a_slow_body_is_evicted(tmp_path: Path, kind: str) -> None:
    """A declared but unsent body is evicted for bodies that arrive at once."""
    size = 700 << 10
    tensor = ("IN", "FP32", [size // 4], bytes(size))
    if kind == "binary":
        whole_body, headers = binary_request([tensor])
        first_piece = whole_body[:-1]
    elif kind == "start":
        whole_body, headers = binary_request([tensor], id="i" * size)
        first_piece = whole_body[: size - 1000]
    else:
        whole_body, headers = b" " * size, {}
        first_piece = whole_body[:-1]
    if kind == "gzip":
        stream = zlib.compressobj(wbits=31)
        first_piece = stream.compress(whole_body) + stream.flush(zlib.Z_SYNC_FLUSH)
        headers["Content-Encoding"] = "gzip"
    lines = [f"{name}: {value}" for name, value in headers.items()]
    start = head(len(whole_body), *lines).replace(b"/simple/", b"/id/")
    with rig(tmp_path, max_input_size=MIB, arena_byte_size=MIB) as model_rig:
        model_rig.serve(identity_config("id", "FP32", [-1]), answer_one_byte)
        model_rig.open()
        with contextlib.ExitStack() as stack:
            slow = [stack.enter_context(raw_connection(model_rig.port)) for _ in range(3)]
            for connection in slow:
                send_slowly(connection, start + first_piece)
                start_s = time.monotonic()

            def send_request() -> int:
                if kind == "binary":
                    return model_rig.http.infer_binary("id", [tensor]).status
                return model_rig.http.post("/v2/models/id/infer", b" " * size).status

            expected_status = 200 if kind == "binary" else 500
            statuses: set[int] = set()

            def is_taken() -> bool:
                statuses.add(send_request())
                return expected_status in statuses

            until("it is taken", is_taken)
            assert statuses <= {503, expected_status}
            assert time.monotonic() - start_s < 20, "before its own patience is over"
            refusals = [reply for reply in map(read_reply, slow) if reply.status != 503]
            assert len(refusals) == 1
            assert refusals[0].status == 408
            assert refusals[0].error.startswith("the request body arrived at less than 1 MiB/s")
            for _ in range(3):
                assert send_request() == expected_status
