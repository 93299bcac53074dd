"""The holder of a CUDA device's workspace pool, a process: it allocates the memory and exports it,
and does nothing more for as long as it lives. The supervisor, which knows who has what of it,
touches no device.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from shmserve import logs
from shmserve.ipc import endpoints, processes
from shmserve.ipc.memory.cuda_ipc import Driver, Exporting
from shmserve.ipc.memory.device_allocation import DeviceAllocation
from shmserve.ipc.messages import SetLogging, Stop, WorkspaceAllocated
from shmserve.ipc.messages.start import WorkspaceStart, decode
from shmserve.ipc.transport.dealer import Dealer


def run(data: bytes, cuda: Callable[[], Exporting] = Driver) -> None:
    """Hold the memory until told to stop; `data` is an encoded `WorkspaceStart`.

    Raises InvalidArgument for a device that is not there, Unavailable where there is no CUDA, or
    the device has not so much memory.
    """
    start = decode(WorkspaceStart, data)
    title = f"workspace cuda:{start.device_id}"
    logs.configure(title, start.log)
    processes.name_process(title)
    # When it ends is the supervisor's decision: a terminal's Ctrl-C reaches every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hold(start, cuda())


def hold(start: WorkspaceStart, cuda: Exporting) -> None:
    """Allocate, tell the supervisor, and wait."""
    allocation = DeviceAllocation(cuda, start.device_id, start.byte_size)
    control = Dealer(endpoints.control(start.run_dir), f"workspace.{os.getpid()}")
    control.send(WorkspaceAllocated(allocation.handle.raw, allocation.handle.uuid))
    try:
        while control.connected:
            control.wait(None)
            for message in control.receive():
                match message:
                    case Stop():
                        return
                    case SetLogging(settings):
                        logs.apply(logs.LogSettings(**settings))
    finally:
        control.close()
