"""The scene of a fault test: a server, clients, and checks of both afterwards."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import psutil

from tests.support.leaks import resident_bytes, server_descriptors, unix_sockets
from tests.support.load import Load
from tests.support.request_pool import RequestPool, request_pool
from tests.support.servers import Server, without_short_lived
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, Reply, json_request

# Maximum seconds after any fault until every client receives correct responses again.
RECOVERY_S = 1.0
# Seconds after which a stopped process (SIGSTOP) counts as dead.
STOP_GRACE_S = 0.5
# Arena memory that a process keeps for later large tensors.
ARENA_BYTES = 64 << 20
_SETTLE_S = 5.0
_MORE_MEMORY = 48 << 20
_WORTH_A_WORD = 1 << 20
# A worker keeps its mappings of gateways: two descriptors for each of two gateways.
_MORE_DESCRIPTORS = 4

VALUES = np.array([[1, 2, 3, 4]], np.int32)


def crime(command: str) -> dict:
    return json_request(COMMAND=np.array([[command]], object), INPUT0=VALUES)


def start_processes(server: Server) -> tuple[psutil.Process, list[psutil.Process]]:
    """Let the model "crimes" start processes; return its worker, and the started processes."""
    worker = server.find_one("worker crimes.0")
    with server.http() as http:
        http.infer("crimes", crime("start")).ok()
    until("they run", lambda: len(worker.children(recursive=True)) == 3)
    return worker, worker.children(recursive=True)


def is_right(reply: Reply) -> bool:
    """Return whether the model "crimes" has responded normally."""
    return reply.status == 200 and bool((reply.tensors()["OUTPUT0"] == VALUES).all())


@dataclass(frozen=True)
class State:
    """The resources of a server, to be compared before and after a test."""

    titles: Counter[str]
    descriptors: dict[str, int]
    sockets: int
    resident: dict[str, int]

    @staticmethod
    def of(server: Server) -> State:
        return State(
            server.titles(),
            server_descriptors(server),
            unix_sockets(server.run_dir),
            resident_bytes(server),
        )

    def differences(self, later_state: State, more_memory: int) -> list[str]:
        found = []
        if later_state.titles != without_short_lived(self.titles):
            found.append(f"processes: {dict(self.titles)} became {dict(later_state.titles)}")
        for title, count in later_state.descriptors.items():
            previous = self.descriptors.get(title, 0)
            if count > previous + _MORE_DESCRIPTORS:
                found.append(f"descriptors of {title}: {previous} became {count}")
        if later_state.sockets > self.sockets + _MORE_DESCRIPTORS:
            found.append(f"unix sockets: {self.sockets} became {later_state.sockets}")
        total, now = sum(self.resident.values()), sum(later_state.resident.values())
        if now > total + _MORE_MEMORY + more_memory:
            grown = [
                f"{title} {previous >> 20} -> {size >> 20}"
                for title, size in later_state.resident.items()
                if size > (previous := self.resident.get(title, 0)) + _WORTH_A_WORD
            ]
            found.append(f"memory: {total >> 20} MiB became {now >> 20} MiB ({', '.join(grown)})")
        return found


@dataclass
class Scene:
    """The server and the clients of a fault test."""

    server: Server
    pool: RequestPool
    load: Load
    http: Http

    def process(self, title: str) -> psutil.Process:
        return self.server.find_one(title)

    def replaced(self, old_process: psutil.Process, title: str) -> None:
        wait_replaced(self.server, old_process, title)


def wait_replaced(
    server: Server,
    old_process: psutil.Process,
    title: str,
    within_s: float = RECOVERY_S + STOP_GRACE_S,
) -> None:
    until(
        f"{title} is replaced",
        lambda: any(process.pid != old_process.pid for process in server.find(title)),
        within_s,
    )


@contextlib.contextmanager
def scene(server: Server, more_memory: int = 0, regions: int = 1) -> Iterator[Scene]:
    """Run clients during the with block, and check the server's resources afterwards.

    Args:
        server: The server.
        more_memory: The bytes that the server may have allocated permanently.
        regions: The number of clients that pass tensors through shared memory.
    """
    state_before = State.of(server)
    with request_pool(server) as pool, Load(server, memory=regions) as load, server.http() as http:
        yield Scene(server, pool, load, http)
    until("the server is ready", lambda: server.answers("/v2/health/ready"), RECOVERY_S)
    assert_is_as_it_was(server, state_before, more_memory)


def assert_is_as_it_was(server: Server, state_before: State, more_memory: int) -> None:
    """Check that the server soon has its former resources, except for `more_memory` bytes."""
    differences: list[str] = []

    def is_as_before() -> bool:
        differences[:] = state_before.differences(State.of(server), more_memory)
        return not differences

    try:
        until("the server is what it was", is_as_before, _SETTLE_S)
    except AssertionError:
        raise AssertionError("; ".join(differences)) from None


def assert_recovers(stage: Scene, fault_time: float, within_s: float = RECOVERY_S) -> None:
    """Check that each client soon has a correct response to a request sent after `fault_time`."""
    late = stage.load.wait_answered(fault_time, max(0.01, fault_time + within_s - time.monotonic()))
    assert late <= within_s, f"took {late:.2f} s"
