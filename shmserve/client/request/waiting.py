"""Channels by which threads submit requests and wait, and the responses of streams."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

from shmserve.client.connection import ServerConnection
from shmserve.client.memory.views import noop
from shmserve.client.request.channel import NO_RESPONSE, ClientRequest, RequestChannel
from shmserve.client.request.prepare import PackedRequest
from shmserve.client.request.results import Result, read_one_of_many
from shmserve.errors import Disconnected, Internal, ShmserveError, TimedOut, Unavailable
from shmserve.ipc.credit import ReadWindow
from shmserve.ipc.messages.inference import Responded, Response
from shmserve.ipc.tensors.schemas import RequestSchema, byte_size_of
from shmserve.ipc.transport.frames import MalformedMessage


class ClientStream(ClientRequest):
    """An in-flight request with any number of responses.

    Attributes:
        items: The responses and errors received and not read yet, with the byte size of each.
        on_item: Called for each response and at the end of the stream.
        has_finished: Whether the last response has been received.
    """

    def __init__(
        self,
        channel: RequestChannel,
        packed_request: PackedRequest,
        on_item: Callable[[], None] = noop,
    ) -> None:
        super().__init__(channel, packed_request, None)
        self.items: deque[tuple[Result | ShmserveError, int]] = deque()
        self.on_item = on_item
        self.has_finished = False
        self._read_size = -1  # bytes of the response that the program now reads; -1: it reads none
        self._window = ReadWindow(in_client_memory=_writes_to_client_memory(packed_request))

    def is_ready(self) -> bool:
        return bool(self.items) or self.has_finished or self.is_abandoned

    def handle(self, message: Response) -> None:
        if type(message) is not Responded:
            super().handle(message)
        elif self.is_abandoned or self.has_finished:
            self.discard(message)
        else:
            if message.code:
                self.items.append((self.error(message.code, message.message), 0))
            elif message.schema:
                self._read(message)
            elif message.spans and self.is_explained:
                # This result contains only the explanation.
                self.items.append((Result({}, {}, None), 0))
            if message.spans and self.is_explained and isinstance(self.items[-1][0], Result):
                self.explain(self.items[-1][0], message.spans)
            self.has_finished = self.has_finished or message.final
            self.on_item()

    def _read(self, message: Responded) -> None:
        item: Result | ShmserveError
        try:
            item = read_one_of_many(self, message)
        except ShmserveError as error:
            item = error
        except MalformedMessage:
            item = Internal("the response cannot be read")
        self.items.append((item, byte_size_of(message.data)))
        if not isinstance(item, Result):
            self.has_finished = True
            self.channel.cancel(self)

    def complete(self, outcome: Result | ShmserveError) -> None:
        if not self.is_abandoned and not self.has_finished:
            self.items.append((outcome, 0))
            self.has_finished = True
            self.on_item()

    def record_read(self) -> int:
        """Record that the program has read the response of the previous `take`, if any.

        Returns:
            The number of responses to grant credit for.
        """
        if self._read_size < 0:
            return 0
        credit = self._window.record_read(self._read_size)
        self._read_size = -1
        return 0 if self.has_finished else credit

    def take(self) -> Result:
        """Return the oldest response received.

        Raises:
            ShmserveError: The response is this error.
        """
        item, self._read_size = self.items.popleft()
        if isinstance(item, Result):
            return item
        try:
            raise self.with_trace(item)
        finally:
            del item  # otherwise the item and its traceback would form a reference cycle

    def abandon(self) -> None:
        """Discard the responses received so far and ignore later ones."""
        self.is_abandoned = True
        self.items.clear()


class ResponseStream:
    """An iterator over the responses to one request, each a `Result`. Not thread-safe.

        with server.stream("words", text=[b"..."]) as responses:
            first = next(responses)["output"]

    `Server.stream` returns it. `next` raises the error of a response (further responses may
    follow), or the error that the request failed with. A request that has not ended is cancelled
    by `close`, at the end of a `with` block, and when the object is collected.
    """

    def __init__(self, channel: Channel, pending_request: ClientStream, owner: object) -> None:
        self._channel = channel
        self._request = pending_request
        self._owner = owner  # the reference keeps the client from being collected and closed

    def __iter__(self) -> ResponseStream:
        return self

    def __next__(self) -> Result:
        pending_request = self._request
        credit = pending_request.record_read()
        if credit:
            self._channel.credit(pending_request, credit)
        if not pending_request.items:
            self._channel.wait_until_ready(pending_request)
            if not pending_request.items:
                raise StopIteration
        return pending_request.take()

    def close(self) -> None:
        """Discard unread responses and cancel the request if it has not ended. Idempotent."""
        pending_request = self._request
        if not pending_request.has_finished and not pending_request.is_abandoned:
            self._channel.cancel((pending_request,))
        pending_request.abandon()

    def __enter__(self) -> ResponseStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _writes_to_client_memory(packed_request: PackedRequest) -> bool:
    """Return whether every response is written to the same ranges of the client's memory."""
    if not packed_request.segments:
        return False
    return any(output.has_range for output in RequestSchema(packed_request.schema).outputs)


