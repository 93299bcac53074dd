"""Calls with one request and one response, served without a task; direct_stream.py has the others.

For every call grpc.aio has three tasks, four futures and a few more turns of the loop, and asks the
core for the next call only when one has come. The inference call is too frequent for that: here
some calls are asked for beforehand, and what happens to one goes on at once when gRPC's event for
it is handled.

    asked for ──> accepted ──> its message is here ──> `handler(message, call)` ──> finish or fail
                     ├──> watched ─────────────────────> gone: the client has left
                     └──> late: its message does not come

Whether a client leaves is asked only of calls that last: each question to gRPC's core is an event,
which is a wake-up, and most calls are over sooner than anybody leaves. Of the small inferences
in a second that this takes, with 16 in flight, grpc.aio's own way takes 0.63 times as many (half of
the CPU time is then the gateway's), and this one with every call watched 0.92 times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc

from shmserve.gateway.grpc.core.call_watchdog import LATE, MISSING, Calls
from shmserve.gateway.grpc.core.core_call import HERE, CoreCall, Metadata, start

try:
    from grpc._cython import cygrpc
except ImportError:
    cygrpc = None

logger = logging.getLogger(__name__)

_OK = grpc.StatusCode.OK.value[0]


class DirectUnaryCall(CoreCall):
    """One call: `finish` or `fail` it once. `on_gone` runs if the client leaves before that, and
    `on_over` in any case, when nothing is left to be sent."""

    __slots__ = ("_calls", "_watched", "done", "on_gone", "on_over")

    def __init__(self, state: Any, calls: Calls) -> None:
        super().__init__(state)
        self._calls = calls
        self._watched = False
        self.done = False
        self.on_gone: Callable[[], None] | None = None
        self.on_over: Callable[[], None] | None = None

    def finish(self, response: bytes) -> None:
        """End it with its response."""
        self._send(
            cygrpc.SendInitialMetadataOperation(None, 0),
            cygrpc.SendMessageOperation(response, 0),
            cygrpc.SendStatusFromServerOperation((), _OK, "", 0),
        )

    def fail(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
        """End it with an error."""
        self._send(
            cygrpc.SendInitialMetadataOperation(None, 0),
            cygrpc.SendStatusFromServerOperation(tuple(metadata), code.value[0], details, 0),
        )

    def late(self) -> None:
        """End it: its message did not come in time."""
        self.fail(*LATE)

    def _send(self, *operations: Any) -> None:
        self.on_gone = None
        if not self.done:
            self.done = True
            self._calls.sending(self)
            if not self._watched:  # gRPC wants it to be asked once
                operations += (cygrpc.ReceiveCloseOnServerOperation(0),)
            try:
                start(cygrpc.execute_batch(self._state, operations, HERE), self._over)
            except BaseException:
                self._over()
                raise

    def _over(self, _: Any = None) -> None:
        self._calls.end(self)
        # `young` may know it for a while; to gRPC it counts until this is gone.
        self._state = self._context = None
        over, self.on_over = self.on_over, None
        if over is not None:
            over()

    def begin(self, handler: Callable[[bytes, DirectUnaryCall], None], refuse: Refuse) -> None:
        """Wait for its message, and soon for its client to leave; of who is refused no message is
        taken, for they can be large."""

        def received(message: bytes | None) -> None:
            if self.done:
                return
            if message is None:
                self.fail(*MISSING)
                return
            self._calls.arrived(self)
            try:
                handler(message, self)
            except Exception:
                logger.exception("a handler failed")
                self.fail(grpc.StatusCode.INTERNAL, "internal error")

        if (ending := refuse(self)) is not None:
            self.fail(*ending)
            return
        start(cygrpc._receive_message(self._state, HERE), received)
        self._calls.begin(self)
        self._calls.young.add(self._watch)

    def _watch(self) -> None:
        """Hear of it when its client leaves."""
        if self.done:
            return
        self._watched = True
        close = cygrpc.ReceiveCloseOnServerOperation(0)

        def closed(_: Any) -> None:
            gone, self.on_gone = self.on_gone, None
            if close.cancelled():
                self.done = True
                self._over()
                if gone is not None:
                    gone()

        start(cygrpc.execute_batch(self._state, (close,), HERE), closed)


# How a call ends that may not be made: its status, text and trailing metadata.
Refuse = Callable[[DirectUnaryCall], tuple[grpc.StatusCode, str, Metadata] | None]
