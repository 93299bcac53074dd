"""The protocol clients that the shell's client and the load generator share.

Every protocol has a transport, which blocks, and a door with lanes, which never block.

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

from shmserve.errors import Unavailable, refused
from shmserve.protocols.tensors import ModelTensor, decode

NOT_READY = "the server is not ready"


class TransportError(Unavailable):
    """The server cannot be reached, refused, or sent something else than a response."""


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Bytes of a region that was registered with the server."""

    region: str
    offset: int
    byte_size: int

    def parameters(self) -> dict[str, str | int]:
        """A tensor's parameters that say so, as protocols have them."""
        return {
            "shared_memory_region": self.region,
            "shared_memory_offset": self.offset,
            "shared_memory_byte_size": self.byte_size,
        }


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input as it travels: bytes, little-endian and row-major, or the part of a region that has
    them (`raw` is empty)."""

    name: str
    datatype: str
    shape: list[int]
    raw: bytes
    part: RegionPart | None = None


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """One inference. No `outputs`: all of them; `timeout_us` 0: none; `version` "": the latest;
    `sequence` 0 or "": none; `parts`: where outputs go, by name."""

    model: str
    version: str
    id: str
    timeout_us: int
    inputs: list[InputTensor]
    outputs: list[str]
    sequence: int | str = ""
    start: bool = False
    end: bool = False
    parts: Mapping[str, RegionPart] = field(default_factory=dict)

    def sequence_parameters(self) -> dict[str, int | str | bool]:
        """The parameters that name its sequence, as protocols have them."""
        given = {"sequence_id": self.sequence, "sequence_start": self.start}
        given["sequence_end"] = self.end
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True, slots=True)
class Credentials:
    """The headers that say who asks, and files in PEM for TLS, by the flags that name them."""

    headers: Sequence[tuple[str, str]] = ()
    root_cert: str | None = None
    client_cert: str | None = None
    client_key: str | None = None

    def tls(self) -> ssl.SSLContext:
        """The files, read; raises InvalidArgument for those that are not what they must be."""
        with refused(f"--root-cert: cannot use '{self.root_cert}'"):
            context = ssl.create_default_context(cafile=self.root_cert)
        if self.client_cert:
            files = f"'{self.client_cert}' and '{self.client_key}'"
            with refused(f"--client-cert, --client-key: cannot use {files}"):
                context.load_cert_chain(self.client_cert, self.client_key, password=str)
        return context


@dataclass(frozen=True, slots=True)
class Address:
    """A listener of `protocol` http or grpc at `target`, HOST:PORT, perhaps with TLS, or at a unix
    socket; `where` is what an error calls it."""

    where: str
    protocol: str
    target: str = ""
    tls: bool = False
    unix_socket: str = ""


class Transport(Protocol):
    """A way to a server; `where` is what an error calls that."""

    where: str

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """The inputs of a model; raises TransportError."""

    def infer(self, request: OutgoingRequest) -> Iterator[dict[str, Any]]:
        """The responses as JSON has them, each when it comes, their outputs' data as nested lists;
        raises TransportError."""

    def close(self) -> None:
        """Close the connection."""


class AdminTransport(Transport, Protocol):
    """A way to all that a server does; every method raises TransportError. A `model` "": all of
    them, or the server itself; what comes back is what HTTP has as JSON."""

    def ready(self, model: str, version: str) -> None:
        """Return if it is ready; else raises TransportError, too."""

    def models(self) -> list[dict[str, Any]]:
        """The repository's index."""

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Load it, or load it again, perhaps with a configuration in the place of its own; returns
        when it is loaded."""

    def unload(self, model: str) -> None:
        """Unload it."""

    def stats(self, model: str, version: str) -> list[dict[str, Any]]:
        """Counters and times of each version."""

    def config(self, model: str, version: str) -> dict[str, Any]:
        """The configuration that is in force."""

    def regions(self) -> list[dict[str, Any]]:
        """The registered regions, of system memory and of CUDA devices."""

    def register(self, kind: str, name: str, fields: Mapping[str, Any]) -> None:
        """Register memory of a kind, "system" or "cuda", as a region; the fields are the
        protocol's, with the handle of "cuda" as bytes."""

    def unregister(self, kind: str, name: str) -> None:
        """Have the server forget a region."""


class Heard(Protocol):
    """What hears from a lane."""

    def responded(self) -> None:
        """One of perhaps many responses has come."""

    def ended(self, error: str = "", responses: int = -1) -> None:
        """The request has ended: "" well, or with an error; `responses` is how many that were,
        where the server says so."""


class Lane(Protocol):
    """A way for one request at a time."""

    def send(self, request: Any) -> None:
        """Send what the door has encoded."""

    def close(self) -> None:
        """Close it, whatever is on its way."""


class Door(Protocol):
    """A way to a server. `streams`: a request may have any number of responses."""

    streams: bool

    def encode(self, request: OutgoingRequest) -> Any:
        """What its lanes send."""

    def lane(self, heard: Heard) -> Lane:
        """One more lane; raises Unavailable where the server cannot be reached."""

    def close(self) -> None:
        """Close it, after its lanes."""


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
