"""The client's request channel, which submits requests to schedulers and handles the responses.

Each channel belongs to one thread or one event loop, so it needs no lock. Only `wake` may be called
from other threads. `flush` sends the queued requests, as one frame for each scheduler.
`process_events` handles received messages in the thread that waits for them (see
ipc/scheduler_client.py).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shmserve.client.memory.views import noop
from shmserve.client.request.prepare import PackedRequest
from shmserve.client.request.results import Result, own_memories, read
from shmserve.client.server_state import ServerState
from shmserve.errors import (
    Disconnected,
    Internal,
    InvalidArgument,
    QueueFull,
    ShmserveError,
    TimedOut,
    Unavailable,
    Unsupported,
    from_code,
)
from shmserve.ipc.endpoints import MAX_REQUEST_BYTES
from shmserve.ipc.messages.inference import (
    Failed,
    Finished,
    Release,
    Responded,
    Response,
    Submit,
    make_submit,
    message_size,
)
from shmserve.ipc.processes import reset_eventfd
from shmserve.ipc.scheduler_client import NO_SCHEDULER, InflightRequest, SchedulerClient
from shmserve.ipc.tensors.descriptors import Range
from shmserve.ipc.tensors.schemas import inline_size_of, runs_once
from shmserve.ipc.trace import TraceContext, phase_durations, unpack_spans
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.ipc.transport.zmtp import Dealer, LinkTable

DECOUPLED = "model '%s' is decoupled (any number of responses to a request): use `stream`"
NO_RESPONSE = "no response arrived within the timeout"
CLOSED_EARLY = "the connection to the server was closed before the response"
NO_DESCRIPTOR = "this process has no file descriptor left for another connection"
_RETRIED = "the server closed the connection before the response, also after one retry"


@dataclass(slots=True, eq=False)
class ClientRequest(InflightRequest):
    """An in-flight request with one response.

    Attributes:
        is_abandoned: Whether the caller has stopped waiting for the request.
        channel: The channel that submitted the request.
        is_retry: Whether the request has been resubmitted because its response was lost.
        on_done: Called with the request when `outcome` is set.
        outcome: The result or the error; None until the request has completed.
        packed_request: The request's schema, data, options and memory.
        release_memory: A function that releases the memory of the request.
    """

    submit: Submit = field(init=False)
    channel: RequestChannel
    packed_request: PackedRequest
    on_done: Callable[[ClientRequest], None] | None
    release_memory: Callable[[], None] = field(init=False)
    outcome: Result | ShmserveError | None = field(init=False, default=None)
    is_abandoned: bool = field(init=False, default=False)
    is_retry: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.release_memory = self.packed_request.release_memory

    def result(self) -> Result:
        """Return the result of a completed request.

        Raises:
            ShmserveError: The request has failed with this error.
        """
        outcome = self.outcome
        if isinstance(outcome, Result):
            return outcome
        assert outcome is not None
        self.outcome = None
        try:
            raise self.with_trace(outcome)
        finally:
            del outcome  # a cycle of the error and its traceback would keep the request's memory

    def is_awaited(self) -> bool:
        return not self.is_abandoned

    def handle(self, message: Response) -> None:
        if type(message) is Finished:
            self._finish(message)
        elif type(message) is Failed:
            self.complete(self.error(message.code, message.message, message.retry_after_s))
        elif type(message) is Responded:  # the model was reloaded and is now decoupled
            self.discard(message)
            self.complete(Unsupported(DECOUPLED % self.packed_request.model.name))
            self.channel.cancel(self)

    def error(self, code: str, text: str, retry_after_s: int = 0) -> ShmserveError:
        """Return the exception for an error that the server has reported.

        The server may detect an expired deadline before the client does. UNAVAILABLE after the
        deadline therefore becomes `TimedOut`.
        """
        if retry_after_s > 0:
            return QueueFull(text, retry_after_s)
        has_expired = 0 < self.packed_request.options.deadline_ns <= time.monotonic_ns()
        if code == "UNAVAILABLE" and has_expired:
            return TimedOut(text)
        return from_code(code, text)

    def with_trace(self, error: ShmserveError) -> ShmserveError:
        """Set the `traceparent` of the error that this request failed with, and return the error.

        The `traceparent` is empty if the request has no trace.
        """
        trace = self.submit.trace
        error.traceparent = TraceContext.of(trace).traceparent if trace else ""
        return error

    def discard(self, message: Response) -> None:
        """Release the outputs of a response without reading them."""
        self.channel.schedulers.discard(self.endpoint, message, self.own_memories())

    def _finish(self, message: Finished) -> None:
        channel = self.channel
        # From now on `read` frees the memory, or keeps it for the arrays of the result.
        release_memory, self.release_memory = self.release_memory, noop
        outcome: Result | ShmserveError
        try:
            outcome = read(self, message)
            if message.spans and self.is_explained:
                self.explain(outcome, message.spans)
        except ShmserveError as error:
            self.release_memory = release_memory
            submit = self.submit
            must_fail = self.is_retry or self.is_abandoned or runs_once(submit.schema, submit.data)
            if isinstance(error, Unavailable) and not must_fail:
                self.is_retry = True  # the worker exited before the response was read
                channel.schedulers.submit(self, self.endpoint, message_size(submit))
                return
            outcome = error
        except MalformedMessage:
            self.release_memory = release_memory
            outcome = Internal("the response cannot be read")
        self.complete(outcome)

    def explain(self, result: Result, spans: bytes) -> None:
        """Write the latency breakdown of the request to the parameters of a result.

        Args:
            result: The result.
            spans: The packed spans of the response.
        """
        span_id, sent_ns = TraceContext.of(self.submit.trace).span_id, self.submit.arrived_ns
        now_ns = time.monotonic_ns()
        explanation = phase_durations(unpack_spans(spans), span_id, sent_ns, sent_ns, now_ns)
        result.parameters["explanation"] = explanation

    @property
    def is_explained(self) -> bool:
        """Return whether the parameter `explain` requests a latency breakdown in the result."""
        return (self.packed_request.options.parameters or {}).get("explain") is True

    def copy_range(self, memory_range: Range) -> bytearray:
        """Return a copy of a range of a worker's memory."""
        return self.channel.server.copy_range(memory_range)

    def release(self, messages: Sequence[Release]) -> None:
        """Send the `Release` messages for outputs that have been read."""
        self.channel.schedulers.release(self.endpoint, messages)

    def own_memories(self) -> set[int]:
        return own_memories(self.packed_request)

    def fail_without_scheduler(self) -> None:
        self.free()
        self.complete(Disconnected(NO_SCHEDULER))

    def free(self) -> None:
        release_memory, self.release_memory = self.release_memory, noop
        release_memory()

    def is_ready(self) -> bool:
        """Return whether the request has completed, so that a waiting thread can continue."""
        return self.outcome is not None

    def complete(self, outcome: Result | ShmserveError) -> None:
        """Complete the request with an outcome and call `on_done`.

        An abandoned request ignores its outcome.
        """
        if self.is_abandoned:
            return
        self.outcome = outcome
        on_done, self.on_done = self.on_done, None  # the callback may refer to this request
        if on_done is not None:
            on_done(self)


