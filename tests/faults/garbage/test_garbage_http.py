"""Malformed HTTP traffic: its sender receives an error, and other clients are not affected."""

import contextlib
import http.client
import json
import random
import socket
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.faults.scene import ARENA_BYTES, Scene, assert_recovers, scene
from tests.support.servers import Server
from tests.support.wire.raw_http import json_input, raw_connection, read_reply

ROW = np.zeros((1, 16), np.int32)
REQUEST = json.dumps({"inputs": [json_input("INPUT0", ROW), json_input("INPUT1", ROW)]}).encode()
REQUEST_HEAD = b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: localhost\r\n"


def head(*lines: str) -> bytes:
    """Return the head of an infer request with these header lines."""
    return REQUEST_HEAD + "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


# Bytes that are sent on a new connection each. The server responds with a client error or
# disconnects.
BAD_BYTES: dict[str, bytes] = {
    "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "random": random.Random(1).randbytes(5000),
    "random after a head": head("Content-Length: 5000") + random.Random(2).randbytes(5000),
    "a bad method": b"\x00\x01 / HTTP/1.1\r\n\r\n",
    "an endless method": b"A" * 100_000,
    "an endless target": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "an endless header": REQUEST_HEAD + b"X: " + b"y" * 1_000_000 + b"\r\n\r\n",
    "endless headers": REQUEST_HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(50_000)) + b"\r\n",
    "a header with a null": REQUEST_HEAD + b"X: a\x00b\r\n\r\n",
    "a header that is folded": REQUEST_HEAD + b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "a length of words": head("Content-Length: many"),
    "a length of 20 digits": head("Content-Length: 99999999999999999999"),
    "length and chunks": head("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "a bad chunk size": head("Transfer-Encoding: chunked") + b"xyz\r\nabc\r\n0\r\n\r\n",
    "a negative chunk size": head("Transfer-Encoding: chunked") + b"-5\r\nabc\r\n0\r\n\r\n",
    "a huge chunk size": head("Transfer-Encoding: chunked") + b"ffffffffffffffffff\r\nabc",
    "100,000 chunks": head("Transfer-Encoding: chunked") + b"1\r\n{\r\n" * 100_000 + b"0\r\n\r\n",
    "a truncated body": head(f"Content-Length: {len(REQUEST) + 100}") + REQUEST,
    "a truncated compressed body": head("Content-Encoding: gzip", "Content-Length: 20")
    + b"\x1f\x8b"
    + bytes(18),
    "an infinite header length": head(
        "Inference-Header-Content-Length: 9" * 40, "Content-Length: 2"
    )
    + b"{}",
    "a pipelined flood of errors": b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000,
}


def one_input_body(
    name: bytes = b"INPUT0",
    datatype: bytes = b"INT32",
    shape: bytes = b"[1,16]",
    data_member: bytes = b'"data":[1]',
) -> bytes:
    """Return a request with one input, one part of which is malformed."""
    members = b'"name":"%s","datatype":"%s","shape":%s,%s' % (name, datatype, shape, data_member)
    return b'{"inputs":[{' + members + b"}]}"


# Invalid JSON bodies. The server responds with a client error, or with 500 for JSON of the wrong
# type.
BODIES: dict[str, bytes] = {
    "nested 100,000 deep": b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested 100,000 deep, objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "nested data": one_input_body(data_member=b'"data":' + b"[" * 5000 + b"]" * 5000),
    "no json": random.Random(3).randbytes(10_000),
    "not utf-8": b'{"id":"\xff\xfe"}',
    "lone surrogate": rb'{"id":"\ud800","inputs":[]}',
    "a nul in a name": one_input_body(name=b"a\\u0000b"),
    "a huge integer": one_input_body(data_member=b'"data":[' + b"9" * 5000 + b"]"),
    "a huge exponent": one_input_body(data_member=b'"data":[1e999999]'),
    "a huge dimension": one_input_body(shape=b"[1," + b"9" * 100 + b"]"),
    "65,536 dimensions": one_input_body(shape=b"[" + b"1," * 65535 + b"1]"),
    "a shape that overflows": one_input_body(shape=b"[4294967296,4294967296,4294967296]"),
    "a fractional shape": one_input_body(shape=b"[1.5]"),
    "a boolean shape": one_input_body(shape=b"[true,true]"),
    "100,000 inputs": b'{"inputs":['
    + one_input_body()[11:-2]
    + (b"," + one_input_body()[11:-2]) * 99_999
    + b"]}",
    "an endless name": one_input_body(name=b"n" * 1_000_000),
    "an unknown datatype": one_input_body(datatype=b"COMPLEX"),
    "a binary size that is negative": one_input_body(
        data_member=b'"parameters":{"binary_data_size":-1}'
    ),
    "a binary size that is huge": one_input_body(
        data_member=b'"parameters":{"binary_data_size":18446744073709551615}'
    ),
    "the same key a thousand times": b"{" + b'"inputs":[],' * 1000 + b'"inputs":[]}',
}

