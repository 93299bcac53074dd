"""Calls of other models, routed to schedulers and rerouted when a scheduler is lost.

FindModel ──> supervisor: endpoint ──> Submit ──> scheduler ──> Finished | Failed ──> CallResponse

A call keeps its message until it has its response. When the scheduler is lost, the call is
resubmitted to the successor, or to the scheduler that currently serves the model (see
ipc/scheduler_client.py). Inputs in the memory of the caller's own request are sent by reference.
Outputs are copied, so a model may keep them.

The model's thread, its event loop (many calls at once) and threads that it starts may call other
models. A signal handler must not, because it may have interrupted a thread that holds the locks.

All callers wait at the same sockets (leader and followers). The thread that wakes up handles all
received messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple, TypeVar

from shmserve.errors import Internal, ShmserveError, Unavailable, from_code
from shmserve.ipc.link_table import LinkTable
from shmserve.ipc.memory.lent import LentMemory, releases
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.inference import (
    Failed,
    Finished,
    Responded,
    Response,
    make_submit,
    message_size,
)
from shmserve.ipc.messages.publications import Losses, ModelWithdrawn, ProcessExited, SchedulerLost
from shmserve.ipc.scheduler_client import InflightRequest, SchedulerClient
from shmserve.ipc.tensors.inference import ResponseSchema, ranges_of
from shmserve.ipc.tensors.schemas import Schemas
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.workers.bls.model_directory import BlsTarget, Key, ModelDirectory
from shmserve.workers.bls.request import CallRequest, CallResponse, PlacedInputs, copied, place
from shmserve.workers.links.supervisor import SupervisorLink, readable

logger = logging.getLogger(__name__)


class SharedWait:
    """A wait of several threads at the same sockets (leader and followers).

    One thread sleeps on the epoll descriptor. The other threads wait for a condition.

    Attributes:
        lock: Guards the state that `done` of `until` examines.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        """Create the epoll descriptor.

        Args:
            take: Called without `lock` to handle all received messages.
        """
        self.lock = threading.Lock()
        self._take = take
        self._turn = threading.Condition(self.lock)
        self._asleep = False
        self._epoll = select.epoll()
        # Not in the epoll set: an event loop that read it would take the sleeping thread's wake-up.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}

    def add(self, fd: int) -> None:
        """Add a descriptor. Threads that are waiting already are woken by it, too."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Remove a descriptor. Must be called before the descriptor is closed."""
        self._epoll.unregister(fd)

    def until(self, done: Callable[[], bool]) -> None:
        """Block this thread until `done()` is true.

        Code that changes the result of `done` must call `wake` afterwards.
        """
        while True:
            self._take()
            with self._turn:
                while self._asleep and not done():
                    self._turn.wait()
                if done():
                    return
                self._asleep = True
            try:
                self._sleep()
            finally:
                with self._turn:
                    self._asleep = False
                    self._turn.notify_all()

    def _sleep(self) -> None:
        readable(self._epoll.fileno(), self._wake)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def wake(self) -> None:
        """Wake up every waiting thread to check its condition. Must be called with `lock` held."""
        self._turn.notify_all()
        if self._asleep:
            os.eventfd_write(self._wake, 1)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle received messages in `loop`, which runs in this thread.

        The loop stops once `unwatch` has been called as often as `watch`.
        """
        if not self._loops.get(loop):
            loop.add_reader(self._epoll.fileno(), self._take)
        self._loops[loop] = self._loops.get(loop, 0) + 1

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo one `watch`."""
        self._loops[loop] -= 1
        if not self._loops[loop]:
            del self._loops[loop]
            loop.remove_reader(self._epoll.fileno())

    def close(self) -> None:
        """Close the descriptors. No thread may be waiting."""
        self._epoll.close()
        os.close(self._wake)


