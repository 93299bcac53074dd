"""Calls taken from gRPC's core instead of grpc.aio (`Acceptor`), each as the core has it
(`CoreCall`), and how their events are handled where they arrive.

This stands on parts of gRPC that are not its public interface. Where a release of it does not have
them, every call goes grpc.aio's own way, as some always do: grpc.aio asks for calls, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

import grpc

try:
    from grpc._cython import cygrpc
except ImportError:  # then there is no call of this kind
    cygrpc = None

logger = logging.getLogger(__name__)

_MOST_ASKED = 64
_PARTS = (
    *("_receive_message", "execute_batch", "_ServicerContext", "ReceiveCloseOnServerOperation"),
    *("SendInitialMetadataOperation", "SendMessageOperation", "SendStatusFromServerOperation"),
)
_SERVER_PARTS = ("add_registered_method_handlers", "_request_registered_call", "is_running")

Metadata = Sequence[tuple[str, str]]


class CoreWaiter:
    """An awaitable for coroutines of gRPC's, in place of a future: it goes on as soon
    as this is done.

    `then` gets what the coroutine returns, None if it failed.
    """

    __slots__ = ("_coroutine", "_error", "_then")

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __await__(self) -> Generator[CoreWaiter, None, None]:
        yield self
        if self._error is not None:
            raise self._error

    def resumes(self, coroutine: Coroutine[Any, Any, Any], then: Callable[[Any], None]) -> None:
        """The callback by which its coroutine goes on."""
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
    """A stand-in for the event loop that gRPC believes an event belongs to: events are handled
    where they are."""

    create_future = CoreWaiter

    @staticmethod
    def call_soon_threadsafe(callback: Callable[..., None], *args: Any) -> None:
        callback(*args)


HERE = _Here()  # for good: gRPC keeps no reference


def start(coroutine: Coroutine[Any, Any, Any], then: Callable[[Any], None]) -> None:
    """Run a coroutine of gRPC's, then `then`; raises what keeps it from starting."""
    coroutine.send(None).resumes(coroutine, then)


class CoreCall:
    """The context of a call, which tells of its client as a servicer's context of grpc.aio does."""

    __slots__ = ("_context", "_state")

    def __init__(self, state: Any) -> None:
        self._state = state
        self._context: Any = cygrpc._ServicerContext(state, None, None, None)

    def peer(self) -> str:
        """The client's address, in gRPC's words."""
        address: str = self._context.peer()
        return address

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """The metadata that the client sent with it."""
        metadata: Sequence[tuple[str, str | bytes]] = self._context.invocation_metadata()
        return metadata

    def time_remaining(self) -> float | None:
        """Until its deadline, in seconds; None: it has none."""
        left_s: float | None = self._context.time_remaining()
        return left_s


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
        self._loop: Any = asyncio.get_running_loop()
        self._taken = 0  # in this turn of the loop

    def open(self) -> None:
        """Take calls; the server has started."""
        self._taken = self._most
        self._ask_again()

    def _ask_again(self) -> None:
        taken, self._taken = self._taken, 0
        if self._server.is_running():
            for _ in range(taken):
                self._ask()

    def _ask(self) -> None:
        # gRPC takes a future of the loop's for this, whose callbacks would run a turn later.
        self._loop.create_future = CoreWaiter
        try:
            start(self._server._request_registered_call(self._path), self._accepted)
        finally:
            del self._loop.create_future

    def _accepted(self, state: Any) -> None:
        # Not at once: while calls come without end, nothing else would have its turn.
        self._taken += 1
        if self._taken == 1:
            self._loop.call_soon(self._ask_again)
        # None: the server is stopping, or the call was gone before it was here.
        if state is not None:
            self._begin(state)


def acceptors(
    server: grpc.aio.Server, ways: Mapping[str, tuple[Any, Callable[[Any], None]]]
) -> list[Acceptor]:
    """The acceptors of calls of these methods, for a server that is not started yet.

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