class ThreadChannel:
    """A request channel of one thread, which polls the channel's sockets while it waits."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.lock = threading.Lock()  # held while the thread uses the channel
        self._to_cancel: deque[ClientRequest] = deque()  # requests to cancel before the next wait
        self._poll = select.epoll()
        self.requests = RequestChannel(connection, self._watch, self._poll.unregister)

    def _watch(self, fd: int) -> None:
        self._poll.register(fd, select.EPOLLIN)

    def submit(self, packed_request: PackedRequest) -> ClientRequest:
        """Submit a request and return the object to pass to `wait`."""
        with self.lock:
            return self.requests.submit(packed_request)

    def send(self, min_messages: int) -> None:
        """Send the queued messages if there are at least `min_messages`."""
        if self.requests.unsent_count >= min_messages:
            with self.lock:
                self.requests.flush()

    def open(self, packed_request: PackedRequest) -> ClientStream:
        """Send a request that may have any number of responses."""
        with self.lock:
            pending_request = self.requests.start(ClientStream(self.requests, packed_request))
            self.requests.flush()
            return pending_request

    def credit(self, pending_request: ClientStream, response_count: int) -> None:
        """Grant credit for `response_count` more responses."""
        with self.lock:
            self.requests.schedulers.credit(pending_request, response_count)
            self.requests.flush()

    def wait(self, pending_request: Any) -> Result:
        """Wait for a request and return its result.

        Raises:
            TimedOut: The deadline has passed.
            ShmserveError: The request has failed with this error.
        """
        self.wait_until_ready(pending_request)
        result: Result = pending_request.result()
        return result

    def wait_until_ready(self, pending_request: ClientRequest) -> None:
        """Wait until a request has completed, or its next response has arrived.

        Raises:
            TimedOut: The deadline has passed. The request is cancelled.
        """
        with self.lock:
            try:
                self.poll_until_ready(pending_request)
            except BaseException:
                self.requests.cancel(pending_request)
                self.requests.flush()
                raise

    def cancel(self, pending_requests: Iterable[ClientRequest]) -> None:
        """Cancel requests; safe in any thread and at any time."""
        self._to_cancel.extend(pending_requests)
        # A stream may be collected while its thread, or another thread, waits with the lock held.
        if self.lock.acquire(blocking=False):
            try:
                self._cancel_queued()
            finally:
                self.lock.release()
        else:
            self.connection.wake(self.requests)

    def _cancel_queued(self) -> None:
        while self._to_cancel:
            self.requests.cancel(self._to_cancel.popleft())
        self.requests.flush()

    def poll_until_ready(self, pending_request: ClientRequest) -> None:
        """Wait until a request is ready; the caller must hold the lock.

        Raises:
            TimedOut: The deadline has passed first.
        """
        channel = self.requests
        if pending_request.is_ready():
            return
        channel.flush()
        deadline_ns = pending_request.packed_request.options.deadline_ns
        while not pending_request.is_ready():
            timeout_s: float | None = None
            if deadline_ns:
                timeout_s = (deadline_ns - time.monotonic_ns()) / 1e9
                if timeout_s <= 0:
                    raise TimedOut(NO_RESPONSE)
            channel.process_events([fd for fd, _ in self._poll.poll(timeout_s)])
            if self._to_cancel:
                self._cancel_queued()

    def close(self) -> None:
        """Close the channel and the epoll descriptor."""
        with self.lock:
            self.requests.close()
            self._poll.close()


class SharedChannel:
    """The connection's channel, shared by the threads that have no channel of their own.

    The connection's thread sends and receives for these threads. The methods are those of
    `ThreadChannel`.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self._arrived = threading.Event()  # set when the stream of `open` has a new item

    def check_may_wait(self) -> None:
        """Check that the caller is not the connection's thread, which would wait for itself.

        Raises:
            Unavailable: The caller is the connection's thread.
        """
        if self.connection.is_current_thread():
            raise Unavailable(
                "a callback cannot wait while other threads use every channel of this client: "
                "use infer_async in the callback"
            )

    def submit(self, packed_request: PackedRequest) -> Future[Result]:
        """Send a request, and return its future."""
        future: Future[Result] = Future()
        future.add_done_callback(_notify_cancelled)
        connection = self.connection
        connection.call(
            partial(_submit_in_thread, connection, packed_request=packed_request, future=future)
        )
        return future

    def send(self, min_messages: int) -> None:
        """Do nothing: `submit` has sent the request already."""

    def wait(self, future: Any) -> Result:
        """Return the result of a submitted request, or raise its error; cancel it on an error."""
        try:
            result: Result = future.result()
            return result
        finally:
            future.cancel()
            del future  # else, the future and the traceback of its error would form a cycle

    def open(self, packed_request: PackedRequest) -> ClientStream:
        """Send a request, and return the stream of its responses."""
        future: Future[ClientStream] = Future()

        def start(channel: RequestChannel) -> None:
            try:
                future.set_result(
                    channel.start(ClientStream(channel, packed_request, self._arrived.set))
                )
            except ShmserveError as error:
                future.set_exception(error)

        self.connection.call(start)
        return future.result()

    def wait_until_ready(self, pending_request: ClientStream) -> None:
        """Wait until a stream has a response or its end; raise TimedOut at its deadline."""
        deadline_ns = pending_request.packed_request.options.deadline_ns
        while not pending_request.is_ready():
            self.check_may_wait()
            timeout_s: float | None = None
            if deadline_ns:
                timeout_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
            has_arrived = self._arrived.wait(timeout_s)
            self._arrived.clear()
            if not has_arrived and not pending_request.is_ready():
                self.cancel((pending_request,))
                raise TimedOut(NO_RESPONSE)

    def credit(self, pending: ClientStream, response_count: int) -> None:
        """Permit the model to send this many further responses."""
        with contextlib.suppress(Disconnected):
            self.connection.call(lambda channel: channel.schedulers.credit(pending, response_count))

    def cancel(self, pending_requests: Iterable[Future[Result] | ClientStream]) -> None:
        """Cancel requests; safe in any thread and at any time."""
        for pending_request in pending_requests:
            if isinstance(pending_request, Future):
                pending_request.cancel()
            else:
                with contextlib.suppress(Disconnected):
                    self.connection.call(
                        partial(RequestChannel.cancel, pending_request=pending_request)
                    )


