"""The link to the listener: a socket of packets, by which the server tells news, and is asked."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import threading
from pathlib import Path
from typing import Any

from shmserve.client.errors import Disconnected
from shmserve.ipc import endpoints
from shmserve.ipc.messages import local_clients as m
from shmserve.ipc.transport import frames

_LARGEST = 4 * 1024 * 1024  # bytes of a packet
# What the kernel takes for a time to wait: 0 would be for ever, and it is counted in an int.
_SHORTEST_S, _LONGEST_S = 1e-3, 2e6
GONE = "there is no server any more"


class ControlRequest:
    """Something that the server was asked, and its response.

    `pending` is locked until that is there: not an Event, in which a thread that waits holds a lock
    of its own, and whoever responds would wait for a signal's handler in it that asks, too.
    """

    __slots__ = ("number", "pending", "response")

    def __init__(self, number: int) -> None:
        self.number = number
        self.pending = threading.Lock()
        self.pending.acquire()
        self.response: Any = None

    def wait(self) -> Any:
        """The response, when it is there: the payload, or an error to be raised."""
        with self.pending:
            return self.response


class ListenerLink:
    """A unix socket, SOCK_SEQPACKET, to a server's listener. Raises OSError where this program has
    no descriptor left for it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers = itertools.count(1)
        self._asked: dict[int, ControlRequest] = {}

    def connect(self, run_dir: Path, timeout_s: float) -> None:
        """Say hello to the server there. From now on nothing waits for longer than this, until
        `settled`. Raises OSError when nobody lets us in within this time."""
        timeout_s = min(max(timeout_s, _SHORTEST_S), _LONGEST_S)
        path = run_dir if run_dir.is_socket() else endpoints.listener(run_dir)
        _connect(self._socket, str(path), timeout_s)
        self._socket.settimeout(timeout_s)
        self._socket.send(frames.pack([m.Hello(frames.VERSION)]))

    def settled(self) -> None:
        """The server has let us in: `receive` waits for as long as it takes."""
        self._socket.settimeout(None)

    def fileno(self) -> int:
        """The descriptor, to wait for."""
        return self._socket.fileno()

    def receive(self) -> list[Any]:
        """The server's next messages. Raises OSError when it has ended, MalformedMessage when it is
        none that we understand."""
        data = self._socket.recv(_LARGEST)
        if not data:
            raise ConnectionResetError(GONE)
        return frames.unpack(data)

    def tell(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Tell the server something, and pass descriptors. Raises Disconnected."""
        # Without a lock: a signal's handler may find its thread in that, and wait for another one
        # that has something to tell. A packet goes as a whole.
        try:
            socket.send_fds(self._socket, [frames.pack([message])], fds)
        except OSError as error:
            raise Disconnected(GONE) from error

    def ended(self) -> bool:
        """Whether it has, though nobody may have read that yet; for any thread."""
        poll = select.poll()
        try:
            poll.register(self._socket, 0)  # a hang-up is told anyway
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed meanwhile
            return True

    # --- requests of ours

    def request(self) -> ControlRequest:
        """A request with a number of its own, whose response is awaited from now on."""
        request = ControlRequest(next(self._numbers))
        self._asked[request.number] = request
        return request

    def respond(self, number: int, response: Any) -> None:
        """Give a request its response."""
        request = self._asked.pop(number, None)
        if request is not None:
            request.response = response
            request.pending.release()

    # --- its end

    def shut_down(self) -> None:
        """End it, so that `receive` returns; for any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; what was asked fails."""
        for number in list(self._asked):
            self.respond(number, Disconnected(GONE))
        self._socket.close()


def _connect(listener: socket.socket, path: str, timeout_s: float) -> None:
    """Connect within a time, waiting for a place where many want to come in: a socket with a
    timeout of Python's is told at once that there is none."""
    seconds, rest = divmod(timeout_s, 1)
    limit = struct.pack("ll", int(seconds), int(rest * 1e6))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    listener.connect(path)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bytes(len(limit)))
