"""A closed loop over HTTP: several connections with one request in flight each."""

from __future__ import annotations

import re
import selectors
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from bench.load.client import RequestFailed

_LENGTH = re.compile(rb"(?i)content-length: (\d+)\r\n")


class Connections:
    """Open connections, each of which sends its entry of `requests` repeatedly."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self._selector = selectors.DefaultSelector()
        for request in requests:
            connection = socket.create_connection(("127.0.0.1", port))
            self._selector.register(connection, selectors.EVENT_READ, request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def run(self, count: int) -> None:
        """Send `count` requests and receive all their responses. Raises RequestFailed."""
        keys = list(self._selector.get_map().values())
        sent_count = min(count, len(keys))
        for key in keys[:sent_count]:
            _send(key)
        received = 0
        while received < count:
            for key, _ in self._selector.select():
                _receive(key)
                received += 1
                if sent_count < count:
                    sent_count += 1
                    _send(key)


def _send(key: selectors.SelectorKey) -> None:
    assert isinstance(key.fileobj, socket.socket)
    key.fileobj.sendall(key.data)


def _receive(key: selectors.SelectorKey) -> None:
    assert isinstance(key.fileobj, socket.socket)
    data = b""
    while True:
        chunk = key.fileobj.recv(65536)
        data += chunk
        head, separator, body = data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n") if separator else None
        if length is not None and len(body) >= int(length[1]):
            break
        if not chunk:
            raise RequestFailed("the server has closed a connection")
    if not data.startswith(b"HTTP/1.1 200"):
        raise RequestFailed(f"{data[:300]!r}")
