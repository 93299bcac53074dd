"""The simulated process of an ensemble: the real core, a client of its steps' schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmserve.errors import Unavailable
from shmserve.ipc.messages import inference as m
from tests.simulation.scheduler import SchedulerProcess
from tests.simulation.world import Link


class StepLinks:
    """The links to the steps' schedulers in `hosts`; those in the same process are called."""

    def __init__(self, process: SchedulerProcess, take: Callable[[str, Any], None]) -> None:
        self._process = process
        self._hosts = process.hosts
        self._links: dict[str, tuple[bytes, Link]] = {}
        self._take = take
        self._in_process_links = process.host.in_process_links
        self.identity = b"%d.h%s" % (process.pid, process.endpoint.encode())
        self._in_process_links.register(self.identity, take)

    def _link(self, endpoint: str) -> Link:
        known_link = self._links.get(endpoint)
        if known_link is None:
            peer = b"%s.%d" % (self.identity, len(self._links))
            link = self._hosts[endpoint].connect_client(
                peer, self._process, lambda messages: self._receive(endpoint, messages)
            )
            known_link = self._links[endpoint] = (peer, link)
        return known_link[1]

    def _receive(self, endpoint: str, messages: list[Any]) -> None:
        for message in messages:
            self._take(endpoint, message)
        self._process.run_turns()

    def links(self) -> list[Link]:
        return [link for _, link in self._links.values()]

    def open(self, endpoint: str) -> None:
        if not self._in_process_links.is_registered(endpoint):
            if endpoint not in self._hosts:
                raise Unavailable("cannot connect to a scheduler")
            self._link(endpoint)

    def queue(self, endpoint: str, message: m.Submit, byte_size: int) -> None:
        if not self._in_process_links.post(endpoint, self.identity, message):
            self.open(endpoint)
            self._link(endpoint).post(message)

    def post(self, endpoint: str, message: Any) -> None:
        is_sent = self._in_process_links.post(endpoint, self.identity, message)
        if not is_sent and endpoint in self._links:
            self._link(endpoint).post(message)

    defer = post

    def drain(self, endpoint: str, take: Callable[[str, Any], None]) -> None:
        if endpoint in self._links:
            reverse_link = self._hosts[endpoint].link_of(self._links[endpoint][0])
            reverse_link.drain()
            reverse_link.close()


class EnsembleProcess(SchedulerProcess):
    def _peers(self) -> Any:
        self.steps = StepLinks(self, self._from_step)
        return self.steps

    def die(self) -> None:
        super().die()
        self.host.in_process_links.remove(self.steps.identity)

    def links(self) -> list[Link]:
        return [*super().links(), *self.steps.links()]

    def _from_step(self, endpoint: str, message: Any) -> None:
        self.host.due_schedulers[self] = None
        self.world.note(endpoint, "->", self.title, message)
        self.core_scheduler.from_peer(endpoint, message, self.world.now_ns)
