"""The peer-credential router: a `Router` for the server's own processes, whose identity must name
the pid that the kernel reports (SO_PEERCRED).

Models run foreign code as the server's user: that code may connect wherever a worker may. An
identity holds the pid of whose link it is; a connection that was made by another process is ended.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from shmserve.ipc.transport.connection import Connection
from shmserve.ipc.transport.router import Router


def first_number(identity: bytes) -> int:
    """The pid in "PID.anything"; 0 when there is none."""
    return _number(identity.partition(b".")[0])


def last_number(identity: bytes) -> int:
    """The pid in "anything.PID"; 0 when there is none."""
    return _number(identity.rpartition(b".")[2])


def _number(digits: bytes) -> int:
    return int(digits) if digits.isdigit() and len(digits) < 10 else 0


class PeerCredRouter(Router):
    """`pid_of(identity)` is whom an identity names; it must be who has connected."""

    def __init__(self, endpoint: str, pid_of: Callable[[bytes], int]) -> None:
        super().__init__(endpoint)
        self._pid_of = pid_of

    def _name(self, connection: Connection, properties: dict[str, bytes]) -> None:
        credentials = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("iii", credentials)
        if self._pid_of(properties.get("identity", b"")) != pid:
            connection.decoder.broken = "it claims to be another process"
            return
        super()._name(connection, properties)
