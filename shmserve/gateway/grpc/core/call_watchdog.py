"""The calls in progress, and the watch over those that wait for their clients: one whose request
does not come is ended, the connection of one whose response is not taken is shut.

gRPC says nothing of a message before all of it is here, or gone. So a call that waits for its
request, or for its client to take the response, is judged by its connection: as long as that moves
as much as a body over HTTP has to, the call may wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
import grpc.aio

from shmserve.common.access.peer_credentials import Address
from shmserve.gateway.grpc.core import sockets as core_sockets
from shmserve.gateway.inference.body_arrival import SLOWEST_RATE

logger = logging.getLogger(__name__)

# Who leaves sooner is noticed then, and whoever waits for such a call's end within twice as long.
_YOUNG_S = 0.015


class WatchedCall(Protocol):
    """One call."""

    def peer(self) -> str:
        """The client's address, in gRPC's words."""

    def late(self) -> None:
        """End it: its request did not come in time."""


class Phase(Enum):
    """The phase of a call: what it waits for."""

    RECEIVING = auto()  # its request
    RUNNING = auto()  # us
    SENDING = auto()  # its client, to take the response


# How a call ends whose request does not come.
LATE = (grpc.StatusCode.UNAVAILABLE, "the request did not arrive in time")
MISSING = (grpc.StatusCode.INTERNAL, "Unable to parse request")  # as from Triton


def client_left(error: BaseException) -> bool:
    """Whether gRPC raises this because the client was gone; it does not say what the class is."""
    return type(error).__name__ == "ExecuteBatchError"


class Soon:
    """Runs what it is given `after_s` seconds later, or up to twice as late, with one timer for
    all; in the event loop."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._new: list[Callable[[], None]] = []
        self._old: list[Callable[[], None]] = []
        self._running = False

    def add(self, action: Callable[[], None]) -> None:
        """Run this, once."""
        self._new.append(action)
        if not self._running:
            self._running = True
            self._go_on()

    def _go_on(self) -> None:
        asyncio.get_running_loop().call_later(self._after_s, self._run)

    def _run(self) -> None:
        due, self._old, self._new = self._old, self._new, []
        self._running = bool(self._old)
        if self._running:
            self._go_on()
        for action in due:
            try:
                action()
            except Exception:
                logger.exception("a call could not be watched")


class Calls:
    """All of a server's; `young` are those whose clients are not watched yet.

    A connection must move at least `SLOWEST_RATE` bytes a second, measured over `patience_s`
    seconds, while one of its calls waits for it: else a call that waits for its request ends, and a
    connection that a response waits for.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._phases: dict[WatchedCall, Phase] = {}
        # What the connections had moved of those that waited at the last look.
        self._moved: dict[tuple[WatchedCall, Phase], int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.young = Soon(_YOUNG_S)

    def begin(self, call: WatchedCall) -> None:
        """A call is here; its request is still to come."""
        self._phases[call] = Phase.RECEIVING
        if self._timer is None:
            self._look_again()

    def arrived(self, call: WatchedCall) -> None:
        """Its request is here."""
        self._phases[call] = Phase.RUNNING

    def sending(self, call: WatchedCall) -> None:
        """Its response is on its way, unless it is over already."""
        if call in self._phases:
            self._phases[call] = Phase.SENDING

    def end(self, call: WatchedCall) -> None:
        """Watch it no more: it is over."""
        self._phases.pop(call, None)

    def addresses(self) -> set[Address | None]:
        """The clients' addresses of all calls."""
        return {core_sockets.address_of(peer) for peer in {call.peer() for call in self._phases}}

    def _look_again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._phases:
            self._moved.clear()
            return
        self._look_again()
        connections = {connection.client: connection for connection in core_sockets.connections()}
        before, self._moved = self._moved, {}
        for call, phase in list(self._phases.items()):
            address = core_sockets.address_of(call.peer())
            connection = None if address is None else connections.get(address)
            if phase is Phase.RUNNING or connection is None:
                continue
            moved = core_sockets.moved(connection, inwards=phase is Phase.RECEIVING)
            known = before.get((call, phase))
            if known is None or moved - known >= self._patience_s * SLOWEST_RATE:
                self._moved[call, phase] = moved
            elif phase is Phase.RECEIVING:
                call.late()
            else:
                logger.info("a client that does not read its responses was disconnected")
                core_sockets.shut(connection)


class Reading:
    """A call that grpc.aio handles; the block is its handler."""

    def __init__(self, calls: Calls, context: Any) -> None:
        self._calls = calls
        self._context = context
        self._limit = asyncio.timeout(None)

    def __enter__(self) -> Self:
        self._calls.arrived(self)  # a stream may be silent for as long as it likes
        self._context.add_done_callback(lambda _: self._calls.end(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._calls.sending(self)

    def peer(self) -> str:
        """The client's address, in gRPC's words."""
        address: str = self._context.peer()
        return address

    def late(self) -> None:
        """End it: its request did not come in time."""
        self._limit.reschedule(0)

    async def request(self) -> bytes:
        """The one request of a call that has only one; without it the call is aborted."""
        self._calls.begin(self)
        ending = MISSING
        try:
            async with self._limit:
                raw = await self._context.read()
        except TimeoutError:
            ending, raw = LATE, grpc.aio.EOF
        self._calls.arrived(self)
        if raw is grpc.aio.EOF:
            await self._context.abort(*ending)
        request: bytes = raw
        return request
