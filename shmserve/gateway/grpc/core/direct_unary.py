"""Calls of one method with one request and one response, answered without a task.

For every call grpc.aio has three tasks, four futures and a few more turns of the loop, and asks the
core for the next call only when one has come. The inference call is too frequent for that: here
some calls are asked for beforehand, and what happens to one goes on at once when gRPC's event for
it is handled.

    asked for ──> accepted ──> its message is here ──> `handler(message, call)` ──> finish or fail
                     ├──> watched ─────────────────────> gone: the client has left
                     └──> late: its message does not come

Whether a client leaves is asked only of calls that last: each question to gRPC's core is an event,
which is a wake-up, and most calls are answered sooner than anybody leaves. Of the small inferences
in a second that this takes, with 16 in flight, grpc.aio's own way takes 0.63 times as many (half of
the CPU time is then the gateway's), and this one with every call watched 0.92 times.

This stands on parts of gRPC that are not its public interface. Where a release of it does not have
them, every call goes grpc.aio's own way, as some always do: grpc.aio asks for calls, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

import grpc

from shmserve.gateway.grpc.core.call_watchdog import LATE, MISSING, Calls

try:
    from grpc._cython import cygrpc
except ImportError:
    cygrpc = None

logger = logging.getLogger(__name__)

_MOST_ASKED = 64
_PARTS = (
    *("_receive_message", "execute_batch", "_ServicerContext", "ReceiveCloseOnServerOperation"),
    *("SendInitialMetadataOperation", "SendMessageOperation", "SendStatusFromServerOperation"),
)
_SERVER_PARTS = ("add_registered_method_handlers", "_request_registered_call", "is_running")
_OK = grpc.StatusCode.OK.value[0]

Metadata = Sequence[tuple[str, str]]


class Waiter:
    """What a coroutine of gRPC's awaits in place of a future: it goes on as soon as this is done.

    `then` gets what the coroutine returns, None if it failed.
    """

    __slots__ = ("_coroutine", "_error", "_then")

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __await__(self) -> Generator[Waiter, None, None]:
        yield self
        if self._error is not None:
            raise self._error

    def resumes(self, coroutine: Coroutine[Any, Any, Any], then: Callable[[Any], None]) -> None:
        """What goes on."""
        self._coroutine = coroutine
        self._then = then

    def cancelled(self) -> bool:
        """Never."""
        return False

    def set_result(self, result: Any) -> None:
        """Go on."""
        try:
            self._coroutine.send(None)
        except StopIteration as end:
            self._go_on(end.value)
        except Exception:  # the call has ended meanwhile
            logger.debug("a call has ended early", exc_info=True)
            self._go_on(None)

    def set_exception(self, error: BaseException) -> None:
        """Go on with an error."""
        self._error = error
        self.set_result(None)

    def _go_on(self, value: Any) -> None:
        # gRPC's core calls: nothing may be raised into it.
        try:
            self._then(value)
        except Exception:
            logger.exception("a call failed")


class _Here:
    """What gRPC takes for the loop that an event belongs to: events are handled where they are."""

    create_future = Waiter

    @staticmethod
    def call_soon_threadsafe(callback: Callable[..., None], *args: Any) -> None:
        callback(*args)


HERE = _Here()  # for good: gRPC keeps no reference


def start(coroutine: Coroutine[Any, Any, Any], then: Callable[[Any], None]) -> None:
    """Run a coroutine of gRPC's, then `then`; raises what keeps it from starting."""
    coroutine.send(None).resumes(coroutine, then)


class Call:
    """One call: `finish` or `fail` it once. `on_gone` runs if the client leaves before that, and
    `on_over` in any case, when nothing is left to be sent."""

    __slots__ = ("_calls", "_context", "_state", "_watched", "done", "on_gone", "on_over")

    def __init__(self, state: Any, calls: Calls) -> None:
        self._state = state
        self._calls = calls
        self._watched = False
        self._context: Any = cygrpc._ServicerContext(state, None, None, None)
        self.done = False
        self.on_gone: Callable[[], None] | None = None
        self.on_over: Callable[[], None] | None = None

    def peer(self) -> str:
        """The client's address, in gRPC's words."""
        address: str = self._context.peer()
        return address

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """What the client sent with it."""
        metadata: Sequence[tuple[str, str | bytes]] = self._context.invocation_metadata()
        return metadata

    def time_remaining(self) -> float | None:
        """Until its deadline, in seconds; None: it has none."""
        left_s: float | None = self._context.time_remaining()
        return left_s

    def finish(self, response: bytes) -> None:
        """Answer it."""
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
            self._calls.answered(self)
            if not self._watched:  # gRPC wants it to be asked once
                operations += (cygrpc.ReceiveCloseOnServerOperation(0),)
            try:
                start(cygrpc.execute_batch(self._state, operations, HERE), self._over)
            except BaseException:
                self._over()
                raise

    def _over(self, _: Any = None) -> None:
        self._calls.end(self)
        over, self.on_over = self.on_over, None
        if over is not None:
            over()

    def begin(self, handler: Callable[[bytes, Call], None], refuse: Refuse) -> None:
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
Refuse = Callable[[Call], tuple[grpc.StatusCode, str, Metadata] | None]


class Acceptor:
    """Asks a server for calls of one method, for `most` at a time, and hands each as gRPC has it to
    `begin`."""

    def __init__(
        self, server: Any, path: str, begin: Callable[[Any], None], most: int = _MOST_ASKED
    ) -> None:
        self._server = server
        self._path = path.encode()
        self._begin = begin
        self._most = most

    def open(self) -> None:
        """Take calls; the server has started."""
        for _ in range(self._most):
            self._ask()

    def _ask(self) -> None:
        asking = self._server._request_registered_call(self._path)
        asking.send(None).add_done_callback(lambda _: self._accepted(asking))

    def _accepted(self, asking: Coroutine[Any, Any, Any]) -> None:
        try:
            asking.send(None)
        except StopIteration as end:
            if self._server.is_running():
                self._ask()
            try:
                self._begin(end.value)
            except Exception:
                logger.exception("a call could not be taken")
        except Exception:
            # The server is stopping, or the call was gone before it was here.
            if self._server.is_running():
                self._ask()


def acceptors(
    server: grpc.aio.Server, ways: Mapping[str, tuple[Any, Callable[[Any], None]]]
) -> list[Acceptor]:
    """Who takes calls of these methods, for a server that is not started yet.

    `ways` has of each method's path grpc.aio's own way for it, and `begin`, which gets each call as
    gRPC has it. None are left where this gRPC has not what it takes, which is logged.
    """
    core: Any = getattr(server, "_server", None)
    missing = [name for name in _SERVER_PARTS if not hasattr(core, name)]
    missing += [name for name in _PARTS if not hasattr(cygrpc, name)]
    if missing:
        logger.warning(
            "gRPC %s is not one that was tested (it has no %s): calls go through grpc.aio alone, "
            "which is slower",
            grpc.__version__,
            ", ".join(missing),
        )
        return []
    core.add_registered_method_handlers({path: way for path, (way, _) in ways.items()})
    return [Acceptor(core, path, begin) for path, (_, begin) in ways.items()]