class Call(InflightRequest):
    """An in-flight inference of another model.

    Attributes:
        arrived_ns: The monotonic time at which the call was created.
        future: The future that receives the outcome of an asynchronous call; None if the caller
            blocks.
        inputs: The inputs as they are sent.
        number: The id of the call.
        outcome: The response or the error; None until the call has completed.
        request: The request.
        router: The router that submits the call.
        takes_many: Whether the call accepts any number of responses (a decoupled model).
    """

    __slots__ = ("arrived_ns", "future", "inputs", "number", "outcome", "request", "router")

    takes_many = False

    def __init__(
        self,
        router: CallRouter,
        request: CallRequest,
        future: asyncio.Future[CallResponse] | None = None,
    ) -> None:
        self.router = router
        self.number = next(router.ids)
        self.request = request
        self.future = future
        self.arrived_ns = time.monotonic_ns()
        self.inputs = PlacedInputs((), [])
        self.outcome: CallResponse | ShmserveError | None = None
        self.endpoint = ""
        self.responses = 0

    @property
    def key(self) -> Key:
        """The name and version of the called model."""
        return self.request.model, self.request.version

    @property
    def ends_ns(self) -> int:
        """The monotonic deadline, the earlier of the call's and the caller's; 0 for none."""
        limit_us = self.request.timeout_us
        own_ns = self.arrived_ns + limit_us * 1000 if limit_us else 0
        return min(filter(None, (own_ns, self.request.deadline_ns)), default=0)

    def awaited(self) -> bool:
        return self.future is None or not self.future.done()

    def respond(self, message: Response) -> None:
        if isinstance(message, Finished):
            self.end(self.router.read(self, message))
        elif isinstance(message, Failed):
            self.end(from_code(message.code, message.message))
        else:  # the model was reloaded and is decoupled now
            self.router.schedulers.discard(self.endpoint, message)
            if message.final:
                self.end(_decoupled(self.request.model))

    def free(self) -> None:
        self.inputs.release()

    def end(self, outcome: CallResponse | ShmserveError) -> None:
        """Complete the call with an outcome and wake up its caller."""
        self.outcome = outcome
        future = self.future
        if future is None:
            self.router.waiting.wake()
            return
        settle_soon(future, outcome)


