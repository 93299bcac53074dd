"""Calls of other models in flight: routed to schedulers, and re-routed when one is lost.

FindModel ──> supervisor: where?  ──> Submit ──> scheduler ──> Finished | Failed ──> CallResponse

A call keeps what it submitted until it has its response: when the scheduler is lost, the call is
submitted again to the successor, or to the scheduler that serves the model now (see
ipc/scheduler_client.py). Inputs that lie in memory of the caller's own request travel as they are;
outputs are copied out, so that a model may keep them.

Calls come from the model's thread, from its event loop (many at once), from threads it starts. None
may come from a signal handler: that may have interrupted one of these with the locks held.

They wait at the same sockets, a leader and its followers: whoever wakes takes all that came.
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
    """One epoll descriptor over all sockets, one thread at a time asleep on it, the others behind.

    `take` is called without `lock`.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self._take = take
        self._turn = threading.Condition(self.lock)
        self._asleep = False
        self._epoll = select.epoll()
        # Not in the epoll set: an event loop that read it would take the sleeping thread's wake-up.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}

    def add(self, fd: int) -> None:
        """Wait for this descriptor too; also for those that wait already."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Wait for it no more; before it is closed."""
        self._epoll.unregister(fd)

    def until(self, done: Callable[[], bool]) -> None:
        """Block this thread until `done()`, which whoever changes it follows with `wake`."""
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
        """Let every waiting thread look again; with `lock` held."""
        self._turn.notify_all()
        if self._asleep:
            os.eventfd_write(self._wake, 1)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have `loop`, which runs in this thread, take what comes, until as many `unwatch`."""
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
        """Close the descriptors; nobody may wait."""
        self._epoll.close()
        os.close(self._wake)


class Call(InflightRequest):
    """An inference that was begun. `outcome`: None until it has ended; `future` has it too, where a
    coroutine began it. `takes_many`: its model may give any number of responses."""

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
        """The model and the version that it is for."""
        return self.request.model, self.request.version

    @property
    def ends_ns(self) -> int:
        """When nobody waits for it any more, by the monotonic clock; 0: there is no such time."""
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
        else:  # its model was loaded again, and is another one
            self.router.schedulers.discard(self.endpoint, message)
            if message.final:
                self.end(_decoupled(self.request.model))

    def free(self) -> None:
        self.inputs.release()

    def end(self, outcome: CallResponse | ShmserveError) -> None:
        """Settle it with this outcome."""
        self.outcome = outcome
        future = self.future
        if future is None:
            self.router.waiting.wake()
            return
        settle_soon(future, outcome)


def settle_soon(future: asyncio.Future[Any], outcome: object) -> None:
    """Give a future its result or its error, in its loop, unless it is done by then."""
    # The loop is gone when the model did not wait for the call.
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
    """A call whose scheduler may not be the one that serves its model now; else it failed so."""

    call: Call
    error: ShmserveError


class CallRouter:
    """Submits calls, takes their responses, and sends them on when
    a scheduler is lost. `waiting` has who waits for them; its lock guards all that is here.

    `arena_byte_size` bytes hold large inputs. Any thread may call it. `on_spans` is told the times
    of calls with a trace.
    """

    def __init__(
        self,
        control: SupervisorLink,
        arena_byte_size: int,
        on_spans: Callable[[bytes], None] = lambda spans: None,
    ) -> None:
        self._control = control
        self._on_spans = on_spans
        self._directory = ModelDirectory(control)
        self._memory = LentMemory(arena_byte_size)
        self.mappings = Mappings()
        self.ids = count(1)  # of calls
        self.waiting = SharedWait(self._take)
        self._lock = self.waiting.lock
        identity = f"{os.getpid()}.{secrets.token_hex(8)}"
        self._links = LinkTable(identity, self.waiting.add, self.waiting.remove)
        self.schedulers: SchedulerClient[Call] = SchedulerClient(self._links, self._doubt)
        self._left: deque[tuple[Call, bool]] = deque()  # to be cancelled; whether one listens
        self._doubtful: list[_Doubt] = []
        self._responses = Schemas(ResponseSchema)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self.waiting.add(self._wakeup)
        self.waiting.add(control.dealer.fd)
        control.follow_models(self._models_changed)

    def close(self) -> None:
        """Close every socket; calls in flight get no response."""
        self._control.follow_models(None)
        with self._lock:
            self._links.close_all()
            self.waiting.close()
            os.close(self._wakeup)

    @property
    def free_bytes(self) -> int:
        """Bytes of the memory for large inputs that no call has."""
        return self._memory.byte_size - self._memory.used

    # --- for the model's code

    def begin(self, call: C) -> C:
        """Submit a call. Raises the ShmserveError that it cannot be submitted for."""
        self.submit(call)
        self.flush()
        return call

    def wait(self, call: Call) -> CallResponse:
        """Wait for the response to a call. Raises the ShmserveError that it ended with."""
        self.waiting.until(lambda: call.outcome is not None)
        if isinstance(call.outcome, CallResponse):
            return call.outcome
        assert call.outcome is not None
        raise call.outcome

    def call_soon(self, request: CallRequest) -> asyncio.Future[CallResponse]:
        """`begin`; the future, of the running event loop, gets what `wait` returns or raises.

        Those begun in one turn of the loop are sent as one. Cancelling the future cancels the
        inference.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CallResponse] = loop.create_future()
        self.submit_soon(Call(self, request, future), future)
        return future

    def submit_soon(self, call: Call, future: asyncio.Future[Any]) -> None:
        """Submit a call at the end of this turn of the running loop, which takes responses until
        the future is done; where that is cancelled, so is the call."""
        loop = asyncio.get_running_loop()
        self.submit(call)
        loop.call_soon(self.flush)
        self.waiting.watch(loop)

        def over(ended: asyncio.Future[Any]) -> None:
            self.waiting.unwatch(loop)
            if ended.cancelled():
                self.cancel_soon(call)

        future.add_done_callback(over)

    # --- out

    def submit(self, call: Call) -> None:
        """Have a call leave with the next flush. Raises the ShmserveError that it cannot."""
        while True:
            target = self._directory.find(call.key, call.ends_ns)
            with self._lock:
                if not self._directory.knows(call.key, target):
                    continue  # lost while this thread waited for its turn
                call.inputs = place(call.request.inputs, self._memory)
                try:
                    self._submit(call, target)
                except BaseException:
                    self.schedulers.pending.pop(call.number, None)
                    call.free()
                    raise
            return

    def _submit(self, call: Call, target: BlsTarget) -> None:
        """Raises InvalidArgument when the request does not fit the model."""
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
        """Send what is queued: calls, credit, cancellations."""
        with self._lock:
            while self._left:
                call, listening = self._left.popleft()
                self.schedulers.cancel(call, listening)
            self._links.flush()

    def credit(self, call: Call, responses: int) -> None:
        """Take so many more responses of a call: as many were taken."""
        with self._lock:
            self.schedulers.credit(call, responses)
        self.flush()

    def cancel_soon(self, call: Call, listening: bool = False) -> None:
        """Cancel a call that nobody waits for any more, or, `listening`, whose model should end it.
        At any moment, in any thread: an object may be collected in the middle of what needs the
        lock."""
        self._left.append((call, listening))
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self.flush()
        else:
            self._wake_up()

    # --- in

    def _take(self) -> None:
        """Handle all that has arrived."""
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
        """Return a copy of a response to a call. Call it with the lock held."""
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
        """Have the next call of `model` ask anew where it is."""
        self._directory.invalidate(model)

    # --- losses

    def _models_changed(self, news: Losses) -> None:
        # Called by whoever reads the supervisor's socket, with its lock held: not to be asked here.
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
        """Have a thread look, without the lock, who serves the model of a call that no scheduler
        has. A scheduler that refused it may be the old one of a model that has been loaded again.
        """
        error: ShmserveError = Unavailable("the scheduler of the model was lost")
        if refusal is not None:
            error = from_code(refusal.code, refusal.message)
        self._doubtful.append(_Doubt(call, error))
        self._wake_up()

    def _wake_up(self) -> None:
        """Have whoever waits, now or next, `_take`."""
        os.eventfd_write(self._wakeup, 1)
        self._woken = True  # in this order: otherwise it could stay readable, and unread

    def _look_again(self, doubt: _Doubt) -> None:
        """Submit a call to whoever serves its model now, unless that is who failed it."""
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