P = TypeVar("P", bound=ClientRequest)


class RequestChannel:
    """The requests and scheduler links of one thread or event loop of a connection.

    Attributes:
        server: The server's published state.
        schedulers: The client of the schedulers, with the requests in flight.
        waker: The eventfd that `wake` writes to.
    """

    def __init__(
        self, server: ServerState, watch: Callable[[int], None], unwatch: Callable[[int], None]
    ) -> None:
        self.server = server
        self._unwatch = unwatch
        self._links = LinkTable(f"{server.identity}.{next(server.link_numbers)}", watch, unwatch)
        self.schedulers: SchedulerClient[ClientRequest] = SchedulerClient(
            self._links, self._find, server.successors
        )
        self._request_ids = itertools.count(1)
        self._handled_loss_count = 0  # losses of schedulers that this channel has handled
        self.waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._is_flush_scheduled = False
        watch(self.waker)
        server.add_channel(self)

    # --- sending

    def submit(
        self, packed_request: PackedRequest, on_done: Callable[[ClientRequest], None] | None = None
    ) -> ClientRequest:
        """Queue a request for the next `flush`.

        Args:
            packed_request: The packed request.
            on_done: Called with the request when it has completed.

        Returns:
            The request in flight.

        Raises:
            Disconnected: The channel is closed, or the request was packed for a server that has
                exited or been replaced.
            InvalidArgument: The request is too large.
        """
        return self.start(ClientRequest(self, packed_request, on_done))

    def start(self, pending_request: P) -> P:
        """Queue a new request object for the next `flush`, and return it.

        Raises:
            Disconnected: As for `submit`.
            InvalidArgument: As for `submit`.
        """
        server, packed_request = self.server, pending_request.packed_request
        is_other_server = packed_request.model.source is not server.models
        if self._is_closed or not server.alive or is_other_server:
            packed_request.release_memory()
            raise Disconnected(
                "this client is closed" if self._is_closed and not is_other_server else CLOSED_EARLY
            )
        schema, data, options = packed_request.schema, packed_request.data, packed_request.options
        message_bytes = len(schema) + inline_size_of(data) + len(options.request_id)
        if message_bytes > MAX_REQUEST_BYTES:
            packed_request.release_memory()
            raise InvalidArgument(
                f"the request has {message_bytes} bytes besides its tensors in shared memory "
                f"(maximum: {MAX_REQUEST_BYTES})"
            )
        pending_request.submit = make_submit(
            next(self._request_ids),
            schema,
            data,
            time.monotonic_ns(),
            request_id=options.request_id,
            priority=options.priority,
            timeout_us=options.timeout_us,
            caller_deadline_ns=options.deadline_ns,
            flags=options.flags,
            correlation_id=options.sequence,
            trace=options.trace,
        )
        self.schedulers.submit(pending_request, packed_request.model.endpoint, message_bytes)
        return pending_request

    def cancel(self, pending_request: ClientRequest) -> None:
        """Cancel a request. Its memory stays in use until the scheduler responds."""
        pending_request.is_abandoned = True
        self.schedulers.cancel(pending_request)

    def expire(self, request_id: int) -> None:
        """Fail and cancel a request whose deadline has passed, unless it has completed."""
        pending_request = self.schedulers.pending.get(request_id)
        if pending_request is not None and not pending_request.is_abandoned:
            pending_request.complete(TimedOut(NO_RESPONSE))
            self.cancel(pending_request)

    @property
    def pending_ids(self) -> Collection[int]:
        """Return the ids of the requests that have not completed."""
        return self.schedulers.pending

    @property
    def unsent_count(self) -> int:
        """Return the number of messages that wait for the next `flush`."""
        return self._links.queued_count

    def flush(self) -> None:
        """Send the queued messages."""
        self._links.flush()

    def flush_soon(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Send the queued messages at the end of this iteration of an event loop.

        The function `call_soon` of the loop calls a function at that time.
        """
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            call_soon(self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self._is_flush_scheduled = False
        self.flush()  # a closed channel has no links, so that nothing is sent

    # --- receiving

    def process_events(self, readable_fds: Collection[int]) -> None:
        """Handle the messages at the readable descriptors and send the queued replies."""
        if self.waker in readable_fds:
            reset_eventfd(self.waker)  # before the check below, so that a later `wake` is not lost
        if self._handled_loss_count != self.server.loss_count or not self.server.alive:
            self._check_server()
        for fd in readable_fds:
            link = self._links.find_by_fd(fd)
            if link is not None:
                for message in link.receive():
                    self.schedulers.handle(link.endpoint, message)
                if not link.connected:
                    self._replace_link(link)
        if self._links.queued_count:
            self.flush()

    def _find(self, pending_request: ClientRequest, _: Failed | None) -> str:
        """Return the endpoint that currently serves the model of a request; "" if there is none."""
        model, models = pending_request.packed_request.model, self.server.models
        current_model = models.find(model.name, model.version) or models.find(model.name, "")
        return "" if current_model is None else current_model.endpoint

    # --- losses

    def _check_server(self) -> None:
        """Resubmit the requests of lost schedulers, or fail all requests if the server exited."""
        server = self.server
        if not server.alive:
            self._fail_all()
            return
        self._handled_loss_count = server.loss_count
        endpoints = [link.endpoint for link in self._links]
        for lost_endpoint in [endpoint for endpoint in endpoints if endpoint in server.successors]:
            self.schedulers.handle_loss(lost_endpoint)

    def _replace_link(self, link: Dealer) -> None:
        """Replace a link that the scheduler has disconnected.

        If the scheduler still runs, the requests of the link are resubmitted over a new link, each
        request at most once. If the scheduler has exited, the listener reports its successor.
        """
        try:
            new_link = self._links.connect(link.endpoint)
        except Unavailable as error:
            self._links.remove(link)
            for pending in self.schedulers.withdraw(link.endpoint):
                pending.fail(error.message)
            return
        if not new_link.connected:
            new_link.close()
            return
        self._links.remove(link)
        requests = self.schedulers.withdraw(link.endpoint)
        if all(pending.is_retry for pending in requests):
            new_link.close()
        else:
            self._links.add(new_link)
        for pending in requests:
            if pending.is_retry:
                pending.free()
                is_closed = self.server.is_closed()
                pending.complete(Disconnected(CLOSED_EARLY) if is_closed else Unavailable(_RETRIED))
            else:
                pending.is_retry = True
                self.schedulers.submit(pending, link.endpoint, message_size(pending.submit))

    def _fail_all(self) -> None:
        self._links.close_all()
        for pending_request in self.schedulers.withdraw_all():
            pending_request.free()
            pending_request.complete(Disconnected(CLOSED_EARLY))

    def wake(self) -> None:
        """Wake up the thread that waits at this channel. May be called from any thread."""
        if not self._is_closed:
            os.eventfd_write(self.waker, 1)

    def close(self) -> None:
        """Close every link and fail the pending requests."""
        if not self._is_closed:
            self._is_closed = True
            self._fail_all()
            self._unwatch(self.waker)
            self.server.remove_channel(self)
            os.close(self.waker)
