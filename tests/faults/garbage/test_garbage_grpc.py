"""Malformed gRPC traffic: its sender receives an error, and other clients are not affected."""

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.faults.scene import Scene, State, assert_is_as_it_was, assert_recovers, scene
from tests.support import repositories
from tests.support.load import Load
from tests.support.servers import Server, running
from tests.support.wire.grpc_calls import is_right, request_of, simple_request, stub
from tests.support.wire.http2 import CLIENT_OPENING, PREFACE, SERVICE, flood, frame, message, post

_PATIENCE_S = 20.0
# Bytes of buffers and threads that gRPC keeps for later calls.
_GRPC_BYTES = 64 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("grpc-garbage")) as running_server:
        yield running_server


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Server]:
    """Yield a server of two models that has answered requests."""
    repositories.add(folder, "simple", "identity")
    with running(folder, *flags, grpc=True) as running_server:
        with Load(running_server), stub(running_server) as call:
            assert is_right(call.ModelInfer(simple_request()))
        yield running_server


def check_other_clients(stage: Scene) -> None:
    """Check that other clients are served over both listeners."""
    with stub(stage.server) as call:
        assert is_right(call.ModelInfer(simple_request(), timeout=_PATIENCE_S))
    assert_recovers(stage, time.monotonic())
    assert stage.load.troubles() == []


_HEADERS = post(f"{SERVICE}ModelInfer")
_RANDOM = random.Random(11)

STREAMS: dict[str, bytes] = {
    "half a preface": PREFACE[:10],
    "no frames": CLIENT_OPENING + _RANDOM.randbytes(5000),
    "an unknown frame": CLIENT_OPENING + frame(99, 255, 1, bytes(100)),
    "a frame that is too large": CLIENT_OPENING + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(100_000),
    "half a frame": CLIENT_OPENING + frame(0, 0, 1, bytes(1000))[:500],
    "data for no stream": CLIENT_OPENING + frame(0, 1, 7, bytes(1000)),
    "headers that are no headers": CLIENT_OPENING + frame(1, 5, 1, _RANDOM.randbytes(500)),
    "headers without end": CLIENT_OPENING + frame(1, 0, 1, b"") + frame(9, 0, 1,
        bytes(10_000)) * 500,
    "a flood of settings": CLIENT_OPENING + frame(4, 0, 0) * 20_000,
    "a flood of pings": CLIENT_OPENING + frame(6, 0, 0, bytes(8)) * 20_000,
    "a flood of resets": CLIENT_OPENING
    + b"".join(frame(1, 5, n, _HEADERS) + frame(3, 0, n, bytes(4)) for n in range(1, 10_001, 2)),
    "a window of nothing": CLIENT_OPENING + frame(8, 0, 0, bytes(4)),
    "a message of 4 GiB": CLIENT_OPENING + frame(1, 4, 1, _HEADERS) + frame(0, 0, 1,
        b"\0\xff\xff\xff\xff" + bytes(1000)),
    "a message that is compressed and is not": CLIENT_OPENING + frame(1, 4, 1, _HEADERS) + frame(0,
        1, 1, b"\1\0\0\0\4abcd"),
    "a message that is cut short": CLIENT_OPENING + frame(1, 4, 1, _HEADERS) + frame(0, 1, 1,
        b"\0\0\0\0\x10abcd"),
}  # fmt: skip


@pytest.mark.usefixtures("state_before")
def test_streams(server: Server) -> None:
    with scene(server, _GRPC_BYTES) as stage:
        for data in STREAMS.values():
            for _ in range(3):
                sock = socket.create_connection(("127.0.0.1", server.grpc_port), timeout=1)
                with sock, contextlib.suppress(OSError):
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
            check_other_clients(stage)


