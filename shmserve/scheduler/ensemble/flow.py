"""The data flow of one request through an ensemble's graph: tensors in, steps to run out (pure).

A step runs once for each number at which all that it reads is there. Tensors that there is one of
count at every number; the others are numbered by the responses of the step that they come from
(graph.py). A response of the ensemble with a number has all the outputs of that number.

Where a step is not run, its outputs are `SKIPPED`, and so are the steps that need one of them;
what a model has not given is `ABSENT`: a step that needs it fails as if its client had left it out.
Inputs that are optional are left out either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from shmserve.scheduler.ensemble.graph import ONCE, Graph, Step, origin_of
from shmserve.scheduler.ensemble.values import ABSENT, SKIPPED, Value


class Firing(NamedTuple):
    """Run a step with these inputs, by the model's names."""

    step: Step
    number: int
    inputs: dict[str, Value]


class StepModels(Protocol):
    """The models of an ensemble's steps. All raise Unavailable for one that does not serve."""

    def decoupled(self, step: Step) -> bool:
        """Whether it gives any number of responses to a request."""

    def optional(self, step: Step) -> frozenset[str]:
        """The inputs that it can do without."""

    def device(self, step: Step) -> int | None:
        """The CUDA device in whose memory it takes and leaves tensors; None: in the host's."""


class Plan:
    """The part of the graph common to all requests that want the same outputs."""

    def __init__(self, graph: Graph, outputs: Iterable[str], models: StepModels) -> None:
        self.outputs = tuple(outputs)
        self.steps = graph.needed(self.outputs)
        needed = [step for step in graph.steps if step.index in self.steps]
        origins = graph.origins(models.decoupled)
        self.decoupled = frozenset(step.index for step in needed if models.decoupled(step))
        self.follows = {step.index: origin_of(step, origins) for step in needed}
        self.origins = origins
        self.once = frozenset(tensor for tensor, origin in origins.items() if origin == ONCE)
        self.optional = {step.index: models.optional(step) for step in needed}
        self.readers = {
            tensor: tuple(step for step in readers if step.index in self.steps)
            for tensor, readers in graph.readers.items()
        }
        self.responses_follow = max(origins[output] for output in self.outputs)
        self.uses = {tensor: self._uses(tensor) for tensor in origins}
        self.devices = self._devices(needed, graph.conditions, models)
        # Stored by steps/submission.py: the kinds of the steps' requests. They are valid as long as
        # the plan, because the models of the steps are the same.
        self.kinds: dict[Any, Any] = {}

    def _devices(
        self, needed: Iterable[Step], conditions: frozenset[str], models: StepModels
    ) -> dict[str, int]:
        """The tensors that stay on a device, because all steps that write and read them are there
        and nobody else reads them."""
        on = {step.index: models.device(step) for step in needed}
        found: dict[str, int] = {}
        for step in needed:
            device = on[step.index]
            for tensor in step.outputs.values():
                readers = {on[reader.index] for reader in self.readers.get(tensor, ())}
                if device is not None and readers == {device}:
                    found[tensor] = device
        for tensor in (*self.outputs, *conditions):
            found.pop(tensor, None)
        return found

    def _uses(self, tensor: str) -> int:
        """The uses of each tensor of this name: 0 for never, -1 for any number of times."""
        follows = [self.follows[step.index] for step in self.readers.get(tensor, ())]
        if tensor in self.outputs:
            follows.append(self.responses_follow)
        if self.origins[tensor] == ONCE and any(origin != ONCE for origin in follows):
            return -1
        return len(follows)