def settle_soon(future: asyncio.Future[Any], outcome: object) -> None:
    """Set the result or exception of a future, in the future's loop, unless it is done by then."""
    # The loop is closed if the model did not wait for the call.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: asyncio.Future[Any], outcome: object) -> None:
    if future.done():
        return
    if isinstance(outcome, ShmserveError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _decoupled(model: str) -> Internal:
    return Internal(
        f"Model {model} is using the decoupled. The current BLS request call doesn't support "
        "models using the decoupled transaction policy. Please use 'decoupled=True' argument to "
        "the 'exec' or 'async_exec' calls for decoupled models.'"
    )


C = TypeVar("C", bound=Call)


class _Doubt(NamedTuple):
    """A call whose scheduler endpoint must be resolved again.

    Attributes:
        call: The call.
        error: The error of the call if no other scheduler serves the model.
    """

    call: Call
    error: ShmserveError


class CallRouter:
    """The router of calls, which submits them, receives responses and fails over.

    Any thread may call its methods.

    Attributes:
        mappings: The mapped memory of other processes.
        ids: The ids of calls.
        waiting: The shared wait of the callers. Its lock guards the state of the router.
        schedulers: The client of the schedulers, with the calls in flight.
    """

    def __init__(
        self,
        control: SupervisorLink,
        arena_byte_size: int,
        on_spans: Callable[[bytes], None] = lambda spans: None,
    ) -> None:
        """Create a router without calls.

        Args:
            control: The link to the supervisor.
            arena_byte_size: The size of the memory for large inputs.
            on_spans: Called with the packed spans of each response to a traced call.
        """
        self._control = control
        self._on_spans = on_spans
        self._directory = ModelDirectory(control)
        self._memory = LentMemory(arena_byte_size)
        self.mappings = Mappings()
        self.ids = count(1)
        self.waiting = SharedWait(self._take)
        self._lock = self.waiting.lock
        identity = f"{os.getpid()}.{secrets.token_hex(8)}"
        self._links = LinkTable(identity, self.waiting.add, self.waiting.remove)
        self.schedulers: SchedulerClient[Call] = SchedulerClient(self._links, self._doubt)
        self._left: deque[tuple[Call, bool]] = deque()  # calls to cancel, and `listening`
        self._doubtful: list[_Doubt] = []
        self._responses = Schemas(ResponseSchema)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self.waiting.add(self._wakeup)
        self.waiting.add(control.dealer.fd)
        control.follow_models(self._models_changed)

    def close(self) -> None:
        """Close every socket. Calls in flight receive no response."""
        self._control.follow_models(None)
        with self._lock:
            self._links.close_all()
            self.waiting.close()
            os.close(self._wakeup)

    @property
    def free_bytes(self) -> int:
        """The number of free bytes in the memory for large inputs."""
        return self._memory.byte_size - self._memory.used

    # --- for the model's code

    def begin(self, call: C) -> C:
        """Submit a call and send it at once.

        Raises:
            ShmserveError: The call cannot be submitted.
        """
        self.submit(call)
        self.flush()
        return call

    def wait(self, call: Call) -> CallResponse:
        """Wait for the response to a call.

        Raises:
            ShmserveError: The call has failed with this error.
        """
        self.waiting.until(lambda: call.outcome is not None)
        if isinstance(call.outcome, CallResponse):
            return call.outcome
        assert call.outcome is not None
        raise call.outcome

    def call_soon(self, request: CallRequest) -> asyncio.Future[CallResponse]:
        """Submit a call from the running event loop.

        The calls submitted in one iteration of the loop are sent together.

        Returns:
            A future of the response or error. Cancelling the future cancels the inference.

        Raises:
            ShmserveError: The call cannot be submitted.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CallResponse] = loop.create_future()
        self.submit_soon(Call(self, request, future), future)
        return future

    def submit_soon(self, call: Call, future: asyncio.Future[Any]) -> None:
        """Submit a call, which is sent in the next iteration of the running event loop.

        The loop handles received messages until the future is done.

        Args:
            call: The call.
            future: A future of the loop. If it is cancelled, the call is cancelled.

        Raises:
            ShmserveError: The call cannot be submitted.
        """
        loop = asyncio.get_running_loop()
        self.submit(call)
        loop.call_soon(self.flush)
        self.waiting.watch(loop)

        def over(ended: asyncio.Future[Any]) -> None:
            self.waiting.unwatch(loop)
            if ended.cancelled():
                self.cancel_soon(call)

        future.add_done_callback(over)

    # --- sending

    def submit(self, call: Call) -> None:
        """Queue a call for the next `flush`.

        Raises:
            ShmserveError: The call cannot be submitted.
        """
        while True:
            target = self._directory.find(call.key, call.ends_ns)
            with self._lock:
                if not self._directory.knows(call.key, target):
                    continue  # the target was lost while this thread waited for the lock
                call.inputs = place(call.request.inputs, self._memory)
                try:
                    self._submit(call, target)
                except BaseException:
                    self.schedulers.pending.pop(call.number, None)
                    call.free()
                    raise
            return

    def _submit(self, call: Call, target: BlsTarget) -> None:
        """Queue a call for its target. Must be called with the lock held.

        Raises:
            InvalidArgument: The request does not fit the model.
            Internal: The model is decoupled, and the call accepts only one response.
        """
        request = call.request
        if target.decoupled and not call.takes_many:
            raise _decoupled(request.model)
        schema, data = request.packed(target.signature, call.inputs.refs)
        call.submit = make_submit(
            call.number,
            schema,
            data,
            call.arrived_ns,
            request_id=request.request_id,
            priority=request.priority,
            timeout_us=request.timeout_us,
            ends_ns=request.deadline_ns,
            flags=request.flags,
            correlation_id=request.correlation_id,
            trace=request.trace,
        )
        self.schedulers.submit(call, target.endpoint, message_size(call.submit))

    def flush(self) -> None:
        """Send the queued calls, credit messages and cancellations."""
        with self._lock:
            while self._left:
                call, listening = self._left.popleft()
                self.schedulers.cancel(call, listening)
            self._links.flush()

    def credit(self, call: Call, responses: int) -> None:
        """Grant credit for `responses` more responses to a call."""
        with self._lock:
            self.schedulers.credit(call, responses)
        self.flush()

    def cancel_soon(self, call: Call, listening: bool = False) -> None:
        """Cancel a call without waiting for the lock.

        May be called at any time and in any thread, because an object may be garbage-collected
        while its thread holds the lock.

        Args:
            call: The call.
            listening: Whether responses that the model sends before it ends are still read.
        """
        self._left.append((call, listening))
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self.flush()
        else:
            self._wake_up()

    # --- receiving

    def _take(self) -> None:
        """Handle all received messages."""
        self._control.pump()
        with self._lock:
            for link in self._links:
                for message in link.receive():
                    self._receive(link.endpoint, message)
            doubtful, self._doubtful = self._doubtful, []
            if self._woken:
                self._woken = False
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
        for doubt in doubtful:
            self._look_again(doubt)
        self.flush()

    def _receive(self, endpoint: str, message: Any) -> None:
        if isinstance(message, Finished | Responded) and message.spans:
            self._on_spans(message.spans)
        self.schedulers.take(endpoint, message)

    def read(self, call: Call, message: Finished | Responded) -> CallResponse | ShmserveError:
        """Return a copy of a response to a call, or the error if the response cannot be read.

        Must be called with the lock held.
        """
        schema, data = message.schema, message.data
        try:
            known = self._responses.find(schema) or self._responses.learn(schema)
            response = known.inferred(data)
        except MalformedMessage as error:
            logger.error("a worker's response is malformed: %s", error)
            return Internal("internal error")
        outcome = copied(response, self.mappings, call.request.model)
        self.schedulers.release(call.endpoint, releases(ranges_of(data)))
        return outcome

    def invalidate(self, model: str) -> None:
        """Remove the cached targets of a model, so that its next call queries the supervisor."""
        self._directory.invalidate(model)

    # --- losses

    def _models_changed(self, news: Losses) -> None:
        # The caller holds the lock of the supervisor's link: send no request to the supervisor.
        with self._lock:
            match news:
                case ProcessExited(process=pid):
                    self.mappings.drop_process(pid)
                case ModelWithdrawn(name=name):
                    self._directory.invalidate(name)
                case SchedulerLost(endpoint=endpoint, successor=successor):
                    self._directory.lose(endpoint)
                    self.schedulers.successors.add(endpoint, successor)
                    self.schedulers.lost(endpoint)

    def _doubt(self, call: Call, refusal: Failed | None) -> None:
        """Schedule the resolution of a call that is not in flight at any scheduler.

        A thread resolves the endpoint later, without the lock. A scheduler that refused the call
        may be the previous one of a model that has been reloaded.
        """
        error: ShmserveError = Unavailable("the scheduler of the model was lost")
        if refusal is not None:
            error = from_code(refusal.code, refusal.message)
        self._doubtful.append(_Doubt(call, error))
        self._wake_up()

    def _wake_up(self) -> None:
        """Make the thread that waits, or the next one to wait, call `_take`."""
        os.eventfd_write(self._wakeup, 1)
        self._woken = True  # set after the write: otherwise the eventfd could remain unread

    def _look_again(self, doubt: _Doubt) -> None:
        """Resubmit a call to the current scheduler of its model, or fail the call.

        The call fails if that is the scheduler that failed it. Must be called without the lock.
        """
        call, outcome = doubt
        self._directory.doubt(call.key, call.endpoint)
        target: BlsTarget | None = None
        while True:
            try:
                target = self._directory.find(call.key, call.ends_ns)
            except ShmserveError as error:
                target, outcome = None, error
            with self._lock:
                if target is not None and not self._directory.knows(call.key, target):
                    continue
                try:
                    if target is not None and target.endpoint != call.endpoint and call.awaited():
                        self._submit(call, target)
                        return
                except ShmserveError as error:
                    outcome = error
                call.free()
                call.end(outcome)
                return