def test_incomplete_messages(server: Server) -> None:
    """A hundred calls whose messages arrive byte by byte block no call and leave no state."""
    partial = (
        CLIENT_OPENING + frame(1, 4, 1, _HEADERS) + frame(0, 0, 1, b"\0\0\x10\0\0" + bytes(100))
    )
    with scene(server, _GRPC_BYTES) as stage, contextlib.ExitStack() as stack:
        slow_sockets = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.grpc_port)))
            for _ in range(100)
        ]
        for sock in slow_sockets:
            sock.sendall(partial)
        for _ in range(5):
            for sock in slow_sockets:
                sock.sendall(frame(0, 0, 1, b"x"))
            check_other_clients(stage)


_REQUEST = frame(0, 1, 0, message(simple_request().SerializeToString()))
_RESET_FRAME = frame(3, 0, 0, bytes(4))


def call_of(path: str, *frames: bytes, flags: int = 4) -> Callable[[int], bytes]:
    """Return a function that encodes a call with its headers and `frames` for a stream."""
    all_frames = (frame(1, flags, 0, post(path)), *frames)

    def make(stream: int) -> bytes:
        number = stream.to_bytes(4, "big")
        return b"".join(frame[:5] + number + frame[9:] for frame in all_frames)

    return make


FLOODS: dict[str, Callable[[int], bytes]] = {
    "begun and reset": call_of(f"{SERVICE}ModelInfer", _RESET_FRAME),
    "asked and reset": call_of(f"{SERVICE}ModelInfer", _REQUEST, _RESET_FRAME),
    "streams that are reset": call_of(f"{SERVICE}ModelStreamInfer", _RESET_FRAME),
    "another method, reset": call_of(
        f"{SERVICE}ServerLive", frame(0, 1, 0, bytes(5)), _RESET_FRAME
    ),
    "reset by the server": call_of(f"{SERVICE}ModelInfer", frame(0, 0, 0, bytes(9)), flags=5),
    "begun and left": call_of(f"{SERVICE}ModelInfer"),
    "asked, the answer not read": call_of(f"{SERVICE}ModelInfer", _REQUEST),
    "no such method": call_of("/no/Such", flags=5),
    "pings": lambda _: frame(6, 0, 0, bytes(8)) * 1000,
    "settings": lambda _: frame(4, 0, 0, b"\0\4\0\0\0\x64" * 10) * 100,
}


@pytest.mark.parametrize("name", FLOODS)
@pytest.mark.usefixtures("state_before")
def test_floods(server: Server, name: str) -> None:
    """However many calls one client begins, no other client is rejected."""
    with scene(server, 2 * _GRPC_BYTES) as stage:
        with flood(server.grpc_port, FLOODS[name]), flood(server.grpc_port, FLOODS[name]):
            with stub(server) as old_stub:
                for _ in range(5):
                    with stub(server) as new_stub:
                        for call in (old_stub, new_stub):
                            answer = call.ModelInfer(simple_request(), timeout=_PATIENCE_S)
                            assert is_right(answer)
            assert stage.load.troubles() == []
        check_other_clients(stage)


def requests() -> Iterator[bytes]:
    request_bytes = simple_request().SerializeToString()
    yield from (request_bytes[:length] for length in range(0, len(request_bytes), 3))
    yield from (_RANDOM.randbytes(size) for size in (1, 10, 1000, 100_000))
    shapes = ([2**62], [2**63 - 1, 2**63 - 1], [-1], [-(2**63)], [1] * 65_536, [0], [1 << 40] * 3)
    for shape in shapes:
        request = pb.ModelInferRequest(model_name="identity")
        request.inputs.add(name="INPUT0", datatype="FP32", shape=shape)
        request.raw_input_contents.append(bytes(16))
        yield request.SerializeToString()
    for _ in range(2):
        request = simple_request()
        request.inputs[0].name = "n" * 1_000_000
        request.id = "i" * 1_000_000
        yield request.SerializeToString()
    request = simple_request()
    for _ in range(10_000):
        request.inputs.add().CopyFrom(request.inputs[0])
    yield request.SerializeToString()
    request = simple_request()
    for number in range(50_000):
        request.parameters[f"p{number}"].int64_param = number
    request.parameters["triton_x"].bool_param = True
    yield request.SerializeToString()
    # A field with a length of 4 GiB, of which few bytes follow.
    yield b"\x0a\xff\xff\xff\xff\x0f" + request_bytes
    yield b"\x33" * 100_000  # nested protobuf groups


