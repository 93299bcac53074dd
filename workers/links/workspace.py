"""A worker's end of its device's workspace pool: memory for the time of an execution.

with lease:           the thread waits until the pool has it
async with lease:     the coroutine does, and the others of its event loop go on
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shmserve.errors import Internal, InvalidArgument
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.control_requests import LeaseWorkspace, ReturnWorkspace
from shmserve.ipc.tensors.descriptors import Range, unpack_range
from shmserve.workers.links.supervisor import SupervisorLink

# Whether the execution that runs here, a thread's or a coroutine's, has a workspace.
_HOLDS: ContextVar[bool] = ContextVar("holds_workspace", default=False)


def _unchanged(view: Any) -> Any:
    return view


@dataclass(eq=False)
class Workspace:
    """The workspace leases of one instance.

    `_settle(number)` waits until a CUDA device has done the work of this process.
    """

    _control: SupervisorLink
    _mappings: Mappings
    _device: str
    _settle: Callable[[int], None]
    coroutines: int = 0  # of the event loop, that have a lease

    def lease(self, byte_size: int, seen_as: Callable[[Any], Any] = _unchanged) -> LeasedWorkspace:
        """Return a lease of bytes for a with block; their contents are undefined.

        Args:
            byte_size: The number of bytes.
            seen_as: Converts a writable memoryview, or a tensor of uint8 on the device.
        """
        return LeasedWorkspace(self, byte_size, seen_as)

    def ask(self, byte_size: int) -> Range:
        """Wait until the pool has so many bytes.

        Raises:
            Internal: The pool is smaller.
            Unavailable: The device has no pool.
        """
        try:
            granted = self._control.ask(LeaseWorkspace, self._device, byte_size)
        except InvalidArgument as error:  # the model's fault, and no client's
            raise Internal(error.message) from None
        return replace(unpack_range(granted["place"]), byte_size=byte_size)

    def view(self, place: Range) -> Any:
        """Return the bytes of a lease."""
        return self._mappings.view(place)

    def release(self, place: Range, used: bool = True) -> None:
        """End a lease.

        Raises:
            DeviceLost: This process cannot use the device any more.
        """
        if used and place.memory.cuda is not None:
            # The next holder may be another process, whose work is not ordered with this one's.
            self._settle(place.memory.cuda.device)
        self._control.send(ReturnWorkspace(self._device, place.memory.id, place.offset))


class LeasedWorkspace:
    """A lease for a `with` block, or for an `async with` block of a coroutine.

    Raises:
        Internal: On entering: the size is not positive or exceeds the pool, the execution already
            has a lease (two executions could deadlock), or a coroutine would block the event loop
            while another coroutine has a lease.
        Unavailable: On entering: the device has no pool.
    """

    def __init__(self, workspace: Workspace, byte_size: int, seen_as: Callable[[Any], Any]) -> None:
        self._workspace = workspace
        self._byte_size = byte_size
        self._seen_as = seen_as
        self._place: Range | None = None
        self._token: Token[bool] | None = None
        self._in_loop = False

    def __enter__(self) -> Any:
        self._check()
        in_loop = _in_event_loop()
        if self._workspace.coroutines and in_loop:
            raise Internal(
                "another coroutine of this model has a workspace, which could not go on while this "
                "one waits: use 'async with'"
            )
        return self._entered(self._workspace.ask(self._byte_size), in_loop)

    def __exit__(self, *_: object) -> None:
        self._release()

    async def __aenter__(self) -> Any:
        self._check()
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[Range] = loop.create_future()
        # A thread for each that waits: no other work of the model's waits behind it.
        threading.Thread(target=self._wait, args=(loop, granted), daemon=True).start()
        try:
            place = await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._workspace.release(granted.result(), used=False)
            raise
        return self._entered(place, in_loop=True)

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _check(self) -> None:
        if type(self._byte_size) is not int or self._byte_size < 1:
            raise Internal(f"a workspace has a positive number of bytes, not {self._byte_size!r}")
        if _HOLDS.get():
            raise Internal(
                "this execution has a workspace already: ask for all that it needs at once"
            )

    def _wait(self, loop: asyncio.AbstractEventLoop, granted: asyncio.Future[Range]) -> None:
        try:
            place = self._workspace.ask(self._byte_size)
        except Exception as error:
            tell = partial(_settle, granted, error)
        else:
            tell = partial(self._granted, granted, place)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the process ends
            loop.call_soon_threadsafe(tell)

    def _granted(self, granted: asyncio.Future[Range], place: Range) -> None:
        if granted.done():  # it was cancelled meanwhile
            self._workspace.release(place, used=False)
        else:
            granted.set_result(place)

    def _entered(self, place: Range, in_loop: bool) -> Any:
        try:
            view = self._seen_as(self._workspace.view(place))
        except BaseException:
            self._workspace.release(place, used=False)
            raise
        self._place = place
        self._token = _HOLDS.set(True)
        self._in_loop = in_loop
        self._workspace.coroutines += in_loop
        return view

    def _release(self) -> None:
        assert self._place is not None and self._token is not None
        with contextlib.suppress(ValueError):  # a generator's, that is closed from elsewhere
            _HOLDS.reset(self._token)
        self._workspace.coroutines -= self._in_loop
        self._workspace.release(self._place)


def _settle(granted: asyncio.Future[Range], error: Exception) -> None:
    if not granted.done():
        granted.set_exception(error)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
