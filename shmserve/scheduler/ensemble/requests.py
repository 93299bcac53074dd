"""A request of an ensemble, and those that it makes of its steps' schedulers."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from shmserve.ipc.credit import SendWindow
from shmserve.ipc.memory.lent import Block
from shmserve.ipc.messages.inference import Failed, Finished, Responded, Response, Submit
from shmserve.ipc.scheduler_client import InflightRequest
from shmserve.ipc.tensors.inference import Inference
from shmserve.scheduler.ensemble.flow import Firing, Flow, Plan
from shmserve.scheduler.ensemble.steps.targets import Target
from shmserve.scheduler.ensemble.values import Value
from shmserve.scheduler.requests.queue import believable
from shmserve.scheduler.requests.request import Client, Lookup


class EnsembleRequest:
    """One request of an ensemble. Times are monotonic ns; `times_ns` those of its steps together:
    input, inference, output; `spans` are its steps' own.

    `running`: its steps' requests by number; `waiting` of them have not been submitted. It is
    `over` when no further step of it runs: it has `failed`, or its client has `left`.
    `told`: its failure has been said, though steps are still running. `done`: it has ended.
    `unread`: the responses that its client has yet to read. `placed`: its client says where outputs
    go. `lookup` is what the response cache said of it, if it was asked.
    """

    def __init__(
        self,
        client: Client[EnsembleRequest],
        submit: Submit,
        inference: Inference,
        plan: Plan,
        units: int,
        now_ns: int,
    ) -> None:
        self.client = client
        self.id = submit.id
        self.submit = submit
        self.inference = inference
        self.lookup: Lookup | None = None
        self.plan = plan
        self.flow = Flow(plan)
        self.arrived_ns = believable(submit.arrived_ns, now_ns)
        self.enqueued_ns = self.started_ns = now_ns
        self.deadline_ns = max(submit.deadline_ns, 0)
        self.units = units
        self.times_ns = [0, 0, 0]
        self.spans = b""
        self.running: dict[int, StepRequest] = {}
        self.waiting = 0
        self.over = False
        self.failure: Failed | None = None
        self.told = False
        self.gone = False
        self.done = False
        self.unread: deque[list[Value]] = deque()
        self.placed_outputs = {o.name for o in inference.outputs if o.place is not None}
        self.placed = bool(self.placed_outputs)
        self.window = SendWindow(self.placed)
        self.responses = 0
        self.responded_ns = now_ns
        self.untimed = False

    def add_times(self, message: Finished | Responded) -> None:
        """A step's execution took so long."""
        times_ns = self.times_ns
        times_ns[0] += message.input_ns
        times_ns[1] += message.infer_ns
        times_ns[2] += message.output_ns
        if message.spans:
            self.spans += message.spans

    def failed(self, failure: Failed) -> None:
        """No further step of it runs, and its client is told."""
        self.failure, self.over = failure, True

    def left(self) -> None:
        """No further step of it runs, and there is no client to be told."""
        self.gone = self.over = True


class Steps:
    """The runner of the steps, as their requests call it."""

    @abstractmethod
    def responded(self, step: StepRequest, message: Response) -> None:
        """A step has responded."""

    @abstractmethod
    def ended(self, step: StepRequest) -> None:
        """No worker has a step's memory any more."""


@dataclass(slots=True, eq=False)
class StepRequest(InflightRequest):
    """A step of a request at its model's scheduler. `override`: the parameters of its sequence that
    its inputs came with. `placed`: the blocks of the ensemble's arena
    that its outputs were to be written to, and which nobody has yet; `given`: the outputs that go
    to places of the client's."""

    steps: Steps
    request: EnsembleRequest
    firing: Firing
    target: Target
    override: dict[str, Any]
    placed: dict[str, Block] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    answered: bool = False

    def awaited(self) -> bool:
        return not self.request.over

    def respond(self, message: Response) -> None:
        self.steps.responded(self, message)

    def free(self) -> None:
        self.steps.ended(self)
