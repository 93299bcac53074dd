"""The client for ordinary programs and for threads: `infer` waits in the thread that calls it."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, Protocol

from shmserve.client.connection import Connection
from shmserve.client.errors import Disconnected, TimedOut
from shmserve.client.inflight import LATE, Pending, RequestChannel
from shmserve.client.memory.region import Region, Specs
from shmserve.client.request.options import options_of
from shmserve.client.request.prepare import Prepared
from shmserve.client.request.results import Result
from shmserve.client.session import Outputs, Session, Tensors
from shmserve.client.streaming import ResponseStream, StreamPending
from shmserve.errors import ShmserveError
from shmserve.ipc.capabilities import MOST_LINKS

_MOST_WAITERS = MOST_LINKS - 1  # one is the connection's own


class _Way(Protocol):
    """How a thread's requests go out, and how it waits for their answers."""

    connection: Connection

    def submit(self, prepared: Prepared) -> Any:
        """Queue a request; what stands for it from then on."""

    def send(self, at_least: int) -> None:
        """Send what is queued, if it is that much."""

    def wait(self, submitted: Any) -> Result:
        """The result; raises the error that it ended with, or TimedOut."""

    def open(self, prepared: Prepared) -> StreamPending:
        """Send a request that may have any number of responses."""

    def attend(self, pending: Any) -> None:
        """Wait until there is something for who waits; raises TimedOut."""

    def grant(self, pending: Any, responses: int) -> None:
        """So many responses have been read."""

    def cancel(self, left: Iterable[Any]) -> None:
        """Nobody waits for these any more."""


class _Waiter:
    """A thread's channel, and how it waits."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lock = threading.Lock()  # held while the thread is in it: others may only close it
        self._left: deque[Pending] = deque()  # to be cancelled
        self.leaving = False  # to be closed by its thread, as soon as that is out of it
        self._poll = select.epoll()
        self.channel = RequestChannel(connection, self._watch, self._poll.unregister)

    def _watch(self, fd: int) -> None:
        self._poll.register(fd, select.EPOLLIN)

    def submit(self, prepared: Prepared) -> Pending:
        try:
            with self.lock:
                return self.channel.submit(prepared)
        finally:
            if self.leaving:
                self.close()

    def send(self, at_least: int) -> None:
        if self.channel.unsent >= at_least:
            with self.lock:
                self.channel.flush()

    def open(self, prepared: Prepared) -> StreamPending:
        try:
            with self.lock:
                pending = self.channel.start(StreamPending(self.channel, prepared))
                self.channel.flush()
                return pending
        finally:
            if self.leaving:
                self.close()

    def grant(self, pending: StreamPending, responses: int) -> None:
        with self.lock:
            self.channel.grant(pending, responses)
            self.channel.flush()

    def wait(self, pending: Pending) -> Result:
        self.attend(pending)
        return pending.result()

    def attend(self, pending: Pending) -> None:
        try:
            with self.lock:
                try:
                    self.until(pending)
                except BaseException:
                    self.channel.cancel(pending)
                    self.channel.flush()
                    raise
        finally:
            if self.leaving:
                self.close()

    def cancel(self, left: Iterable[Pending]) -> None:
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

    def until(self, pending: Pending) -> None:
        """Return when it is `ready`; raises TimedOut when its deadline passes first."""
        channel = self.channel
        if pending.ready():
            return
        channel.flush()
        deadline_ns = pending.prepared.options.deadline_ns
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


class _Borrower:
    """A thread that has no channel, since others have all that there may be, or it waits in its
    own: the connection's own thread sends, and waits, for it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        # Locked until something has come for the stream that this was opened for: see `_Answer` of
        # the connection for why it is no Event.
        self._arrived = threading.Lock()

    def submit(self, prepared: Prepared) -> Future[Result]:
        future: Future[Result] = Future()
        future.add_done_callback(_notified)
        self.connection.call(lambda channel: _submit(channel, prepared, future))
        return future

    def send(self, at_least: int) -> None:
        """It is on its way."""

    def wait(self, future: Future[Result]) -> Result:
        try:
            return future.result()
        finally:
            future.cancel()
            del future  # no cycle of it and its error's traceback

    def open(self, prepared: Prepared) -> StreamPending:
        future: Future[StreamPending] = Future()
        arrived = self._arrived
        arrived.acquire()

        def on_item() -> None:
            with contextlib.suppress(RuntimeError):  # released already
                arrived.release()

        def start(channel: RequestChannel) -> None:
            try:
                future.set_result(channel.start(StreamPending(channel, prepared, on_item)))
            except ShmserveError as error:
                future.set_exception(error)

        self.connection.call(start)
        return future.result()

    def attend(self, pending: StreamPending) -> None:
        deadline_ns = pending.prepared.options.deadline_ns
        while not pending.ready():
            timeout_s = -1.0
            if deadline_ns:
                timeout_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
            if not self._arrived.acquire(timeout=timeout_s) and not pending.ready():
                self.cancel((pending,))
                raise TimedOut(LATE)

    def grant(self, pending: StreamPending, responses: int) -> None:
        with contextlib.suppress(Disconnected):
            self.connection.call(lambda channel: channel.grant(pending, responses))

    def cancel(self, left: Iterable[Future[Result] | StreamPending]) -> None:
        for each in left:
            if isinstance(each, Future):
                each.cancel()
            else:
                with contextlib.suppress(Disconnected):
                    self.connection.call(partial(RequestChannel.cancel, pending=each))


