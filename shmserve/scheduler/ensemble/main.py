"""Entry point of an ensemble's process."""

from __future__ import annotations

import gc
import os
import time
from typing import get_args

from shmserve.ipc import endpoints
from shmserve.ipc.memory.lent import LentMemory
from shmserve.ipc.messages import MemoryDropped, SchedulerReady, SupervisorToEnsemble
from shmserve.ipc.transport.dealer import Dealer
from shmserve.ipc.transport.peercred_router import PeerCredRouter, first_number
from shmserve.scheduler.ensemble.core import Ensemble
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.steps.links import StepSchedulers
from shmserve.scheduler.local_clients import ClientRouters
from shmserve.scheduler.loop import Loop
from shmserve.scheduler.main import PARTING_S, begin, open_cache, open_listener
from shmserve.scheduler.waiting import Waiter


def run(data: bytes) -> None:
    """Run one ensemble until told to stop; `data` is an encoded `SchedulerStart`."""
    start, settings = begin(data, "ensemble")
    number, run_dir = start.number, start.run_dir
    clients = PeerCredRouter(endpoints.scheduler(run_dir, number), first_number)
    control = Dealer(endpoints.control(run_dir), f"ensemble.{number}.{os.getpid()}")
    listener = open_listener(start)
    control.send(SchedulerReady(os.getpid()))
    waiter = Waiter()
    steps = StepSchedulers(waiter, lambda: ensemble)
    lent = LentMemory(start.arena_byte_size)
    memory = EnsembleMemory(lent, lambda memory_id: control.post(MemoryDropped(memory_id)))
    ensemble = Ensemble(
        settings,
        start.config,
        ClientRouters(clients, listener),
        steps,
        control,
        memory,
        time.time_ns,
        open_cache(start, settings, lent),
    )
    if start.kept:
        ensemble.go_on(start.kept, time.monotonic_ns())
    # Steps before clients: who waits for their last words hears them first.
    outboxes = (steps, clients, listener.link, control)
    gc.freeze()  # what is here now stays: no collection needs to look at it
    try:
        Loop(ensemble, waiter, {}, outboxes, control, _FROM_CONTROL, clients, listener).run()
    finally:
        steps.close()
        for link in (clients, control, listener.link):
            link.close(PARTING_S)
        memory.close()


# What a peer may say: a well-formed message in the wrong direction is garbage too.
_FROM_CONTROL = frozenset(get_args(SupervisorToEnsemble))
