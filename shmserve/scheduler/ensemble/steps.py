"""The steps of an ensemble's requests: submitted to their models' schedulers, as many at a time as
may run, and what comes of them.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from shmserve.errors import Internal, ShmserveError
from shmserve.ipc.inflight import ENDED, InflightTable, Response
from shmserve.ipc.messages import (
    Cancel,
    Failed,
    Finished,
    Grant,
    Release,
    Responded,
    SchedulerToClient,
    Submit,
    Timed,
)
from shmserve.ipc.tensors.descriptors import Place, TensorRef
from shmserve.ipc.tensors.inference import Inferred, unpack_inferred
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.scheduler.ensemble.flow import Firing
from shmserve.scheduler.ensemble.graph import Graph
from shmserve.scheduler.ensemble.memory import EnsembleMemory, once_all
from shmserve.scheduler.ensemble.requests import EnsembleRequest, StepRequest, Steps
from shmserve.scheduler.ensemble.submission import prepare
from shmserve.scheduler.ensemble.targets import Target, Targets
from shmserve.scheduler.ensemble.values import Value

logger = logging.getLogger(__name__)

_OVERRIDES = ("sequence_id", "sequence_start", "sequence_end")


class StepLinks(Protocol):
    """The links to the schedulers of steps, by endpoint."""

    def submit(self, endpoint: str, message: Submit) -> None:
        """Queue a request for a scheduler. Raises Unavailable when no link to it can be made."""

    def tell(self, endpoint: str, message: Cancel | Grant | Release) -> None:
        """Queue a message for a scheduler, or for who has taken its place."""

    def lose(self, endpoint: str, successor: str, hear_out: Callable[[Any], None]) -> None:
        """The scheduler at `endpoint` is gone; `hear_out` takes its last words."""


class Requests(Protocol):
    """What steps do to requests."""

    def touch(self, request: EnsembleRequest) -> None:
        """Something of a request has changed."""

    def fail(self, request: EnsembleRequest, code: str, text: str, retry_after_s: int = 0) -> None:
        """No further step of a request runs."""

    def tell_early(self, request: EnsembleRequest) -> None:
        """Its time is over."""


class StepRunner(Steps):
    """Runs steps, and puts what they give into the flow of their requests. `now_ns` is the time of
    what is being handled."""

    def __init__(
        self,
        graph: Graph,
        targets: Targets,
        links: StepLinks,
        memory: EnsembleMemory,
        requests: Requests,
    ) -> None:
        self._graph = graph
        self._targets = targets
        self._links = links
        self._memory = memory
        self._requests = requests
        self._table: InflightTable[StepRequest] = InflightTable()
        self._numbers = itertools.count(1)
        self._running = [0] * len(graph.steps)
        self._waiting: list[deque[tuple[EnsembleRequest, Firing]]] = [deque() for _ in graph.steps]
        self.now_ns = 0

    def hear(self, endpoint: str, message: SchedulerToClient) -> None:
        """Handle what the scheduler at `endpoint` says."""
        match message:
            case Timed():
                step = self._table.pending.get(message.id)
                if step is not None:
                    for index, ns in enumerate(
                        (message.input_ns, message.infer_ns, message.output_ns)
                    ):
                        step.request.times_ns[index] += ns
            case Finished() | Responded():
                if not self._table.take(message):
                    self._discard(endpoint, message.body)
            case Failed():
                self._table.take(message)
            case _:
                self._table.take(message)  # type: ignore[arg-type]

    def responded(self, step: StepRequest, message: Response) -> None:
        request = step.request
        self._requests.touch(request)
        if isinstance(message, Failed):
            self._requests.fail(request, message.code, message.message, message.retry_after_s)
            if message.early:
                self._requests.tell_early(request)
        elif isinstance(message, Responded) and message.code:
            self._requests.fail(request, message.code, message.message)
        elif message.body:
            self._made(step, message)

    def _made(self, step: StepRequest, message: Finished | Responded) -> None:
        """A step has given outputs."""
        request = step.request
        try:
            inferred = unpack_inferred(message.body)
        except MalformedMessage as error:
            logger.error("a worker's response is malformed: %s", error)
            self._requests.fail(request, Internal.code, "internal error")
            return
        if request.over or (step.answered and step.firing.step.index not in request.plan.decoupled):
            self._release(step.endpoint, inferred.outputs, step)
            return
        step.answered = True
        values = self._values(step, inferred, isinstance(message, Responded) and not message.final)
        request.flow.respond(step.firing, values)

    def _values(self, step: StepRequest, inferred: Inferred, grants: bool) -> dict[str, Value]:
        """The outputs of a response; `grants`: once nobody uses it, the next may come."""
        given = inferred.parameters
        override = {key: given[key] for key in _OVERRIDES if key in given}
        override = override or _inherited(step.firing)
        endpoint, number = step.endpoint, step.submit.id

        def granted() -> None:
            if number in self._table.pending:
                self._links.tell(endpoint, Grant(number, 1))

        one = once_all(len(inferred.outputs), granted) if grants and inferred.outputs else None
        if grants and not inferred.outputs:
            granted()
        values: dict[str, Value] = {}
        conditions, batched = self._graph.conditions, step.signature.max_batch_size > 0
        for tensor in inferred.outputs:
            holds = True
            if step.firing.step.outputs.get(tensor.name) in conditions:
                holds = self._memory.any_true(tensor)
            values[tensor.name] = Value(
                tensor,
                self._freeing(step, tensor, one),
                holds=holds,
                batched=batched,
                override=override,
            )
        return values

    def _freeing(
        self, step: StepRequest, tensor: TensorRef, also: Callable[[], None] | None
    ) -> Callable[[], None] | None:
        """What gives the memory of an output back; None: it lies in none of ours."""
        data, endpoint = tensor.data, step.endpoint
        if not isinstance(data, Place) or tensor.name in step.given:
            return also
        place = step.placed.pop(tensor.name, None)
        if place is None:
            self._memory.hold(data)

        def free() -> None:
            if place is not None:
                self._memory.free(place)
            else:
                self._memory.let_go(data)
                self._links.tell(endpoint, Release(data.memory.pid, [data.offset]))
            if also is not None:
                also()

        return free

    def _discard(self, endpoint: str, body: bytes) -> None:
        """Nobody reads this response of a scheduler."""
        try:
            outputs = unpack_inferred(body).outputs if body else ()
        except MalformedMessage:
            return
        self._release(endpoint, outputs, None)

    def _release(
        self, endpoint: str, outputs: tuple[TensorRef, ...], step: StepRequest | None
    ) -> None:
        """Tell a step's workers that nobody reads these outputs."""
        for tensor in outputs:
            data = tensor.data
            if not isinstance(data, Place) or not data.memory.sealed or self._memory.owns(data):
                continue
            if step is None or tensor.name not in step.given:
                self._links.tell(endpoint, Release(data.memory.pid, [data.offset]))

    def moves(self, step: StepRequest) -> bool:
        try:
            target = self._targets.find(step.firing.step)
        except ShmserveError:
            return False
        if target.endpoint == step.endpoint:
            return False
        self._send(step, target)
        return True

    def ended(self, step: StepRequest) -> None:
        request, index = step.request, step.firing.step.index
        for value in step.firing.inputs.values():
            value.release()
        for place in step.placed.values():
            self._memory.free(place)
        step.placed.clear()
        request.running.pop(step.submit.id, None)
        self._requests.touch(request)
        self._running[index] -= 1
        self._run_waiting(index)

    def cancel(self, request: EnsembleRequest) -> None:
        """Tell the steps of a request that nobody waits for them."""
        self._requests.touch(request)
        for step in request.running.values():
            if step.submit.id in self._table.pending:
                self._links.tell(step.endpoint, Cancel(step.submit.id))

    def lost(self, endpoint: str, successor: str) -> None:
        """The scheduler at `endpoint` is gone: what it had goes to who serves its model now."""
        self._targets.move(endpoint, successor)

        def last_words(message: Any) -> None:
            self.hear(endpoint, message)

        self._links.lose(endpoint, successor, last_words)
        for step in self._table.lose(endpoint):
            try:
                target = self._targets.find(step.firing.step)
            except ShmserveError:
                target = None
            if target is None or target.endpoint == endpoint:
                step.fail(ENDED)
            else:
                self._send(step, target)

    def run(self, request: EnsembleRequest, firing: Firing) -> None:
        """Run a step, as soon as there is room for it."""
        index, most = firing.step.index, self._graph.max_inflight
        if request.over:
            let_go(firing)
        elif most and self._running[index] >= most:
            self._waiting[index].append((request, firing))
            request.waiting += 1
        else:
            self._run_now(request, firing)

    def _run_waiting(self, index: int) -> None:
        waiting = self._waiting[index]
        while waiting and self._running[index] < self._graph.max_inflight:
            request, firing = waiting.popleft()
            request.waiting -= 1
            self._requests.touch(request)
            self._run_now(request, firing)

    def _run_now(self, request: EnsembleRequest, firing: Firing) -> None:
        number = next(self._numbers)
        try:
            target = self._targets.find(firing.step)
            submit, placed, given = prepare(
                number, request, firing, target, self._graph, self._memory, self.now_ns
            )
        except ShmserveError as error:
            let_go(firing)
            self._requests.fail(request, error.code, error.message)
            return
        step = StepRequest(
            self, request, firing, target.signature, submit, target.endpoint, placed, given
        )
        request.running[number] = step
        self._running[firing.step.index] += 1
        self._send(step, target)

    def _send(self, step: StepRequest, target: Target) -> None:
        step.endpoint = target.endpoint
        try:
            self._links.submit(target.endpoint, step.submit)
        except ShmserveError as error:
            step.fail(error.message)
        else:
            self._table.add(step)

    def forget(self, request: EnsembleRequest) -> None:
        """What waits of a request does not run any more."""
        if not request.waiting:
            return
        for waiting in self._waiting:
            for entry in [entry for entry in waiting if entry[0] is request]:
                waiting.remove(entry)
                let_go(entry[1])
        request.waiting = 0


def let_go(firing: Firing) -> None:
    """A step is not run after all."""
    for value in firing.inputs.values():
        value.release()


def _inherited(firing: Firing) -> dict[str, Any]:
    """The sequence's parameters that the inputs of a step came with."""
    found: dict[str, Any] = {}
    for value in firing.inputs.values():
        found.update(value.override)
    return found
