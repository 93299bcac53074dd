"""The ensemble core: to its clients the scheduler of a model, to the schedulers of its steps a
client.

admit, cancel, ...        a client's message, by the front
from_step, from_control   a step's scheduler's, or the supervisor's
tick                      now: run steps, respond, expire
"""

from __future__ import annotations

import logging
from typing import Any, assert_never

from shmserve.errors import Internal, QueueFull, ShmserveError, Unavailable
from shmserve.ipc.messages import SchedulerToClient, SupervisorToEnsemble
from shmserve.ipc.messages.inference import Release, Submit
from shmserve.ipc.messages.supervision import Acknowledged, ModelPublished, SchedulerLost
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.signature import Signature, id_prefix
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.scheduler.ensemble.admission import RequestAdmission
from shmserve.scheduler.ensemble.graph import Graph
from shmserve.scheduler.ensemble.live import LiveRequests
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.progress import Progress
from shmserve.scheduler.ensemble.requests import EnsembleRequest
from shmserve.scheduler.ensemble.responses import Responses
from shmserve.scheduler.ensemble.steps.memory_plan import MemoryPlanner
from shmserve.scheduler.ensemble.steps.outputs import StepLinks
from shmserve.scheduler.ensemble.steps.runner import StepRunner
from shmserve.scheduler.ensemble.steps.targets import Targets
from shmserve.scheduler.front import Core
from shmserve.scheduler.outboxes import ControlLink, Peers
from shmserve.scheduler.requests.client import Client, stopping
from shmserve.scheduler.requests.queue import EXPIRED
from shmserve.scheduler.requests.request import Lookup
from shmserve.scheduler.response_cache.cache import ResponseCache
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics.counters import Reason, Statistics

logger = logging.getLogger(__name__)


class EnsembleCore(Core[EnsembleRequest]):
    """One ensemble's requests, each a flow of tensors through its steps."""

    def __init__(
        self,
        settings: Settings,
        config: ModelSpec,
        clients: Peers,
        links: StepLinks,
        control: ControlLink,
        memory: EnsembleMemory,
        cache: ResponseCache | None = None,
    ) -> None:
        graph = Graph.of(config)
        signature = Signature(config, settings.version)
        statistics = self.statistics = Statistics(settings)
        responses = Responses(signature, settings.decoupled, clients, memory, statistics, cache)
        live = LiveRequests(settings.name, statistics, responses)
        targets = Targets(graph)
        steps = StepRunner(graph, targets, links, memory, live)
        self._live = live
        self._targets = targets
        self._steps = steps
        self._responses = responses
        self._admission = RequestAdmission(graph, signature, targets, memory)
        self._progress = Progress(settings.decoupled, live, steps, responses)
        self._planner = MemoryPlanner(graph, signature.max_batch_size, targets, memory)
        self._control = control
        self._memory = memory
        self._cache = cache
        # Of steps that max_inflight_requests has no room for; 0: any number.
        self._most_waiting = settings.policies.default.max_size
        self._endpoints: dict[tuple[str, str], str] = {}  # of all models that serve

    # --- clients ----------------------------------------------------------------------------------

    def check(self, submit: Submit, now_ns: int) -> None:
        if 0 < submit.deadline_ns < now_ns:
            raise Unavailable(EXPIRED)

    def retry_after_s(self, error: ShmserveError) -> int:
        return 1 if isinstance(error, QueueFull) else 0

    def admit(
        self,
        client: Client[EnsembleRequest],
        submit: Submit,
        lookup: Lookup | None,
        now_ns: int,
    ) -> None:
        self._live.now_ns = now_ns
        self.check(submit, now_ns)
        if 0 < self._most_waiting <= self._steps.waiting:
            raise QueueFull(f"{id_prefix(submit.request_id)}Exceeds maximum queue size")
        try:
            request = self._admission.admit(client, submit, now_ns)
        except MalformedMessage as error:
            logger.error("a request cannot be read: %s", error)
            raise Internal("internal error") from None
        request.lookup = lookup
        self._live.add(request)

    def hit(
        self, client: Client[EnsembleRequest], submit: Submit, lookup: Lookup, now_ns: int
    ) -> None:
        self._responses.hit(client, submit, lookup, now_ns)

    def worded(self, text: str) -> str:
        return self._live.told(text)

    def cancel(self, request: EnsembleRequest, now_ns: int) -> None:
        self._live.now_ns = now_ns
        self._live.fail(request, "CANCELLED", "request cancelled")
        self._steps.cancel(request)

    def credit(self, request: EnsembleRequest, responses: int, now_ns: int) -> None:
        self._responses.credit(request, responses)
        self._live.touch(request)

    def release(self, client: Client[EnsembleRequest], message: Release) -> None:
        self._memory.lent.release(client.pid, message.pid, message.offsets)

    def disconnect(self, client: Client[EnsembleRequest], now_ns: int) -> None:
        for request in list(client.requests.values()):
            if request.failure is None:
                self.statistics.failed(request.arrived_ns, Reason.CANCELED, now_ns)
            request.gone = True
            self._steps.cancel(request)

    def stop(self, request: EnsembleRequest, now_ns: int) -> None:
        self._live.now_ns = now_ns
        if not request.told and not request.gone:
            self._live.fail(request, Unavailable.code, stopping(request.submit.request_id))
            self._responses.failed(request)

    # --- steps and supervisor ---------------------------------------------------------------------

    def from_step(self, endpoint: str, message: SchedulerToClient, now_ns: int) -> None:
        """Handle a message of the scheduler at `endpoint`."""
        self._live.now_ns = now_ns
        self._steps.hear(endpoint, message)

    def from_control(self, message: SupervisorToEnsemble, now_ns: int) -> None:
        self._live.now_ns = now_ns
        match message:
            case ModelPublished():
                self._published(message)
                if message.acknowledge:
                    self._control.post(Acknowledged(message.acknowledge))
            case SchedulerLost():
                self._steps.lost(message.endpoint, message.successor)
                for key, endpoint in list(self._endpoints.items()):
                    if endpoint == message.endpoint:
                        del self._endpoints[key]
            case _:
                assert_never(message)

    def _published(self, message: ModelPublished) -> None:
        key = (message.name, message.version)
        if self._endpoints.get(key) != message.endpoint:
            self._endpoints[key] = message.endpoint
            # Any model may be under a step, of an ensemble that is one, too.
            if self._cache is not None:
                self._cache.clear()
        self._targets.publish(message)
        self._planner.plan()

    def process_exited(self, pid: int, now_ns: int) -> None:
        self._live.now_ns = now_ns
        self._memory.process_exited(pid)
        self._memory.lent.drop_reader(pid)

    @property
    def live(self) -> int:
        return self._live.count

    # --- time -------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> int:
        self._live.now_ns = now_ns
        for request in self._live.expired():
            self._steps.cancel(request)
        while changed := self._live.changed():
            for request in changed:
                self._progress.advance(request)
        return self._live.due_ns

    def gauges(self) -> dict[str, Any]:
        return {
            "pending": 0,  # what waits, waits for its steps
            "executing": self._live.count,
            "instances": {},
            "malformed": 0,
        }
