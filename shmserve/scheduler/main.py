"""Entry point of a process that hosts schedulers."""

from __future__ import annotations

import signal

from shmserve import logs
from shmserve.ipc import processes
from shmserve.ipc.memory.c_library import keep_no_large_memory
from shmserve.ipc.messages.supervision import HostStart, decode_start
from shmserve.scheduler.hosting.host import Host


def run(data: bytes) -> None:
    """Host schedulers until told to stop; `data` is an encoded `HostStart`."""
    start = decode_start(HostStart, data)
    logs.configure(start.title, start.log)
    processes.name_process(start.title)
    # When it ends is the supervisor's decision: a terminal's Ctrl-C reaches every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.exact_timers()
    keep_no_large_memory()
    Host(start).run()
