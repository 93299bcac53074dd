"""A run of one seed: drawn models, requests and faults, then an idle phase and the final checks."""

from random import Random
from typing import Any

from shmserve.ipc.tensors.schemas import SEQUENCE_END, SEQUENCE_START
from tests.simulation import cores, draw
from tests.simulation.client import Client
from tests.simulation.memory import SimulatedMemory
from tests.simulation.models import Model
from tests.simulation.oracles import Ledger, Request
from tests.simulation.supervisor import Supervisor
from tests.simulation.world import MS, SECOND, TRACED_EVENTS, US, Violation, World

_TRAFFIC_NS = 200 * MS
_FIXED_SIZE = 20_000  # bytes of a tensor that is too large for a message
_LONGEST_QUIET_NS = 120 * SECOND


class Simulation:
    """A run of one seed with this number of requests."""

    def __init__(self, seed: int, requests: int = 400, traced: int = TRACED_EVENTS) -> None:
        self.seed = seed
        self.world = World(seed, traced)
        self.memory = SimulatedMemory()
        self.ledger = Ledger(self.world)
        self.supervisor = Supervisor(self.world, self.memory)
        self.models = draw.draw_models(self.world.random)
        if seed % 2:
            draw.share_process(self.models)
        if seed % 3 == 0:
            draw.fix_sizes(self.models, _FIXED_SIZE)
        if seed % 4 == 3:
            self.models.append(draw.generative(self.world.random, "g"))
        self._requests = requests
        self._names = 0
        self._sequences = 0

    @property
    def _random(self) -> Random:
        return self.world.random

    @property
    def request_count(self) -> int:
        return len(self.ledger.requests)

    def run(self) -> None:
        """Run the seed; raise Violation if a rule was broken."""
        world = self.world
        for model in self.models:
            self.supervisor.load(model)
        for _ in range(self._random.randint(1, 3)):
            self._new_client()
        world.run(world.now_ns + 30 * MS)
        self._draw_traffic()
        self._draw_faults()
        world.run(world.now_ns + _TRAFFIC_NS)
        self._finish_requests()
        self._check_idle_state()
        self._check_counters()
        self._end_clients()

    def _new_client(self, pid: int = 0) -> None:
        self._names += 1
        is_slow = self.world.chance(0.3)
        client = Client(
            *(self.world, self.memory, self.ledger, self.supervisor.hosts),
            f"c{self._names}",
            is_slow,
            pid,
        )
        self.supervisor.add_client(client)

    # --- traffic ----------------------------------------------------------------------------------

    def _draw_traffic(self) -> None:
        bursts = [self._random.randrange(_TRAFFIC_NS) for _ in range(self._random.randint(1, 30))]
        for _ in range(self._requests):
            at_ns = self._random.choice(bursts) + self.world.between(US, 20 * MS)
            self.world.after(
                min(at_ns, _TRAFFIC_NS), self._submit, self._random.choice(self.models)
            )

    def _choose_client(self) -> Client | None:
        clients = [client for client in self.supervisor.clients if client.alive]
        return self._random.choice(clients) if clients else None

    def _submit(self, model: Model) -> None:
        client, random = self._choose_client(), self._random
        if client is None:
            return
        if model.has_sequences and not model.is_iterative:
            self._submit_step(client, model, [], random.randint(1, 6), "")
            return
        content = b"x%d" % random.getrandbits(40)
        if model.cache_byte_size:
            content = b"x%d" % random.randrange(6) * random.choice((1, 1, 9000))
        shape_key = random.choice((b"", b"", b"", b"s"))
        if model.padding is not None:
            content = content.ljust(random.randint(1, 100), b"_")
            shape_key = model.padding.key(shape_key, {"IN": (len(content),)})
        pending = client.submit(
            model,
            content.ljust(model.input_byte_size, b"_"),
            units=1 if model.is_iterative else random.randint(1, 2),
            in_arena=random.random() < 0.4,
            timeout_us=0 if random.random() < 0.8 else self.world.between(10, 20_000),
            priority=random.randint(0, 3),
            shape_key=shape_key,
            **(self._draw_sequence_fields() if model.is_iterative else {}),
        )
        if pending is not None and model.is_generative and random.random() < 0.03:
            pending.request.unread = True
        if pending is not None and random.random() < 0.06:
            self.world.after(self.world.between(US, 10 * MS), client.cancel, pending)

    def _draw_sequence_fields(self) -> dict[str, Any]:
        """Return a sequence id for a request of an iterative model; only some clients set one."""
        if self._random.random() < 0.5:
            return {}
        self._sequences += 1
        return {"correlation_id": self._sequences, "flags": SEQUENCE_START}

    def _submit_step(
        self,
        client: Client,
        model: Model,
        earlier_requests: list[Request],
        length: int,
        endpoint: str,
    ) -> None:
        """Submit a sequence's next request and, whatever its result, later the following ones."""
        random, step = self._random, len(earlier_requests)
        if step == 0:
            self._sequences += 1
            endpoint = client.endpoints.get(model.name, "")
        first = earlier_requests[0].uid if earlier_requests else ""
        number = int(first.rpartition("/")[0].rpartition(":s")[2]) if first else self._sequences
        flags = (SEQUENCE_START if step == 0 else 0) | (SEQUENCE_END if step + 1 == length else 0)
        pending = client.submit(
            model,
            b"x%d" % random.getrandbits(40),
            endpoint=endpoint,
            uid=f"{client.title}:s{number}/{step}",
            in_arena=random.random() < 0.4,
            earlier_requests=tuple(earlier_requests),
            timeout_us=0 if random.random() < 0.95 else self.world.between(10, 20_000),
            shape_key=random.choice((b"", b"", b"", b"s")),
            flags=flags,
            correlation_id=number,
        )
        if pending is None:
            return
        if random.random() < 0.03:
            self.world.after(self.world.between(US, 10 * MS), client.cancel, pending)
        if step + 1 < length and random.random() < 0.97:
            after_ns = self.world.between(US, 10 * MS)
            steps = [*earlier_requests, pending.request]
            self.world.after(after_ns, self._submit_step, client, model, steps, length, endpoint)

    # --- faults -----------------------------------------------------------------------------------

    def _draw_faults(self) -> None:
        for _ in range(self._random.randint(0, 40)):
            self.world.after(self._random.randrange(_TRAFFIC_NS), self._cause_fault)

    def _cause_fault(self) -> None:
        kinds = {
            self._kill_worker: 6, self._kill_scheduler: 2, self._kill_client: 1, self._reload: 1,
            self._reconfigure: 1, self._rescale: 4, self._regroup: 3, self._stall_link: 6,
            self._fill_arena: 3, self._jump_wall_clock: 2,
        }  # fmt: skip
        self._random.choices(list(kinds), list(kinds.values()))[0]()

    def _kill_worker(self) -> None:
        workers = [w for v in self.supervisor.versions for w in v.workers.values()]
        if workers:
            self.supervisor.kill(self._random.choice(workers))

    def _kill_scheduler(self) -> None:
        schedulers = [v.scheduler for v in self.supervisor.versions if v.scheduler]
        if schedulers:
            scheduler = self._random.choice(schedulers)
            self.memory.ensembles_died |= any(h.model.steps for h in scheduler.host.schedulers)
            self.supervisor.kill(scheduler)

    def _kill_client(self) -> None:
        client = self._choose_client()
        if client is not None:
            for link in client.links():
                if self.world.chance(0.3):
                    # The last frames of the killed client arrive late.
                    link.stall(self.world.between(100 * US, 10 * MS))
            self.supervisor.kill(client)
            self.world.after(self.world.between(MS, 5 * MS), self._new_client)

    def _reload(self) -> None:
        model = self._random.choice(self.models)
        self.world.fault("reload", model.name)
        self.supervisor.load(model)

    def _reconfigure(self) -> None:
        """Unload a random model for a while, possibly one that an ensemble needs."""
        model = self._random.choice(self.models)
        if self.supervisor.is_moving(self.supervisor.serving.get(model.name)):
            return
        self.world.fault("unload", model.name)
        self.ledger.unloaded.add(model.name)
        self.supervisor.unload(model)
        self.world.after(self.world.between(MS, 10 * MS), self.supervisor.load, model)

    def _rescale(self) -> None:
        """Change the number of instances of a serving model."""
        serving = self.supervisor.serving.values()
        versions = [v for v in serving if not v.model.steps and v.former_scheduler is None]
        if versions:
            version = self._random.choice(versions)
            if len(version.indices) < 2 or (len(version.indices) < 4 and self.world.chance(0.5)):
                self.world.fault("instance added", version.model.name)
                self.supervisor.add_instance(version)
            else:
                self.world.fault("instance retired", version.model.name)
                self.supervisor.retire_instance(version, self._random.choice([*version.indices]))

    def _regroup(self) -> None:
        """Move an ensemble and its steps into one process, or apart."""
        for model in self.models:
            if model.steps:
                group = "" if model.group else model.name
                for part in (model, *model.steps):
                    part.group = group
                    self.supervisor.move(part)

    def _stall_link(self) -> None:
        links = self.supervisor.links()
        for client in self.supervisor.clients:
            links += client.links()
        for version in self.supervisor.versions:
            if version.scheduler is not None:
                links += version.scheduler.links()
        if not links:
            return
        self.world.fault("stall")
        self._random.choice(links).stall(self.world.between(100 * US, 10 * MS))

    def _fill_arena(self) -> None:
        owners: list[Any] = [w for v in self.supervisor.versions for w in v.workers.values()]
        owners += self.supervisor.clients
        owner = self._random.choice(owners) if owners else None
        if owner is not None:
            self.world.fault("full", owner)
            owner.arena.is_full = True
            self.world.after(self.world.between(100 * US, 10 * MS), self._drain, owner.arena)

    @staticmethod
    def _drain(arena: Any) -> None:
        arena.is_full = False

    def _jump_wall_clock(self) -> None:
        self.world.fault("clock")
        self.world.skew_ns += self._random.randint(-SECOND, SECOND)

    # --- shutdown ---------------------------------------------------------------------------------

    def _finish_requests(self) -> None:
        """Stop all faults, and let every request end."""
        world = self.world
        world.run(world.now_ns + _LONGEST_QUIET_NS, is_over=self._all_requests_ended)
        for request in self.ledger.open():
            request.fail(f"has not ended after {_LONGEST_QUIET_NS // SECOND} s of quiet")
        world.run(world.now_ns + 2 * SECOND)  # time for late reads and releases
        self.ledger.check_complete()

    def _all_requests_ended(self) -> bool:
        return not self.world.events % 64 and not self.ledger.open()

    def _check_idle_state(self) -> None:
        for version in self.supervisor.versions:
            scheduler = version.scheduler
            if version.former_scheduler is not None:
                raise Violation(f"{version.former_scheduler} is not done, and its successor waits")
            if scheduler is None or not scheduler.alive:
                raise Violation(f"no scheduler of {version.model.name} is left")
            live_count = scheduler.core_scheduler.front._core.live_count
            if live_count:
                raise Violation(f"{scheduler} has {live_count} requests when all is quiet")
            for table_name, size, bound in cores.tables(scheduler.core_scheduler):
                if size > bound:
                    raise Violation(f"{scheduler} has {size} entries left in {table_name}")
            if scheduler.core_scheduler.used_blocks:
                raise Violation(
                    f"{scheduler} has {scheduler.core_scheduler.used_blocks} blocks in use"
                )
            idle = scheduler.core_scheduler.instances.get("idle", 0)
            if not idle == sum(scheduler.core_scheduler.instances.values()) == len(version.indices):
                raise Violation(
                    f"{scheduler} of {len(version.indices)} instances has, when all is quiet, "
                    f"{scheduler.core_scheduler.instances}"
                )
            if unreleased := scheduler.unreleased_offsets():
                raise Violation(f"{scheduler} has not passed on the releases of {unreleased}")
            for worker in version.workers.values():
                if worker.slots:
                    raise Violation(f"{worker} has the states {worker.slots} of ended sequences")
        # A successor cannot release memory that only a killed scheduler had recorded.
        if not self.world.faults["kill scheduler"]:
            self._check_leaks()

    def _check_leaks(self) -> None:
        leaks = self.memory.leaks()
        if leaks:
            raise Violation(f"{len(leaks)} blocks were not given back: {leaks[:5]}")

    def _check_counters(self) -> None:
        (client, *_) = self.supervisor.clients
        new = [
            v.scheduler for v in self.supervisor.versions if v.scheduler and v.scheduler.is_first
        ]
        for scheduler in new:
            client.ask_statistics(scheduler.endpoint)
        self.world.run(self.world.now_ns + SECOND)
        for scheduler in new:
            scheduler.trace.check_counters(client.reports[scheduler.endpoint])

    def _end_clients(self) -> None:
        """End all clients, including ensembles and the processes that have hosted one."""
        for client in list(self.supervisor.clients):
            self.supervisor.kill(client)
        hosts = [process.host for process in self.supervisor.hosts.values() if process.model.steps]
        for host in dict.fromkeys(hosts):
            self.supervisor.kill(host)
        self.world.run(self.world.now_ns + SECOND)
        self._check_leaks()
        ensembles = sum(bool(version.model.steps) for version in self.supervisor.versions)
        for version in self.supervisor.versions:
            assert version.scheduler is not None
            for table_name, size, _ in cores.tables(version.scheduler.core_scheduler):
                if table_name.endswith("._clients") and size > ensembles:
                    raise Violation(f"{version.scheduler} knows {size} clients that are dead")
