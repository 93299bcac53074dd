"""What the connections of a gateway share, and what a connection is to the calls on it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.grpc.calls.head import CallHead
from shmserve.gateway.grpc.calls.messages import ArrivingMessage, Deflater
from shmserve.gateway.http2.connection import Http2Connection
from shmserve.gateway.http2.limits import Limits
from shmserve.gateway.http2.outgoing import Stream
from shmserve.gateway.inference.body_arrival import BodyBudget
from shmserve.gateway.settings import GrpcSettings

_READ = 64 * 1024  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class GrpcFront:
    """What all connections of a gateway share. `begin` makes a call of a stream and its head;
    `body_timeout_s` is a client's time to send a message or to take one, `largest_inflated` bounds
    compressed messages, in bytes."""

    settings: GrpcSettings
    begin: Callable[[Carrier, Stream, CallHead], Any]
    budget: BodyBudget
    header_timeout_s: float
    body_timeout_s: float
    largest_inflated: int
    tls: ssl.SSLContext | None
    deflater: Deflater | None
    limits: Limits = field(default_factory=Limits)
    # What comes of any of them is read to this, and used before the next is.
    read_buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_READ)))


class Carrier(Protocol):
    """A connection, as the calls on it see it."""

    front: GrpcFront
    loop: asyncio.AbstractEventLoop
    client: ClientIdentity
    guarded: bool  # calls of this client must be authorised
    http2: Http2Connection[CallHead]

    def flush(self) -> None:
        """Write what is ready."""

    def watch(self, call: Any, arriving: ArrivingMessage) -> None:
        """Have an eye on a call whose message is not here."""

    def unwatch(self, call: Any) -> None:
        """Its message is here, or it is over."""

    def over(self) -> None:
        """A call is over, and all of it is sent."""

    def settled(self) -> None:
        """Who was told to go knows it, and no call is here that is waited for."""

    def abort(self) -> None:
        """End it now, whatever is not flushed."""

    def force_close(self) -> None:
        """End it; what is written already may still be flushed."""
