"""The models of a simulated server: their configurations and their expected responses.

A model has the input IN and the outputs OUT and WHO. OUT is IN followed by the model's name and
version, so that a response shows its input and the models that processed it, even behind several
steps. WHO is the version alone: all outputs of a response come from one version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shmserve.ipc.engine_settings import LLM_BACKEND
from shmserve.ipc.messages.supervision import SchedulingLimits
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.padding import Padding
from shmserve.ipc.tensors.schemas import RequestSchema
from shmserve.ipc.tensors.signature import BatchProperties, Signature

IN = {"name": "IN", "data_type": "TYPE_UINT8", "dims": [-1]}
IN2 = {**IN, "name": "IN2"}
GO = {"name": "GO", "data_type": "TYPE_BOOL", "dims": [1]}
OUT = {"name": "OUT", "data_type": "TYPE_UINT8", "dims": [-1]}
WHO = {"name": "WHO", "data_type": "TYPE_UINT8", "dims": [-1]}


@dataclass
class Model:
    """A model: its normalised `config`, and the behaviour of its workers.

    Attributes:
        compute_us: The minimum and maximum duration of a batch.
        is_large: Whether outputs are in the arena of the worker.
        error_probability: The probability that a request fails.
        most_responses: The maximum number of responses of a decoupled model.
        reads_second_input: Whether the model reads IN2, too, if it is present.
        returns_condition: Whether the model returns GO, a condition.
        condition: The index of the conditional step of an ensemble; -1 for none.
        group: Models of one group are scheduled in one process.
        input_byte_size: The input size of each request of an ensemble with fixed tensor sizes.
    """

    name: str
    config: dict[str, Any]
    limits: SchedulingLimits = field(default_factory=SchedulingLimits)
    instances: int = 1
    compute_us: tuple[int, int] = (50, 2000)
    is_large: bool = False
    error_probability: float = 0.0
    most_responses: int = 4
    reads_second_input: bool = False
    returns_condition: bool = False
    steps: tuple[Model, ...] = ()
    condition: int = -1
    group: str = ""
    input_byte_size: int = 0
    arena_byte_size: int = 1 << 24

    @property
    def batches(self) -> int:
        return int(self.config["max_batch_size"])

    def batch_properties(self, schema: bytes) -> BatchProperties:
        """Return how requests of a schema are batched: the drawn value, or the real one."""
        parameter = RequestSchema(schema).parameters.get(self.name)
        return (
            self._signature.batch_properties(schema)
            if parameter is None
            else BatchProperties(*parameter)
        )

    @cached_property
    def _signature(self) -> Signature:
        return Signature(ModelSpec.of(self.config), "1")

    @property
    def has_sequences(self) -> bool:
        return "sequence_batching" in self.config

    @property
    def is_iterative(self) -> bool:
        """Return whether each request is a sequence that the model reschedules."""
        return bool((self.config.get("sequence_batching") or {}).get("iterative_sequence"))

    @property
    def is_generative(self) -> bool:
        return bool(self.config.get("backend") == LLM_BACKEND)

    @staticmethod
    def rounds(content: bytes) -> int:
        """Return how often an iterative model executes a request with this input."""
        return 1 + content[-1] % 4

    @property
    def is_decoupled(self) -> bool:
        """Return whether a request may have any number of responses."""
        policy = self.config.get("model_transaction_policy") or {}
        return bool(policy.get("decoupled"))

    @property
    def preserves_order(self) -> bool:
        """Return whether responses are sent in the order of the requests."""
        dynamic = self.config.get("dynamic_batching") or {}
        return bool(dynamic.get("preserve_ordering"))

    @property
    def needs_tickets(self) -> bool:
        return self.limits.rate_limited

    @cached_property
    def padding(self) -> Padding | None:
        """Return the padding rules; None if requests of different lengths do not share a batch."""
        return ModelSpec.of(self.config).padding

    @property
    def cache_byte_size(self) -> int:
        """Return the size of the response cache, or 0 without a cache."""
        return int((self.config.get("response_cache") or {}).get("byte_size", 0))

    @property
    def tensor_maps(self) -> list[dict[str, Any]]:
        scheduling = self.config.get("ensemble_scheduling") or {}
        steps: list[dict[str, Any]] = scheduling.get("step") or [_SINGLE_STEP]
        return steps

    @staticmethod
    def runs_step(content: bytes) -> bool:
        """Return whether the conditional step runs for a request with this input."""
        return bool(content.rstrip(b"_")[-1] % 2)

    def skipped_steps(self, content: bytes) -> set[int]:
        """Return the steps that do not run: the conditional step and its dependents."""
        if self.condition < 0 or self.runs_step(content):
            return set()
        conditions = {self.condition}
        for number, (step, maps) in enumerate(zip(self.steps, self.tensor_maps, strict=True)):
            needed = {maps["input_map"][name] for name in step.needs}
            if any(self.tensor_maps[c]["output_map"]["OUT"] in needed for c in conditions):
                conditions.add(number)
        return conditions

    @property
    def needs(self) -> list[str]:
        return [tensor["name"] for tensor in self.config["input"] if not tensor.get("optional")]

    def outputs_of(self, data: bytes, version: str) -> tuple[bytes, bytes]:
        """Return OUT and WHO of a version for an input; two inputs are joined by `join_inputs`."""
        return b"%s|%s.%s" % (data, self.name.encode(), version.encode()), version.encode()

    def source(self, output_bytes: bytes, model_name: bytes) -> bytes | None:
        """Return the input of OUT, with the index of a decoupled response; None if invalid."""
        values = {"OUT": output_bytes}
        step_mark = b""
        for step, maps in reversed(list(zip(self.steps or (self,), self.tensor_maps, strict=True))):
            value = values.pop(maps["output_map"]["OUT"], None)
            if value is None:
                continue  # the step did not run
            data, _, tag = value.rpartition(b"|")
            maker, _, version = tag.partition(b".")
            if maker != step.name.encode() or (
                "WHO" in maps["output_map"] and version != model_name
            ):
                return None
            if step.is_decoupled:
                data, sign, number = data.rpartition(b"#")
                step_mark = sign + number
            for name, part in zip(
                ("IN", "IN2"), parts(data) if step.reads_second_input else [data], strict=False
            ):
                if part and values.setdefault(maps["input_map"][name], part) != part:
                    return None
        return values["IN"] + step_mark if values.keys() == {"IN"} else None


_SINGLE_STEP = {"input_map": {"IN": "IN", "IN2": "IN2"}, "output_map": {"OUT": "OUT", "WHO": "WHO"}}


def join_inputs(first_row: bytes, second_row: bytes) -> bytes:
    return b"[%s&%s]" % (first_row, second_row)


def parts(data: bytes) -> tuple[bytes, bytes]:
    depth = 0
    for match in re.finditer(rb"[\[\]&]", data):
        depth += {b"[": 1, b"]": -1}.get(match[0], 0)
        if depth == 1 and match[0] == b"&":
            return data[1 : match.start()], data[match.end() : -1]
    return data, b""
