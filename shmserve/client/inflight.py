"""Requests on their way: what was submitted to which scheduler, and one answer each.

    submit ──> pending ──Finished / Failed───────> answered, memory given back
                  │  └──Failed (early)──> settling ──Settled──> memory given back
                  └──its scheduler is gone──> submitted again, to who serves the model now

One thread, or one event loop, has an exchange for itself, so nothing here is locked; `wake` alone
may be called by others. What is submitted leaves at `flush`, all for a scheduler as one frame; what
has come is handled by `take`, in the thread that waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from shmserve.client.errors import Disconnected, TimedOut
from shmserve.client.request.prepare import Prepared
from shmserve.client.request.results import Result, read
from shmserve.errors import (
    Internal,
    InvalidArgument,
    QueueFull,
    ShmserveError,
    Unavailable,
    from_code,
)
from shmserve.ipc.capabilities import LARGEST_WORK
from shmserve.ipc.messages import Cancel, Failed, Finished, Release, Settled, Submit
from shmserve.ipc.tensors.aliasing import runs_once
from shmserve.ipc.transport.dealer import Dealer
from shmserve.ipc.transport.records import MalformedMessage

if TYPE_CHECKING:
    from shmserve.client.connection import Connection

_MOST_UNSENT = 1 << 19  # bytes of requests; more leave at once: a frame has its bounds as well
_MOST_TOGETHER = 1 << 14  # messages
LATE = "nobody answered within the timeout"
ENDED = "the connection to the server ended before it answered"
FULL = "this program has no descriptor left for another link"
_ENDED = "the model's scheduler ended before it could answer, and no other serves the model"
_TWICE = "the server ended the connection, twice"
_ONCE = "the answer is lost, and the outputs go over the inputs, which may be changed"


class Pending:
    """A request that was submitted. `outcome`: None until it is answered; `on_done` hears of it."""

    __slots__ = ("abandoned", "again", "endpoint", "on_done", "outcome", "prepared", "submit")

    def __init__(
        self,
        prepared: Prepared,
        submit: Submit,
        on_done: Callable[[Pending], None] | None,
    ) -> None:
        self.prepared = prepared
        self.submit = submit
        self.endpoint = prepared.model.endpoint
        self.on_done = on_done
        self.outcome: Result | ShmserveError | None = None
        self.abandoned = False
        self.again = False  # it was submitted once more, since what should have come is lost

    def result(self) -> Result:
        """The result; raises the error that it ended with."""
        outcome = self.outcome
        if isinstance(outcome, Result):
            return outcome
        assert outcome is not None
        self.outcome = None
        try:
            raise outcome
        finally:
            del outcome  # no cycle of it and its traceback, which would keep the request's memory


class InflightTable:
    """The requests of one thread, or event loop, of a connection. `watch(fd)` hears of a descriptor
    to wait for, `unwatch(fd)` that it is about to go."""

    def __init__(
        self,
        connection: Connection,
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
    ) -> None:
        self.connection = connection
        self._watch = watch
        self._unwatch = unwatch
        self._name = connection.next_link_name()
        self._links: dict[str, Dealer] = {}
        self._by_fd: dict[int, Dealer] = {}
        self._busy: list[Dealer] = []  # with something to flush
        self.unsent = 0
        self._unsent_bytes = 0
        self._pending: dict[int, Pending] = {}
        self._settling: dict[int, Pending] = {}
        self._numbers = itertools.count(1)
        self._losses = 0
        self.waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        watch(self.waker)
        connection.join(self)

    # --- out

    def submit(
        self, prepared: Prepared, on_done: Callable[[Pending], None] | None = None
    ) -> Pending:
        """Queue a request for the next `flush`. Raises Disconnected once this is closed, or the
        server that it was made for gone, InvalidArgument when it is too large,
        Unavailable when it cannot be sent."""
        connection = self.connection
        another = prepared.model.source is not connection.models
        if self._closed or not connection.alive or another:
            prepared.end()
            raise Disconnected("this client is closed" if self._closed and not another else ENDED)
        if len(prepared.work) > LARGEST_WORK:
            prepared.end()
            raise InvalidArgument(
                f"a request of {len(prepared.work)} bytes besides its tensors is larger than "
                f"{LARGEST_WORK}"
            )
        options = prepared.options
        number = next(self._numbers)
        submit = Submit(
            number,
            prepared.batch_size,
            prepared.shape_key,
            time.monotonic_ns(),
            options.deadline_ns,
            options.timeout_us,
            options.priority,
            prepared.work,
            options.request_id,
        )
        pending = Pending(prepared, submit, on_done)
        try:
            self._send(pending)
        except OSError as error:
            prepared.end()
            raise Unavailable(FULL) from error
        return pending

    def _send(self, pending: Pending) -> None:
        link = self._links.get(pending.endpoint) or self._link(pending.endpoint)
        # Before it leaves: its memory is kept until it is answered, wherever we are interrupted.
        self._pending[pending.submit.id] = pending
        self._queue(link, pending.submit)
        self._unsent_bytes += len(pending.submit.work)
        if self._unsent_bytes > _MOST_UNSENT:
            self.flush()

    def cancel(self, pending: Pending) -> None:
        """Nobody waits for it any more; its memory is in use until the scheduler answers."""
        pending.abandoned = True
        if pending.submit.id in self._pending:
            self._post(pending.endpoint, Cancel(pending.submit.id))

    def expire(self, number: int) -> None:
        """The time of a request is over: it fails, unless it was answered."""
        pending = self._pending.get(number)
        if pending is not None and not pending.abandoned:
            self._done(pending, TimedOut(LATE))
            self.cancel(pending)

    @property
    def waiting(self) -> Collection[int]:
        """The numbers of the requests that were not answered yet."""
        return self._pending

    def flush(self) -> None:
        """Send what is queued."""
        busy, self._busy = self._busy, []
        self.unsent = self._unsent_bytes = 0
        for link in busy:
            link.flush()

    def _post(self, endpoint: str, message: Any) -> None:
        self._queue(self._link(endpoint), message)

    def _link(self, endpoint: str) -> Dealer:
        link = self._links.get(endpoint)
        if link is None:
            link = self._connect(endpoint)
            self._keep(link)
            if endpoint in self.connection.lost:
                # It was lost before this request was made; where that goes now is looked up as for
                # those that were on their way.
                self._losses = -1
                self.wake()
        return link

    def _queue(self, link: Dealer, message: Any) -> None:
        link.post(message)
        self.unsent += 1
        if link not in self._busy:
            self._busy.append(link)
        if self.unsent >= _MOST_TOGETHER:
            self.flush()

    def _connect(self, endpoint: str) -> Dealer:
        return Dealer(endpoint, f"{self.connection.identity}.{self._name}")

    def _keep(self, link: Dealer) -> None:
        self._links[link.endpoint] = link
        self._by_fd[link.fd] = link
        self._watch(link.fd)

    # --- in

    def take(self, readable: Collection[int]) -> None:
        """Handle what is at these descriptors, and send what that asks for."""
        if self.waker in readable:
            self._slept()  # first: what happens after we have looked around wakes us again
        if self._losses != self.connection.losses or not self.connection.alive:
            self._look_around()
        for fd in readable:
            link = self._by_fd.get(fd)
            if link is not None:
                for message in link.receive():
                    self._handle(message)
                if not link.connected:
                    self._cut_off(link)
        if self._busy:
            self.flush()

    def _handle(self, message: Any) -> None:
        if type(message) is Finished:
            pending = self._pending.pop(message.id, None)
            if pending is not None:
                self._finish(pending, message.body)
        elif type(message) is Failed:
            self._fail(message)
        elif type(message) is Settled:
            self._end_settling(message.id)

    def _finish(self, pending: Pending, body: bytes) -> None:
        def release(pid: int, offsets: list[int]) -> None:
            endpoint, lost = pending.endpoint, self.connection.lost
            while endpoint in lost:
                endpoint = lost[endpoint]
            if endpoint:  # else its workers are gone as well
                self._post(endpoint, Release(pid, offsets))

        outcome: Result | ShmserveError
        try:
            outcome = read(pending.prepared, body, self.connection.copied, release)
        except ShmserveError as error:
            over = pending.again or pending.abandoned or runs_once(pending.submit.work)
            if isinstance(error, Unavailable) and not over:
                pending.again = True  # its worker died before the answer was read
                self._send(pending)
                return
            pending.prepared.end()
            outcome = error
        except MalformedMessage:
            pending.prepared.end()
            outcome = Internal("the answer cannot be read")
        self._done(pending, outcome)

    def _fail(self, message: Failed) -> None:
        if message.early and message.id in self._pending:  # first: a worker has its memory yet
            self._settling[message.id] = self._pending[message.id]
        pending = self._pending.pop(message.id, None)
        if pending is None:
            return
        if message.code == "UNAVAILABLE" and not message.early and self._moved(pending):
            return
        if not message.early:
            pending.prepared.end()
        self._done(pending, _error(pending, message))

    def _end_settling(self, number: int) -> None:
        pending = self._settling.get(number)
        if pending is not None:
            self._pending.pop(number, None)  # where `_fail` was interrupted
            del self._settling[number]
            pending.prepared.end()

    def _moved(self, pending: Pending) -> bool:
        """Submit to who serves the model now, if that is another scheduler than refused it."""
        model = pending.prepared.model
        now = self.connection.models.find(model.name, model.version)
        if now is None:
            now = self.connection.models.find(model.name, "")
        if now is None or now.endpoint == pending.endpoint or pending.abandoned:
            return False
        self._resubmit(pending, now.endpoint)
        return True

    def _resubmit(self, pending: Pending, endpoint: str) -> None:
        pending.endpoint = endpoint
        self._send(pending)

    def _done(self, pending: Pending, outcome: Result | ShmserveError) -> None:
        if pending.abandoned:
            return
        pending.outcome = outcome
        on_done, pending.on_done = pending.on_done, None  # it may refer to this: no cycle stays
        if on_done is not None:
            on_done(pending)

    # --- ends

    def _look_around(self) -> None:
        """Schedulers, or the whole server, have ended: see who had something."""
        connection = self.connection
        if not connection.alive:
            self._drop_all()
            return
        self._losses = connection.losses
        for endpoint in [at for at in self._links if at in connection.lost]:
            link = self._links.pop(endpoint)
            while link.wait(0):  # its last words
                for message in link.receive():
                    self._handle(message)
            self._close(link)
            self._lose(endpoint, connection.lost[endpoint])

    def _lose(self, endpoint: str, successor: str) -> None:
        for pending in self._left_at(endpoint):
            if successor:
                self._resubmit(pending, successor)
            elif not self._moved(pending):
                pending.prepared.end()
                self._done(pending, Disconnected(_ENDED))

    def _left_at(self, endpoint: str) -> list[Pending]:
        """Take out what a scheduler that will not answer had; those that somebody waits for, and
        that can run again."""
        left: list[Pending] = []
        for number in [n for n, pending in self._settling.items() if pending.endpoint == endpoint]:
            self._end_settling(number)
        for number in [n for n, pending in self._pending.items() if pending.endpoint == endpoint]:
            pending = self._pending.pop(number)
            if pending.abandoned:
                pending.prepared.end()
            elif runs_once(pending.submit.work):
                pending.prepared.end()
                self._done(pending, Unavailable(_ONCE))
            else:
                left.append(pending)
        return left

    def _cut_off(self, link: Dealer) -> None:
        """A link has ended. Where the scheduler has too, the listener will tell who has taken over;
        one that lives has had enough of the link, and gets what was on it once more."""
        again = self._connect(link.endpoint)
        if not again.connected:
            again.close()
            return
        del self._links[link.endpoint]
        self._close(link)
        left = self._left_at(link.endpoint)
        if all(pending.again for pending in left):
            again.close()
        else:
            self._keep(again)
        for pending in left:
            if pending.again:
                pending.prepared.end()
                over = self.connection.is_over()
                self._done(pending, Disconnected(ENDED) if over else Unavailable(_TWICE))
            else:
                pending.again = True
                self._send(pending)

    def _drop_all(self) -> None:
        for link in self._links.values():
            self._close(link)
        self._links.clear()
        for number in list(self._settling):
            self._end_settling(number)
        for pending in list(self._pending.values()):
            pending.prepared.end()
            self._done(pending, Disconnected(ENDED))
        self._pending.clear()

    def _close(self, link: Dealer) -> None:
        if link in self._busy:
            self._busy.remove(link)
        del self._by_fd[link.fd]
        self._unwatch(link.fd)
        link.close()

    def wake(self) -> None:
        """Have whoever waits for this exchange look around; for any thread."""
        if not self._closed:
            os.eventfd_write(self.waker, 1)

    def _slept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.waker)

    def close(self) -> None:
        """Close every link; what is pending fails."""
        if not self._closed:
            self._closed = True
            self._drop_all()
            self._unwatch(self.waker)
            self.connection.part(self)
            os.close(self.waker)


def _error(pending: Pending, message: Failed) -> ShmserveError:
    if message.retry_after_s > 0:
        return QueueFull(message.message, message.retry_after_s)
    deadline_ns = pending.prepared.options.deadline_ns
    if message.code == "UNAVAILABLE" and 0 < deadline_ns <= time.monotonic_ns():
        return TimedOut(message.message)
    return from_code(message.code, message.message)
