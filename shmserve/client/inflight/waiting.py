"""Channels by which threads submit requests and wait: one of their own, or one that they share."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, Protocol

from shmserve.client.connection import ServerConnection
from shmserve.client.errors import Disconnected, TimedOut
from shmserve.client.inflight.channel import LATE, ClientRequest, RequestChannel
from shmserve.client.inflight.streaming import Attending, ClientStream
from shmserve.client.request.prepare import PackedRequest
from shmserve.client.request.results import Result
from shmserve.errors import ShmserveError, Unavailable


class Waiting(Attending, Protocol):
    """A thread's way to submit requests, and to wait for what comes."""

    connection: ServerConnection

    def submit(self, built: PackedRequest) -> Any:
        """Queue a request; what stands for it from then on."""

    def send(self, at_least: int) -> None:
        """Send what is queued, if it is that much."""

    def wait(self, submitted: Any) -> Result:
        """The result; raises the error that it ended with, or TimedOut."""

    def open(self, built: PackedRequest) -> ClientStream:
        """Send a request that may have any number of responses."""


class ThreadChannel:
    """A thread's channel, and how it waits."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.lock = threading.Lock()  # held while the thread is in it: others may only close it
        self._left: deque[ClientRequest] = deque()  # to be cancelled
        self._poll = select.epoll()
        self.channel = RequestChannel(connection, self._watch, self._poll.unregister)

    def _watch(self, fd: int) -> None:
        self._poll.register(fd, select.EPOLLIN)

    def submit(self, built: PackedRequest) -> ClientRequest:
        with self.lock:
            return self.channel.submit(built)

    def send(self, at_least: int) -> None:
        if self.channel.unsent >= at_least:
            with self.lock:
                self.channel.flush()

    def open(self, built: PackedRequest) -> ClientStream:
        with self.lock:
            pending = self.channel.start(ClientStream(self.channel, built))
            self.channel.flush()
            return pending

    def credit(self, pending: ClientStream, responses: int) -> None:
        with self.lock:
            self.channel.schedulers.credit(pending, responses)
            self.channel.flush()

    def wait(self, pending: ClientRequest) -> Result:
        self.attend(pending)
        return pending.result()

    def attend(self, pending: ClientRequest) -> None:
        with self.lock:
            try:
                self.until(pending)
            except BaseException:
                self.channel.cancel(pending)
                self.channel.flush()
                raise

    def cancel(self, left: Iterable[ClientRequest]) -> None:
        self._left.extend(left)
        # A generator that is collected may find its thread, or another, in the middle of a wait.
        if self.lock.acquire(blocking=False):
            try:
                self._cancel_left()
            finally:
                self.lock.release()
        else:
            self.connection.wake(self.channel)

    def _cancel_left(self) -> None:
        while self._left:
            self.channel.cancel(self._left.popleft())
        self.channel.flush()

    def until(self, pending: ClientRequest) -> None:
        """Return when it is `ready`; raises TimedOut when its deadline passes first."""
        channel = self.channel
        if pending.ready():
            return
        channel.flush()
        deadline_ns = pending.built.options.deadline_ns
        while not pending.ready():
            timeout_s: float | None = None
            if deadline_ns:
                timeout_s = (deadline_ns - time.monotonic_ns()) / 1e9
                if timeout_s <= 0:
                    raise TimedOut(LATE)
            channel.take([fd for fd, _ in self._poll.poll(timeout_s)])
            if self._left:
                self._cancel_left()

    def close(self) -> None:
        """Close all of it."""
        with self.lock:
            self.channel.close()
            self._poll.close()


class SharedChannel:
    """The connection's own channel, for a thread without one because others have all channels: the
    connection's thread sends and receives for it."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self._arrived = threading.Event()  # something for the stream that this was opened for

    def check_may_wait(self) -> None:
        """Raise Unavailable in the connection's own thread, which would wait for itself."""
        if self.connection.is_current_thread():
            raise Unavailable(
                "a callback cannot wait here, since other threads have every channel of this "
                "client: use infer_async in it"
            )

    def submit(self, built: PackedRequest) -> Future[Result]:
        future: Future[Result] = Future()
        future.add_done_callback(_notified)
        connection = self.connection
        connection.call(partial(_submit, connection, built=built, future=future))
        return future

    def send(self, at_least: int) -> None:
        """Nothing: the request is on its way."""

    def wait(self, future: Future[Result]) -> Result:
        try:
            return future.result()
        finally:
            future.cancel()
            del future  # no cycle of it and its error's traceback

    def open(self, built: PackedRequest) -> ClientStream:
        future: Future[ClientStream] = Future()

        def start(channel: RequestChannel) -> None:
            try:
                future.set_result(channel.start(ClientStream(channel, built, self._arrived.set)))
            except ShmserveError as error:
                future.set_exception(error)

        self.connection.call(start)
        return future.result()

    def attend(self, pending: ClientStream) -> None:
        deadline_ns = pending.built.options.deadline_ns
        while not pending.ready():
            self.check_may_wait()
            timeout_s: float | None = None
            if deadline_ns:
                timeout_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
            arrived = self._arrived.wait(timeout_s)
            self._arrived.clear()
            if not arrived and not pending.ready():
                self.cancel((pending,))
                raise TimedOut(LATE)

    def credit(self, pending: ClientStream, responses: int) -> None:
        with contextlib.suppress(Disconnected):
            self.connection.call(lambda channel: channel.schedulers.credit(pending, responses))

    def cancel(self, left: Iterable[Future[Result] | ClientStream]) -> None:
        for each in left:
            if isinstance(each, Future):
                each.cancel()
            else:
                with contextlib.suppress(Disconnected):
                    self.connection.call(partial(RequestChannel.cancel, pending=each))


def _notified(future: Future[Result]) -> None:
    """Notify those who are in `concurrent.futures.wait` for a future of its cancellation."""
    if future.cancelled():
        future.set_running_or_notify_cancel()


def _submit(
    connection: ServerConnection,
    channel: RequestChannel,
    built: PackedRequest,
    future: Future[Result],
) -> None:
    if future.cancelled():
        built.end()
        return
    try:
        pending = channel.submit(built, partial(_resolve, future))
    except ShmserveError as error:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
        return

    deadline_ns = built.options.deadline_ns
    if deadline_ns:
        connection.expire_at(deadline_ns, pending.submit.id)

    def over(ended: Future[Result]) -> None:  # names no `future`, which keeps this: no cycle
        if ended.cancelled() and pending.outcome is None:
            connection.call(partial(RequestChannel.cancel, pending=pending))

    future.add_done_callback(over)


def _resolve(future: Future[Result], done: ClientRequest) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        if isinstance(done.outcome, Result):
            future.set_result(done.outcome)
        else:
            future.set_exception(done.outcome)
