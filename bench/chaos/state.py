"""The resources that must not grow during the test, and the readiness that a client sees."""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass

from tests.faults.scene import State
from tests.support import servers
from tests.support.servers import Server
from tests.support.waiting import until

_SETTLE_S = 15.0
_MAX_THREAD_GROWTH = 4
# Allowed growth in bytes. A worker shares 40 MB with its zygote and the zygote's other children.
# When another zygote replaces that zygote, the worker's memory counts in full.
_MAX_MEMORY_GROWTH = 640 << 20
_MAX_PROCESS_GROWTH = 160 << 20
_PROBE_S = 0.05


@dataclass(frozen=True)
class ServerResources:
    """The resources that a server without load uses."""

    state: State
    threads: Counter[str]
    shm: frozenset[str]

    @staticmethod
    def of(server: Server) -> ServerResources:
        """Return the resources that the server uses now."""
        threads: Counter[str] = Counter()
        for process in server.tree():
            with contextlib.suppress(OSError):
                threads[servers.title(process)] += len(os.listdir(f"/proc/{process.pid}/task"))
        return ServerResources(State.of(server), threads, frozenset(os.listdir("/dev/shm")))

    def differences(self, now: ServerResources) -> list[str]:
        """Return a line for each resource that has grown."""
        lines = self.state.differences(now.state, _MAX_MEMORY_GROWTH)
        for title, size in now.state.resident.items():
            growth = size - self.state.resident.get(title, size)
            if growth > _MAX_PROCESS_GROWTH and not title.endswith("zygote"):
                lines.append(f"memory of {title}: {growth >> 20} MiB more")
        for title, count in now.threads.items():
            if count > self.threads.get(title, 0) + _MAX_THREAD_GROWTH:
                lines.append(f"threads of {title}: {self.threads.get(title, 0)} became {count}")
        lines += [f"/dev/shm/{name}" for name in now.shm - self.shm]
        return lines

    def wait_restored(self, server: Server) -> list[str]:
        """Wait some seconds for the server to return to this state.

        Returns:
            The remaining differences.
        """
        remaining_texts: list[str] = []

        def is_restored() -> bool:
            remaining_texts[:] = self.differences(ServerResources.of(server))
            return not remaining_texts

        with contextlib.suppress(AssertionError):
            until("the server's resources are restored", is_restored, _SETTLE_S)
        return remaining_texts

    def as_text(self) -> str:
        """Return the totals of the server's resources as a line of text."""
        state = self.state
        return (
            f"{sum(state.titles.values())} processes, {sum(self.threads.values())} threads, "
            f"{sum(state.descriptors.values())} descriptors, {state.sockets} unix sockets, "
            f"{sum(state.resident.values()) >> 20} MiB, {len(self.shm)} objects in /dev/shm"
        )


class Probe:
    """A thread that polls the server's health.

    `slowest_s` is the longest time that a response took.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe")
        self.slowest_s = 0.0
        self.probe_count = 0
        self.not_ready_count = 0

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                self._server.http(10) as connection,
            ):
                while not self._stop.wait(_PROBE_S):
                    start_s = time.monotonic()
                    self.not_ready_count += connection.get("/v2/health/ready").status != 200
                    self.probe_count += 1
                    self.slowest_s = max(self.slowest_s, time.monotonic() - start_s)
