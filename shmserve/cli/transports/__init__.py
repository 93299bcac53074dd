"""The transports of the shell's client: each asks what a model takes, and sends a request.

native.py    shared memory and unix sockets, on the server's host
http.py      HTTP, by TCP or at a unix socket
grpc.py      gRPC
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shmserve.cli.client_tensors import ModelTensor, decode


class TransportError(Exception):
    """The server cannot be reached, refused, or sent something else than a response."""


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input as it travels: bytes, little-endian and row-major."""

    name: str
    datatype: str
    shape: list[int]
    raw: bytes


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """One inference. No `outputs`: all of them; `timeout_us` 0: none; `version` "": the latest;
    `sequence` 0 or "": none."""

    model: str
    version: str
    id: str
    timeout_us: int
    inputs: list[InputTensor]
    outputs: list[str]
    sequence: int | str = ""
    start: bool = False
    end: bool = False

    def sequence_parameters(self) -> dict[str, int | str | bool]:
        """The parameters that name its sequence, as protocols have them."""
        given = {"sequence_id": self.sequence, "sequence_start": self.start}
        given["sequence_end"] = self.end
        return {name: value for name, value in given.items() if value}


class Transport(Protocol):
    """A way to a server."""

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """The inputs of a model; raises Failed."""

    def infer(self, request: OutgoingRequest) -> Iterator[dict[str, Any]]:
        """The responses as JSON has them, each when it comes, their outputs' data as nested lists;
        raises Failed."""

    def close(self) -> None:
        """Close the connection."""


def output(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> dict[str, Any]:
    """An output of these bytes; raises ValueError or KeyError when it is malformed."""
    data = decode(datatype, list(shape), memoryview(raw))
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data}


def response(
    model: str, version: str, request_id: str, parameters: Any, outputs: list[dict[str, Any]]
) -> dict[str, Any]:
    """A response, whichever way it came."""
    named = {"id": request_id, "model_name": model, "model_version": version}
    return {
        **{key: value for key, value in named.items() if value},
        **({"parameters": parameters} if parameters else {}),
        "outputs": outputs,
    }
