"""CUDA IPC handles of regions, validated by workers: the supervisor touches no device.

Only workers open handles. At registration one that already uses the device is asked to; where none
does, or all are busy, the first request that uses the region finds out.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shmserve.common.host import CUDA_INVALID
from shmserve.errors import InvalidArgument, Unavailable, from_code
from shmserve.ipc.messages.supervision import CheckMemory, MemoryChecked
from shmserve.ipc.tensors.descriptors import Memory

logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0
_OpenCheck = tuple[list[int], asyncio.Future[MemoryChecked]]


@dataclass(eq=False)
class HandleCheck:
    """Asks workers whether a handle opens. `workers(device_id)` gives those on a device that are
    ready."""

    devices: int
    _workers: Callable[[int], list[int]]
    _send: Callable[[int, Any], None]
    _numbers: itertools.count[int] = field(init=False, default_factory=partial(itertools.count, 1))
    _open: dict[int, _OpenCheck] = field(init=False, default_factory=dict)

    async def check(self, memory: Memory) -> None:
        """Raise InvalidArgument for memory that a worker cannot open, Unavailable where no worker
        can open any."""
        handle = memory.cuda
        assert handle is not None
        if handle.device >= self.devices:
            raise InvalidArgument(f"{CUDA_INVALID} (the server has {self.devices} CUDA devices)")
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
            async with asyncio.timeout(_PATIENCE_S):
                response = await future
        except TimeoutError:
            logger.info("no worker had time to look at a CUDA handle; its first request will")
            return
        finally:
            del self._open[number]
        if response.code == InvalidArgument.code:
            raise InvalidArgument(f"{CUDA_INVALID} ({response.message})")
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
