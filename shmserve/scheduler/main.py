"""Entry point of a scheduler process."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

from shmserve import logs
from shmserve.common.access.peer_credentials import admit_group
from shmserve.common.access.shm_access import NO_GROUP
from shmserve.ipc import endpoints, processes
from shmserve.ipc.capabilities import Capabilities
from shmserve.ipc.memory.lent import LentMemory
from shmserve.ipc.messages import SchedulerReady
from shmserve.ipc.messages.start import SchedulerStart, decode
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport.dealer import Dealer
from shmserve.ipc.transport.peercred_router import PeerCredRouter, first_number, last_number
from shmserve.scheduler.core import Scheduler
from shmserve.scheduler.local_clients import ClientRouters, LocalClientListener
from shmserve.scheduler.loop import scheduler_loop
from shmserve.scheduler.response_cache.cache import ResponseCache
from shmserve.scheduler.settings import Settings

PARTING_S = 0.3  # for the last responses to leave


def run(data: bytes) -> None:
    """Schedule one model version until told to stop; `data` is an encoded `SchedulerStart`."""
    start, settings = begin(data, "scheduler")
    number, run_dir = start.number, start.run_dir
    clients = PeerCredRouter(endpoints.scheduler(run_dir, number), first_number)
    workers = PeerCredRouter(endpoints.instances(run_dir, number), last_number)
    control = Dealer(endpoints.control(run_dir), f"scheduler.{number}.{os.getpid()}")
    listener = open_listener(start)
    control.send(SchedulerReady(os.getpid()))
    scheduler = Scheduler(
        settings,
        ClientRouters(clients, listener),
        workers,
        control,
        time.time_ns,
        open_cache(start, settings, LentMemory(start.arena_byte_size)),
    )
    if start.kept:
        scheduler.go_on(start.kept, start.alive, time.monotonic_ns())
    gc.freeze()  # what is here now stays: no collection needs to look at it
    try:
        scheduler_loop(scheduler, control, workers, clients, listener).run()
    finally:
        for link in (clients, workers, control, listener.link):
            link.close(PARTING_S)


def begin(data: bytes, role: str) -> tuple[SchedulerStart, Settings]:
    """What the process was started with; it gets its name, its log, and its signals."""
    start = decode(SchedulerStart, data)
    settings = Settings.read(start.config, start.version, start.limits)
    logs.configure(f"{role} {settings.name}", start.log)
    processes.name_process(f"{role} {settings.name}")
    # When it ends is the supervisor's decision: a terminal's Ctrl-C reaches every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.exact_timers()
    return start, settings


def open_cache(start: SchedulerStart, settings: Settings, lent: LentMemory) -> ResponseCache | None:
    """The response cache of the model version that is to be scheduled, if it has one."""
    if not settings.cached or not start.cache.byte_size:
        return None
    return ResponseCache(settings.name, settings.version, start.cache, lent)


def open_listener(start: SchedulerStart) -> LocalClientListener:
    """The listener for local clients of the model version that is to be scheduled."""
    endpoint = endpoints.local_clients(start.run_dir, start.number)
    listener = LocalClientListener(
        endpoint,
        Capabilities(start.capability_key),
        Signature(start.config, start.version),
        start.limits.request_timeout_us,
    )
    if start.group != NO_GROUP:
        admit_group(Path(endpoint.removeprefix("ipc://")), start.group)
    return listener
