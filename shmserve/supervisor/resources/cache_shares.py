"""The server's response cache, shared out: each model version that has one gets an equal part.

Each scheduler keeps its own entries: no memory of one model is where another's process can reach
it. What is divided is only the bound, again whenever a version with a cache comes or goes.
"""

from __future__ import annotations

from collections.abc import Callable

from shmserve.ipc.messages.supervision import ResizeCache


class CacheShares:
    """Equal parts of `byte_size` (0: there is no cache) for all who have joined."""

    def __init__(self, byte_size: int) -> None:
        self.byte_size = byte_size
        self._members: dict[int, Callable[[ResizeCache], None]] = {}

    @property
    def share(self) -> int:
        """The bytes that each member may use now."""
        return self.byte_size // max(1, len(self._members))

    def join(self, member: int, tell: Callable[[ResizeCache], None]) -> int:
        """Give a member its share, which is returned; the others hear of theirs."""
        if member not in self._members:
            self._members[member] = tell
            self._tell_all(member)
        return self.share

    def leave(self, member: int) -> None:
        """Share out again what one had that is gone (or never was there)."""
        if self._members.pop(member, None) is not None:
            self._tell_all()

    def _tell_all(self, but: int = 0) -> None:
        for member, tell in self._members.items():
            if member != but:
                tell(ResizeCache(self.share))
