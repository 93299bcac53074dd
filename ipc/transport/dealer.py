"""The dealer (ZeroMQ's DEALER): the connecting end of a link for typed messages.

It never blocks.
"""

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
    """The connecting end of a link to a `Router`; `identity` names this end.

    A dealer sends before it receives the peer's greeting, so that messages sent just before its
    exit arrive. `Router` accepts this, whereas libzmq's does not. If no socket listens at
    `endpoint`, messages are lost; the supervisor handles exits and successors.
    """

    def __init__(self, endpoint: str, identity: str) -> None:
        self.endpoint = endpoint
        self.malformed = 0
        self.pending: list[Any] = []
        # Queues a message for the next `flush`. Requests use this often, so it avoids another call.
        self.post: Callable[[Any], None] = self.pending.append
        self._poll = select.epoll()
        self.fd: int = self._poll.fileno()
        self._connection: Connection | None = None
        self.connected = False  # the other end is known to be connected
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
        self.connected = True
        self._write(b"")

    def flush(self) -> bool:
        """Send the queued messages as one frame.

        A message that cannot be packed raises an exception and is removed from the queue.

        Returns:
            False if the other end is gone.
        """
        pending = self.pending
        if not pending:
            return True
        messages = pending[:]
        pending.clear()
        return self._write(zmtp.frame(pack(messages)))

    def send(self, message: Any) -> bool:
        """Call `post` and `flush`."""
        if self.pending:
            self.post(message)
            return self.flush()
        return self._write(zmtp.frame(pack((message,))))

    def _write(self, data: bytes) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send(data)
        except OSError:
            # Messages that the peer sent before it closed are still read; the end is detected
            # there.
            self._connection.unsent.clear()
            return False
        return True

    def receive(self) -> list[Any]:
        """Return the available messages, at most those of one bounded read."""
        connection = self._connection
        if connection is None:
            return []
        if connection.unsent:
            self._write(b"")
        frames = connection.receive()
        messages: list[Any] = []
        for frame in frames or ():
            try:
                messages += unpack(frame)
            except MalformedMessage as error:
                self.malformed += 1
                logger.warning("dropped a malformed frame: %s", error)
        if frames is None or connection.decoder.broken:
            self._disconnect(connection)
        elif connection.decoder.dropped:
            self.malformed += connection.decoder.dropped
            connection.decoder.dropped = 0
        return messages

    def _disconnect(self, connection: Connection) -> None:
        connection.close()
        self._connection = None
        self.connected = False

    def wait(self, timeout_s: float | None) -> bool:
        """Block until a message is available (True) or the time has expired (False)."""
        return bool(self._poll.poll(timeout_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Close the link.

        Output that the other end has not read after `linger_s` seconds is lost.
        """
        if self._connection is not None:
            linger([self._connection], linger_s)
            self._disconnect(self._connection)
        self._poll.close()
