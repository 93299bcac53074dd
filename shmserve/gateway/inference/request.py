"""The neutral form of an inference request, whatever protocol it came by: parsed, not checked
against its model yet; and headers of a client's call that become parameters of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument, Unsupported
from shmserve.ipc.tensors.inference import LONGEST_CORRELATION_ID

# More than any program sends: millions fit into a request, and take every process that handles them
# seconds in which it does nothing else. Inputs, outputs and parameters.
_MOST_OF_A_KIND = 16384


@dataclass(slots=True)
class RegionRange:
    """[offset, offset + byte_size) of a region, as the client says it: not checked yet."""

    region: str
    offset: int
    byte_size: int


@dataclass(slots=True)
class InferInput:
    """An input: its bytes are `data`, or the next `binary_size` bytes of the body, or at `place`.

    `count` is how many elements its shape has. A protocol's parser may keep values of its own in
    `data`, until it has made bytes of them for the builder.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    count: int
    data: Any = None
    binary_size: int = -1
    place: RegionRange | None = None


@dataclass(slots=True)
class InferOutput:
    """A requested output and the form it is to have: with `classes`, so many of its largest values
    as texts."""

    name: str
    binary: bool
    place: RegionRange | None = None
    classes: int = 0


@dataclass(slots=True)
class InferRequest:
    """A request. Outputs that are not listed are sent in the form that `binary` says.

    `version` is the model's as a gRPC request has it, "" for the latest. `empty_final`: a last
    response without outputs is to be sent where only the end is left to be said.
    """

    id: str
    inputs: list[InferInput]
    outputs: list[InferOutput]
    binary: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    priority: int = 0
    version: str = ""
    empty_final: bool = False

    def identified(self, identity: RequestIdentity) -> InferRequest:
        """A copy with another id and place in a sequence."""
        return InferRequest(
            identity.request_id,
            self.inputs,
            self.outputs,
            self.binary,
            self.parameters,
            identity.correlation_id,
            identity.flags,
            self.timeout_us,
            self.priority,
            self.version,
            self.empty_final,
        )

    @property
    def classes(self) -> dict[str, int]:
        """The number of values that are asked for, by the name of an output to be classified."""
        return {output.name: output.classes for output in self.outputs if output.classes}


class RequestIdentity(NamedTuple):
    """The part of a request that differs between requests of one form: its id, and its place in a
    sequence."""

    request_id: str
    correlation_id: int | str
    flags: int

    def is_of(self, request: InferRequest) -> bool:
        """Whether the request says this."""
        return (request.id, request.correlation_id, request.flags) == self


ANONYMOUS = RequestIdentity("", 0, 0)


def check_number(members: Sized, noun: str) -> None:
    """Raise InvalidArgument for more than any model has: no other request is handled while one is
    parsed, and there is room for millions in it."""
    if len(members) > _MOST_OF_A_KIND:
        raise InvalidArgument(
            f"a request may have {_MOST_OF_A_KIND} {noun} at most, this one has {len(members)}"
        )


def correlation_id(value: int | str) -> int | str:
    """A sequence's id; raises Unsupported for a text that is too long."""
    if isinstance(value, str) and len(value) > LONGEST_CORRELATION_ID:
        raise Unsupported(
            f"string correlation ID cannot be longer than {LONGEST_CORRELATION_ID} characters"
        )
    return value


_RESERVED = frozenset(
    (
        *("sequence_id", "sequence_start", "sequence_end"),
        *("priority", "timeout", "headers", "binary_data_output"),
    )
)


def forwarded_headers(pattern: str, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The headers whose names match somewhere, whatever their case, in their order; of one that
    comes twice the last. An empty pattern matches none.

    Raises InvalidArgument for one that would be a parameter with a meaning to the server, and for
    one that is not UTF-8, which no parameter can be.
    """
    if not pattern:
        return {}
    matches = _compiled(pattern).search
    found = {name: value for name, value in headers if matches(name)}
    for name in found:
        lower = name.lower()
        if lower in _RESERVED or lower.startswith("triton_"):
            # Parsers write the names that they know in capitals.
            raise InvalidArgument(
                f"Header '{lower}' is reserved for Triton usage and cannot be forwarded."
            )
        if not _is_text(found[name]):
            raise InvalidArgument(f"Header '{name}' is not UTF-8 and cannot be forwarded.")
    return found


def _is_text(value: str) -> bool:
    # Parsers have bytes that are not UTF-8 as surrogates.
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


@lru_cache(maxsize=4)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)
