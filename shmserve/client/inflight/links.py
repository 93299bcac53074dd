"""Links to schedulers: one socket each, whose queued messages leave at `flush` as one frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shmserve.ipc.transport.dealer import Dealer

_MOST_UNSENT = 1 << 19  # bytes of requests; more leave at once: a frame has its bounds as well
_MOST_TOGETHER = 1 << 14  # messages


class Links:
    """Dealers by endpoint and by descriptor. `watch(fd)` hears of a descriptor to wait for,
    `unwatch(fd)` that it is about to go."""

    def __init__(
        self, identity: str, watch: Callable[[int], None], unwatch: Callable[[int], None]
    ) -> None:
        self._identity = identity
        self._watch = watch
        self._unwatch = unwatch
        self._by_endpoint: dict[str, Dealer] = {}
        self._by_fd: dict[int, Dealer] = {}
        self.busy: list[Dealer] = []  # with something to flush
        self.unsent = 0
        self._unsent_bytes = 0

    def get(self, endpoint: str) -> Dealer | None:
        """The link to a scheduler, if there is one."""
        return self._by_endpoint.get(endpoint)

    def by_fd(self, fd: int) -> Dealer | None:
        """The link with this descriptor."""
        return self._by_fd.get(fd)

    def connect(self, endpoint: str) -> Dealer:
        """A link that is not among these yet; see `keep`. Raises OSError without a descriptor."""
        return Dealer(endpoint, self._identity)

    def keep(self, link: Dealer) -> Dealer:
        """It is the link to its endpoint from now on."""
        self._by_endpoint[link.endpoint] = link
        self._by_fd[link.fd] = link
        self._watch(link.fd)
        return link

    def queue(self, link: Dealer, message: Any, byte_size: int = 0) -> None:
        """Send a message at the next `flush`, or now with what waits if it is much."""
        link.post(message)
        self.unsent += 1
        self._unsent_bytes += byte_size
        if link not in self.busy:
            self.busy.append(link)
        if self.unsent >= _MOST_TOGETHER or self._unsent_bytes > _MOST_UNSENT:
            self.flush()

    def flush(self) -> None:
        """Send what is queued."""
        busy, self.busy = self.busy, []
        self.unsent = self._unsent_bytes = 0
        for link in busy:
            link.flush()

    def among(self, endpoints: Iterable[str]) -> list[str]:
        """Those of the endpoints that there is a link to."""
        return [endpoint for endpoint in self._by_endpoint if endpoint in endpoints]

    def take_out(self, endpoint: str) -> Dealer:
        """It is the link to its endpoint no longer; what is on it can be read until `close`."""
        return self._by_endpoint.pop(endpoint)

    def close(self, link: Dealer) -> None:
        """Close a link."""
        if link in self.busy:
            self.busy.remove(link)
        del self._by_fd[link.fd]
        self._unwatch(link.fd)
        link.close()

    def close_all(self) -> None:
        """Close every link."""
        for link in self._by_endpoint.values():
            self.close(link)
        self._by_endpoint.clear()