class Server:
    """A server as programs on its host use it. For any number of threads."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiters: dict[threading.Thread, _Waiter] = {}
        self._lock = threading.Lock()

    def infer(
        self,
        model: str,
        inputs: Tensors | None = None,
        /,
        *,
        outputs: Outputs | None = None,
        version: str = "",
        timeout: float | None = None,
        priority: int = 0,
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
        **tensors: Any,
    ) -> Result:
        """Run a model and wait: inputs by keyword, or as a mapping or a region.

        An input is a numpy array, a torch tensor, anything with DLPack, or lists of numbers; its
        shape has the batch dimension if the model has one. `outputs` names those wanted, or says
        where they go: a region, or {name: array of a region}. `timeout` is in seconds.

        Raises the server's error (ShmserveError, with its code), TimedOut or Disconnected.
        """
        options = options_of(request_id, parameters, priority, timeout)
        waiter = self._waiter()
        prepared = self._session.prepared(model, inputs, outputs, version, options, tensors)
        return waiter.wait(waiter.submit(prepared))

    def map(
        self,
        model: str,
        inputs: Iterable[Tensors],
        /,
        *,
        in_flight: int = 16,
        outputs: Sequence[str] | None = None,
        version: str = "",
        timeout: float | None = None,
    ) -> Iterator[Result]:
        """The results for many inputs, in their order, with up to `in_flight` requests at a time.

        Raises at the first that fails; the others are cancelled.
        """
        waiting: deque[Any] = deque()
        waiter = self._waiter()
        few = max(1, in_flight // 4)  # several a message, and the server is never without any
        try:
            for given in inputs:
                options = options_of("", None, 0, timeout)
                prepared = self._session.prepared(model, given, outputs, version, options, {})
                waiting.append(waiter.submit(prepared))
                waiter.send(at_least=few)
                if len(waiting) >= in_flight:
                    yield waiter.wait(waiting.popleft())
            while waiting:
                yield waiter.wait(waiting.popleft())
        finally:
            waiter.cancel(waiting)

    def stream(
        self,
        model: str,
        inputs: Tensors | None = None,
        /,
        *,
        outputs: Outputs | None = None,
        version: str = "",
        timeout: float | None = None,
        priority: int = 0,
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
        **tensors: Any,
    ) -> ResponseStream:
        """Run a model that gives any number of responses, and iterate over them as they come.

        What it takes is what `infer` takes. Who does not read stops the model, and nobody else.
        Outputs that go to a region are written there once for each response: it holds one until the
        next is asked for. `timeout` is for all of the responses. Leaving the iterator cancels:

        >>> with server.stream("words", TEXT=[b"..."]) as responses:  # doctest: +SKIP
        ...     for response in responses:
        ...         print(response["WORD"])
        """
        options = options_of(request_id, parameters, priority, timeout)
        way = self._waiter()
        prepared = self._session.prepared(
            model, inputs, outputs, version, options, tensors, stream=True
        )
        return ResponseStream(way, way.open(prepared), self)

    def infer_async(
        self,
        model: str,
        inputs: Tensors | None = None,
        /,
        *,
        outputs: Outputs | None = None,
        version: str = "",
        timeout: float | None = None,
        priority: int = 0,
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
        **tensors: Any,
    ) -> Future[Result]:
        """`infer`, in the background. Cancelling the future cancels the request."""
        options = options_of(request_id, parameters, priority, timeout)
        prepared = self._session.prepared(model, inputs, outputs, version, options, tensors)
        future = _Borrower(self._session.connection()).submit(prepared)
        future.add_done_callback(lambda _: self._session)  # until then somebody needs this client
        return future

    def allocate(
        self,
        tensors: Specs,
        *,
        device: str = "cpu",
        pin: bool = False,
        huge_pages: bool = False,
    ) -> Region:
        """Memory for tensors, {name: (shape, datatype)}, that the server uses in place.

        `device`: "cuda:0" for memory on the server's device 0, which this program must see by the
        same number. For host memory, `pin` has workers on CUDA devices lock it, for faster copies,
        and `huge_pages` takes it from the pages that the host has reserved. Raises InvalidArgument,
        or Unavailable where there is none.
        """
        return self._session.allocate(tensors, device=device, pin=pin, huge_pages=huge_pages)

    def models(self) -> list[tuple[str, str]]:
        """Name and version of every model that may be called now."""
        return self._session.connection().models.names()

    def _waiter(self) -> _Way:
        connection = self._session.connection()
        thread = threading.current_thread()
        waiter = self._waiters.get(thread)
        if waiter is not None and waiter.lock.locked():
            return _Borrower(connection)  # a signal's handler, which this thread's wait runs
        if waiter is None or waiter.connection is not connection:
            return self._new_waiter(thread, connection)
        return waiter

    def _new_waiter(self, thread: threading.Thread, connection: Connection) -> _Way:
        with self._lock:
            for other, waiter in list(self._waiters.items()):
                over = waiter.connection is not connection and not other.is_alive()
                if over or other is thread:
                    self._waiters.pop(other).close()
            # That of a thread which has ended is taken over, and not closed: its requests may be on
            # their way yet, workers use their memory, and a generator of `map` may wait for them.
            for other, waiter in self._waiters.items():
                if not other.is_alive() and not waiter.lock.locked():
                    self._waiters[thread] = self._waiters.pop(other)
                    return waiter
            if len(self._waiters) >= _MOST_WAITERS:
                return _Borrower(connection)
            try:
                waiter = self._waiters[thread] = _Waiter(connection)
            except OSError:  # no descriptor is left for one of its own
                return _Borrower(connection)
            return waiter

    def close(self) -> None:
        """Leave the server, which frees all that this client had there. A second time is fine."""
        self._session.close()
        if self._session.inherited:
            return
        with self._lock:
            for thread, waiter in self._waiters.items():
                if thread is threading.current_thread() and waiter.lock.locked():
                    waiter.leaving = True  # this is a signal's handler, which its wait runs
                else:
                    waiter.close()
            self._waiters.clear()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._session.abandon(self.close)


def _notified(future: Future[Result]) -> None:
    """Who is in `concurrent.futures.wait` for a future hears of its cancellation only by this."""
    if future.cancelled():
        future.set_running_or_notify_cancel()


def _submit(channel: RequestChannel, prepared: Prepared, future: Future[Result]) -> None:
    if future.cancelled():
        prepared.end()
        return
    try:
        pending = channel.submit(prepared, lambda done: _resolve(future, done))
    except ShmserveError as error:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
        return

    deadline_ns = prepared.options.deadline_ns
    if deadline_ns:
        channel.connection.expire_at(deadline_ns, pending.submit.id)

    def over(ended: Future[Result]) -> None:  # names no `future`, which keeps this: no cycle
        if ended.cancelled() and pending.outcome is None:
            channel.connection.call(lambda own: own.cancel(pending))

    future.add_done_callback(over)


def _resolve(future: Future[Result], done: Pending) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        if isinstance(done.outcome, Result):
            future.set_result(done.outcome)
        else:
            future.set_exception(done.outcome)
