"""The graph of an ensemble: steps, and the tensors between them (pure).

A tensor has an origin: the last step before it that gives any number of responses, or `ONCE`. All
tensors of one origin are numbered by that step's responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shmserve.ipc.model_spec import ModelSpec

ONCE = -1  # the origin of tensors of which there is one a request

_CONDITION = "step[{}].condition"


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A model to run: `inputs` and `outputs` map the model's names to tensors of the ensemble;
    version "" is the latest. `condition`: the tensor that says whether it runs, or ""."""

    index: int
    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    condition: str = ""
    reads: frozenset[str] = field(init=False)  # the tensors it waits for

    def __post_init__(self) -> None:
        read = {*self.inputs.values(), *([self.condition] if self.condition else [])}
        object.__setattr__(self, "reads", frozenset(read))


@dataclass(frozen=True, eq=False)
class Graph:
    """An ensemble's steps, in the order of its configuration, and its own inputs and outputs."""

    name: str
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_inflight: int = 0  # requests of a step, of all requests of the ensemble; 0: any number

    @classmethod
    def of(cls, config: ModelSpec) -> Graph:
        """The graph of an ensemble's configuration."""
        scheduling = config.ensemble_scheduling
        assert scheduling is not None
        return cls(
            config.name,
            tuple(
                Step(
                    index,
                    step.model_name,
                    step.version,
                    step.input_map,
                    step.output_map,
                    config.parameters.get(_CONDITION.format(index), ""),
                )
                for index, step in enumerate(scheduling.step)
            ),
            tuple(each.name for each in config.input),
            tuple(each.name for each in config.output),
            scheduling.max_inflight_requests,
        )

    @cached_property
    def readers(self) -> Mapping[str, tuple[Step, ...]]:
        """The steps that wait for each tensor."""
        found: dict[str, list[Step]] = {}
        for step in self.steps:
            for tensor in step.reads:
                found.setdefault(tensor, []).append(step)
        return {tensor: tuple(steps) for tensor, steps in found.items()}

    @cached_property
    def writers(self) -> Mapping[str, Step]:
        """The step that makes each tensor which is no input."""
        return {tensor: step for step in self.steps for tensor in step.outputs.values()}

    @cached_property
    def conditions(self) -> frozenset[str]:
        """The tensors that say whether a step runs."""
        return frozenset(step.condition for step in self.steps if step.condition)

    def needed(self, outputs: Iterable[str]) -> frozenset[int]:
        """The steps without which these outputs cannot be made."""
        found: set[int] = set()
        tensors = list(outputs)
        while tensors:
            step = self.writers.get(tensors.pop())
            if step is not None and step.index not in found:
                found.add(step.index)
                tensors += step.reads
        return frozenset(found)

    def in_order(self) -> tuple[Step, ...]:
        """The steps, each after those whose tensors it reads; without those in circles."""
        written = set(self.inputs)
        ordered: list[Step] = []
        waiting = list(self.steps)
        while ready := [step for step in waiting if step.reads <= written]:
            ordered += ready
            waiting = [step for step in waiting if step not in ready]
            for step in ready:
                written.update(step.outputs.values())
        return tuple(ordered)

    def origins(self, decoupled: Callable[[Step], bool]) -> dict[str, int]:
        """The origin of each tensor."""
        found = dict.fromkeys(self.inputs, ONCE)
        for step in self.in_order():
            origin = step.index if decoupled(step) else origin_of(step, found)
            found.update(dict.fromkeys(step.outputs.values(), origin))
        return found


def origin_of(step: Step, origins: Mapping[str, int]) -> int:
    """The origin whose numbers a step follows: in no graph that was loaded it follows two."""
    return max(origins[tensor] for tensor in step.reads)
