"""A simulated scheduler process: the real core with simulated links and a loop of turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shmserve.ipc.messages import generation, supervision
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.model_spec import ModelSpec
from shmserve.scheduler.ensemble.runner import InProcessLinks
from shmserve.scheduler.requests.scheduled import NEVER
from shmserve.scheduler.settings import Settings
from shmserve.supervisor.processes.control_socket import SchedulerAddress
from tests.simulation import cores
from tests.simulation.memory import SimulatedMemory
from tests.simulation.models import Model
from tests.simulation.oracles import SchedulerTrace
from tests.simulation.world import US, Link, Process, Violation, World


class Host(Process):
    """A process of schedulers (`in_process_links`); the `due_schedulers` have the next turn."""

    def __init__(self, world: World, title: str) -> None:
        super().__init__(world, title)
        self.in_process_links = InProcessLinks()
        self.schedulers: list[SchedulerProcess] = []
        self.due_schedulers: dict[SchedulerProcess, None] = {}

    def run_turns(self) -> None:
        """Run turns until none of the schedulers sends a message to another."""
        while self.due_schedulers or self.in_process_links.queued_messages:
            self.in_process_links.deliver()
            touched, self.due_schedulers = list(self.due_schedulers), {}
            for scheduler in touched:
                scheduler.tick()


class Outbox:
    """The outbox of a core; `in_process_links` reach some peers; `on_post` checks each message."""

    malformed_messages = 0

    def __init__(
        self, endpoint: str, in_process_links: InProcessLinks, on_post: Callable[[bytes, Any], None]
    ) -> None:
        self._endpoint = endpoint
        self._in_process_links = in_process_links
        self._on_post = on_post
        self.links: dict[bytes, Link] = {}

    def post(self, peer: bytes, message: Any) -> None:
        self._on_post(peer, message)
        if self._in_process_links.post(peer, self._endpoint, message):
            return
        link = self.links.get(peer)
        if link is not None:
            link.post(message)

    def sender_of(self, peer: bytes) -> Callable[[Any], None]:
        return partial(self.post, peer)


class SchedulerProcess(Process):
    """The scheduler of a version at its endpoint; `control` is its link to the supervisor."""

    def __init__(
        self,
        world: World,
        memory: SimulatedMemory,
        model: Model,
        version: str,
        number: int,
        control: Callable[[SchedulerProcess, Any], None],
        checkpoint: list[Any],
        alive: list[int],
        hosts: dict[str, SchedulerProcess],
        host: Host,
    ) -> None:
        self.host = host
        super().__init__(world, f"scheduler-{model.name}.{number}", host.pid)
        self.model = model
        self.version = version
        self._memory = memory
        self.endpoint = f"{model.name}.{number}"
        self.is_first = not checkpoint
        self._number = number
        settings = Settings.read(ModelSpec.of(model.config), version, model.limits)
        self.trace = SchedulerTrace(world, model, settings, self.title)
        self._clients = Outbox(self.endpoint, host.in_process_links, self._sent_to_client)
        self._workers = Outbox(self.endpoint, InProcessLinks(), self._record_sent)
        self._control = control
        self._timer_ns = NEVER
        self._is_turn_due = False
        self.malformed_messages = 0
        # The blocks of workers' memory that clients of this process have released: memory, offset
        # and content.
        self._released_blocks: list[tuple[int, int, bytearray]] = []
        self.hosts = hosts
        self.core_scheduler = cores.Scheduler(
            model, version, self, memory, (self._clients, self._peers(), self), checkpoint, alive
        )
        host.in_process_links.register(self.endpoint, self._from_in_process_peer)
        host.schedulers.append(self)

    @property
    def alive(self) -> bool:
        """Return whether the scheduler is open and its process is alive."""
        return self._alive and self.host.alive

    @property
    def address(self) -> SchedulerAddress:
        return SchedulerAddress(self.pid, self._number)

    def die(self) -> None:
        super().die()
        self.host.schedulers.remove(self)
        self.host.in_process_links.remove(self.endpoint)

    # --- links ------------------------------------------------------------------------------------

    def connect_client(self, peer: bytes, client: Process, on_message: Callable[..., None]) -> Link:
        """Return a client's link to this scheduler; `on_message` receives its messages."""
        self._clients.links[peer] = Link(self.world, client, on_message)
        return Link(self.world, self, lambda messages: self._from_clients(peer, messages))

    def connect_worker(self, peer: bytes, worker: Process, on_message: Callable[..., None]) -> Link:
        self._workers.links[peer] = Link(self.world, worker, on_message)
        return Link(self.world, self, lambda messages: self._from_workers(peer, messages))

    def _peers(self) -> Any:
        """Return the core's peers besides clients and the supervisor."""
        return self._workers

    def link_of(self, peer: bytes) -> Link:
        return self._clients.links[peer]

    def drain_to(self, worker: Process) -> None:
        """Deliver all sent messages to a worker now."""
        for link in self._workers.links.values():
            if link.target is worker:
                link.drain()

    def take_sent_to(self, worker: Process) -> list[Any]:
        links = self._workers.links.values()
        return [sent for link in links if link.target is worker for sent in link.take_in_transit()]

    def links(self) -> list[Link]:
        return [*self._clients.links.values(), *self._workers.links.values()]

    def post(self, message: Any) -> None:
        self.world.note(self.title, "->", "supervisor", message)
        self._control(self, message)

    def _sent_to_client(self, peer: bytes, message: Any) -> None:
        self.world.note(self.title, "->", peer, message)
        self.trace.sent_to_client(peer, message)

    def _record_sent(self, peer: bytes, message: Any) -> None:
        self.world.note(self.title, "->", peer, message)
        if isinstance(message, m.Execute):
            self.trace.record_execute(peer, message)
            if self.model.needs_tickets:
                self._check_limit()
        elif isinstance(message, generation.Prepare):
            self.trace.prepares(peer, message)
        elif isinstance(message, generation.Step):
            self.trace.steps[peer] = message.step

    def _check_limit(self) -> None:
        """Check that at most one limited model executes, since all need the only resource."""
        limited = [host for host in self.hosts.values() if host.alive and host.model.needs_tickets]
        busy = sum(host.trace.busy for host in limited)
        if busy > 1:
            raise Violation(
                f"{self.title}: {busy} executions have a resource of which there is one"
            )

    # --- received messages ------------------------------------------------------------------------

    def _from_clients(self, peer: bytes, messages: list[Any]) -> None:
        for message in messages:
            self._from_in_process_peer(peer, message)
        self.run_turns()

    def _from_in_process_peer(self, peer: bytes, message: Any) -> None:
        self.host.due_schedulers[self] = None
        self.world.note(peer, "->", self.title, message)
        self.trace.from_client(peer, message)
        self.core_scheduler.front.handle_client_message(peer, message, self.world.now_ns)
        self.trace.record_handled(peer, message)
        if isinstance(message, m.Release) and not self.model.steps and message.pid != self.pid:
            for offset in message.offsets:
                block = self._memory.block(message.memory, offset)
                if block is not None:
                    self._released_blocks.append((message.memory, offset, block))

    def unreleased_offsets(self) -> list[int]:
        """Return the offsets of blocks that clients have released here and that are still lent."""
        return [
            offset
            for memory, offset, block in self._released_blocks
            if self._memory.block(memory, offset) is block
        ]

    def _from_workers(self, peer: bytes, messages: list[Any]) -> None:
        if self.core_scheduler.front.has_stopped:
            return
        for message in messages:
            self.world.note(peer, "->", self.title, message)
            if isinstance(message, m.BatchFinished):
                self.trace.record_returned(peer, message)
            elif isinstance(message, generation.Stepped):
                self.trace.record_step(peer, message)
            self.core_scheduler.from_peer(peer, message, self.world.now_ns)
        self.run_turns()

    def from_supervisor(self, messages: list[Any]) -> None:
        for message in messages:
            self.world.note("supervisor", "->", self.title, message)
            if isinstance(message, ProcessExited):
                for peer in list(self._workers.links):
                    if peer.endswith(b".%d" % message.process):
                        self.trace.record_lost_worker(peer)
                        del self._workers.links[peer]
            elif isinstance(message, supervision.InstanceExpected):
                self.trace.retiring.discard(b"%d.%d" % (message.index, message.process))
            elif isinstance(message, supervision.RetireInstance):
                peers = [p for p in self._workers.links if p.startswith(b"%d." % message.index)]
                self.trace.retiring.update(peers)
            elif isinstance(message, supervision.Stop):
                self.trace.check_before_stop()
            self.core_scheduler.front.handle_control_message(message, self.world.now_ns)
            if isinstance(message, ProcessExited):
                self.trace.process_exited(message.process)
        self.run_turns()

    # --- turns ------------------------------------------------------------------------------------

    def run_turns(self) -> None:
        """Handle the received messages, possibly later together with further ones."""
        if self.world.chance(0.2):
            if not self._is_turn_due:
                self._is_turn_due = True
                self.world.after(self.world.between(1, 20 * US), self._take_turn)
        elif not self._is_turn_due:
            self._take_turn()

    def _take_turn(self) -> None:
        self._is_turn_due = False
        if self.alive:
            self.host.due_schedulers[self] = None
            self.host.run_turns()

    def tick(self) -> None:
        if not self.alive or self.core_scheduler.front.has_stopped:
            return
        now_ns = self.world.now_ns
        wake_ns = self.core_scheduler.front.tick(now_ns)
        self.trace.check_turn_end()
        if wake_ns < now_ns - 1_000_000:
            raise Violation(f"{self.title} wants to be woken in the past")
        if wake_ns != NEVER and not now_ns < self._timer_ns <= wake_ns:
            self._timer_ns = max(wake_ns, now_ns + 1)
            self.world.after(self._timer_ns - now_ns, self._on_timer, self._timer_ns)

    def _on_timer(self, due_ns: int) -> None:
        if due_ns == self._timer_ns:
            self._take_turn()
