"""A call as gRPC's core has it, and how its events are handled where they arrive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

try:
    from grpc._cython import cygrpc
except ImportError:  # then there is no call of this kind
    cygrpc = None

logger = logging.getLogger(__name__)

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
