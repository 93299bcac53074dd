"""The dealer (ZeroMQ's DEALER), the connecting end of a link: typed messages, many a frame, never
blocking."""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable
from typing import Any

from shmserve.ipc.transport import zmtp
from shmserve.ipc.transport.connection import PREFIX, Connection, linger
from shmserve.ipc.transport.frames import pack, unpack
from shmserve.ipc.transport.records import MalformedMessage

logger = logging.getLogger(__name__)
_CONNECT_S = 1.0


class Dealer:
    """One end of a link to a `Router`. `identity` names this end to the other side.

    It speaks without waiting for the other's greeting, so that what is said just before the end
    arrives; a Router takes that, libzmq's would not. Where nothing listens at `endpoint`, or no
    longer, what is sent is lost: who ends and who takes over is the supervisor's to say.
    """

    def __init__(self, endpoint: str, identity: str) -> None:
        self.endpoint = endpoint
        self.malformed = 0
        self.pending: list[Any] = []
        # Queues a message for the next `flush`. Requests on their way do it often: no call is
        # between.
        self.post: Callable[[Any], None] = self.pending.append
        self._poll = select.epoll()
        self.fd: int = self._poll.fileno()
        self._connection: Connection | None = None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(endpoint.removeprefix(PREFIX))
        except OSError as error:
            logger.debug("nobody listens at %s: %s", endpoint, error)
            sock.close()
            return
        greeting = bytearray(zmtp.GREETING + zmtp.ready("DEALER", identity.encode()))
        self._connection = Connection(sock, self._poll, greeting)
        self._send(b"")

    def flush(self) -> bool:
        """Send what is queued as one frame; what cannot be packed raises, and is queued no more.

        False: the other end has gone, and will not have it.
        """
        pending = self.pending
        if not pending:
            return True
        messages = pending[:]
        pending.clear()
        return self._send(zmtp.frame(pack(messages)))

    def send(self, message: Any) -> bool:
        """`post` and `flush`."""
        self.pending.append(message)
        return self.flush()

    def _send(self, data: bytes) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send(data)
        except OSError:
            # What it said before it went is still to be read; the end of it shows there.
            self._connection.unsent.clear()
            return False
        return True

    def receive(self) -> list[Any]:
        """The messages that are here now; never more than a bounded read brings."""
        connection = self._connection
        if connection is None:
            return []
        if connection.unsent:
            self._send(b"")
        frames = connection.receive()
        messages: list[Any] = []
        for frame in frames or ():
            try:
                messages += unpack(frame)
            except MalformedMessage as error:
                self.malformed += 1
                logger.warning("dropped a malformed frame: %s", error)
        if frames is None or connection.decoder.broken:
            connection.close()
            self._connection = None
        elif connection.decoder.dropped:
            self.malformed += connection.decoder.dropped
            connection.decoder.dropped = 0
        return messages

    @property
    def connected(self) -> bool:
        """Whether the other end is there, as far as is known."""
        return self._connection is not None

    def wait(self, timeout_s: float | None) -> bool:
        """Block until something is here (True) or the time is over (False)."""
        return bool(self._poll.poll(timeout_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Close; what the other end has not taken after `linger_s` seconds is lost."""
        if self._connection is not None:
            linger([self._connection], linger_s)
            self._connection.close()
            self._connection = None
        self._poll.close()
