"""The steps of an ensemble's requests: submitted to their models' schedulers, as many at a time as
may run, until they end.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from shmserve.errors import Internal, ShmserveError
from shmserve.ipc.messages.inference import (
    Failed,
    Finished,
    Responded,
    Response,
    message_size,
)
from shmserve.ipc.scheduler_client import Links, SchedulerClient
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.scheduler.ensemble.flow import Firing
from shmserve.scheduler.ensemble.graph import Graph
from shmserve.scheduler.ensemble.live import LiveRequests
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.requests import EnsembleRequest, StepRequest, Steps
from shmserve.scheduler.ensemble.steps.outputs import StepOutputs
from shmserve.scheduler.ensemble.steps.submission import prepare
from shmserve.scheduler.ensemble.steps.targets import Targets
from shmserve.scheduler.ensemble.values import overrides
from shmserve.scheduler.requests.request import DONE

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StepRunner(Steps):
    """Runs steps; what they give goes into the flow of their requests (outputs.py)."""

    _graph: Graph
    _targets: Targets
    _links: Links
    _memory: EnsembleMemory
    _live: LiveRequests
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    waiting: int = 0  # steps of requests for which there is no room yet

    def __post_init__(self) -> None:
        steps = self._graph.steps
        self.schedulers: SchedulerClient[StepRequest] = SchedulerClient(self._links, self._find)
        self._outputs = StepOutputs(self._graph, self._memory, self.schedulers)
        self._running = [0] * len(steps)
        self._waiting: list[deque[tuple[EnsembleRequest, Firing]]] = [deque() for _ in steps]

    def responded(self, step: StepRequest, message: Response) -> None:
        request = step.request
        self._live.touch(request)
        if isinstance(message, Failed):
            self._live.fail(request, message.code, message.message, message.retry_after_s)
            if message.early:
                self._live.tell_early(request)
                self.cancel(request)
            return
        request.add_times(message)
        if isinstance(message, Responded) and message.code:
            self._live.fail(request, message.code, message.message)
            self._outputs.credit_discarded(step, message)
        elif message.schema:
            try:
                self._outputs.made(step, message)
            except (MalformedMessage, ShmserveError) as error:
                self._unusable(step, message, error)
        else:
            self._outputs.credit_discarded(step, message)

    def _unusable(
        self,
        step: StepRequest,
        message: Finished | Responded,
        error: MalformedMessage | ShmserveError,
    ) -> None:
        """A step has given what cannot be taken."""
        if isinstance(error, ShmserveError):
            self._live.fail(step.request, error.code, error.message)
            return
        logger.error("a worker's response is malformed: %s", error)
        self._live.fail(step.request, Internal.code, "internal error")
        self._outputs.credit_discarded(step, message)

    def _find(self, step: StepRequest, _: Failed | None) -> str:
        """Return the endpoint of the scheduler that serves the model of a step now."""
        try:
            return self._targets.find(step.firing.step).endpoint
        except ShmserveError:
            return ""

    def ended(self, step: StepRequest) -> None:
        request, index = step.request, step.firing.step.index
        for value in step.firing.inputs.values():
            value.release()
        for block in step.placed.values():
            block.release()
        step.placed.clear()
        request.running.pop(step.submit.id, None)
        self._live.touch(request)
        self._running[index] -= 1
        if self._waiting[index]:
            self._run_waiting(index)

    def cancel(self, request: EnsembleRequest) -> None:
        """Tell the steps of a request that nobody waits for them."""
        self._live.touch(request)
        for step in request.running.values():
            self.schedulers.cancel(step)

    def lost(self, endpoint: str, successor: str) -> None:
        """Fail over: the scheduler at `endpoint` has ended."""
        self._targets.move(endpoint, successor)
        self.schedulers.successors.add(endpoint, successor)
        self.schedulers.lost(endpoint)

    def run(self, request: EnsembleRequest, firing: Firing) -> None:
        """Run a step, as soon as there is room for it."""
        index, most = firing.step.index, self._graph.max_inflight
        if request.over:
            let_go(firing)
        elif most and self._running[index] >= most:
            self._waiting[index].append((request, firing))
            request.waiting += 1
            self.waiting += 1
        else:
            self._run_now(request, firing)

    def _run_waiting(self, index: int) -> None:
        waiting = self._waiting[index]
        while waiting and self._running[index] < self._graph.max_inflight:
            request, firing = waiting.popleft()
            request.waiting -= 1
            self.waiting -= 1
            self._live.touch(request)
            if request.over:
                let_go(firing)
            else:
                self._run_now(request, firing)

    def _run_now(self, request: EnsembleRequest, firing: Firing) -> None:
        number = next(self._numbers)
        try:
            target = self._targets.find(firing.step)
            override = overrides(firing.inputs.values())
            step = StepRequest(DONE, self, request, firing, target, override)
            prepare(step, number, self._graph, self._memory, self._live.now_ns)
        except ShmserveError as error:
            let_go(firing)
            self._live.fail(request, error.code, error.message)
            return
        request.running[number] = step
        self._running[firing.step.index] += 1
        self.schedulers.submit(step, target.endpoint, message_size(step.submit))

    def forget(self, request: EnsembleRequest) -> None:
        """Drop the waiting steps of a request: they do not run any more."""
        if not request.waiting:
            return
        for index, waiting in enumerate(self._waiting):
            firings = [firing for other, firing in waiting if other is request]
            if firings:
                self._waiting[index] = deque(entry for entry in waiting if entry[0] is not request)
            for firing in firings:
                let_go(firing)
        self.waiting -= request.waiting
        request.waiting = 0


def let_go(firing: Firing) -> None:
    """A step is not run after all."""
    for value in firing.inputs.values():
        value.release()
