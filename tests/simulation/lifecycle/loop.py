"""The simulated world as an asyncio event loop: coroutines wait in virtual time."""

import asyncio
import contextlib
import time
from asyncio.events import _set_running_loop
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any, TypeVarTuple, Unpack
from unittest.mock import patch

from tests.simulation.world import SECOND, World

Ts = TypeVarTuple("Ts")


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop of world events; exceptions are passed to `report_violation`."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.report_violation: Callable[[str], None]
        self._stopped = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run coroutines in this loop, with the world's clock, within the with block."""
        with patch.object(time, "monotonic", self.time):
            _set_running_loop(self)
            try:
                yield
            finally:
                self._stopped = True
                for task in asyncio.all_tasks(self):
                    task.cancel()
                self._world.run(self._world.now_ns)  # lets the cancelled tasks end
                _set_running_loop(None)
                self.close()

    # --- the interface of asyncio event loops

    def time(self) -> float:
        return self._world.now_ns / SECOND

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback for the current time, after the events already scheduled for it."""
        handle = asyncio.Handle(callback, args, self, context)
        self._world.after(0, self._call, handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.after(max(0, round((when - self.time()) * SECOND)), self._call, handle)
        return handle

    def _call(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            handle._run()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._stopped:
            self.report_violation(f"{context['message']}: {context.get('exception')!r}")
