"""Entry point of a scheduler process."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

from shmserve import logs
from shmserve.common.group_access import admit_group
from shmserve.common.shm_access import NO_GROUP
from shmserve.ipc import endpoints, processes
from shmserve.ipc.capabilities import Capabilities
from shmserve.ipc.messages import SchedulerReady
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport.dealer import Dealer
from shmserve.ipc.transport.peercred_router import PeerCredRouter, first_number, last_number
from shmserve.scheduler.core import Scheduler
from shmserve.scheduler.local_clients import Fronts, LocalClientListener
from shmserve.scheduler.loop import Loop
from shmserve.scheduler.settings import Settings

_PARTING_S = 0.3  # for the last answers to leave


def run(args: dict[str, Any]) -> None:
    """Schedule one model version until told to stop.

    `args`: number (of this scheduler), version, config (normalised), run_dir, settings
    (execution_timeout_s, request_timeout_us, max_queue_size, delay_scheduler), log (`LogSettings`
    by name), kept and alive (what `Scheduler.go_on` takes, of a predecessor that died; empty for
    the first), and local clients (key, group: -1 for none).
    """
    server = args["settings"]
    settings = Settings.read(args["config"], args["version"], server)
    logs.configure(f"scheduler {settings.name}", logs.LogSettings(**args["log"]))
    processes.name_process(f"scheduler {settings.name}")
    # When it ends is the supervisor's decision: a terminal's Ctrl-C reaches every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.exact_timers()

    number, run_dir = args["number"], Path(args["run_dir"])
    clients = PeerCredRouter(endpoints.scheduler(run_dir, number), first_number)
    workers = PeerCredRouter(endpoints.instances(run_dir, number), last_number)
    control = Dealer(endpoints.control(run_dir), f"scheduler.{number}.{os.getpid()}")
    listener = _open_listener(args, run_dir)
    control.send(SchedulerReady(os.getpid()))
    scheduler = Scheduler(settings, Fronts(clients, listener), workers, control, time.time_ns)
    if args["kept"]:
        scheduler.go_on(args["kept"], args["alive"], time.monotonic_ns())
    gc.freeze()  # what is here now stays: no collection needs to look at it
    try:
        Loop(scheduler, control, workers, clients, listener).run()
    finally:
        for link in (clients, workers, control, listener.link):
            link.close(_PARTING_S)


def _open_listener(args: dict[str, Any], run_dir: Path) -> LocalClientListener:
    endpoint = endpoints.local_clients(run_dir, args["number"])
    signature = Signature(args["config"], args["version"])
    limit_us = int(args["settings"].get("request_timeout_us") or 0)
    listener = LocalClientListener(
        endpoint, Capabilities(args["guests"]["key"]), signature, limit_us
    )
    group: int = args["guests"]["group"]
    if group != NO_GROUP:
        admit_group(Path(endpoint.removeprefix("ipc://")), group)
    return listener
