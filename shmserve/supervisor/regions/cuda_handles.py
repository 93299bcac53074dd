"""CUDA IPC handles of regions, validated by workers (the supervisor touches no device), and the
lifetime of the process that exported one.

Only workers open handles. At registration one that already uses the device is asked to; where none
does, or all are busy, the first request that uses the region finds out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

from shmserve.common.cuda_errors import INVALID
from shmserve.errors import InvalidArgument, ShmserveError, Unavailable, from_code
from shmserve.ipc.messages import CheckMemory, MemoryChecked
from shmserve.ipc.tensors.descriptors import Memory

logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0


class HandleCheck:
    """Asks workers whether a handle opens. `workers(device_id)` gives those on a device that are
    ready."""

    def __init__(
        self,
        devices: int,
        workers: Callable[[int], list[int]],
        send: Callable[[int, Any], None],
    ) -> None:
        self.devices = devices
        self._workers = workers
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[list[int], asyncio.Future[MemoryChecked]]] = {}

    async def check(self, memory: Memory) -> None:
        """Raise InvalidArgument for memory that a worker cannot open, Unavailable where no worker
        can open any."""
        handle = memory.cuda
        assert handle is not None
        if handle.device >= self.devices:
            raise InvalidArgument(f"{INVALID} (the server has {self.devices} CUDA devices)")
        workers = list(self._workers(handle.device))
        if not workers:
            return
        number = next(self._numbers)
        future: asyncio.Future[MemoryChecked] = asyncio.get_running_loop().create_future()
        self._open[number] = workers, future
        for pid in workers:
            self._send(
                pid, CheckMemory(number, handle.raw, handle.device, handle.uuid, memory.byte_size)
            )
        try:
            response = await asyncio.wait_for(future, _PATIENCE_S)
        except TimeoutError:
            logger.info("no worker had time to look at a CUDA handle; its first request will")
            return
        finally:
            del self._open[number]
        if response.code == InvalidArgument.code:
            raise InvalidArgument(f"{INVALID} ({response.message})")
        if response.code:
            raise from_code(response.code, response.message)

    def checked(self, pid: int, message: MemoryChecked) -> None:
        """The response of worker `pid`; of those who were asked the first counts that can use the
        device, or the last."""
        workers, future = self._open.get(message.id, ([], None))
        if future is None or pid not in workers or future.done():
            return
        workers.remove(pid)
        if message.code != Unavailable.code or not workers:
            future.set_result(message)


class ExporterWatch:
    """The process that owns a region's memory; `on_exit` is called in the loop when it ends."""

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            raise _gone() from error
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ended, on_exit)

    def _ended(self, on_exit: Callable[[], None]) -> None:
        self._loop.remove_reader(self._fd)
        on_exit()

    def close(self) -> None:
        """Stop watching."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.remove_reader(self._fd)
        os.close(self._fd)


def _gone() -> ShmserveError:
    return InvalidArgument(f"{INVALID} (the process that exported it is gone)")
