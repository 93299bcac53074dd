"""A simulated client, like a gateway: it submits, cancels, reads responses, and exits."""

from __future__ import annotations

import itertools
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.ipc.credit import FIRST_CREDIT, ReadWindow
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages import publications
from shmserve.ipc.messages.inference import Response
from shmserve.ipc.scheduler_client import InflightRequest, SchedulerClient
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.tensors.schemas import Inference, byte_size_of, pack_inference
from tests.simulation.memory import SimulatedMemory
from tests.simulation.models import Model
from tests.simulation.oracles import MAX_STARTS, Ledger, Request
from tests.simulation.scheduler import SchedulerProcess
from tests.simulation.world import MS, US, Link, Process, Violation, World
from tests.support.messages import inferred_of


class ClientRequest(InflightRequest):
    """An in-flight request of a client, with its ledger entry and the block of its input."""

    __slots__ = ("client", "credited", "memory_range", "read", "request", "window")

    def __init__(
        self, client: Client, request: Request, submit: m.Submit, memory_range: Range | None
    ) -> None:
        super().__init__(submit)
        self.client = client
        self.request = request
        self.memory_range = memory_range
        self.window = ReadWindow()
        self.read = self.credited = 0

    def is_awaited(self) -> bool:
        return not self.request.cancelled

    def handle(self, message: Response) -> None:
        if self.request.cancelled:
            self.client.schedulers.discard(self.endpoint, message)
        else:
            # A generation may run on several workers, and each worker has its own credit.
            workers = MAX_STARTS if self.request.model.is_generative else 1
            if self.response_count - self.read > FIRST_CREDIT * workers + 1:
                self.request.fail(f"{self.response_count} responses came, {self.read} were read")
            self.client.world_ledger.record_response(self.request, message)
            self.client.read_soon(self, message)

    def free(self) -> None:
        self.client.world_ledger.record_freed(self.request)
        if self.memory_range is not None:
            self.client.arena.free(self.memory_range.offset)


class ClientLinks:
    """The links of a client (`Links` of ipc/scheduler_client.py)."""

    def __init__(self, client: Client, hosts: dict[str, SchedulerProcess]) -> None:
        self._client = client
        self._hosts = hosts
        self._identity = client.world.random.getrandbits(32)
        self.links: dict[str, tuple[bytes, Link]] = {}

    def open(self, endpoint: str) -> Link:
        known_link = self.links.get(endpoint)
        if known_link is None:
            client = self._client
            peer = b"%d.%x%d" % (client.pid, self._identity, len(self.links))
            link = self._hosts[endpoint].connect_client(
                peer, client, lambda messages: client.from_scheduler(endpoint, messages)
            )
            known_link = self.links[endpoint] = (peer, link)
        return known_link[1]

    def queue(self, endpoint: str, message: Any, byte_size: int = 0) -> None:
        pending = self._client.schedulers.pending.get(message.id)
        if isinstance(message, m.Submit) and pending is not None and pending.request.cancelled:
            raise Violation(f"{self._client} submits a request again that it has cancelled")
        self.open(endpoint).post(message)

    def post(self, endpoint: str, message: Any) -> None:
        if endpoint in self._client.schedulers.successors:
            raise Violation(f"{self._client} tells a lost scheduler {message}")
        if isinstance(message, m.Credit):
            pending = self._client.schedulers.pending[message.id]
            pending.credited += message.responses
            if pending.credited > pending.read:
                raise Violation(f"{self._client} gives credit for {message}: {pending.read} read")
        if endpoint in self.links:
            self.open(endpoint).post(message)

    defer = post

    def drain(self, endpoint: str, take: Any) -> None:
        client, reverse_link = self._client, self._hosts[endpoint].link_of(self.links[endpoint][0])
        for message in reverse_link.take_in_transit() if reverse_link.connected else ():
            client.check(endpoint, message)
            take(endpoint, message)
            if isinstance(message, m.Finished) and message.id in client.schedulers.pending:
                raise Violation(f"{client} runs a request again that had ended: {message}")
        reverse_link.close()


