"""The inference request of every protocol, parsed but not checked against its model.

Headers of the client's call can become parameters of the request (`select_forwarded_headers`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument, Unsupported
from shmserve.ipc.tensors.schemas import LONGEST_CORRELATION_ID, MAX_MEMBERS


@dataclass(slots=True)
class RegionRange:
    """The range [offset, offset + byte_size) of a region, as requested by the client."""

    region: str
    offset: int
    byte_size: int


@dataclass(slots=True)
class InferInput:
    """An input, whose bytes are in one of three locations.

    Attributes:
        count: The number of elements of the shape.
        data: The bytes. A parser may store other values here until it has decoded them.
        binary_size: The number of bytes in the body, or -1 if the body does not have the tensor.
        memory_range: The range in a region.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    count: int  # the number of elements
    data: Any = None
    binary_size: int = -1  # the number of bytes in the body, or -1
    memory_range: RegionRange | None = None


@dataclass(slots=True)
class InferOutput:
    """A requested output.

    Attributes:
        binary: Whether the output is sent as binary data.
        memory_range: The range in a region that the output is written to.
        class_count: The number k of the classification extension; 0: the output is not classified.
    """

    name: str
    binary: bool  # whether the output is sent as binary data
    memory_range: RegionRange | None = None
    class_count: int = 0


@dataclass(slots=True)
class InferRequest:
    """A parsed inference request.

    Attributes:
        binary: Whether outputs that `outputs` does not list are sent as binary data.
        correlation_id: The id of the sequence; 0 or "" for a request without a sequence.
        flags: The start and end flags of the sequence.
        timeout_us: The time limit in the queue, if the queue's policy permits one; 0: no limit.
        deadline_us: The time limit of the request, from its arrival; 0 means no limit.
        version: The version of the model in a gRPC request, "" for the latest.
        has_empty_final: Whether a response without outputs ends the responses of a decoupled model.
    """

    id: str
    inputs: list[InferInput]
    outputs: list[InferOutput]
    binary: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    correlation_id: int | str = 0
    flags: int = 0  # SEQUENCE_START and SEQUENCE_END
    timeout_us: int = 0  # the limit of the time in the queue; 0: none
    priority: int = 0
    version: str = ""
    has_empty_final: bool = False  # triton_enable_empty_final_response
    deadline_us: int = 0  # the limit of the whole time; 0: none

    def with_identity(self, identity: RequestIdentity) -> InferRequest:
        """Return a copy with another id and position in a sequence."""
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
            self.has_empty_final,
            self.deadline_us,
        )

    @property
    def region_outputs(self) -> set[str]:
        """Return the names of the outputs that are written to the client's regions."""
        return {output.name for output in self.outputs if output.memory_range is not None}

    @property
    def class_counts(self) -> dict[str, int]:
        """Return the number of classes of each classified output, by name."""
        return {output.name: output.class_count for output in self.outputs if output.class_count}


class RequestIdentity(NamedTuple):
    """The id of a request and its position in a sequence, which request templates do not contain.

    The position is the id of the sequence and the start and end flags.
    """

    request_id: str
    correlation_id: int | str
    flags: int

    def is_identity_of(self, request: InferRequest) -> bool:
        """Return whether a request has this id and this position in its sequence."""
        return (request.id, request.correlation_id, request.flags) == self


ANONYMOUS = RequestIdentity("", 0, 0)  # of a request without an id and without a sequence


def check_member_count(members: Sized, noun: str) -> None:
    """Raise InvalidArgument if a request has too many inputs, outputs or parameters (`noun`)."""
    if len(members) > MAX_MEMBERS:
        text = f"a request may have at most {MAX_MEMBERS} {noun}, got {len(members)}"
        raise InvalidArgument(text)


def check_correlation_id(correlation_id: int | str) -> int | str:
    """Return the id of a sequence.

    Raises:
        Unsupported: The id is a string that is too long.
    """
    if isinstance(correlation_id, str) and len(correlation_id) > LONGEST_CORRELATION_ID:
        text = f"string correlation ID cannot be longer than {LONGEST_CORRELATION_ID} characters"
        raise Unsupported(text)
    return correlation_id


_RESERVED_PARAMETERS = {
    *("sequence_id", "sequence_start", "sequence_end"),
    *("priority", "timeout", "deadline_us", "headers", "binary_data_output"),
}


def select_forwarded_headers(pattern: str, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers whose names match a pattern at any position, ignoring case.

    The last of several headers with one name counts. An empty pattern matches no header.

    Raises:
        InvalidArgument: A header has the name of a reserved parameter, or is not UTF-8.
    """
    if not pattern:
        return {}
    find_match = re.compile(pattern, re.IGNORECASE).search
    forwarded_headers = {name: value for name, value in headers if find_match(name)}
    for name in forwarded_headers:
        lower_name = name.lower()
        if lower_name in _RESERVED_PARAMETERS or lower_name.startswith("triton_"):
            # The parser capitalises the names of standard headers.
            text = f"Header '{lower_name}' is reserved for Triton usage and cannot be forwarded."
            raise InvalidArgument(text)
        if not _is_utf8(forwarded_headers[name]):
            raise InvalidArgument(f"Header '{name}' is not UTF-8 and cannot be forwarded.")
    return forwarded_headers


def _is_utf8(value: str) -> bool:
    # The parser of headers represents bytes that are not UTF-8 as surrogates.
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
