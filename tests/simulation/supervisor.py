"""A simulated supervisor: it starts processes, reports exits, and replaces dead processes."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from shmserve.ipc.messages import supervision
from shmserve.ipc.messages.control_requests import AskTicket, TicketReturned
from shmserve.ipc.messages.publications import (
    ModelPublished,
    ModelWithdrawn,
    ProcessExited,
    SchedulerLost,
)
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.resources.rate_limiter import Needs, Tickets
from tests.simulation.client import Client
from tests.simulation.ensemble import EnsembleProcess
from tests.simulation.generator import Generator
from tests.simulation.memory import SimulatedMemory
from tests.simulation.models import Model
from tests.simulation.scheduler import Host, SchedulerProcess
from tests.simulation.worker import Worker
from tests.simulation.world import MS, SECOND, US, Link, Process, Violation, World


class Version:
    """A loaded version of a model: its scheduler, and its workers by instance index.

    `indices` contains its instances, and `retiring_indices` those that retire. During a move,
    `former_scheduler` is the scheduler that is replaced, and `former_is_drained` its state.
    """

    def __init__(self, model: Model, number: str) -> None:
        self.model = model
        self.number = number
        self.scheduler: SchedulerProcess | None = None
        self.workers: dict[int, Worker] = {}
        self.indices = dict.fromkeys(range(model.instances))
        self.retiring_indices: set[int] = set()
        self.former_scheduler: SchedulerProcess | None = None
        self.former_is_drained = False
        self.snapshot: list[Any] = []
        self.is_retiring = False

    @property
    def endpoint(self) -> str:
        assert self.scheduler is not None
        return self.scheduler.endpoint

    def worker(self, pid: int) -> Worker | None:
        return next((worker for worker in self.workers.values() if worker.pid == pid), None)


class Supervisor(Process):
    """The parent of all processes. `hosts` contains all past and present schedulers by endpoint."""

    def __init__(self, world: World, memory: SimulatedMemory) -> None:
        super().__init__(world, "supervisor", 1)
        self.hosts: dict[str, SchedulerProcess] = {}
        self.serving: dict[str, Version] = {}
        self.versions: list[Version] = []
        self.clients: list[Client] = []
        self.tickets = Tickets(True, {}, self._send_ticket)
        self._memory = memory
        self._links: dict[Any, Link] = {}
        self._from_schedulers: dict[Any, Link] = {}
        self._groups: dict[str, Host] = {}
        self._numbers = itertools.count(1)
        self._versions = itertools.count(1)

    # --- links ------------------------------------------------------------------------------------

    def _connect(self, process: Process, take: Callable[[list[Any]], None]) -> None:
        self._links[process.address] = Link(self.world, process, take)

    def send(self, process: Process | None, *messages: Any) -> None:
        if process is not None and process.address in self._links:
            self._links[process.address].post(*messages)

    def _broadcast(self, message: Any, *, clients_only: bool = False) -> None:
        for client in self.clients:
            self.send(client, message)
        if clients_only:
            if not isinstance(message, ModelWithdrawn):
                for ensemble in self._ensembles():
                    self.send(ensemble, message)
            return
        for version in self.versions:
            self.send(version.scheduler, message)
            self.send(version.former_scheduler, message)
            for worker in version.workers.values():
                self.send(worker, message)

    def _ensembles(self) -> list[SchedulerProcess]:
        versions = [version for version in self.versions if version.model.steps]
        schedulers = [s for v in versions for s in (v.scheduler, v.former_scheduler)]
        return [s for s in schedulers if s is not None]

    def _send_ticket(self, address: Any, message: Any) -> None:
        if address in self._links:
            self._links[address].post(message)

    def links(self) -> list[Link]:
        return list(self._links.values())

    # --- messages from schedulers -----------------------------------------------------------------

    def receive(self, scheduler: SchedulerProcess, message: Any) -> None:
        scheduler_link = self._from_schedulers.get(scheduler.address)
        if scheduler_link is None:
            scheduler_link = self._from_schedulers[scheduler.address] = Link(
                self.world, self, lambda messages: self._take(scheduler, messages)
            )
        scheduler_link.post(message)

    def _take(self, scheduler: SchedulerProcess, messages: list[Any]) -> None:
        for message in messages:
            self._handle(scheduler, message)

    def _handle(self, scheduler: SchedulerProcess, message: Any) -> None:
        matching = (v for v in self.versions if scheduler in (v.scheduler, v.former_scheduler))
        version = next(matching, None)
        if version is None:
            return
        is_moving = scheduler is version.former_scheduler
        match message:
            case AskTicket() | TicketReturned():
                self.tickets.handle(scheduler.address, message)
            case supervision.KillInstance(process=pid):
                worker = version.worker(pid)
                if worker is not None:
                    self.kill(worker)
            case supervision.StatisticsSnapshot() if not is_moving:
                statistics_before = version.snapshot[0] if version.snapshot else {}
                version.snapshot = [{**statistics_before, **message.statistics}, message.metrics]
            case supervision.InstanceRetired(process=pid):
                worker = version.worker(pid)
                if worker is not None and worker.index in version.retiring_indices:
                    scheduler.drain_to(worker)
                    if worker.alive and worker.busy:
                        raise Violation(f"{worker} is to end, and is not done")
                    self._end(worker)
            case supervision.Drained():
                if is_moving:
                    version.former_is_drained = True
                elif version.is_retiring:
                    self._stop(version)

    # --- versions ---------------------------------------------------------------------------------

    def load(self, model: Model) -> None:
        """Load a version of a model, which replaces the serving version once it is ready."""
        version = Version(model, f"{next(self._versions):03}")
        self.versions.append(version)
        self._reserve(version, version.indices)
        self._start_scheduler(version)
        for index in version.indices:
            self.send(version.scheduler, supervision.InstanceExpected(index, 0))
            self._start_worker(version, index)
        self.world.after(self.world.between(5 * MS, 20 * MS), self._publish, version)

    def _reserve(self, version: Version, indices: Iterable[int]) -> None:
        """Register instances with the rate limiter."""
        if version.model.needs_tickets:
            (group,) = ModelSpec.of(version.model.config).instance_group
            ticket_needs = Needs.of(group.rate_limiter, 0)
            self.tickets.join(id(version), dict.fromkeys(indices, ticket_needs))

    def add_instance(self, version: Version) -> None:
        index = min({*range(9)} - {*version.indices, *version.workers})
        version.indices[index] = None
        self._reserve(version, [index])
        self._start_worker(version, index)

    def retire_instance(self, version: Version, index: int) -> None:
        """Retire an instance after its requests, or at once if it does not serve."""
        del version.indices[index]
        worker = version.workers.get(index)
        if worker is not None and worker.is_loaded and worker.alive:
            version.retiring_indices.add(index)
        else:
            self._remove_ended(version, index)
            if worker is not None:
                self._end(worker)
        self.send(version.scheduler, supervision.RetireInstance(index))

    def _remove_ended(self, version: Version, index: int) -> None:
        version.retiring_indices.discard(index)
        version.workers.pop(index, None)
        self.tickets.remove_instance(id(version), index)

    def _publish(self, version: Version) -> None:
        model = version.model
        previous_version = self.serving.get(model.name)
        is_dead = version.scheduler is None or not version.scheduler.alive
        if version.is_retiring or is_dead or self.is_moving(previous_version):
            self.world.after(MS, self._publish, version)
            return
        self.serving[model.name] = version
        self._announce(version)
        if previous_version is not None:
            self._supersede(previous_version)

    def _publication_of(self, version: Version) -> ModelPublished:
        model = version.model
        return ModelPublished(
            model.name,
            version.number,
            ModelSpec.of(model.config),
            {},
            version.endpoint,
            True,
            True,
            0.0,
            0,
        )

    def _announce(self, version: Version) -> None:
        self._broadcast(self._publication_of(version), clients_only=True)

    def _once_received(
        self, former: SchedulerProcess | None, callback: Callable[..., None], *arguments: Any
    ) -> None:
        """Call a function once all peers know the new endpoint and old messages have arrived."""
        clients: list[Client | SchedulerProcess] = [*self.clients, *self._ensembles()]
        links = [link for c in clients for link in c.links() if link.target is former]
        links += [self._links[c.address] for c in clients if c.address in self._links]
        if any(link.pending for link in links):
            self.world.after(50 * US, self._once_received, former, callback, *arguments)
        else:
            callback(*arguments)

    def _supersede(self, version: Version, reporter: SchedulerProcess | None = None) -> None:
        """Retire a version once all peers know its replacement and old messages have arrived."""
        scheduler = version.scheduler
        if reporter is scheduler:
            self._retire(version)
        else:
            self._once_received(scheduler, self._supersede, version, scheduler)

    # --- replacements -----------------------------------------------------------------------------

    @staticmethod
    def is_moving(version: Version | None) -> bool:
        """Return whether a move is in progress, for which an order of the model must wait."""
        return version is not None and version.former_scheduler is not None

    def move(self, model: Model) -> None:
        """Move the scheduling of a model into its group's process, like `ModelVersion.regroup`."""
        version = self.serving.get(model.name)
        if version is None or version.former_scheduler is not None or version.is_retiring:
            return
        former = version.scheduler
        is_bound = model.has_sequences or model.is_decoupled or model.needs_tickets
        if not model.steps and not any(w.is_loaded and w.alive for w in version.workers.values()):
            return
        if is_bound or former is None or not former.alive:
            return
        self.world.fault("move", model.name)
        version.former_scheduler, version.snapshot = former, []
        self._start_scheduler(version)
        self._announce(version)
        workers = [
            worker for worker in version.workers.values() if worker.is_loaded and worker.alive
        ]
        self._once_received(former, self._drain_former, version, workers, self._succeed_former)

    def _drain_former(
        self, version: Version, moved: list[Worker], done: Callable[..., None]
    ) -> None:
        version.former_is_drained = False
        self.send(version.former_scheduler, supervision.Drain())
        if self.world.chance(0.3):
            # The move continues, although the former scheduler still has requests.
            for worker in moved:
                self.world.after(self.world.between(5 * US, 500 * US), self.kill, worker)
        self._await_drained(version, moved, done)

    def _await_drained(
        self, version: Version, workers: list[Worker], callback: Callable[..., None]
    ) -> None:
        assert version.former_scheduler is not None
        can = version.former_scheduler.alive and (not workers or any(w.alive for w in workers))
        if can and not version.former_is_drained:
            self.world.after(50 * US, self._await_drained, version, workers, callback)
            return
        version.former_scheduler.trace.succeeded_by_another |= not version.former_is_drained
        callback(version, workers)

    def _succeed_former(self, version: Version, workers: list[Worker]) -> None:
        assert version.former_scheduler is not None
        self._introduce(version)
        lost_message = SchedulerLost(version.former_scheduler.endpoint, version.endpoint)
        self._broadcast(lost_message, clients_only=True)
        self._announce(version)
        self._once_received(
            version.former_scheduler, self._drain_former, version, workers, self._finish_move
        )

    def _finish_move(self, version: Version, _: list[Worker]) -> None:
        assert version.former_scheduler is not None and version.scheduler is not None
        self._attach(version)
        self.send(version.former_scheduler, supervision.Stop())
        self.world.after(5 * MS, self._close, version.former_scheduler)
        version.former_scheduler = None
        if version.scheduler.address not in self._links:  # the scheduler exited in the meantime
            self._scheduler_died(version)

    def _close(self, scheduler: SchedulerProcess) -> None:
        if scheduler.alive:
            scheduler.die()
            self._links.pop(scheduler.address)
            if not scheduler.host.schedulers:
                self._end(scheduler.host)

    # --- the end of versions ----------------------------------------------------------------------

    def unload(self, model: Model) -> None:
        """Withdraw a model; its requests in flight are completed."""
        version = self.serving.pop(model.name, None)
        if version is not None:
            self._broadcast(ModelWithdrawn(model.name, version.number, 0), clients_only=True)
            self._retire(version)

    def _retire(self, version: Version) -> None:
        if self.is_moving(version):
            self.world.after(MS, self._retire, version)
            return
        version.is_retiring = True
        if version.scheduler is not None and version.scheduler.alive:
            self.send(version.scheduler, supervision.Drain())
        else:
            self._stop(version)

    def _stop(self, version: Version) -> None:
        """Stop the processes of a version whose requests are completed or lost."""
        if version not in self.versions:
            return
        self.versions.remove(version)
        for worker in version.workers.values():
            self._end(worker)
        self.tickets.remove(id(version))
        scheduler = version.scheduler
        if scheduler is None:
            return
        self.world.after(2 * MS, self._workers_ended, version, scheduler)

    def _workers_ended(self, version: Version, scheduler: SchedulerProcess) -> None:
        """Report the exit of each worker to the scheduler, and then stop the scheduler."""
        if scheduler.alive:
            for worker in version.workers.values():
                self.send(scheduler, ProcessExited(worker.pid, ""))
            self.send(scheduler, supervision.Stop())
        self.world.after(5 * MS, self._finish_stop, version, scheduler)

    def _finish_stop(self, version: Version, scheduler: SchedulerProcess) -> None:
        self._close(scheduler)
        serving_version = self.serving.get(version.model.name)
        successor = "" if serving_version is None else serving_version.endpoint
        self._broadcast(SchedulerLost(scheduler.endpoint, successor), clients_only=True)

    # --- processes --------------------------------------------------------------------------------

    def _start_scheduler(self, version: Version) -> None:
        alive = [worker.pid for worker in version.workers.values() if worker.alive]
        kind = EnsembleProcess if version.model.steps else SchedulerProcess
        scheduler = version.scheduler = kind(
            self.world,
            self._memory,
            version.model,
            version.number,
            next(self._numbers),
            self.receive,
            version.snapshot,
            alive,
            self.hosts,
            self._host(version.model),
        )
        self.hosts[scheduler.endpoint] = scheduler
        self._connect(scheduler, scheduler.from_supervisor)
        for step in version.model.steps:
            if step.name in self.serving:
                self.send(scheduler, self._publication_of(self.serving[step.name]))
        if version.model.needs_tickets:
            self.tickets.bind(scheduler.address, id(version))

    def _host(self, model: Model) -> Host:
        host = self._groups.get(model.group)
        if host is None or not host.alive or not model.group:
            host = self._groups[model.group] = Host(self.world, f"host-{model.group or model.name}")
        return host

    def _start_worker(self, version: Version, index: int) -> None:
        if version not in self.versions or index not in version.indices or index in version.workers:
            return
        pid = self.world.new_pid(reuse=self.world.chance(0.5))
        model = version.model
        kind = Generator if model.is_generative else Worker
        worker = kind(self.world, self._memory, model, version.number, index, pid)
        version.workers[index] = worker
        self._connect(worker, worker.take)
        self.send(version.scheduler, supervision.InstanceExpected(index, worker.pid))
        pause_ns = self.world.between(100 * US, 5 * MS)
        self.world.after(pause_ns, self._on_loaded, version, worker, version.scheduler)

    def _on_loaded(
        self, version: Version, worker: Worker, scheduler: SchedulerProcess | None
    ) -> None:
        worker.is_loaded = True
        if scheduler is not version.former_scheduler:
            scheduler = version.scheduler
        if scheduler is not None and scheduler.alive:
            self.send(worker, scheduler)

    def add_client(self, client: Client) -> None:
        self.clients.append(client)
        self._connect(client, client.take)
        for version in self.serving.values():
            self.send(client, self._publication_of(version))

    def _end(self, process: Process) -> None:
        if process.alive:
            process.die()
            self.world.after(self.world.between(50 * US, MS), self._reap, process)

    def kill(self, process: Process) -> None:
        """Kill a process with all schedulers that it hosts; the exit is detected later."""
        if process.alive:
            self.world.fault(f"kill {process.title.partition('-')[0]}", process)
            self._end(process.host if isinstance(process, SchedulerProcess) else process)

    def _reap(self, process: Process) -> None:
        self._links.pop(process.address, None)
        self.tickets.process_exited(process.pid)
        if process in self.clients:
            self.clients.remove(process)
        for scheduler in process.schedulers if isinstance(process, Host) else ():
            self._links.pop(scheduler.address)
        for version in self.versions[:]:
            has_died = version.scheduler is not None and process is version.scheduler.host
            if has_died and version.former_scheduler is None:
                self._scheduler_died(version)
            for index, worker in list(version.workers.items()):
                if worker is process:
                    if index in version.retiring_indices:
                        self._remove_ended(version, index)
                    else:
                        del version.workers[index]
                        self._restart(version, index)
        self._broadcast(ProcessExited(process.pid, "signal 9"))
        if isinstance(process, Worker):
            self.world.after(SECOND // 20, self.world.free_pid, process.pid)

    def _restart(self, version: Version, index: int) -> None:
        pause_ns = self.world.between(100 * US, 20 * MS)
        self.world.after(pause_ns, self._start_worker, version, index)

    def _scheduler_died(self, version: Version) -> None:
        if version.is_retiring:
            self._stop(version)
        else:
            self.world.after(self.world.between(MS, 20 * MS), self._replace, version)

    def _replace(self, version: Version) -> None:
        if version.is_retiring or version not in self.versions:
            self._stop(version)
            return
        lost_endpoint = version.endpoint
        self._start_scheduler(version)
        self._introduce(version)
        self._attach(version)
        self._broadcast(SchedulerLost(lost_endpoint, version.endpoint), clients_only=True)
        if self.serving.get(version.model.name) is version:
            self._announce(version)

    def _introduce(self, version: Version) -> None:
        for (
            index
        ) in version.retiring_indices:  # the requests of these instances are retried elsewhere
            self._end(version.workers[index])
        expected: list[supervision.InstanceExpected] = []
        for index in version.indices:
            worker = version.workers.get(index)
            pid = 0 if worker is None or not worker.alive else worker.pid
            expected.append(supervision.InstanceExpected(index, pid))
        self.send(version.scheduler, *expected)

    def _attach(self, version: Version) -> None:
        """Let the instances register with a new scheduler."""
        for index, worker in version.workers.items():
            if worker.is_loaded and index not in version.retiring_indices:
                self.send(worker, version.scheduler)