class Flow:
    """One request. What is not used any more is in `unused`, for whoever keeps its memory;
    `absent`: the outputs that a step should have made, and has not."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._values: dict[tuple[str, int], Value] = {}
        self._left: dict[tuple[str, int], int] = {}  # uses, of what has been used and will be again
        self._begun: set[tuple[int, int]] = set()
        self._responses: dict[int, int] = {}  # of steps that give any number
        self._responded: set[int] = set()
        self.firings: list[Firing] = []
        self.responses: list[dict[str, Value]] = []
        self.unused: list[Value] = []
        self.absent: set[str] = set()

    @property
    def responded(self) -> bool:
        """Whether there has been a response."""
        return bool(self._responded)

    def begin(self, inputs: Mapping[str, Value]) -> None:
        """The request's inputs; ABSENT are those that it lacks."""
        self._put(inputs, 0)

    def respond(self, firing: Firing, outputs: Mapping[str, Value]) -> None:
        """A response of a step, by the model's names; what it lacks is ABSENT."""
        self._made(firing.step, firing.number, outputs, ABSENT)

    def close(self) -> None:
        """The request is over: nothing is used any more."""
        self.unused += self._values.values()
        self._values.clear()
        self.firings.clear()
        self.responses.clear()

    def _made(
        self, step: Step, number: int, outputs: Mapping[str, Value], otherwise: Value
    ) -> None:
        if step.index in self._plan.decoupled:
            number = self._responses.get(step.index, 0)
            self._responses[step.index] = number + 1
        made = {tensor: outputs.get(name, otherwise) for name, tensor in step.outputs.items()}
        self._put(made, number)

    def _put(self, made: Mapping[str, Value], number: int) -> None:
        """Take values of tensors with one number, and see what can run or be told now."""
        plan = self._plan
        uses = plan.uses
        for tensor, value in made.items():
            if uses.get(tensor):
                self._values[tensor, number] = value
            else:
                self.unused.append(value)
        for tensor in made:
            for step in plan.readers.get(tensor, ()):
                if plan.follows[step.index] == ONCE or tensor not in plan.once:
                    self._try(step, number)
                else:
                    for at in self._numbers(step.reads):
                        self._try(step, at)
            if tensor not in plan.outputs:
                continue
            if plan.responses_follow == ONCE or tensor not in plan.once:
                self._tell(number)
            else:
                for at in self._numbers(plan.outputs):
                    self._tell(at)

    def _numbers(self, tensors: Iterable[str]) -> Iterable[int]:
        """The numbers for which a tensor that there is one of may be the last that lacked of
        these."""
        once = self._plan.once
        for other in tensors:
            if other not in once:
                return sorted([at for name, at in self._values if name == other])
        return ()

    def _taken(self, tensors: Iterable[str], number: int) -> dict[str, Value] | None:
        """The values of tensors at a number; None while one lacks."""
        values: dict[str, Value] = {}
        there, once = self._values, self._plan.once
        for tensor in tensors:
            at = (tensor, 0 if tensor in once else number)
            if at not in there:
                return None
            values[tensor] = there[at]
        return values

    def _try(self, step: Step, number: int) -> None:
        begun = (step.index, number)
        if begun in self._begun:
            return
        values = self._taken(step.reads, number)
        if values is None:
            return
        self._begun.add(begun)
        inputs: dict[str, Value] = {}
        skipped = bool(step.condition) and not values[step.condition].holds
        for name, tensor in step.inputs.items():
            value = values[tensor]
            if value.tensor is not None:
                inputs[name] = value
            elif value is SKIPPED and name not in self._plan.optional[step.index]:
                skipped = True
        if skipped:
            self._made(step, number, {}, SKIPPED)
        else:
            for value in inputs.values():
                value.acquire()
            self.firings.append(Firing(step, number, inputs))
        self._used(step.reads, number)

    def _tell(self, number: int) -> None:
        if number in self._responded:
            return
        outputs = self._plan.outputs
        values = self._taken(outputs, number)
        if values is None:
            return
        self._responded.add(number)
        response = {name: value for name, value in values.items() if value.there}
        self.absent.update(name for name, value in values.items() if value is ABSENT)
        for value in response.values():
            value.acquire()
        self.responses.append(response)
        self._used(outputs, number)

    def _used(self, tensors: Iterable[str], number: int) -> None:
        plan = self._plan
        for tensor in tensors:
            at = (tensor, 0 if tensor in plan.once else number)
            left = self._left.pop(at, plan.uses[tensor])
            if left == 1:
                self.unused.append(self._values.pop(at))
            elif left > 1:
                self._left[at] = left - 1
