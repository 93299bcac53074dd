"""The models of a simulated server: what each is configured as, and what its responses must be.

A model from IN to OUT and WHO: OUT is IN with the model's name and version behind it, so that a
response shows whose input it was made of and by what, also behind several steps. WHO is the version
alone: all outputs of a response are of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shmserve.ipc.messages.start import SchedulingLimits
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.padding import Padding

IN = {"name": "IN", "data_type": "TYPE_UINT8", "dims": [-1]}
OUT = {"name": "OUT", "data_type": "TYPE_UINT8", "dims": [-1]}
WHO = {"name": "WHO", "data_type": "TYPE_UINT8", "dims": [-1]}


@dataclass
class Model:
    """A model: its normalised `config`, and how its workers behave.

    `compute_us`: the least and the most that a batch takes; `large`: its outputs lie in the arena
    of its worker; `errs`: how likely it is to fail a request; `most_responses` of a decoupled one.
    The `steps` of an ensemble run one behind the other. Models of one `group` are scheduled in one
    process. `input_byte_size`: that of each request of an ensemble whose tensors have fixed sizes.
    """

    name: str
    config: dict[str, Any]
    limits: SchedulingLimits = field(default_factory=SchedulingLimits)
    instances: int = 1
    compute_us: tuple[int, int] = (50, 2000)
    large: bool = False
    errs: float = 0.0
    most_responses: int = 4
    steps: tuple[Model, ...] = ()
    group: str = ""
    input_byte_size: int = 0
    arena_byte_size: int = 1 << 24

    @property
    def batches(self) -> int:
        """The largest batch; 0: the model does not batch."""
        return int(self.config["max_batch_size"])

    @property
    def sequences(self) -> bool:
        """Whether its requests belong to sequences."""
        return "sequence_batching" in self.config

    @property
    def iterative(self) -> bool:
        """Whether each of its requests is a sequence, which it asks for again and again."""
        return bool((self.config.get("sequence_batching") or {}).get("iterative_sequence"))

    @staticmethod
    def rounds(content: bytes) -> int:
        """How often an iterative one runs a request with this input."""
        return 1 + content[-1] % 4

    @property
    def decoupled(self) -> bool:
        """Whether it gives any number of responses."""
        policy = self.config.get("model_transaction_policy") or {}
        return bool(policy.get("decoupled"))

    @property
    def ordered(self) -> bool:
        """Whether its responses come in the order of the requests."""
        dynamic = self.config.get("dynamic_batching") or {}
        return bool(dynamic.get("preserve_ordering"))

    @property
    def limited(self) -> bool:
        """Whether its instances execute with a ticket only."""
        return self.limits.rate_limited

    @cached_property
    def padding(self) -> Padding | None:
        """Which of its requests of unequal lengths may share a batch; None: none."""
        return ModelSpec.of(self.config).padding

    @property
    def cache_byte_size(self) -> int:
        """What its response cache may have; 0: it has none."""
        return int((self.config.get("response_cache") or {}).get("byte_size", 0))

    def made(self, data: bytes, version: str) -> tuple[bytes, bytes]:
        """OUT and WHO of a version for an input."""
        return b"%s|%s.%s" % (data, self.name.encode(), version.encode()), version.encode()

    def source(self, out: bytes, who: bytes) -> bytes | None:
        """What OUT is made of, where a version or, of an ensemble, one of each step made it; None:
        it is no response of this model."""
        for number, model in enumerate(reversed(self.steps or (self,))):
            data, _, tag = out.rpartition(b"|")
            name, _, version = tag.partition(b".")
            if name != model.name.encode() or (not number and version != who):
                return None
            out = data
        return out
