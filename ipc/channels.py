"""ZeroMQ sockets that speak typed messages: many a frame, never blocking, never trusting.

`post` queues; `flush` sends everything queued for a peer as one frame: call it once a loop turn.
High-water marks are off (work in flight is bounded by credits, a full pipe would deadlock), linger
is 0, sends do not block. A frame that is not ours is dropped and counted. ZeroMQ's descriptor is
edge-triggered: after a wake-up, and after each send, `receive` until it is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import zmq

from shmserve.ipc.messages import pack, unpack
from shmserve.ipc.tensors import MalformedMessage

logger = logging.getLogger(__name__)

_MAX_FRAME = 256 * 1024 * 1024


def _tune(socket: zmq.Socket[bytes]) -> None:
    socket.set(zmq.LINGER, 0)
    socket.set_hwm(0)
    socket.set(zmq.MAXMSGSIZE, _MAX_FRAME)


class Dealer:
    """One end of a link to a `Router`. `identity` names this end to the other side."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: str
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        _tune(self.socket)
        self.socket.set(zmq.IDENTITY, identity.encode())
        self.socket.set(zmq.RECONNECT_IVL, 10)
        self.socket.set(zmq.RECONNECT_IVL_MAX, 200)
        self.socket.connect(endpoint)
        self.endpoint = endpoint
        self.fd: int = int(self.socket.get(zmq.FD))
        self.malformed = 0
        self._pending: list[Any] = []

    def post(self, message: Any) -> None:
        """Queue a message for the next `flush`."""
        self._pending.append(message)

    def flush(self) -> bool:
        """Send what is queued as one frame; whether there was anything."""
        if not self._pending:
            return False
        frame = pack(self._pending)
        self._pending.clear()
        self.socket.send(frame, zmq.NOBLOCK)
        return True

    def send(self, message: Any) -> None:
        """`post` and `flush`."""
        self._pending.append(message)
        self.flush()

    def receive(self) -> Iterator[Any]:
        """Every message that is here now."""
        # Asking first is cheaper than the exception that an empty socket raises.
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 1:
                self.malformed += 1
                continue
            try:
                messages = unpack(frames[0])
            except MalformedMessage as error:
                self.malformed += 1
                logger.warning("dropped a malformed frame: %s", error)
                continue
            yield from messages

    def wait(self, timeout_s: float | None) -> bool:
        """Block until something is here (True) or the time is over (False)."""
        timeout = None if timeout_s is None else max(0, int(timeout_s * 1000))
        return bool(self.socket.poll(timeout, zmq.POLLIN))

    def close(self) -> None:
        """Close the socket; what is queued is lost."""
        self.socket.close(0)


class Router:
    """The bound end of links from many `Dealer`s, told apart by their identity."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        _tune(self.socket)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(endpoint)
        self.endpoint = endpoint
        self.fd: int = int(self.socket.get(zmq.FD))
        self.malformed = 0
        self._pending: dict[bytes, list[Any]] = {}

    def post(self, peer: bytes, message: Any) -> None:
        """Queue a message for a peer, for the next `flush`."""
        queue = self._pending.get(peer)
        if queue is None:
            self._pending[peer] = [message]
        else:
            queue.append(message)

    def flush(self) -> bool:
        """Send what is queued, one frame a peer; whether there was anything.

        What is for a peer that is gone is dropped.
        """
        if not self._pending:
            return False
        for peer, messages in self._pending.items():
            try:
                self.socket.send_multipart((peer, pack(messages)), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                logger.debug("%d messages for a peer that is gone: %s", len(messages), error)
        self._pending.clear()
        return True

    def receive(self) -> Iterator[tuple[bytes, Any]]:
        """Every (peer, message) that is here now."""
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 2:
                self.malformed += 1
                continue
            try:
                messages = unpack(frames[1])
            except MalformedMessage as error:
                self.malformed += 1
                logger.warning("dropped a malformed frame: %s", error)
                continue
            for message in messages:
                yield frames[0], message

    def close(self) -> None:
        """Close the socket; what is queued is lost."""
        self.socket.close(0)
