"""The protocol clients that `shmserve client` and the load generator share.

Every protocol has a transport, which blocks, and a lane factory. A lane is a channel with one
request in flight, and never blocks.

connection.py      a non-blocking connection, and the event loop of lanes
grpc.py            gRPC
http.py            HTTP 1.1, over TCP or a unix socket; server-sent events
native.py          shared memory and unix sockets, on the server's host
servers.py         the transport to the server that flags name
tensors.py         values of a command line as tensors, tensors as JSON
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shmserve.errors import Unavailable, convert_os_errors
from shmserve.protocols.tensors import ModelTensor, decode, encode

NOT_READY = "the server is not ready"
TOKEN_HINT = "; choose the file of a token with --token-file"  # for errors with status 401
# The timeout of requests for readiness and statistics; other requests have no timeout.
QUERY_TIMEOUT_S = 10.0

Parameter = bool | int | float | str


class TransportError(Unavailable):
    """The error of a transport: no connection, a rejected request, or a malformed response."""


@dataclass(frozen=True, slots=True)
class RegionPart:
    """A byte range of a region that was registered with the server."""

    region: str
    offset: int
    byte_size: int

    def parameters(self) -> dict[str, str | int]:
        """Return the protocols' parameters of a tensor whose bytes are in this range."""
        return {
            "shared_memory_region": self.region,
            "shared_memory_offset": self.offset,
            "shared_memory_byte_size": self.byte_size,
        }


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input as it is sent: its bytes are little-endian and row-major.

    Attributes:
        name: The input's name.
        datatype: The datatype.
        shape: The shape.
        raw: The bytes; empty if they are in a region.
        region_part: The part of a region that contains the bytes.
    """

    name: str
    datatype: str
    shape: list[int]
    raw: bytes
    region_part: RegionPart | None = None

    @classmethod
    def of(cls, tensor: ModelTensor, value: Any) -> InputTensor:
        """Return the input `tensor` with a value: JSON or an array.

        Raises:
            InvalidArgument: The value does not fit the input.
        """
        return cls(tensor.name, tensor.datatype, *encode(tensor, value))


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """One inference request.

    Attributes:
        model: The model's name.
        version: The model's version; "": the latest.
        id: The name of the request in the server's errors.
        timeout_us: The timeout in microseconds; 0: no limit.
        inputs: The inputs.
        outputs: The names of the requested outputs; empty: all.
        sequence: The id of the request's sequence; 0 or "": none.
        is_start: Whether the request is the first one of its sequence.
        is_end: Whether the request is the last one of its sequence.
        output_parts: The range of each output that the server writes to a region, by output.
        parameters: The parameters by name.
    """

    model: str
    version: str
    id: str
    timeout_us: int
    inputs: list[InputTensor]
    outputs: list[str]
    sequence: int | str = ""
    is_start: bool = False
    is_end: bool = False
    output_parts: Mapping[str, RegionPart] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def request_parameters(self) -> dict[str, Parameter]:
        """Return the parameters of the request and of its sequence, by their protocol names."""
        sequence = {"sequence_id": self.sequence, "sequence_start": self.is_start}
        sequence["sequence_end"] = self.is_end
        return {**self.parameters, **{name: value for name, value in sequence.items() if value}}


@dataclass(frozen=True, slots=True)
class Credentials:
    """The headers that authenticate a client, and the client's PEM files for TLS."""

    headers: Sequence[tuple[str, str]] = ()
    root_cert: str | None = None
    client_cert: str | None = None
    client_key: str | None = None

    def create_tls_context(self) -> ssl.SSLContext:
        """Return the TLS context of the PEM files. Raises InvalidArgument if a file is invalid."""
        with convert_os_errors(f"--root-cert: cannot use '{self.root_cert}'"):
            context = ssl.create_default_context(cafile=self.root_cert)
        if self.client_cert:
            files = f"'{self.client_cert}' and '{self.client_key}'"
            with convert_os_errors(f"--client-cert, --client-key: cannot use {files}"):
                context.load_cert_chain(self.client_cert, self.client_key, password=str)
        return context


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a listener.

    Attributes:
        address_text: The address as text, for error messages.
        protocol: "http" or "grpc".
        target: HOST:PORT, or "" if `unix_socket` is set.
        uses_tls: Whether the listener uses TLS.
        unix_socket: The path of a unix socket, or "".
    """

    address_text: str
    protocol: str
    target: str = ""
    uses_tls: bool = False
    unix_socket: str = ""


class Transport(Protocol):
    """A blocking client for inference.

    Its errors contain `address_text`, which identifies the server. Methods raise TransportError if
    the server is unreachable, rejects the request or sends a malformed response.
    """

    address_text: str

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """Return the inputs of a model by name."""

    def infer(self, request: OutgoingRequest) -> Iterator[dict[str, Any]]:
        """Yield each response as a JSON object, with outputs as nested lists."""

    def close(self) -> None:
        """Close the connection."""


class AdminTransport(Transport, Protocol):
    """A blocking client for every operation of a server.

    An empty `model` stands for all models, or for the server.
    Results have the form of the HTTP API's JSON.
    """

    def ready(self, model: str, version: str) -> None:
        """Raise TransportError unless the model, or for an empty `model` the server, is ready."""

    def models(self) -> list[dict[str, Any]]:
        """Return the index of the repository."""

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Load or reload a model and wait until it is loaded.

        `config`, if given, replaces the model's own configuration.
        """

    def unload(self, model: str) -> None:
        """Unload a model."""

    def stats(self, model: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of each version."""

    def config(self, model: str, version: str) -> dict[str, Any]:
        """Return the effective configuration of a model."""

    def regions(self) -> list[dict[str, Any]]:
        """Return the registered regions of system memory and of CUDA devices."""

    def register(self, kind: str, name: str, fields: Mapping[str, Any]) -> None:
        """Register memory of a kind, "system" or "cuda", as a region.

        The fields have the names of the protocol; the handle of "cuda" is bytes.
        """

    def unregister(self, kind: str, name: str) -> None:
        """Unregister a region."""


class LaneObserver(Protocol):
    """The observer of a lane, which is called for responses and for the ends of requests."""

    def on_response(self) -> None:
        """Record a response to a request that may have several responses."""

    def on_end(self, error: str = "", response_count: int = -1) -> None:
        """Record the end of a request, and its error if it failed.

        `response_count` is the number of responses that the server reports, or -1.
        """


class Lane(Protocol):
    """A non-blocking channel that has one request in flight at a time."""

    def send(self, request: Any) -> None:
        """Send a request that the factory has encoded."""

    def close(self) -> None:
        """Close the lane, and discard its request in flight."""


class LaneFactory(Protocol):
    """A factory of lanes to one server over one protocol.

    If `is_decoupled` is true, a request may have any number of responses.
    """

    is_decoupled: bool

    def encode(self, request: OutgoingRequest) -> Any:
        """Return the encoded request, for a lane to send."""

    def lane(self, observer: LaneObserver) -> Lane:
        """Open a lane. Raises Unavailable if the server cannot be reached."""

    def close(self) -> None:
        """Close the factory; its lanes must have been closed before."""


def output_json(name: str, datatype: str, shape: Sequence[int], data: bytes) -> dict[str, Any]:
    """Return {"name", "datatype", "shape", "data"} of an output.

    Raises:
        ValueError: The bytes do not match the datatype or the shape.
        KeyError: The datatype is unknown.
    """
    nested_lists = decode(datatype, list(shape), memoryview(data))
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": nested_lists}


def response_json(
    model: str, version: str, request_id: str, parameters: Any, outputs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the JSON object of a response."""
    ids = {"id": request_id, "model_name": model, "model_version": version}
    return {
        **{key: value for key, value in ids.items() if value},
        **({"parameters": parameters} if parameters else {}),
        "outputs": outputs,
    }
