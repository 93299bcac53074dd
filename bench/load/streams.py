"""The load of programs that read many responses to a request: `python -m bench.load.streams ...`.

A process of its own, the same for both servers. Over gRPC it speaks HTTP/2 itself, as far as one
stream a connection takes: a library's client in Python takes longer for a response than the servers
do, and one would measure that. Prints one line of JSON: responses a second, and the median time
from a request to its first response in microseconds.
"""

from __future__ import annotations

import json
import select
import socket
import statistics
import struct
import sys
import time
from dataclasses import dataclass, field

import numpy as np

MODEL = "repeat"
RESPONSES, FIRST = "responses/s", "µs"

_WARM_UP_S = 0.5
_ANSWERS_WITHIN_S = 30.0

# RFC 9113: frame types, flags, settings; windows so large that a run does not fill them.
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_INITIAL_WINDOW_SIZE, _LARGEST_WINDOW, _DEFAULT_WINDOW = 4, 2**31 - 1, 65_535
_FRAME = struct.Struct(">HBBBI")  # length (in 16 and 8 bits), type, flags, stream
_STREAM = 1
_MESSAGE = struct.Struct(">BI")  # gRPC: compressed or not, size


@dataclass
class Counted:
    """What has come: `first_us` of each request."""

    responses: int = 0
    first_us: list[float] = field(default_factory=list)

    def figures(self, seconds: float) -> dict[str, float]:
        """What is printed."""
        return {RESPONSES: self.responses / seconds, FIRST: statistics.median(self.first_us)}


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return _FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """A field that is not indexed (RFC 7541, 6.2.2)."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


def _opening(address: str) -> bytes:
    """What a connection begins with, and the stream."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/inference.GRPCInferenceService/ModelStreamInfer",
        ":authority": address,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    wide = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
    more = struct.pack(">I", _LARGEST_WINDOW - _DEFAULT_WINDOW)
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0, wide)
        + _frame(_WINDOW_UPDATE, 0, 0, more)
        + _frame(_HEADERS, _END_HEADERS, _STREAM, b"".join(map(_header, fields, fields.values())))
    )


def request(count: int) -> bytes:
    """A ModelInferRequest for so many responses."""
    from tritonclient.grpc import service_pb2 as pb

    message = pb.ModelInferRequest(model_name=MODEL)
    message.inputs.add(name="COUNT", datatype="INT32", shape=[1])
    message.raw_input_contents.append(np.array([count], np.int32).tobytes())
    packed: bytes = message.SerializeToString()
    return packed


def _refuse_error(response: bytes) -> None:
    """End where a response is an error."""
    from tritonclient.grpc import service_pb2 as pb

    found = pb.ModelStreamInferResponse.FromString(response)
    if found.error_message:
        raise SystemExit(found.error_message)


class Stream:
    """A connection with one stream: request after request, each when all responses to the one
    before it are read."""

    def __init__(self, address: str, count: int) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        packed = request(count)
        message = _MESSAGE.pack(0, len(packed)) + packed
        self._request = _frame(_DATA, 0, _STREAM, message)
        self._count = count
        self._frames = bytearray()
        self._messages = bytearray()
        self._sent_ns = 0
        self.awaited = 0  # responses
        self.sock.sendall(_opening(address))

    def ask(self) -> None:
        """Send a request."""
        self.awaited = self._count
        self._sent_ns = time.perf_counter_ns()
        self.sock.sendall(self._request)

    def read(self, counted: Counted) -> None:
        """Count what has come."""
        data = self.sock.recv(1 << 18)
        if not data:
            raise SystemExit("the server closed the connection")
        self._frames += data
        at, end = 0, len(self._frames)
        while end - at >= _FRAME.size:
            high, low, kind, flags, _ = _FRAME.unpack_from(self._frames, at)
            next_ = at + _FRAME.size + (high << 8 | low)
            if next_ > end:
                break
            self._take(kind, flags, self._frames[at + _FRAME.size : next_], counted)
            at = next_
        del self._frames[:at]

    def _take(self, kind: int, flags: int, payload: bytearray, counted: Counted) -> None:
        if kind == _DATA and not flags & _PADDED:
            self._messages += payload
            self._count_messages(counted)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            data = bytes(payload) if kind == _PING else b""
            self.sock.sendall(_frame(kind, _ACK, 0, data))
        elif kind in (_RESET, _GOAWAY) or flags & _PADDED:
            raise SystemExit(f"the server sent a frame of type {kind}")
        elif kind == _HEADERS and flags & _END_STREAM:
            raise SystemExit(f"the server ended the stream: {bytes(payload)!r}")

    def _count_messages(self, counted: Counted) -> None:
        at, end = 0, len(self._messages)
        while end - at >= _MESSAGE.size:
            _, size = _MESSAGE.unpack_from(self._messages, at)
            next_ = at + _MESSAGE.size + size
            if next_ > end:
                break
            if self.awaited == self._count:
                counted.first_us.append((time.perf_counter_ns() - self._sent_ns) / 1000)
                _refuse_error(bytes(self._messages[at + _MESSAGE.size : next_]))
            if not self.awaited:
                raise SystemExit("there were more responses than that")
            self.awaited -= 1
            counted.responses += 1
            at = next_
        del self._messages[:at]


def over_grpc(address: str, streams: int, count: int, seconds: float) -> dict[str, float]:
    """So many streams at once."""
    opened = {stream.sock: stream for stream in (Stream(address, count) for _ in range(streams))}
    for s in (_WARM_UP_S, seconds):
        counted, began = Counted(), time.perf_counter()
        for stream in opened.values():
            stream.ask()
        while any(stream.awaited for stream in opened.values()):
            ready, _, _ = select.select(list(opened), [], [], _ANSWERS_WITHIN_S)
            if not ready:
                raise SystemExit("the server does not respond any more")
            for sock in ready:
                opened[sock].read(counted)
                if not opened[sock].awaited and time.perf_counter() < began + s:
                    opened[sock].ask()
        took = time.perf_counter() - began
    return counted.figures(took)


def natively(run_dir: str, count: int, seconds: float) -> dict[str, float]:
    """One stream of `shmserve.client` after the other."""
    import shmserve.client

    asked = np.array([count], np.int32)
    with shmserve.client.connect(run_dir) as server:
        for s in (_WARM_UP_S, seconds):
            counted, started = Counted(), time.perf_counter()
            while time.perf_counter() < started + s:
                began = time.perf_counter_ns()
                with server.stream(MODEL, COUNT=asked) as responses:
                    next(responses)
                    counted.first_us.append((time.perf_counter_ns() - began) / 1000)
                    counted.responses += 1 + sum(1 for _ in responses)
            took = time.perf_counter() - started
    return counted.figures(took)


def main(arguments: list[str]) -> None:
    """`grpc` HOST:PORT or `native` RUN_DIR; STREAMS COUNT SECONDS."""
    kind, where, streams, count, seconds = arguments
    if kind == "grpc":
        found = over_grpc(where, int(streams), int(count), float(seconds))
    else:
        found = natively(where, int(count), float(seconds))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
