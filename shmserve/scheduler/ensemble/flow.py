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
        self.optional = {step.index: models.optional(step) for step in needed}
        self.readers = {
            tensor: tuple(step for step in readers if step.index in self.steps)
            for tensor, readers in graph.readers.items()
        }
        self.responses_follow = max(origins[output] for output in self.outputs)
        self.uses = {tensor: self._uses(tensor) for tensor in origins}
        self.devices = self._devices(needed, graph.conditions, models)
        # How the requests of steps are prepared, for whoever does that: while a plan holds, so do
        # the models that it was made for.
        self.forms: dict[Any, Any] = {}

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
    """One request. What is not used any more is in `unused`, for whoever keeps its memory."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._values: dict[str, dict[int, Value]] = {}
        self._left: dict[tuple[str, int], int] = {}
        self._begun: set[tuple[int, int]] = set()
        self._responses: dict[int, int] = {}  # of steps that give any number
        self._responded: set[int] = set()
        self.firings: list[Firing] = []
        self.responses: list[dict[str, Value]] = []
        self.unused: list[Value] = []

    @property
    def responded(self) -> bool:
        """Whether there has been a response."""
        return bool(self._responded)

    def begin(self, inputs: Mapping[str, Value]) -> None:
        """The request's inputs; ABSENT are those that it lacks."""
        self._put({tensor: (0, value) for tensor, value in inputs.items()})

    def respond(self, firing: Firing, outputs: Mapping[str, Value]) -> None:
        """A response of a step, by the model's names; what it lacks is ABSENT."""
        self._made(firing.step, firing.number, outputs, ABSENT)

    def close(self) -> None:
        """The request is over: nothing is used any more."""
        for numbered in self._values.values():
            self.unused += numbered.values()
        self._values.clear()
        self.firings.clear()
        self.responses.clear()

    def _made(
        self, step: Step, number: int, outputs: Mapping[str, Value], otherwise: Value
    ) -> None:
        if step.index in self._plan.decoupled:
            number = self._responses.get(step.index, 0)
            self._responses[step.index] = number + 1
        self._put(
            {
                tensor: (number, outputs.get(name, otherwise))
                for name, tensor in step.outputs.items()
            }
        )

    def _put(self, made: Mapping[str, tuple[int, Value]]) -> None:
        """Take values of tensors, and see what can run or be told now."""
        plan = self._plan
        for tensor, (number, value) in made.items():
            uses = plan.uses.get(tensor, 0)
            if uses:
                self._values.setdefault(tensor, {})[number] = value
                self._left[tensor, number] = uses
            else:
                self.unused.append(value)
        for tensor, (number, _) in made.items():
            for step in plan.readers.get(tensor, ()):
                follows = plan.follows[step.index]
                for at in self._numbers(step.reads, follows, plan.origins[tensor], number):
                    self._try(step, at)
            if tensor in plan.outputs:
                follows, origin = plan.responses_follow, plan.origins[tensor]
                for at in self._numbers(plan.outputs, follows, origin, number):
                    self._tell(at)

    def _numbers(
        self, tensors: Iterable[str], follows: int, origin: int, number: int
    ) -> Iterable[int]:
        """The numbers for which a new tensor of this origin may be the last that lacked."""
        if origin != ONCE or follows == ONCE:
            return (number,)
        for tensor in tensors:
            if self._plan.origins[tensor] != ONCE:
                return sorted(self._values.get(tensor, ()))
        return ()

    def _value(self, tensor: str, number: int) -> Value | None:
        numbered = self._values.get(tensor, {})
        return numbered.get(0 if self._plan.origins[tensor] == ONCE else number)

    def _try(self, step: Step, number: int) -> None:
        if (step.index, number) in self._begun:
            return
        values = {tensor: self._value(tensor, number) for tensor in step.reads}
        if any(value is None for value in values.values()):
            return
        self._begun.add((step.index, number))
        inputs: dict[str, Value] = {}
        skipped = bool(step.condition) and not values[step.condition].holds  # type: ignore[union-attr]
        for name, tensor in step.inputs.items():
            value = values[tensor]
            assert value is not None
            if value.there:
                inputs[name] = value
            elif value is SKIPPED and name not in self._plan.optional[step.index]:
                skipped = True
        if skipped:
            self._made(step, number, {}, SKIPPED)
        else:
            for value in inputs.values():
                value.acquire()
            self.firings.append(Firing(step, number, inputs))
        for tensor in step.reads:
            self._used(tensor, number)

    def _tell(self, number: int) -> None:
        if number in self._responded:
            return
        values = {output: self._value(output, number) for output in self._plan.outputs}
        if any(value is None for value in values.values()):
            return
        self._responded.add(number)
        response = {name: value for name, value in values.items() if value and value.there}
        for value in response.values():
            value.acquire()
        self.responses.append(response)
        for output in self._plan.outputs:
            self._used(output, number)

    def _used(self, tensor: str, number: int) -> None:
        number = 0 if self._plan.origins[tensor] == ONCE else number
        left = self._left[tensor, number]
        if left == 1:
            del self._left[tensor, number]
            self.unused.append(self._values[tensor].pop(number))
        elif left > 1:
            self._left[tensor, number] = left - 1