def test_requests(server: Server) -> None:
    """Each malformed request is rejected with a short message for clients."""
    with scene(server, _GRPC_BYTES) as stage, grpc.insecure_channel(server.grpc_url) as channel:
        infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        methods = [channel.unary_unary(SERVICE + name) for name in ("ModelConfig", "NoSuchCall")]
        methods.append(channel.unary_unary("/"))
        methods.append(channel.unary_unary("/" + "x" * 5000))
        for data in requests():
            with pytest.raises(grpc.RpcError) as error_info:
                infer(data, timeout=_PATIENCE_S)
            assert error_info.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
            assert "Traceback" not in error_info.value.details()
            assert str(server.run_dir) not in error_info.value.details()
        for call in methods:
            with pytest.raises(grpc.RpcError):
                call(_RANDOM.randbytes(1000), timeout=_PATIENCE_S)
        check_other_clients(stage)


def test_metadata(server: Server) -> None:
    """The metadata is too large or malformed."""
    odd_metadata: list[list[tuple[str, Any]]] = [
        [("x", "y" * 100_000)],
        [(f"x{number}", "y") for number in range(5000)],
        [("x-bin", _RANDOM.randbytes(4000))],
        [("grpc-timeout", "99999999999S")],
        [("authorization", "Bearer " + "x" * 6000)],
    ]
    with scene(server, _GRPC_BYTES) as stage, stub(server) as call:
        for metadata in odd_metadata:
            with contextlib.suppress(grpc.RpcError, ValueError):
                call.ModelInfer(simple_request(), timeout=_PATIENCE_S, metadata=metadata)
        check_other_clients(stage)


def test_bombs(server: Server) -> None:
    """A message that inflates to a large size is sent repeatedly."""
    request = request_of("simple", np.zeros(64 << 20, np.uint8), "INT32")
    with scene(server, 3 * _GRPC_BYTES) as stage, stub(server) as call:
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                call.ModelInfer(request, timeout=_PATIENCE_S, compression=grpc.Compression.Gzip)
        check_other_clients(stage)


def test_streams_that_are_not_read(tmp_path: Path) -> None:
    """The server reads few requests of such a client, and disconnects it after a while."""
    large_request = request_of("identity", np.zeros(250_000, np.float32), "FP32")
    options = [("grpc.http2.lookahead_bytes", 65536), ("grpc.use_local_subchannel_pool", 1)]
    received_count = 0

    def large_messages() -> Iterator[Any]:
        nonlocal received_count
        while True:
            received_count += 1
            yield large_request

    with (
        serving(tmp_path, "--http-body-timeout-secs=2") as server,
        scene(server, 4 * _GRPC_BYTES) as stage,
    ):
        with grpc.insecure_channel(server.grpc_url, options) as channel:
            stream = channel.stream_stream(
                f"{SERVICE}ModelStreamInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
            )(large_messages(), timeout=60)
            while stream.is_active():
                check_other_clients(stage)
                assert received_count < 5000
            # Only this stream ends. Its status arrives after the unread messages.
            assert stream.code() is grpc.StatusCode.CANCELLED
        check_other_clients(stage)


def test_cancelled_calls(server: Server) -> None:
    """Hundreds of calls and streams are begun and cancelled."""
    with scene(server, _GRPC_BYTES) as stage, stub(server) as call:
        for number in range(300):
            call.ModelInfer.future(simple_request(str(number)), timeout=_PATIENCE_S).cancel()
            call.ModelStreamInfer(iter([simple_request()]), timeout=_PATIENCE_S).cancel()
        check_other_clients(stage)


def test_no_resources_remain_after_all_grpc_garbage(server: Server, state_before: State) -> None:
    assert_is_as_it_was(server, state_before, 4 * _GRPC_BYTES)
    assert "Traceback" not in server.log()
