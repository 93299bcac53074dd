"""A simulated ensemble's process: the real core, which is a client of its steps' schedulers."""

from __future__ import annotations

from typing import Any

from shmserve.errors import Unavailable
from shmserve.ipc.messages import inference as m
from tests.simulation.scheduler import SchedulerProcess
from tests.simulation.world import Link, Process


class StepLinks:
    """The links of an ensemble to its steps' schedulers, `hosts` by endpoint."""

    def __init__(self, process: Process, hosts: dict[str, SchedulerProcess]) -> None:
        self._process = process
        self._hosts = hosts
        self._links: dict[str, tuple[bytes, Link]] = {}
        self._moved: dict[str, str] = {}
        self.take: Any = None

    def _open(self, endpoint: str) -> Link:
        known = self._links.get(endpoint)
        if known is None:
            peer = b"%d.%d" % (self._process.pid, len(self._links))
            link = self._hosts[endpoint].connect_client(
                peer, self._process, lambda messages: self.take(endpoint, messages)
            )
            known = self._links[endpoint] = (peer, link)
        return known[1]

    def links(self) -> list[Link]:
        """All of them."""
        return [link for _, link in self._links.values()]

    def submit(self, endpoint: str, message: m.Submit) -> None:
        """As `StepLinks` says."""
        if endpoint not in self._hosts:
            raise Unavailable("no link to a scheduler can be made")
        self._open(endpoint).post(message)

    def tell(self, endpoint: str, message: Any) -> None:
        """As `StepLinks` says."""
        while endpoint in self._moved:
            endpoint = self._moved[endpoint]
        if endpoint in self._links:
            self._links[endpoint][1].post(message)

    def lose(self, endpoint: str, successor: str) -> None:
        """As `StepLinks` says."""
        if endpoint not in self._links or endpoint in self._moved:
            return
        if successor:
            self._moved[endpoint] = successor
            self._open(successor)
        self._hosts[endpoint].back(self._links[endpoint][0]).drain()


class EnsembleProcess(SchedulerProcess):
    """The scheduler of an ensemble, in a process of its own."""

    def _peers(self) -> Any:
        self.steps = StepLinks(self, self.hosts)
        self.steps.take = self._from_steps
        return self.steps

    def links(self) -> list[Link]:
        """All links from here."""
        return [*super().links(), *self.steps.links()]

    def _from_steps(self, endpoint: str, messages: list[Any]) -> None:
        for message in messages:
            self.world.note(endpoint, "->", self.title, message)
            self.hosted.from_peer(endpoint, message, self.world.now_ns)
        self._turn()