# Other endpoints that take bodies.
BAD_REQUESTS: dict[str, tuple[str, bytes]] = {
    "register without json": ("/v2/systemsharedmemory/region/x/register", b"\xff"),
    "register a list": ("/v2/systemsharedmemory/region/x/register", b"[]"),
    "register deep": ("/v2/systemsharedmemory/region/x/register", b"[" * 100_000),
    "register a long name": (
        f"/v2/systemsharedmemory/region/{'x' * 5000}/register",
        b'{"key":"/x","byte_size":1}',
    ),
    "index without json": ("/v2/repository/index", b"{{{"),
    "load without json": ("/v2/repository/models/simple/load", b"{{{"),
    "load deep": ("/v2/repository/models/simple/load", b"[" * 100_000),
    "load a long name": (f"/v2/repository/models/{'x' * 5000}/load", b""),
    "infer a long name": (f"/v2/models/{'x' * 5000}/infer", REQUEST),
    "infer an odd name": ("/v2/models/%00%ff%2e%2e/infer", REQUEST),
    "a version of 100 digits": (f"/v2/models/simple/versions/{'9' * 100}/infer", REQUEST),
}


def assert_refused(connection: socket.socket, name: str) -> None:
    """Check that the response is an error, or that the connection is closed without one."""
    try:
        status = read_reply(connection).status
    except (OSError, http.client.HTTPException):
        return
    assert 400 <= status < 600, name


def test_bytes(server: Server) -> None:
    with scene(server) as stage:
        for name, data in BAD_BYTES.items():
            for _ in range(2):
                with raw_connection(server.http_port) as connection:
                    try:
                        connection.sendall(data)
                        connection.shutdown(socket.SHUT_WR)
                    except OSError:
                        pass
                    assert_refused(connection, name)
            check_clients(stage)


def test_bodies(server: Server) -> None:
    with scene(server) as stage:
        for name, body in BODIES.items():
            for _ in range(2):
                reply = stage.http.infer("simple", body)
                assert reply.status in (400, 500, 501), (name, reply)
                assert len(reply.error) < 3_000_000, name
            check_clients(stage)


def test_other_requests(server: Server) -> None:
    with scene(server) as stage:
        for name, (path, body) in BAD_REQUESTS.items():
            assert stage.http.post(path, body).status in (400, 404, 500, 503), name
            check_clients(stage)


def test_every_truncation_of_a_request(server: Server) -> None:
    """The body is truncated at every position."""
    with scene(server) as stage:
        for length in range(0, len(REQUEST), 3):
            assert stage.http.infer("simple", REQUEST[:length]).status in (400, 500)
        check_clients(stage)


def test_every_split_of_a_binary_request(server: Server) -> None:
    """The header length has every wrong value."""
    with scene(server) as stage:
        for size in range(1, len(REQUEST), 3):
            headers = {"Inference-Header-Content-Length": str(size)}
            assert stage.http.infer("simple", REQUEST, headers).status in (400, 500)
        check_clients(stage)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v2/models/simple/config HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",
        head(f"Content-Length: {len(REQUEST)}") + REQUEST,
        head("Content-Length: 2") + b"{}",
    ],
    ids=["config", "nothing", "infer", "infer nothing"],
)
def test_a_client_that_reads_nothing_is_not_read_from(server: Server, request_bytes: bytes) -> None:
    """The client pipelines requests; the server reads a limited number of them."""
    flood = request_bytes * (1 + 65536 // len(request_bytes))
    with scene(server) as stage, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(1.0)
        connection.connect(("127.0.0.1", server.http_port))
        sent_bytes = 0
        with contextlib.suppress(TimeoutError):
            while sent_bytes < 64 << 20:
                sent_bytes += connection.send(flood)
        assert sent_bytes < 64 << 20
        check_clients(stage)


def test_a_slow_sender_delays_no_other_client(server: Server) -> None:
    with scene(server) as stage, raw_connection(server.http_port) as connection:
        connection.sendall(head(f"Content-Length: {len(REQUEST)}"))
        for start in range(0, len(REQUEST), 40):
            connection.sendall(REQUEST[start : start + 40])
            check_clients(stage)
        assert read_reply(connection).status == 200


def test_a_large_json_body_delays_no_other_client(serve: Callable[..., Server]) -> None:
    """While 20 MB of JSON are parsed, health checks and small requests are answered."""
    server = serve("--gateways=1")
    values = np.arange(3_000_000, dtype=np.float32)
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    body = json.dumps({"inputs": [json_input("INPUT0", values)], "outputs": outputs}).encode()
    longest = []  # the longest wait as a share of all waits, by round
    with scene(server, ARENA_BYTES) as stage, server.http() as other_client:
        for _ in range(3):  # three rounds, because the machine may pause in some of them
            pending = stage.pool.infer("identity", body)
            waits_s = []
            while not pending.done():
                start_s = time.monotonic()
                assert other_client.get("/v2/health/live").status == 200
                waits_s.append(time.monotonic() - start_s)
            assert pending.result().status == 200
            longest.append(max(waits_s) / sum(waits_s))
        assert min(longest) < 1 / 3  # in one round at least, no wait took most of the time
        check_clients(stage)


def test_metrics_port(server: Server) -> None:
    for text in (
        b"\x00" * 1000,
        b"GET /metrics HTTP/1.1\r\n" * 5000,
        b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        with raw_connection(server.metrics_port) as connection:
            try:
                connection.sendall(text)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            assert_refused(connection, "metrics")
    assert "nv_inference_count" in server.metrics()


def check_clients(stage: Scene) -> None:
    assert_recovers(stage, time.monotonic())
    with stage.server.http() as other_client:
        assert other_client.infer("simple", REQUEST).status == 200
    assert stage.load.troubles() == []
