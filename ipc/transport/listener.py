"""A listening socket in the run directory, that never stays readable: whoever cannot be let in is
turned away.

A process without a descriptor left cannot accept, so that who waits at its listener would wake it
up again and again, for ever. One descriptor is kept back for that moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from shmserve.errors import Unavailable

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def listening(kind: socket.SocketKind, path: str, backlog: int) -> socket.socket:
    """A socket of this kind that listens at `path`.

    Raises Unavailable when there is no room for it, or no folder.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, kind)
        try:
            sock.bind(path)
            sock.listen(backlog)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise no_room(error) from None
    return sock


def no_room(error: OSError) -> Unavailable:
    """The error for when nothing can be made in the run directory."""
    return Unavailable(f"no socket can be made in the run directory: {error.strerror or error}")


class Listener:
    """Accepts connections at `sock`, which is non-blocking from now on."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self._spare = _spare()

    def fileno(self) -> int:
        """The listening socket's descriptor."""
        return self.sock.fileno()

    def accept(self) -> socket.socket | None:
        """The next connection, non-blocking; None when nobody waits or who did was turned away."""
        try:
            accepted, _ = self.sock.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                self._turn_away()
            return None
        accepted.setblocking(False)
        return accepted

    def _turn_away(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            with contextlib.suppress(OSError):
                self.sock.accept()[0].close()
        self._spare = _spare()

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def _spare() -> int:
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
