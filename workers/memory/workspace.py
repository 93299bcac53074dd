"""Leases of memory from the workspace pool of a device or of the host, for one execution.

with lease:           blocks the thread until the pool has enough memory
async with lease:     suspends the coroutine; other coroutines of its event loop continue
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
from shmserve.workers.links import SupervisorLink

# Whether the current execution (of a thread or a coroutine) has a workspace.
_HAS_WORKSPACE: ContextVar[bool] = ContextVar("holds_workspace", default=False)


def _identity(view: Any) -> Any:
    return view


@dataclass(eq=False)
class Workspace:
    """The workspace leases of one instance.

    Attributes:
        mappings: The mapped memories, including the pool.
        _synchronize: Waits until a CUDA device has completed the work of this process.
        coroutine_count: The number of coroutines that have a lease.
    """

    _control: SupervisorLink
    mappings: Mappings
    _device: str
    _synchronize: Callable[[int], None]
    coroutine_count: int = 0

    def lease(self, byte_size: int, convert: Callable[[Any], Any] = _identity) -> LeasedWorkspace:
        """Return a lease for a `with` block. The contents of its memory are undefined.

        Args:
            byte_size: The number of bytes.
            convert: Converts the memory, a writable memoryview or a uint8 tensor on the device, to
                the value of the `with` block.
        """
        return LeasedWorkspace(self, byte_size, convert)

    def ask(self, byte_size: int) -> Range:
        """Wait until the pool has `byte_size` free bytes, and lease them.

        Raises:
            Internal: The pool is smaller than `byte_size`.
            Unavailable: The device has no pool.
        """
        try:
            reply = self._control.ask(LeaseWorkspace, self._device, byte_size)
        except InvalidArgument as error:  # this is an error of the model, not of a client
            raise Internal(error.message) from None
        return replace(unpack_range(reply["place"]), byte_size=byte_size)

    def release(self, memory_range: Range, was_used: bool = True) -> None:
        """End a lease.

        Raises:
            DeviceLost: This process cannot use the device any more.
        """
        if was_used and memory_range.memory.cuda is not None:
            # The next lease may be another process's, whose work on the device is not ordered after
            # this process's work.
            self._synchronize(memory_range.memory.cuda.device)
        memory, offset = memory_range.memory, memory_range.offset
        self._control.send(ReturnWorkspace(self._device, memory.id, offset))


class LeasedWorkspace:
    """A lease for a `with` block, or for an `async with` block of a coroutine.

    Raises:
        Internal: On entry, if the size is not positive or exceeds the pool. Also if the execution
            already has a lease, since two executions could deadlock. Also if another execution is
            within the block of this lease. Also if a coroutine would block the event loop while
            another coroutine has a lease.
        Unavailable: On entry, if the device has no pool.
    """

    def __init__(self, workspace: Workspace, byte_size: int, convert: Callable[[Any], Any]) -> None:
        self._workspace = workspace
        self._byte_size = byte_size
        self._convert = convert
        self._memory_range: Range | None = None
        self._token: Token[bool] | None = None
        self._in_loop = False

    def __enter__(self) -> Any:
        self._check()
        in_loop = _in_event_loop()
        if self._workspace.coroutine_count and in_loop:
            raise Internal(
                "'with' would block the event loop while another coroutine of this model has a "
                "workspace: use 'async with'"
            )
        return self._enter(self._workspace.ask(self._byte_size), in_loop)

    def __exit__(self, *_: object) -> None:
        self._release()

    async def __aenter__(self) -> Any:
        self._check()
        loop = asyncio.get_running_loop()
        lease: asyncio.Future[Range] = loop.create_future()
        # One thread for each waiting coroutine, so that no other work of the model is blocked.
        threading.Thread(target=self._wait, args=(loop, lease), daemon=True).start()
        try:
            memory_range = await lease
        except asyncio.CancelledError:
            if lease.done() and not lease.cancelled() and lease.exception() is None:
                self._workspace.release(lease.result(), was_used=False)
            raise
        return self._enter(memory_range, in_loop=True)

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _check(self) -> None:
        if type(self._byte_size) is not int or self._byte_size < 1:
            raise Internal(f"workspace: the number of bytes must be > 0, got {self._byte_size!r}")
        if _HAS_WORKSPACE.get():
            raise Internal("this execution has a workspace already: request all memory at once")

    def _wait(self, loop: asyncio.AbstractEventLoop, lease: asyncio.Future[Range]) -> None:
        memory_range: Range | None = None
        try:
            memory_range = self._workspace.ask(self._byte_size)
        except Exception as error:
            complete = partial(_fail, lease, error)
        else:
            complete = partial(self._complete_lease, lease, memory_range)
        try:
            loop.call_soon_threadsafe(complete)
        except RuntimeError:  # the model has closed the loop, or the process exits
            if memory_range is not None:
                self._workspace.release(memory_range, was_used=False)

    def _complete_lease(self, lease: asyncio.Future[Range], memory_range: Range) -> None:
        if lease.done():  # the coroutine was cancelled in the meantime
            self._workspace.release(memory_range, was_used=False)
        else:
            lease.set_result(memory_range)

    def _enter(self, memory_range: Range, in_loop: bool) -> Any:
        try:
            if self._memory_range is not None:
                raise Internal("this workspace is used by another execution: request one for each")
            view = self._convert(self._workspace.mappings.view(memory_range))
        except BaseException:
            self._workspace.release(memory_range, was_used=False)
            raise
        self._memory_range = memory_range
        self._token = _HAS_WORKSPACE.set(True)
        self._in_loop = in_loop
        self._workspace.coroutine_count += in_loop
        return view

    def _release(self) -> None:
        assert self._memory_range is not None and self._token is not None
        # ValueError: the block is in a generator that was closed in another context.
        with contextlib.suppress(ValueError):
            _HAS_WORKSPACE.reset(self._token)
        self._workspace.coroutine_count -= self._in_loop
        memory_range, self._memory_range = self._memory_range, None
        self._workspace.release(memory_range)


def _fail(lease: asyncio.Future[Range], error: Exception) -> None:
    if not lease.done():
        lease.set_exception(error)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
