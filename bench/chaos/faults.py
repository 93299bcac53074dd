"""The table of faults.

Each fault occurs under load, and ends when every client receives correct responses again.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.chaos.ledger import Fault, Ledger
from bench.chaos.loads import REGIONS
from tests.faults.scene import crime, is_right
from tests.support import servers
from tests.support.regions import SharedObject
from tests.support.servers import Server
from tests.support.wire.raw_http import raw_connection

# Maximum seconds until all clients are served again after any fault.
RECOVERY_LIMIT_S = 60.0
_SHM = Path("/dev/shm")


@dataclass
class Host:
    """The facilities of the host for faults.

    Attributes:
        private_shm: Whether /dev/shm belongs to this run alone, and may be filled.
        cgroup: The control group (version 1) of the server, or None.
        clock: The file with the offset of the server's wall clock in seconds, or None.
        missing_faults: The faults that cannot be injected, with the reasons.
    """

    private_shm: bool = False
    cgroup: Path | None = None
    clock: Path | None = None
    missing_faults: list[str] = field(default_factory=list)


@dataclass
class Stage:
    """The context of a fault: the server, its clients, the host and the ledger."""

    server: Server
    ledger: Ledger
    host: Host
    rng: random.Random
    kills: int = 0
    _victims: list[str] = field(default_factory=list)

    @contextmanager
    def fault(self, fault_name: str) -> Iterator[Fault]:
        """Record a fault during the block, and wait until all clients are served again.

        Yields:
            The fault. Its `since` may be set to the time at which the cause was removed.
        """
        fault = self.ledger.begin(fault_name)
        started_at = fault.since
        yield fault
        since, fault.since = fault.since, started_at
        self.ledger.wait_recovered(fault, since, RECOVERY_LIMIT_S, self._is_ready)

    def _is_ready(self) -> bool:
        return self.server.answers("/v2/health/ready")

    def victim(self) -> psutil.Process | None:
        """Return a process of the server to kill, except for the supervisor.

        Each process is chosen in turn, so that none dies so often that its restart is delayed.
        """
        processes = {servers.title(process): process for process in self.server.tree()[1:]}
        if not self._victims:
            self._victims = sorted(processes)
            self.rng.shuffle(self._victims)
        return processes.get(self._victims.pop())


def _no_fault(stage: Stage) -> None:
    """Inject no fault: measure the time until all clients are served, for comparison."""
    with stage.fault("nothing"):
        pass


def _signal(verb: str, number: signal.Signals) -> Callable[[Stage], None]:
    def inject(stage: Stage) -> None:
        victim = stage.victim()
        if victim is None:
            return
        with (
            stage.fault(f"{verb} {servers.title(victim)}") as fault,
            contextlib.suppress(psutil.NoSuchProcess),
        ):
            victim.send_signal(number)
            stage.kills += 1
            fault.since = time.monotonic()

    return inject


def _pause(stage: Stage) -> None:
    victim = stage.victim()
    if victim is None:
        return
    with (
        stage.fault(f"pause {servers.title(victim)}") as fault,
        contextlib.suppress(psutil.NoSuchProcess),
    ):
        victim.suspend()
        time.sleep(stage.rng.uniform(0.02, 0.3))
        victim.resume()
        fault.since = time.monotonic()


def _model(verb: str, command: str, error: str = "") -> Callable[[Stage], None]:
    """Return a fault that makes a model fail by one request. Only that request may fail."""

    def inject(stage: Stage) -> None:
        with stage.fault(f"{verb} {command}") as fault, stage.server.http() as http:
            reply = http.infer("crimes", crime(command))
            fault.since = time.monotonic()
            if reply.status not in (500, 503) or error not in reply.error:
                text = f"{reply.status} {reply.body!r}, expected an error 500 or 503 with '{error}'"
                stage.ledger.fail(f"the command '{command}' of a model: {text}")
            if not is_right(http.infer("crimes", crime("ok"))):
                stage.ledger.fail(f"no correct response after the command '{command}' of a model")

    return inject


def _leak(stage: Stage) -> None:
    """Let a model exceed the memory of its control group. Only its process may be killed."""
    if stage.host.cgroup is None:
        return
    limit = stage.host.cgroup / "memory.limit_in_bytes"
    used_bytes = int((stage.host.cgroup / "memory.usage_in_bytes").read_text())
    limit.write_text(str(used_bytes + (192 << 20)))
    try:
        _model("leak", "leak")(stage)
    finally:
        limit.write_text("-1")


def _truncate_region(stage: Stage) -> None:
    shared_object = stage.rng.choice([*REGIONS.values()] or [None])
    if shared_object is None:
        return
    with stage.fault("region cut") as fault, contextlib.suppress(OSError):
        shared_object.truncate(stage.rng.choice([0, 4096, shared_object.byte_size // 2]))
        time.sleep(0.1)
        shared_object.truncate(shared_object.byte_size)
        fault.since = time.monotonic()


def _unlink(stage: Stage) -> None:
    """Unlink the name of a shared memory object. Its registrations must remain valid."""
    shared_object = stage.rng.choice([*REGIONS.values()] or [None])
    if shared_object is not None:
        with stage.fault("unlink region"):
            shared_object.path.unlink(missing_ok=True)


def _fill(stage: Stage) -> None:
    """Fill /dev/shm, and register a shared memory object that has no pages yet."""
    if not stage.host.private_shm:
        return
    filler = _SHM / "full"
    with stage.fault("full /dev/shm") as fault, SharedObject(1 << 20) as empty_object:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass
        with stage.server.http() as http:
            reply = http.register(empty_object.name, empty_object.key, 1 << 20)
            if reply.status not in (200, 400, 503):
                text = f"{reply.status} {reply.body!r}, expected 200, 400 or 503"
                stage.ledger.fail(f"registration while /dev/shm is full: {text}")
            if reply.status == 200:
                http.unregister(empty_object.name)
        time.sleep(0.2)
        filler.unlink()
        fault.since = time.monotonic()


def _reload(stage: Stage) -> None:
    """Reload a model under load. No request may fail."""
    with stage.fault("reload swap"), stage.server.http() as http:
        http.post("/v2/repository/models/swap/load").ok()


def _unload(stage: Stage) -> None:
    """Unload a model for a while. Requests for the model must fail with the right error."""
    with stage.fault("unload swap") as fault, stage.server.http() as http:
        http.post("/v2/repository/models/swap/unload").ok()
        if http.get("/v2/models/swap/ready").status == 200:
            stage.ledger.fail("an unloaded model is reported as ready")
        time.sleep(stage.rng.uniform(0, 0.2))
        http.post("/v2/repository/models/swap/load").ok()
        if http.get("/v2/models/swap/ready").status != 200:
            stage.ledger.fail("a loaded model is reported as not ready")
        fault.since = time.monotonic()


def _descriptors(stage: Stage) -> None:
    """Exhaust the file descriptors of a gateway while clients connect."""
    gateway = stage.rng.choice(stage.server.find("gateway"))
    is_grpc = "grpc" in servers.title(gateway)
    port = stage.server.grpc_port if is_grpc else stage.server.http_port
    with (
        stage.fault("descriptors of a gateway") as fault,
        contextlib.ExitStack() as stack,
        contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError),
    ):
        limits = gateway.rlimit(resource.RLIMIT_NOFILE)
        limit = len(os.listdir(f"/proc/{gateway.pid}/fd")) + 2
        gateway.rlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
        for _ in range(16):
            stack.enter_context(raw_connection(port))
        time.sleep(0.2)
        gateway.rlimit(resource.RLIMIT_NOFILE, limits)
        fault.since = time.monotonic()


def _clock(stage: Stage) -> None:
    """Set the wall clock forward and back."""
    if stage.host.clock is None:
        return
    # The server's processes have mapped this file, so its content is changed in place.
    with stage.host.clock.open("r+b", buffering=0) as clock:
        for jump_s in (stage.rng.randint(-(10**6), 10**6), 0):
            with stage.fault("clock jumps"):
                clock.seek(0)
                clock.write(jump_s.to_bytes(8, "little", signed=True))


class Entry(NamedTuple):
    """A fault in the table, and how often it is drawn."""

    weight: int
    inject: Callable[[Stage], None]


FAULTS = (
    Entry(3, _no_fault),
    Entry(60, _signal("kill", signal.SIGKILL)),
    Entry(15, _signal("crash", signal.SIGSEGV)),
    Entry(6, _signal("stop", signal.SIGSTOP)),
    Entry(6, _pause),
    Entry(1, _model("raise", "raise", "ValueError: raised as you wished")),
    Entry(1, _model("raise", "error", "as you wished")),
    Entry(1, _model("crash", "exit")),
    Entry(1, _model("crash", "segfault")),
    Entry(1, _model("hang", "hang")),
    Entry(1, _leak),
    Entry(2, _truncate_region),
    Entry(2, _unlink),
    Entry(1, _fill),
    Entry(2, _reload),
    Entry(2, _unload),
    Entry(2, _descriptors),
    Entry(1, _clock),
)


def draw(rng: random.Random) -> Callable[[Stage], None]:
    """Return a random fault, according to the weights of the table."""
    (entry,) = rng.choices(FAULTS, [entry.weight for entry in FAULTS])
    return entry.inject