class Client(Process):
    """A process that submits requests; with `is_slow`, it releases responses late."""

    def __init__(
        self,
        world: World,
        memory: SimulatedMemory,
        ledger: Ledger,
        hosts: dict[str, SchedulerProcess],
        name: str,
        is_slow: bool = False,
        pid: int = 0,
    ) -> None:
        super().__init__(world, f"client-{name}", pid)
        self.world_ledger = ledger
        self.arena = memory.arena(self, 1 << 24)
        self.endpoints: dict[str, str] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self._name = name
        self._slow = is_slow
        self._memory = memory
        self._numbers = itertools.count(1)
        self._links = ClientLinks(self, hosts)
        self.schedulers: SchedulerClient[ClientRequest] = SchedulerClient(self._links)

    # --- links ------------------------------------------------------------------------------------

    def links(self) -> list[Link]:
        return [link for _, link in self._links.links.values()]

    def take(self, messages: list[Any]) -> None:
        for message in messages:
            match message:
                case publications.ModelPublished():
                    self.endpoints[message.name] = message.endpoint
                    self._links.open(message.endpoint)
                case publications.ModelWithdrawn():
                    self.endpoints.pop(message.name, None)
                case publications.SchedulerLost():
                    self._handle_loss(message.endpoint, message.successor)

    def _handle_loss(self, endpoint: str, successor: str) -> None:
        """Handle the loss of a scheduler, like `GatewaySchedulers.fail_over`."""
        if endpoint in self._links.links and endpoint not in self.schedulers.successors:
            self.schedulers.successors.add(endpoint, successor)
            self.schedulers.handle_loss(endpoint)

    def from_scheduler(self, endpoint: str, messages: list[Any]) -> None:
        """Handle messages of the scheduler at `endpoint`; each must belong to a request there."""
        for message in messages:
            self.check(endpoint, message)
            self.schedulers.handle(endpoint, message)

    def check(self, endpoint: str, message: Any) -> None:
        if isinstance(message, m.StatisticsReported):
            self.reports[endpoint] = message.statistics
        else:
            table = self.schedulers
            settles = isinstance(message, m.Settled)
            entry = (table.settling if settles else table.pending).get(message.id)
            if entry is None:
                raise Violation(f"{self} is told {message} of no request that it has")
            if entry.endpoint != endpoint:
                entry.request.fail(f"told {message} by {endpoint}, and is at {entry.endpoint}")

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        model: Model,
        content: bytes,
        *,
        endpoint: str = "",
        uid: str = "",
        units: int = 1,
        in_arena: bool = False,
        earlier_requests: tuple[Request, ...] | None = None,
        timeout_us: int = 0,
        priority: int = 0,
        shape_key: bytes = b"",
        flags: int = 0,
        correlation_id: int = 0,
    ) -> ClientRequest | None:
        """Submit a request. Return None if its model is not served, or if the arena is full."""
        endpoint = self.schedulers.successors.latest(endpoint or self.endpoints.get(model.name, ""))
        if not endpoint or not self.alive:
            return None
        data: bytes | Range = content
        if in_arena:
            try:
                data = self.arena.memory_range(content)
            except ShmserveError:
                return None
        number = next(self._numbers)
        now_ns = self.world.now_ns
        shape = (1, len(content)) if model.batches else (len(content),)
        tensors = [TensorRef("IN", "UINT8", shape, data)]
        if model.config["input"][-1]["name"] == "GO":
            tensors.append(TensorRef("GO", "BOOL", (1,), b"%c" % model.runs_step(content)))
        schema, datas = pack_inference(Inference(tuple(tensors)))
        if not model.steps:
            row_shapes = {model.name: [units if model.batches else 0, shape_key]}
            schema = pack_inference(Inference(tuple(tensors), (), row_shapes))[0]
        submit = m.Submit(
            number,
            schema,
            datas,
            now_ns,
            now_ns + timeout_us * 1000 if timeout_us else 0,
            timeout_us,
            priority,
            uid or f"{self._name}:{number}",
            flags,
            correlation_id,
        )
        request = Request(submit.request_id, model, content, units, submit.deadline_ns, client=self)
        if earlier_requests is not None:
            request.earlier_requests, request.step = earlier_requests, len(earlier_requests)
        self.world_ledger.add(request)
        memory_range = data if isinstance(data, Range) else None
        pending = ClientRequest(self, request, submit, memory_range)
        self.schedulers.submit(pending, endpoint)
        return pending

    def cancel(self, pending: ClientRequest) -> None:
        if not self.alive or pending.request.ending is not None or pending.request.cancelled:
            return
        self.world.fault("cancel", pending.request.uid)
        pending.request.cancelled = True
        self.schedulers.cancel(pending)

    def ask_statistics(self, endpoint: str) -> None:
        self._links.queue(endpoint, m.ReportStatistics(next(self._numbers)))

    # --- responses --------------------------------------------------------------------------------

    def read_soon(self, pending: ClientRequest, message: Response) -> None:
        if isinstance(message, m.Failed) or pending.request.unread:
            return
        if self._slow:
            wait_ns = self.world.between(100 * US, 40 * MS)
        else:
            wait_ns = self.world.between(US, 100 * US)
        self.world.after(wait_ns, self._read, pending, message, pending.response_count)

    def _read(self, pending: ClientRequest, message: Any, count: int) -> None:
        if not self.alive:
            return
        if message.schema:
            self._check(pending.request, message, count)
            self.schedulers.discard(pending.endpoint, message)
        pending.read += 1
        credit = pending.window.record_read(byte_size_of(message.data))
        if credit:
            self.schedulers.credit(pending, credit)

    def _check(self, request: Request, message: Any, count: int) -> None:
        """Check that a response was made of its request's own input, and by one version."""
        contents: dict[str, bytes] = {}
        for tensor in inferred_of(message).outputs:
            data = tensor.data
            if isinstance(data, Range):
                try:
                    data = self._memory.read(data, self)
                except ShmserveError:
                    return  # the worker that owned the memory has exited
            contents[tensor.name] = data
        if request.is_skipped(contents):
            return
        source = request.model.source(contents["OUT"], contents["WHO"])
        if source is None or source != request.expected_source(source, count - 1):
            request.fail(f"has the response {contents} to {request.content!r}")
