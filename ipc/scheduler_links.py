"""Links to schedulers of other models, from a process that calls these: a worker whose model does,
an ensemble."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator

from shmserve.errors import Unavailable
from shmserve.ipc.messages.inference import Cancel, Credit, Release, Submit
from shmserve.ipc.transport.dealer import Dealer

Message = Submit | Cancel | Credit | Release


class SchedulerLinks:
    """Dealers by endpoint. `watch(fd)` hears of a descriptor to wait for, `unwatch(fd)` that it is
    about to go."""

    def __init__(
        self,
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._identity = f"{os.getpid()}.{secrets.token_hex(8)}"
        self._links: dict[str, Dealer] = {}

    def __iter__(self) -> Iterator[Dealer]:
        return iter(self._links.values())

    def open(self, endpoint: str) -> Dealer:
        """The link to a scheduler, made when it is needed. Raises Unavailable when the process has
        no descriptor left for it."""
        link = self._links.get(endpoint)
        if link is None:
            try:
                link = Dealer(endpoint, self._identity)
            except OSError as error:
                raise Unavailable(
                    f"no link to a scheduler can be made: {error.strerror}"
                ) from error
            self._links[endpoint] = link
            self._watch(link.fd)
        return link

    def tell(self, endpoint: str, message: Message) -> None:
        """Queue a message for a scheduler, if there is a link to it."""
        link = self._links.get(endpoint)
        if link is not None:
            link.post(message)

    def lose(self, endpoint: str, successor: str, drain: Callable[[Dealer], None]) -> None:
        """The scheduler at `endpoint` is gone: `drain` handles what it sent last, and what
        that tells it goes to the successor, if there is one."""
        link = self._links.pop(endpoint, None)
        if link is None:
            return
        if successor:
            with contextlib.suppress(Unavailable):
                self._links[endpoint] = self.open(successor)
        drain(link)
        self._links.pop(endpoint, link).flush()
        self._unwatch(link.fd)
        link.close()

    def flush(self) -> None:
        """Send what is queued."""
        for link in self._links.values():
            link.flush()

    def close(self) -> None:
        """Close every link."""
        for link in self._links.values():
            link.close()
        self._links.clear()
