"""A model that calls other models: this worker as a client of their schedulers.

FindModel ──> supervisor: where?  ──> Submit ──> scheduler ──> Finished | Failed ──> Reply

A call keeps what it submitted until it is answered: when the scheduler is lost, it is submitted
again to the successor, or to whoever serves the model now. Inputs that lie in memory of the
caller's own request travel as they are; outputs are copied out, so that a model may keep them.
Calls come from the model's thread, from its event loop (many at once), from threads it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from shmserve.errors import Internal, ShmserveError, Unavailable, from_code
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import (
    Cancel,
    Failed,
    Finished,
    ModelWithdrawn,
    ProcessExited,
    Release,
    SchedulerLost,
    Settled,
    Submit,
)
from shmserve.ipc.tensors.descriptors import Place, TensorRef
from shmserve.ipc.tensors.inference import (
    INLINE_LIMIT,
    Inference,
    RequestedOutput,
    pack_inference,
    unpack_inferred,
)
from shmserve.ipc.transport.dealer import Dealer
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.workers.batch.request import Input
from shmserve.workers.bls.model_directory import Key, ModelDirectory, Target
from shmserve.workers.bls.shared_wait import SharedWait
from shmserve.workers.control import Control, News

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallInput:
    """A tensor to send; `data` is its wire form, or where that already lies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | Place


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One inference of another model; `version` "" is the latest, no `outputs` all of them.

    `timeout_us` is the call's own limit, `deadline_ns` (monotonic) when its caller's ends; 0: none.
    """

    model: str
    version: str
    inputs: Sequence[CallInput]
    outputs: Sequence[str] = ()
    request_id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    deadline_ns: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """What the other model answered; the outputs are this process's own."""

    outputs: list[Input]
    parameters: dict[str, Any]


@dataclass(slots=True, eq=False)
class Call:
    """An inference that was begun."""

    id: int
    request: CallRequest
    future: asyncio.Future[Reply] | None
    arrived_ns: int
    inputs: tuple[TensorRef, ...] = ()
    taken: list[int] = field(default_factory=list)  # offsets of its blocks in the arena
    endpoint: str = ""
    outcome: Reply | ShmserveError | None = None

    @property
    def key(self) -> Key:
        return self.request.model, self.request.version


class _Doubt(NamedTuple):
    """A call whose scheduler may not be the one that serves its model now; else it failed so."""

    call: Call
    endpoint: str
    error: ShmserveError


