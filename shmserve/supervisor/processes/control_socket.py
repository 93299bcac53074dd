"""The supervisor's socket: typed messages to and from its processes, told apart by their pid."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from shmserve.ipc.transport.peercred_router import PeerCredRouter, last_number

logger = logging.getLogger(__name__)

_MOST_STRANGERS = 64
_MOST_WORDS = 4  # of each
_MOST_READS = 64  # at a time: somebody may never end


class Control:
    """Routes messages in the event loop. `on_message(pid, message)` runs for each that a known
    process sends.

    A peer's identity is "role.....pid": models run foreign code, which may connect here, but not as
    a gateway. A process may speak a moment before the supervisor has entered it, so what comes from
    a pid that is not a child of ours waits for `admit` in a short queue, where a stranger's words
    are forgotten.
    """

    def __init__(
        self, endpoint: str, knows: Callable[[int], bool], on_message: Callable[[int, Any], None]
    ) -> None:
        self._router = PeerCredRouter(endpoint, last_number)
        self._knows = knows
        self._on_message = on_message
        self._peers: dict[int, bytes] = {}
        self._strangers: deque[tuple[int, bytes, Any]] = deque(maxlen=_MOST_STRANGERS)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._router.fd, self._receive)
        self._flushing = False

    def hear(self) -> None:
        """Handle all that has been said so far."""
        for _ in range(_MOST_READS):
            if not self._router.wait(0):
                return
            self._receive()

    def _receive(self) -> None:
        for identity, message in self._router.receive():
            pid = last_number(identity)
            if self._knows(pid):
                self._take(pid, identity, message)
            elif sum(item[0] == pid for item in self._strangers) < _MOST_WORDS:
                self._strangers.append((pid, identity, message))

    def _take(self, pid: int, identity: bytes, message: Any) -> None:
        self._peers[pid] = identity
        try:
            self._on_message(pid, message)
        except Exception:
            logger.exception("a message could not be handled: %s", type(message).__name__)

    def admit(self, pid: int) -> None:
        """`pid` is ours: handle what it has said already."""
        known = [item for item in self._strangers if item[0] == pid]
        for item in known:
            self._strangers.remove(item)
            self._take(*item)

    def send(self, pid: int, message: Any) -> None:
        """Queue a message for a process; one frame goes out a loop turn. Dropped when it never
        said anything."""
        identity = self._peers.get(pid)
        if identity is None:
            return
        self._router.post(identity, message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._router.flush()

    def forget(self, pid: int) -> None:
        """A process is gone."""
        self._peers.pop(pid, None)

    def connected(self, pid: int) -> bool:
        """Whether the process has said something."""
        return pid in self._peers

    def close(self) -> None:
        """Flush and close the socket."""
        self._router.flush()
        self._loop.remove_reader(self._router.fd)
        self._router.close()
