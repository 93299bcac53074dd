"""The ways to a server, for a load: each encodes a request once, and has lanes that carry one
request at a time.

connection.py      a connection that never blocks, under http.py and grpc.py
http.py            HTTP/1.1: a lane is a connection; server-sent events of what generates
grpc.py            HTTP/2 and gRPC: some lanes share a connection
native.py          `shmserve.client`
"""

from __future__ import annotations

from typing import Any, Protocol

from shmserve.cli.transports import OutgoingRequest


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
