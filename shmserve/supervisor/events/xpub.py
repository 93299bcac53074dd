"""The events socket: a ZeroMQ XPUB, on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

import zmq

MOST_QUEUED = 1000  # messages, for each subscriber: one that does not read loses what comes then
_LONGEST_MESSAGE = 256  # bytes: who listens has nothing to say but topics


class Xpub:
    """Listens at ipc://PATH, for this user's programs.

    on_message(bytes): a subscriber's message. Raises OSError where there is no room for it.
    libzmq's threads are this process's alone: it must not fork after this.
    """

    def __init__(self, endpoint: str, on_message: Callable[[bytes], None]) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        try:
            self._context.set(zmq.MAX_SOCKETS, 4)
            self._socket = self._context.socket(zmq.XPUB)
            self._socket.set(zmq.LINGER, 0)
            self._socket.set(zmq.SNDHWM, MOST_QUEUED)
            self._socket.set(zmq.MAXMSGSIZE, _LONGEST_MESSAGE)
            self._socket.bind(endpoint)
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from None
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._take)

    def send(self, topic: bytes, frame: bytes) -> None:
        """To each subscriber of the topic that has room for it."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([topic, frame], zmq.NOBLOCK)
        # The descriptor is edge-triggered, and sending may have consumed the edge.
        if self._readable():
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        while not self._socket.closed and self._readable():
            self._on_message(self._socket.recv(zmq.NOBLOCK))

    def _readable(self) -> bool:
        events = self._socket.get(zmq.EVENTS)
        return isinstance(events, int) and bool(events & zmq.POLLIN)

    def close(self) -> None:
        """Disconnect everybody."""
        self._loop.remove_reader(self._fd)
        self._context.destroy(linger=0)