Channel = ThreadChannel | SharedChannel


def _notify_cancelled(future: Future[Result]) -> None:
    """Wake up the threads that wait for a cancelled future in `concurrent.futures.wait`."""
    if future.cancelled():
        future.set_running_or_notify_cancel()


def _submit_in_thread(
    connection: ServerConnection,
    channel: RequestChannel,
    packed_request: PackedRequest,
    future: Future[Result],
) -> None:
    if future.cancelled():
        packed_request.release_memory()
        return
    try:
        pending_request = channel.submit(packed_request, partial(_set_outcome, future))
    except ShmserveError as error:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
        return

    deadline_ns = packed_request.options.deadline_ns
    if deadline_ns:
        connection.timers.add(deadline_ns, pending_request.submit.id)

    # The callback uses its parameter instead of `future`: a reference would form a cycle.
    def on_done(completed_future: Future[Result]) -> None:
        if completed_future.cancelled() and pending_request.outcome is None:
            connection.call(partial(RequestChannel.cancel, pending_request=pending_request))

    future.add_done_callback(on_done)


def _set_outcome(future: Future[Result], pending_request: ClientRequest) -> None:
    with contextlib.suppress(InvalidStateError):  # the future may have been cancelled
        if isinstance(pending_request.outcome, Result):
            future.set_result(pending_request.outcome)
        else:
            future.set_exception(pending_request.outcome)
