"""The cost of one gRPC client's flood to other clients: `python -m bench.load.attacks`.

Eight clients have one call each in flight, on separate connections. Their rate during a flood is
compared with their rate without it, in turns. A process sends the flood as fast as the server
reads, and connects again whenever the server closes its connection. The process acknowledges the
server's settings, like a well-behaved client. The program prints a line for each flood: the median
of the ratios and their extremes, and the number of connections that the server closed per second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import select
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.system import servers

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _, _PING, _, _WINDOW, _CONTINUATION = range(10)
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_FRAME = struct.Struct(">HBBBI")
_LARGEST_WINDOW = 2**31 - 1

_CLIENTS = 8
_ROUNDS = 5
_SECONDS = 1.0
_SEND_BYTES = 64 * 1024
_FLOOD_BYTES = 16 * 1024 * 1024  # bytes of a flood that are created in advance and then repeated


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return the bytes of an HTTP/2 frame."""
    return _FRAME.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def head(path: str) -> bytes:
    """Return the header block of a call to this path, with literal fields."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(
        b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in field)
        for field in fields.items()
    )


_INFER = head("/inference.GRPCInferenceService/ModelInfer")


def simple_message() -> bytes:
    """Return an encoded `ModelInferRequest` for the model `simple`."""
    from tritonclient.grpc import service_pb2 as pb

    message = pb.ModelInferRequest(model_name="simple")
    for name in ("INPUT0", "INPUT1"):
        message.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        message.raw_input_contents.append(struct.pack("<16i", *range(16)))
    encoded_message: bytes = message.SerializeToString()
    return encoded_message


def simple_request() -> bytes:
    """Return the message of `simple_message` with its gRPC prefix."""
    message = simple_message()
    return b"\0" + struct.pack(">I", len(message)) + message


def attacks(request: bytes) -> dict[str, Callable[[int], bytes]]:
    """Return the floods by name: functions from a stream id to the bytes of that stream."""

    def call(stream: int) -> bytes:
        return frame(_HEADERS, _END_HEADERS, stream, _INFER) + frame(
            _DATA, _END_STREAM, stream, request
        )

    reset = bytes(4)
    return {
        "calls begun and reset": lambda n: (
            frame(_HEADERS, _END_HEADERS, n, _INFER) + frame(_RESET, 0, n, reset)
        ),
        "calls asked and reset": lambda n: call(n) + frame(_RESET, 0, n, reset),
        "calls that make the server reset": lambda n: (
            frame(_HEADERS, _END_HEADERS, n, _INFER) + frame(_WINDOW, 0, n, bytes(4))
        ),
        "header blocks without end": lambda n: (
            frame(_HEADERS, 0, 1, b"") + frame(_CONTINUATION, 0, 1, bytes(16)) * 64
        ),
        "pings": lambda _: frame(_PING, 0, 0, bytes(8)) * 64,
        "settings": lambda _: frame(_SETTINGS, 0, 0, b"\0\4\0\0\xff\xff") * 64,
        "priorities": lambda _: frame(_PRIORITY, 0, 3, b"\0\0\0\1\0") * 64,
        "empty data": lambda n: (
            (frame(_HEADERS, _END_HEADERS, 1, _INFER) if n == 1 else b"") + frame(_DATA, 0, 1) * 64
        ),
        "windows of a byte": lambda _: frame(_WINDOW, 0, 0, b"\0\0\0\1") * 64,
        "calls whose responses are not read": call,
        "calls that are not asked": lambda n: frame(_HEADERS, _END_HEADERS, n, _INFER),
    }


def flood(port: int, name: str, ended_connections: Any) -> None:
    """Send the bytes of a flood until the process is killed.

    The bytes are created once, so that the flood costs its sender hardly any time.
    `ended_connections` counts the connections that the server has closed.
    """
    stream_bytes = attacks(simple_request())[name]
    flood_bytes = bytearray(_PREFACE + frame(_SETTINGS, 0, 0) + frame(_SETTINGS, _ACK, 0))
    stream = 1
    while len(flood_bytes) < _FLOOD_BYTES:
        flood_bytes += stream_bytes(stream)
        stream += 2
    reads = "not read" not in name
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as sock:
            _flood(sock, memoryview(flood_bytes), reads)
        ended_connections.value += 1


def _flood(sock: socket.socket, flood_bytes: memoryview, reads: bool) -> None:
    sock.setblocking(False)
    sent_bytes = 0
    while True:
        readable, writable, _ = select.select([sock] if reads else [], [sock], [], 0.1)
        if readable and not sock.recv(1 << 20):
            return
        if writable:
            sent_bytes += sock.send(flood_bytes[sent_bytes : sent_bytes + _SEND_BYTES])
            if sent_bytes == len(flood_bytes):
                return


class HonestClient:
    """A well-behaved client with one call in flight."""

    def __init__(self, port: int, request: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request
        self._stream = -1
        self._response = b""
        settings = frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, _LARGEST_WINDOW))
        window = frame(_WINDOW, 0, 0, struct.pack(">I", _LARGEST_WINDOW - 65535))
        self.sock.sendall(_PREFACE + settings + frame(_SETTINGS, _ACK, 0) + window)

    def send_request(self) -> None:
        """Begin a call."""
        self._stream += 2
        self.sock.sendall(
            frame(_HEADERS, _END_HEADERS, self._stream, _INFER)
            + frame(_DATA, _END_STREAM, self._stream, self._request)
        )

    def read(self) -> int:
        """Read the available data, and begin a new call for each completed one.

        Returns:
            The number of completed calls.
        """
        data = self.sock.recv(1 << 16)
        if not data:
            raise SystemExit("the server ended a well-behaved client's connection")
        self._response += data
        if self._response.endswith(b"grpc-status\x010"):
            self._response = b""
            self.send_request()
            return 1
        if b"grpc-message" in self._response:
            raise SystemExit(f"a call of a well-behaved client failed: {self._response!r}")
        return 0


def rate(clients: dict[socket.socket, HonestClient], seconds: float) -> float:
    """Return the calls per second of all clients."""
    began_s = time.perf_counter()
    completed_count = 0
    while (took_s := time.perf_counter() - began_s) < seconds:
        for sock in select.select(list(clients), [], [], 0.1)[0]:
            completed_count += clients[sock].read()
    return completed_count / took_s


@contextlib.contextmanager
def run_attack(port: int, name: str, ended_connections: Any) -> Iterator[None]:
    """Run the flood of this name during the block."""
    process = multiprocessing.Process(target=flood, args=(port, name, ended_connections))
    process.start()
    try:
        time.sleep(0.3)  # the measurement begins after the first moments of the flood
        yield
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Measure every flood and print a line for each."""
    request = simple_request()
    model = servers.BENCH / "models" / "simple"
    with servers.running(servers.Shmserve(), [model], notes=[]) as server:
        port = server.ports.grpc
        honest_clients = [HonestClient(port, request) for _ in range(_CLIENTS)]
        clients = {client.sock: client for client in honest_clients}
        for client in clients.values():
            client.send_request()
        rate(clients, _SECONDS)
        for name in attacks(request):
            ended_connections = multiprocessing.Value("i", 0)
            ratios = []
            for _ in range(_ROUNDS):
                rate_alone = rate(clients, _SECONDS)
                with run_attack(port, name, ended_connections):
                    ratios.append(rate(clients, _SECONDS) / rate_alone)
            low, high = min(ratios), max(ratios)
            ended_per_s = ended_connections.value / (_ROUNDS * _SECONDS)
            print(
                f"{name:36} {statistics.median(ratios):5.2f} [{low:.2f} .. {high:.2f}] "
                f"{ended_per_s:8.0f} ended/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