class BlsClient:
    """The calls of one worker. Its arena, of `arena_byte_size`, is made when it is needed."""

    def __init__(self, control: Control, arena_byte_size: int) -> None:
        self._control = control
        self._directory = ModelDirectory(control)
        self._arena_byte_size = arena_byte_size
        self._arena: Arena | None = None
        self._mappings = Mappings()
        self._identity = f"{os.getpid()}.{secrets.token_hex(8)}"
        self._ids = count(1)
        self._waiting = SharedWait(self._take)
        self._lock = self._waiting.lock
        self._links: dict[str, Dealer] = {}
        self._open: dict[int, Call] = {}
        self._unsettled: dict[int, Call] = {}  # failed early: a worker still reads their inputs
        self._doubtful: list[_Doubt] = []
        self._doubts_arose = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting.add(self._doubts_arose)
        self._waiting.add(control.dealer.fd)
        control.on_models_changed = self._hear

    # --- what a model asks for

    def begin(self, request: CallRequest) -> Call:
        """Submit an inference. Raises the ShmserveError that it cannot be submitted for."""
        call = self._begin(request, None)
        self._flush()
        return call

    def wait(self, call: Call) -> Reply:
        """Wait for what was begun. Raises the ShmserveError that it ended with."""
        self._waiting.until(lambda: call.outcome is not None)
        if isinstance(call.outcome, Reply):
            return call.outcome
        assert call.outcome is not None
        raise call.outcome

    def call_soon(self, request: CallRequest) -> asyncio.Future[Reply]:
        """`begin`; the future, of the running event loop, gets what `wait` returns or raises.

        Those begun in one turn of the loop are sent as one. Cancelling the future cancels the
        inference.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        call = self._begin(request, future)
        loop.call_soon(self._flush)
        self._waiting.watch(loop)

        def over(_: asyncio.Future[Reply]) -> None:
            self._waiting.unwatch(loop)
            if future.cancelled():
                self._cancel(call)

        future.add_done_callback(over)
        return future

    def forget(self, model: str) -> None:
        """Have the next call of `model` ask anew where it is."""
        self._directory.forget(model)

    def close(self) -> None:
        """Close every socket; what is open stays unanswered."""
        self._control.on_models_changed = lambda news: None
        with self._lock:
            self._waiting.close()
            os.close(self._doubts_arose)
            for link in self._links.values():
                link.close()
            self._links.clear()

    # --- out

    def _begin(self, request: CallRequest, future: asyncio.Future[Reply] | None) -> Call:
        call = Call(next(self._ids), request, future, time.monotonic_ns())
        while True:
            target = self._directory.find(call.key)
            with self._lock:
                if not self._directory.knows(call.key, target):
                    continue  # lost while this thread waited for its turn
                call.inputs, call.taken = self._placed(request.inputs)
                try:
                    self._submit(call, target)
                except BaseException:
                    self._open.pop(call.id, None)
                    self._free(call)
                    raise
            return call

    def _placed(self, inputs: Sequence[CallInput]) -> tuple[tuple[TensorRef, ...], list[int]]:
        """The inputs as they travel, and the blocks of the arena they take."""
        loose = sum(len(item.data) for item in inputs if not isinstance(item.data, Place))
        refs: list[TensorRef] = []
        taken: list[int] = []
        for item in inputs:
            data = item.data
            if not isinstance(data, Place):
                data = bytes(data) if loose <= INLINE_LIMIT else self._written(data, taken)
            refs.append(TensorRef(item.name, item.datatype, item.shape, data))
        return tuple(refs), taken

    def _written(self, data: bytes | memoryview, taken: list[int]) -> Place:
        if self._arena is None:
            self._arena = Arena(self._arena_byte_size)
        try:
            place = self._arena.allocate(len(data))
        except ShmserveError:
            for offset in taken:
                self._arena.free(offset)
            raise
        taken.append(place.offset)
        self._arena.view(place)[:] = data
        return place

    def _submit(self, call: Call, target: Target) -> None:
        """Raises InvalidArgument when the request does not fit the model."""
        request = call.request
        outputs = tuple(map(RequestedOutput, dict.fromkeys(request.outputs)))
        admission = target.signature.admit(request.request_id, call.inputs, outputs)
        deadline_ns = request.deadline_ns
        if request.timeout_us:
            own_ns = call.arrived_ns + request.timeout_us * 1000
            deadline_ns = min(deadline_ns or own_ns, own_ns)
        work = pack_inference(
            Inference(
                request.request_id,
                call.inputs,
                outputs,
                request.parameters,
                request.correlation_id,
                request.flags,
                request.timeout_us,
                deadline_ns=deadline_ns,
            )
        )
        submit = Submit(
            call.id,
            admission.batch_size,
            admission.shape_key,
            call.arrived_ns,
            deadline_ns,
            request.timeout_us,
            0,
            work,
            request.request_id,
        )
        self._open[call.id] = call
        call.endpoint = target.endpoint
        self._link(target.endpoint).post(submit)

    def _link(self, endpoint: str) -> Dealer:
        link = self._links.get(endpoint)
        if link is None:
            link = self._links[endpoint] = Dealer(endpoint, self._identity)
            self._waiting.add(link.fd)
        return link

    def _flush(self) -> None:
        with self._lock:
            for link in self._links.values():
                link.flush()

    def _cancel(self, call: Call) -> None:
        with self._lock:
            link = self._links.get(call.endpoint)
            if call.id in self._open and link is not None:
                link.post(Cancel(call.id))
        self._flush()

    # --- in

    def _take(self) -> None:
        """Handle all that has arrived."""
        self._control.pump()
        with self._lock:
            for link in self._links.values():
                self._drain(link, link)
            doubtful, self._doubtful = self._doubtful, []
            if doubtful:
                os.eventfd_read(self._doubts_arose)
        for doubt in doubtful:
            self._look_again(doubt)
        self._flush()

    def _drain(self, link: Dealer, heir: Dealer) -> None:
        """Handle what is at a link; `successor` is told what was read."""
        for message in link.receive():
            match message:
                case Finished(id=number, body=body):
                    call = self._open.pop(number, None)
                    if call is not None:
                        self._free(call)
                        self._end(call, self._read(call, heir, body))
                case Failed():
                    self._failed(message)
                case Settled(id=number):
                    call = self._unsettled.pop(number, None)
                    if call is not None:
                        self._free(call)
                case _:
                    logger.warning("unexpected %s", type(message).__name__)

    def _read(self, call: Call, link: Dealer, body: bytes) -> Reply | ShmserveError:
        try:
            answer = unpack_inferred(body)
        except MalformedMessage as error:
            logger.error("a worker's answer is malformed: %s", error)
            return Internal("internal error")
        held: dict[int, list[int]] = {}
        outputs: list[Input] = []
        outcome: Reply | ShmserveError = Reply(outputs, answer.parameters)
        model = call.request.model
        for ref in answer.outputs:
            data = ref.data
            if isinstance(data, Place):
                held.setdefault(data.memory.pid, []).append(data.offset)
            try:
                own = bytearray(data if isinstance(data, bytes) else self._mappings.view(data))
            except ShmserveError as error:
                outcome = error
                continue
            outputs.append(Input(ref.name, ref.datatype, ref.shape, memoryview(own), model=model))
        for pid, offsets in held.items():
            link.post(Release(pid, offsets))
        return outcome

    def _failed(self, message: Failed) -> None:
        call = self._open.get(message.id)
        if call is None:
            return
        error = from_code(message.code, message.message)
        if message.early:
            self._unsettled[message.id] = call
        elif message.code == Unavailable.code:
            # Perhaps it was the old scheduler of a model that has been loaded again.
            self._doubt(call, error)
            return
        else:
            self._free(call)
        del self._open[message.id]
        self._end(call, error)

    def _hear(self, news: News) -> None:
        # Called by whoever reads the supervisor's socket, with its lock held: not to be asked here.
        with self._lock:
            match news:
                case ProcessExited(pid=pid):
                    self._mappings.drop_process(pid)
                case ModelWithdrawn(name=name):
                    self._directory.forget(name)
                case SchedulerLost(endpoint=endpoint, successor=successor):
                    self._lose(endpoint, successor)

    def _lose(self, endpoint: str, successor: str) -> None:
        self._directory.lose(endpoint)
        link = self._links.pop(endpoint, None)
        if link is not None:
            heir = self._link(successor) if successor else link
            self._drain(link, heir)
            heir.flush()
            self._waiting.remove(link.fd)
            link.close()
        for call in [call for call in self._unsettled.values() if call.endpoint == endpoint]:
            del self._unsettled[call.id]
            self._free(call)
        for call in self._open.values():
            if call.endpoint == endpoint:
                self._doubt(call, Unavailable("the scheduler of the model was lost"))

    def _doubt(self, call: Call, error: ShmserveError) -> None:
        self._doubtful.append(_Doubt(call, call.endpoint, error))
        os.eventfd_write(self._doubts_arose, 1)  # someone must look again, without the lock

    def _look_again(self, doubt: _Doubt) -> None:
        """Submit a call to whoever serves its model now, unless that is who failed it."""
        call, endpoint, outcome = doubt
        self._directory.doubt(call.key, endpoint)
        target: Target | None = None
        while True:
            try:
                target = self._directory.find(call.key)
            except ShmserveError as error:
                target, outcome = None, error
            with self._lock:
                if call.id not in self._open or call.endpoint != endpoint:
                    return  # dealt with already
                if target is not None and not self._directory.knows(call.key, target):
                    continue
                abandoned = call.future is not None and call.future.done()
                try:
                    if target is not None and target.endpoint != endpoint and not abandoned:
                        self._submit(call, target)
                        return
                except ShmserveError as error:
                    outcome = error
                del self._open[call.id]
                self._free(call)
                self._end(call, outcome)
                return

    def _free(self, call: Call) -> None:
        for offset in call.taken:
            assert self._arena is not None
            self._arena.free(offset)
        call.taken = []

    def _end(self, call: Call, outcome: Reply | ShmserveError) -> None:
        call.outcome = outcome
        future = call.future
        if future is None:
            self._waiting.wake()
            return
        # The loop is gone when the model did not wait for the call.
        with contextlib.suppress(RuntimeError):
            future.get_loop().call_soon_threadsafe(_resolve, future, outcome)


def _resolve(future: asyncio.Future[Reply], outcome: Reply | ShmserveError) -> None:
    if future.done():
        return
    if isinstance(outcome, Reply):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
