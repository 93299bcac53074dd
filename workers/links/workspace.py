"""A worker's end of its device's workspace pool: memory for the time of an execution."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from shmserve.errors import Internal, InvalidArgument
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import LeaseWorkspace, ReturnWorkspace
from shmserve.ipc.tensors.descriptors import unpack_place
from shmserve.workers.links.supervisor import Control


class Workspace:
    """Leases of one instance, on `device` (torch's name). `settle(number)` waits until a CUDA
    device has done what this process asked of it."""

    def __init__(
        self,
        control: Control,
        mappings: Mappings,
        device: str,
        settle: Callable[[int], None],
    ) -> None:
        self._control = control
        self._mappings = mappings
        self._device = device
        self._settle = settle
        self._held = threading.local()

    @contextlib.contextmanager
    def lease(self, byte_size: int) -> Iterator[Any]:
        """So many bytes in the with block, as a writable memoryview, or a tensor of uint8 on the
        device; what is in them is anybody's. Waits until the pool has them.

        Raises InvalidArgument for what is no positive integer or more than the whole pool,
        Unavailable where the device has no pool, Internal for a second lease of the same thread:
        two such, each waiting for what the other has, would wait for ever.
        """
        if type(byte_size) is not int or byte_size < 1:
            raise InvalidArgument(f"a workspace has a positive number of bytes, not {byte_size!r}")
        if getattr(self._held, "here", False):
            raise Internal(
                "this execution has a workspace already: ask for all that it needs at once"
            )
        granted = self._control.ask(lambda number: LeaseWorkspace(number, self._device, byte_size))
        self._held.here = True
        place = replace(unpack_place(granted["place"]), byte_size=byte_size)
        try:
            view = self._mappings.view(place)
            try:
                yield view
            finally:
                if place.memory.cuda is not None:
                    # Who has it next may be another process, whose work is in no order with ours.
                    self._settle(place.memory.cuda.device)
        finally:
            self._held.here = False
            self._control.send(ReturnWorkspace(self._device, place.memory.id, place.offset))
