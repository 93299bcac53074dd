"""A proxy that forwards bytes in pieces of random sizes."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

_SIZES = (1, 2, 3, 5, 9, 40, 300, 1400, 9000, 16384)  # sizes of the forwarded pieces in bytes


class CuttingProxy:
    """A proxy at `port` within the with block; `sent` and `received` count bytes."""

    def __init__(self, connect: Callable[[], socket.socket], seed: int) -> None:
        self._connect = connect
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.connections = 0
        self.sent = 0
        self.received = 0

    def __enter__(self) -> CuttingProxy:
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # no further connection is accepted
        for thread in self._threads[1:]:
            thread.join()
        for sock in (self._listener, *self._open):
            sock.close()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                self.connections += 1
                self._open.append(accepted)
                target = self._connect()
                self._open.append(target)
                self._pump(accepted, target, outwards=True)
                self._pump(target, accepted, outwards=False)

    def _pump(self, source: socket.socket, sink: socket.socket, *, outwards: bool) -> None:
        cuts = random.Random(self._random.random())
        for sock in (source, sink):
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

        def forward_bytes() -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    if outwards:
                        self.sent += len(data)
                    else:
                        self.received += len(data)
                    while data:
                        size = cuts.choice(_SIZES)
                        sink.sendall(data[:size])
                        data = data[size:]
                sink.shutdown(socket.SHUT_WR)

        self._start(forward_bytes)


def connect_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock
