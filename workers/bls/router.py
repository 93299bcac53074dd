"""The router of calls of other models: submission to schedulers, responses and failover.

FindModel ──> supervisor: endpoint ──> Submit ──> scheduler ──> Finished | Failed ──> CallResponse

A call keeps its message until it has its response. When the scheduler is lost, the call is
resubmitted to the successor, or to the scheduler that currently serves the model (see
ipc/scheduler_client.py). Inputs in the memory of the caller's own request are sent by reference.
Outputs are copied, so a model may keep them.

The model's thread, its event loop (concurrent calls) and threads that it starts may call other
models. A signal handler must not, because it may have interrupted a thread that holds the locks.
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
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from shmserve.errors import (
    Internal,
    InvalidArgument,
    NotFound,
    ShmserveError,
    Unavailable,
    from_code,
)
from shmserve.ipc.memory.lent import LentMemory, release_messages
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.control_requests import FindModel
from shmserve.ipc.messages.inference import (
    Failed,
    Finished,
    Responded,
    Response,
    make_submit,
    message_size,
)
from shmserve.ipc.messages.publications import Loss, ModelWithdrawn, ProcessExited, SchedulerLost
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.processes import reset_eventfd
from shmserve.ipc.scheduler_client import InflightRequest, SchedulerClient
from shmserve.ipc.tensors.schemas import ResponseSchema, Schemas, unpack_ranges
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.ipc.transport.zmtp import LinkTable
from shmserve.workers.bls.request import (
    CallRequest,
    Outcome,
    StoredInputs,
    copy_response,
    store_inputs,
)
from shmserve.workers.links import SupervisorLink, wait_readable


class SharedWait:
    """The shared wait of the threads and event loops that call other models.

    One thread sleeps on the epoll descriptor, and the other threads wait for a condition. The
    thread that wakes up handles all received messages. Event loops watch the epoll descriptor, too.

    Attributes:
        lock: Guards the state that `is_done` of `wait_until` examines.
    """

    def __init__(self, handle_received: Callable[[], None]) -> None:
        """Create the descriptors.

        Args:
            handle_received: Called without `lock` to handle all received messages.
        """
        self.lock = threading.Lock()
        self._handle_received = handle_received
        self._condition = threading.Condition(self.lock)
        self._has_sleeper = False
        self._epoll = select.epoll()
        # Wakes the sleeping thread. Not in the epoll set, where an event loop could consume it.
        self._recheck_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._notification_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_notified = False
        self._future_counts: Counter[asyncio.AbstractEventLoop] = Counter()  # of waiting futures
        self.add(self._notification_fd)

    def add(self, fd: int) -> None:
        """Add a descriptor, which also wakes threads that are already waiting."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Remove a descriptor. Must be called before the descriptor is closed."""
        self._epoll.unregister(fd)

    def close(self) -> None:
        """Close the descriptors. No thread may be waiting."""
        self._epoll.close()
        os.close(self._recheck_fd)
        os.close(self._notification_fd)

    # --- waiting

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Block this thread until `is_done()` is true.

        Code that changes the result of `is_done` must call `wake` afterwards.
        """
        while True:
            self._handle_messages()
            with self._condition:
                while self._has_sleeper and not is_done():
                    self._condition.wait()
                if is_done():
                    return
                self._has_sleeper = True
            try:
                wait_readable(self._epoll.fileno(), self._recheck_fd)
                reset_eventfd(self._recheck_fd)
            finally:
                with self._condition:
                    self._has_sleeper = False
                    self._condition.notify_all()

    def serve(self, future: asyncio.Future[Any]) -> None:
        """Handle received messages in the event loop of this thread until its `future` is done."""
        loop = future.get_loop()
        if not self._future_counts[loop]:
            loop.add_reader(self._epoll.fileno(), self._handle_messages)
        self._future_counts[loop] += 1
        future.add_done_callback(self._stop_serving)

    def _stop_serving(self, future: asyncio.Future[Any]) -> None:
        loop = future.get_loop()
        self._future_counts[loop] -= 1
        if not self._future_counts[loop]:
            del self._future_counts[loop]
            loop.remove_reader(self._epoll.fileno())

    def _handle_messages(self) -> None:
        if self._is_notified:
            self._is_notified = False
            reset_eventfd(self._notification_fd)
        self._handle_received()

    # --- waking

    def wake(self) -> None:
        """Wake up every waiting thread to check its condition. Must be called with `lock` held."""
        self._condition.notify_all()
        if self._has_sleeper:
            os.eventfd_write(self._recheck_fd, 1)

    def notify(self) -> None:
        """Wake a waiting thread or event loop, or the next one that waits, to handle messages."""
        os.eventfd_write(self._notification_fd, 1)
        self._is_notified = True  # set after the write: otherwise the eventfd could remain unread


def complete_soon(future: asyncio.Future[Any], outcome: object) -> None:
    """Set the result or exception of a future, in the future's loop, unless it is done by then."""
    # The loop is closed if the model did not wait for the call.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(_complete, future, outcome)


def _complete(future: asyncio.Future[Any], outcome: object) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


logger = logging.getLogger(__name__)

ModelKey = tuple[str, str]  # the name of a model, and its version or "" for the latest


class BlsCall(InflightRequest):
    """An in-flight inference of another model.

    Attributes:
        router: The router that submits the call.
        request: The request.
        number: The id of the call.
        arrived_ns: The monotonic time at which the call was created.
        inputs: The inputs as they are sent.
        accepts_stream: Whether the call accepts any number of responses (a decoupled model).
    """

    __slots__ = ("arrived_ns", "inputs", "number", "request", "router")

    accepts_stream = False

    def __init__(self, router: CallRouter, request: CallRequest) -> None:
        self.router = router
        self.request = request
        self.number = next(router.call_numbers)
        self.arrived_ns = time.monotonic_ns()
        self.inputs = StoredInputs((), [])
        self.endpoint = ""
        self.response_count = 0

    @property
    def key(self) -> ModelKey:
        """Return the name and version of the called model."""
        return self.request.model, self.request.version

    @property
    def effective_deadline_ns(self) -> int:
        """Return the monotonic deadline, the earlier of the call's and the caller's; 0 for none."""
        limit_us = self.request.limit_us
        call_deadline_ns = self.arrived_ns + limit_us * 1000 if limit_us else 0
        return min(filter(None, (call_deadline_ns, self.request.deadline_ns)), default=0)

    def free(self) -> None:
        self.inputs.release()

    def handle(self, message: Response) -> None:
        if isinstance(message, Finished):
            self.end(self.router.read(self, message))
        elif isinstance(message, Failed):
            self.end(_to_error(self, message))
        else:
            self.receive(message)

    @abstractmethod
    def receive(self, message: Responded) -> None:
        """Handle a response to a call that may have many responses."""

    @abstractmethod
    def end(self, outcome: Outcome) -> None:
        """Complete the call with its only response or an error, and wake up its caller."""


C = TypeVar("C", bound=BlsCall)


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """A loaded model version.

    Attributes:
        endpoint: The endpoint of the model's scheduler.
        signature: The inputs and outputs of the model.
        decoupled: Whether the model may send any number of responses to a request.
    """

    endpoint: str
    signature: Signature
    decoupled: bool


class CallRouter:
    """The router of a model's calls of other models: submission, responses and failover.

    Any thread may call its methods.

    Attributes:
        mappings: The mapped memory of other processes.
        call_numbers: The ids of calls.
        shared_wait: The shared wait of the callers. Its lock guards the state of the router.
        schedulers: The client of the schedulers, with the calls in flight.
        _targets: The targets that the supervisor has reported.
        _loss_count: The number of schedulers that were lost.
        _unresolved_calls: The calls whose endpoint must be resolved again, with the error of the
            call if no other scheduler serves its model.
        _cancellations: The calls to cancel, and whether their further responses are still read.
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
        self._input_memory = LentMemory(arena_byte_size)
        self.mappings = Mappings()
        self.call_numbers = count(1)
        self.shared_wait = SharedWait(self._handle_received)
        self._lock = self.shared_wait.lock
        identity = f"{os.getpid()}.{secrets.token_hex(8)}"
        self._links = LinkTable(identity, self.shared_wait.add, self.shared_wait.remove)
        self.schedulers: SchedulerClient[BlsCall] = SchedulerClient(
            self._links, self._resolve_later
        )
        self._targets: dict[ModelKey, _Target] = {}
        self._loss_count = 0
        self._unresolved_calls: list[tuple[BlsCall, ShmserveError]] = []  # with their errors
        self._cancellations: deque[tuple[BlsCall, bool]] = deque()  # (call, keeps reading)
        self._needs_cancel_check = False
        self._response_schemas = Schemas(ResponseSchema)
        self.add, self.remove = self.shared_wait.add, self.shared_wait.remove
        control.follow_models(self._models_changed, self)

    def close(self) -> None:
        """Close every socket. Calls in flight receive no response."""
        self._control.follow_models(None)
        with self._lock:
            self._links.close_all()
            self.shared_wait.close()

    @property
    def free_bytes(self) -> int:
        """Return the number of free bytes in the memory for large inputs."""
        return self._input_memory.byte_size - self._input_memory.used_bytes

    # --- sending

    def submit_now(self, call: C) -> C:
        """Submit a call and send it immediately.

        Raises:
            ShmserveError: The call cannot be submitted.
        """
        self._submit(call)
        self._flush()
        return call

    def submit_soon(self, call: BlsCall, future: asyncio.Future[Any]) -> None:
        """Submit a call, which is sent in the next iteration of the running event loop.

        The loop handles received messages until the future is done. The calls submitted in one
        iteration are sent together.

        Args:
            call: The call.
            future: A future of the loop. If it is cancelled, the call is cancelled.

        Raises:
            ShmserveError: The call cannot be submitted.
        """
        self._submit(call)
        future.get_loop().call_soon(self._flush)
        self.shared_wait.serve(future)
        future.add_done_callback(partial(self._cancel_with, call))

    def _cancel_with(self, call: BlsCall, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self.cancel(call)

    def _submit(self, call: BlsCall) -> None:
        """Queue a call for the next `_flush`.

        Raises:
            ShmserveError: The call cannot be submitted.
        """
        with self._locked_target(call) as target:
            call.inputs = store_inputs(call.request.inputs, self._input_memory)
            try:
                self._submit_to(target, call)
            except BaseException:
                self.schedulers.pending.pop(call.number, None)
                call.free()
                raise

    @contextlib.contextmanager
    def _locked_target(self, call: BlsCall) -> Iterator[_Target]:
        """Yield the target of a call with the lock held; query the supervisor if it is unknown.

        Raises:
            NotFound: There is no such model.
            Unavailable: The model is not loaded.
        """
        while True:
            with self._lock:
                target = self._targets.get(call.key)
                if target is not None:
                    yield target
                    return
            self._look_up(call)

    def _look_up(self, call: BlsCall) -> None:
        """Query the supervisor for the target of a call. Must be called without the lock.

        The query of a model that is loaded on demand waits until the model is loaded. The response
        is ignored if a scheduler was lost in the meantime, because it may be outdated.
        """
        loss_count = self._loss_count
        deadline_ns = call.effective_deadline_ns
        timeout_s = max(1e-6, (deadline_ns - time.monotonic_ns()) / 1e9) if deadline_ns else 0.0
        reply = self._control.ask(FindModel, *call.key, timeout_s)
        config = ModelSpec.of(reply["config"])
        signature = Signature(config, reply["version"])
        with self._lock:
            if loss_count == self._loss_count:
                self._targets[call.key] = _Target(reply["endpoint"], signature, config.decoupled)

    def _submit_to(self, target: _Target, call: BlsCall) -> None:
        """Queue a call for its target. Must be called with the lock held.

        Raises:
            InvalidArgument: The request does not fit the model.
            Internal: The model is decoupled, and the call accepts only one response.
        """
        request = call.request
        if target.decoupled and not call.accepts_stream:
            raise decoupled_error(request.model)
        schema, data = request.packed(target.signature, call.inputs.refs)
        call.submit = make_submit(
            call.number,
            schema,
            data,
            call.arrived_ns,
            request_id=request.request_id,
            priority=request.priority,
            timeout_us=request.timeout_us,
            limit_us=request.limit_us,
            limit_origin="the call's parameter 'deadline_us'",
            caller_deadline_ns=request.deadline_ns,
            flags=request.flags,
            correlation_id=request.correlation_id,
            trace=request.trace,
            callers=request.callers,
        )
        self.schedulers.submit(call, target.endpoint, message_size(call.submit))

    def _flush(self) -> None:
        """Send the queued calls, credit messages and cancellations."""
        with self._lock:
            while self._cancellations:
                self.schedulers.cancel(*self._cancellations.popleft())
            self._links.flush()

    def credit(self, call: BlsCall, responses: int) -> None:
        """Grant credit for `responses` more responses to a call."""
        with self._lock:
            self.schedulers.credit(call, responses)
        self._flush()

    def cancel(self, call: BlsCall, keeps_reading: bool = False) -> None:
        """Cancel a call, later if another thread holds the lock.

        May be called at any time and in any thread, because an object may be garbage-collected
        while its thread holds the lock.

        Args:
            call: The call.
            keeps_reading: Whether responses that the model sends before it ends are still read.
        """
        self._cancellations.append((call, keeps_reading))
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self._flush()
        else:
            self.shared_wait.notify()

    def on_cancelled(self) -> None:
        """Request the cancellation of calls whose `origins` are all cancelled; thread-safe."""
        self._needs_cancel_check = True
        self.shared_wait.notify()

    # --- receiving

    def _handle_received(self) -> None:
        """Handle all received messages of the supervisor and the schedulers."""
        self._control.pump_all()
        if self._needs_cancel_check:
            self._needs_cancel_check = False
            with self._lock:
                calls = tuple(self.schedulers.pending.values())
            # Without the lock: `cancelled` needs the lock of the instance's link.
            self._cancellations += [(call, False) for call in calls if call.request.cancelled]
        with self._lock:
            for link in self._links:
                for message in link.receive():
                    if isinstance(message, Finished | Responded | Failed) and message.spans:
                        self._on_spans(message.spans)
                    self.schedulers.handle(link.endpoint, message)
            unresolved_calls, self._unresolved_calls = self._unresolved_calls, []
        for call, error in unresolved_calls:
            self._resolve(call, error)
        self._flush()

    def read(self, call: BlsCall, message: Finished | Responded) -> Outcome:
        """Return a copy of a response to a call, or the error if the response cannot be read.

        Must be called with the lock held.
        """
        schema, data = message.schema, message.data
        try:
            response = self._response_schemas[schema].inferred(data)
        except MalformedMessage as error:
            logger.error(
                "model '%s': a response is malformed, so its request fails: %s",
                call.request.model,
                error,
            )
            return Internal()
        outcome = copy_response(response, self.mappings, call.request.model)
        self.schedulers.release(call.endpoint, release_messages(unpack_ranges(data)))
        return outcome

    # --- failover

    def invalidate(self, model: str) -> None:
        """Remove the known targets of a model, so that its next call queries the supervisor."""
        with self._lock:
            self._remove_targets(model)

    def _remove_targets(self, model: str) -> None:
        self._targets = {key: target for key, target in self._targets.items() if key[0] != model}

    def _models_changed(self, message: Loss) -> None:
        # The caller holds the lock of the supervisor's link: send no request to the supervisor.
        with self._lock:
            match message:
                case ProcessExited(process=pid):
                    self.mappings.unmap_process(pid)
                case ModelWithdrawn(name=name):
                    self._remove_targets(name)
                case SchedulerLost(endpoint=lost_endpoint, successor=successor):
                    self._loss_count += 1
                    targets = self._targets.items()
                    self._targets = {key: t for key, t in targets if t.endpoint != lost_endpoint}
                    self.schedulers.successors.add(lost_endpoint, successor)
                    self.schedulers.handle_loss(lost_endpoint)

    def _resolve_later(self, call: BlsCall, refusal: Failed | None) -> None:
        """Schedule the resolution of a call that is not in flight at any scheduler.

        A thread resolves the endpoint later, without the lock. A scheduler that refused the call
        may be the previous one of a model that has been reloaded.
        """
        error: ShmserveError = Unavailable("the scheduler of the model was lost")
        if refusal is not None:
            error = _to_error(call, refusal)
        self._unresolved_calls.append((call, error))
        self.shared_wait.notify()

    def _resolve(self, call: BlsCall, error: ShmserveError) -> None:
        """Resubmit a call to the current scheduler of its model, or fail the call.

        The call fails if its last scheduler is still the current one. Call without the lock.
        """
        with self._lock:
            known_target = self._targets.get(call.key)
            if known_target is not None and known_target.endpoint == call.endpoint:
                del self._targets[call.key]
        try:
            with self._locked_target(call) as target:
                if target.endpoint != call.endpoint and call.is_awaited():
                    self._submit_to(target, call)
                    return
        except ShmserveError as submit_error:
            error = unsubmitted_error(call.request.model, submit_error)
        with self._lock:
            call.free()
            call.end(error)


def decoupled_error(model: str) -> Internal:
    """Return the error of a call that accepts one response, but whose model is decoupled."""
    return Internal(
        f"Model {model} is using the decoupled. The current BLS request call doesn't support "
        "models using the decoupled transaction policy. Please use 'decoupled=True' argument to "
        "the 'exec' or 'async_exec' calls for decoupled models.'"
    )


def _to_error(call: BlsCall, message: Failed) -> ShmserveError:
    error = from_code(message.code, message.message)
    return unsubmitted_error(call.request.model, error) if message.is_refused else error


def unsubmitted_error(model: str, error: ShmserveError) -> ShmserveError:
    """Return the error, in Triton's words, of a call that no scheduler has admitted."""
    reason = error.message
    if isinstance(error, NotFound):
        reason = f"Failed for execute the inference request. Model '{model}' is not ready."
    message = f"Model {model} - Error when running inference: {reason}"
    if isinstance(error, NotFound | InvalidArgument):
        return Internal(message)
    return type(error)(message)
