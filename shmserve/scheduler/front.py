"""The front of a scheduler, the same for every kind: clients, drains, statistics.

The front handles clients and exited peers, submit, cancel, credit, release, drain, stop, restore
and reports. The front has no socket, and receives its clock as an argument.

    client       Submit Cancel Credit Release ReportStatistics ─┐
                                                               ├─> Front ──> Core
    supervisor   Drain Stop ProcessExited SnapshotStatistics ... ──┘

The core decides about admitted requests (batching.py, ensemble/core.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, assert_never

from shmserve.common import model_metrics
from shmserve.common.model_metrics import ModelMetrics
from shmserve.errors import InvalidArgument, QueueFull, ShmserveError, Unavailable
from shmserve.ipc.messages.inference import (
    Cancel,
    Credit,
    Failed,
    MetricsReported,
    Release,
    ReportStatistics,
    StatisticsReported,
    Submit,
)
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.messages.supervision import (
    BaseCounters,
    Drain,
    Drained,
    ResizeCache,
    SnapshotStatistics,
    StatisticsSnapshot,
    Stop,
)
from shmserve.ipc.messages.unions import ClientToScheduler
from shmserve.ipc.processes import REMEMBERED_EXITS
from shmserve.ipc.tensors.signature import stopping_text
from shmserve.ipc.trace import TraceContext
from shmserve.ipc.transport.router import trailing_pid
from shmserve.scheduler.requests.queue import plausible_arrival_ns
from shmserve.scheduler.requests.scheduled import NEVER, Client, ControlLink, Lookup
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.statistics import Reason, Statistics

logger = logging.getLogger(__name__)


# The keys of a snapshot that are current values, not counts.
_GAUGE_KEYS = ("pending", "executing", "open_sequences", "live", "instances")
_MAX_CLIENTS = 1024  # beyond this number, clients without requests are removed

R = TypeVar("R")  # the type of requests


class ClientLinks(Protocol):
    """The links to clients."""

    @property
    def malformed_messages(self) -> int:
        """Return the number of unreadable frames that clients have sent so far."""

    def sender_of(self, peer: bytes) -> Callable[[Any], object]:
        """Return the function that queues a message for the client at this address."""


class ClientTable(dict[bytes, Client[R]]):
    """The clients by address. A lookup of an unknown address adds the client."""

    def __init__(self, links: ClientLinks) -> None:
        super().__init__()
        self._links = links

    def __missing__(self, peer: bytes) -> Client[R]:
        if len(self) >= _MAX_CLIENTS:
            for idle_client in [client for client in self.values() if not client.requests]:
                del self[idle_client.peer]
        client: Client[R] = Client(peer, self._links.sender_of(peer))
        self[peer] = client
        return client


@dataclass(eq=False)
class Reports:
    """The reports of a scheduler: its counters, current values (gauges), and the model's metrics.

    `unexpected_messages` counts messages that were dropped because their sender must not send them.
    `_wall_clock` returns the ns since the epoch.
    """

    _statistics: Statistics
    _control: ControlLink
    _wall_clock: Callable[[], int]
    _read_gauges: Callable[[], dict[str, Any]]
    _metrics: ModelMetrics = field(default_factory=ModelMetrics)
    unexpected_messages: int = 0

    def answer(self, client: Client[Any], request_number: int, now_ns: int) -> None:
        """Send a client the report for metrics and for GET /v2/models/NAME/stats."""
        gauges = self._take_gauges()
        gauges["families"] = model_metrics.to_lists(self._metrics.total())
        report = self._statistics.report(now_ns, self._wall_clock(), gauges)
        self.send_snapshot()
        client.post(StatisticsReported(request_number, report))

    def _take_gauges(self) -> dict[str, Any]:
        """Return the gauges, without `malformed`, which becomes a counter of the statistics."""
        gauges = self._read_gauges()
        self._statistics.malformed = gauges.pop("malformed") + self.unexpected_messages
        return gauges

    def send_snapshot(self, omits_responses: bool = False) -> None:
        """Send the counts to the supervisor, which passes them to this scheduler's successor.

        The successor continues them, because a published count must never decrease.
        `omits_responses` is passed to `Statistics.snapshot`.
        """
        gauges = self._take_gauges()
        gauge_values = {name: gauges[name] for name in _GAUGE_KEYS}
        statistics = {**self._statistics.snapshot(omits_responses), **gauge_values}
        self._control.post(StatisticsSnapshot(statistics, self._metrics.snapshot()))

    def set_base(self, message: BaseCounters) -> None:
        """Continue the counts of the version that this version replaces."""
        try:
            if message.moved_statistics:
                self._statistics.add_moved(message.moved_statistics)
            else:
                self._statistics.set_base(message.statistics)
        except (AttributeError, KeyError, TypeError, ValueError):
            text = "model '%s': the statistics of the previous version cannot be read"
            logger.exception(text, self._statistics.model_key[0])
        self.send_snapshot()

    def restore(self, snapshot: list[Any], alive_pids: list[int]) -> None:
        """Continue the counts of a predecessor's snapshot (see `Front.restore`)."""
        statistics, metrics = snapshot
        try:
            self._statistics.restore(statistics)
            self._metrics.restore(metrics, alive_pids)
            self.unexpected_messages = self._statistics.malformed
        except (AttributeError, KeyError, TypeError, ValueError):
            text = "model '%s': the statistics of the previous scheduler cannot be read"
            logger.exception(text, self._statistics.model_key[0])

    def record_metrics(self, pid: int, message: MetricsReported) -> None:
        """Record the metrics that the model of an instance has reported."""
        try:
            families = model_metrics.parse(message.families)
        except ValueError:
            self.unexpected_messages += 1
        else:
            self._metrics.report(pid, families)

    def process_exited(self, pid: int) -> None:
        """Record the exit of a process; the counts of its model are kept."""
        self._metrics.process_exited(pid)


_LOG_INTERVAL_NS = 60_000_000_000


class OverloadLog:
    """The rate-limited log of one model's refused requests; times are monotonic ns.

    The next log line is due at `due_ns`, which is `NEVER` while no refusal was counted.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._refused_count = 0
        self._next_ns = 0  # the earliest time of the next line in the log
        self.due_ns = NEVER

    def count_refused(self) -> None:
        """Count a refused request in the next log line."""
        self._refused_count += 1
        self.due_ns = self._next_ns

    def tick(self, now_ns: int) -> None:
        """Log the number of refused requests; called when `due_ns` has passed."""
        self._next_ns = now_ns + _LOG_INTERVAL_NS
        self.write()

    def write(self) -> None:
        """Write the log line with the number of refused requests, and reset it."""
        self.due_ns = NEVER
        if self._refused_count:
            logger.warning(
                "model '%s' is overloaded: its queue is full, and %d more requests were rejected",
                self._model,
                self._refused_count,
            )
            self._refused_count = 0


class Core(Protocol[R]):
    """The decisions of one kind of scheduler about the requests of a model version.

    Times are arguments (monotonic ns). `R` is the class of the requests. From `admit` to
    its end, a request is in the `requests` of its client.
    """

    statistics: Statistics

    @property
    def live_count(self) -> int:
        """Return the number of requests that have not ended."""

    @property
    def unfinished_count(self) -> int:
        """Return the number of requests and sequences that a drain waits for."""
        return self.live_count

    def check(self, submit: Submit, now_ns: int) -> None:
        """Raise ShmserveError if the request would not be admitted; `admit` has the same checks."""

    def admit(self, client: Client[R], submit: Submit, lookup: Lookup | None, now_ns: int) -> None:
        """Admit a request with the result of its cache lookup.

        Raise ShmserveError if it is not admitted.
        """

    def serve_cached(self, client: Client[R], submit: Submit, lookup: Lookup, now_ns: int) -> None:
        """Serve a request from the cache; it has passed `check`."""

    def cancel(self, request: R, now_ns: int, keeps_reading: bool = False) -> None:
        """Cancel a request; with `keeps_reading`, its client still reads responses."""

    def credit(self, request: R, read_count: int, now_ns: int) -> None:
        """Record that the client has read this number of responses."""

    def release(self, client: Client[R], message: Release) -> None:
        """Release outputs that a client has read and that are not in a response cache."""

    def disconnect(self, client: Client[R], now_ns: int) -> None:
        """Cancel the requests of a client that has exited."""

    def stop(self, request: R, now_ns: int) -> None:
        """Fail a request because the scheduler stops."""

    def process_exited(self, pid: int, reason: str, now_ns: int) -> None:
        """Handle the exit of a process of the server, whose memory and executions are lost."""

    def handle_control_message(self, message: Any, now_ns: int) -> None:
        """Handle a message of the supervisor that only this kind of scheduler receives."""

    def tick(self, now_ns: int) -> int:
        """Expire and start requests, and send responses.

        Returns:
            The time (monotonic ns) of the next call unless a message arrives before, or `NEVER`.
        """

    def gauges(self) -> dict[str, Any]:
        """Return the current values for metrics by name, such as `pending` and `executing`."""

    def drain(self, awaits_sequences: bool) -> None:
        """Start to drain; `awaits_sequences` extends the drain until open sequences have ended."""
        return

    def accepts_while_draining(self, submit: Submit) -> bool:
        """Check whether a request is accepted while the scheduler drains."""
        return False

    def retry_after_s(self, error: ShmserveError) -> int:
        """Return after how many seconds a refused client may retry; 0: unknown."""
        return 0

    def format_error(self, text: str) -> str:
        """Return an error text in the form in which this kind of scheduler sends errors."""
        return text


@dataclass(eq=False)
class Front(Generic[R]):
    """The clients of a scheduler and its lifecycle.

    `_wall_clock` returns the ns since the epoch; `_model` is a name for the log. While the
    scheduler drains, it admits no requests. Once it `has_stopped`, it can be closed.
    """

    _core: Core[R]
    _links: ClientLinks
    _control: ControlLink
    _wall_clock: Callable[[], int]
    _model: str
    _cache: ResponseCache | None = None
    _exited_pids: dict[int, None] = field(default_factory=dict)  # oldest first
    _is_draining: bool = False
    _is_drained: bool = False
    has_stopped: bool = False

    def __post_init__(self) -> None:
        self._clients: ClientTable[R] = ClientTable(self._links)
        self._overload_log = OverloadLog(self._model)
        statistics = self._core.statistics
        self._reports = Reports(statistics, self._control, self._wall_clock, self._collect_gauges)

    # --- clients ----------------------------------------------------------------------------------

    def handle_client_message(self, peer: bytes, message: ClientToScheduler, now_ns: int) -> None:
        """Handle a client's message; the message of an exited process is dropped."""
        client = self._clients[peer]
        if client.pid in self._exited_pids:
            del self._clients[peer]
            self.count_unexpected()
            return
        match message:
            case Submit():
                self._submit(client, message, now_ns)
            case Cancel():
                request = client.requests.get(message.id)
                if request is not None:
                    self._core.cancel(request, now_ns, message.keeps_reading)
            case Credit():
                request = client.requests.get(message.id)
                if request is not None:
                    self._core.credit(request, message.responses, now_ns)
            case Release():
                read_blocks = (client.pid, message.memory, message.offsets)
                if self._cache is None or not self._cache.lent_memory.release(*read_blocks):
                    self._core.release(client, message)
            case ReportStatistics():
                self._reports.answer(client, message.id, now_ns)
            case _:
                assert_never(message)

    def _submit(self, client: Client[R], submit: Submit, now_ns: int) -> None:
        if submit.id in client.requests:
            # No response is sent: the client would assign it to its request in flight with this id.
            self.count_unexpected()
            return
        core, lookup = self._core, None
        try:
            if self._is_draining and not core.accepts_while_draining(submit):
                of_sequence = bool(submit.correlation_id or submit.correlation_text)
                raise Unavailable(stopping_text(submit.request_id, of_sequence=of_sequence))
            if self._cache is not None:
                core.check(submit, now_ns)
                lookup = self._cache.look_up(submit)
                if lookup is not None and lookup.is_hit:
                    core.serve_cached(client, submit, lookup, now_ns)
                    return
            core.admit(client, submit, lookup, now_ns)
        except ShmserveError as error:
            if lookup is not None:
                lookup.cancel()
            self._refuse(client, submit, error, now_ns)

    def ids_of(self, peer: bytes, request_id: int) -> dict[str, str]:
        """Return the ids of a client's request for a log record; {} if the request has ended."""
        client = self._clients.get(peer)
        request: Any = None if client is None else client.requests.get(request_id)
        if request is None:
            return {}
        trace_id = TraceContext.of(request.submit.trace).trace_id
        return {"request_id": request.submit.request_id, "trace_id": trace_id}

    def _refuse(self, client: Client[R], submit: Submit, error: ShmserveError, now_ns: int) -> None:
        if not isinstance(error, InvalidArgument):
            arrived_ns = plausible_arrival_ns(submit.arrived_ns, now_ns)
            self._core.statistics.count_failure(arrived_ns, Reason.REJECTED, now_ns)
        if isinstance(error, QueueFull):
            self._overload_log.count_refused()
        text, retry_s = self._core.format_error(error.message), self._core.retry_after_s(error)
        client.post(Failed(submit.id, error.code, text, retry_s, False, is_refused=True))

    # --- supervisor -------------------------------------------------------------------------------

    def handle_control_message(self, message: Any, now_ns: int) -> None:
        """Handle a message of the supervisor: a `SupervisorToScheduler`, or one for the core."""
        match message:
            case ProcessExited():
                self._process_exited(message.process, message.reason, now_ns)
            case BaseCounters():
                self._reports.set_base(message)
            case SnapshotStatistics():
                self._reports.send_snapshot(omits_responses=True)
            case ResizeCache():
                if self._cache is not None:
                    self._cache.resize(message.byte_size)
            case Drain():
                self._reports.send_snapshot()
                self._is_draining, self._is_drained = True, False
                self._core.drain(message.awaits_sequences)
            case Stop():
                self._stop(now_ns)
            case _:
                self._core.handle_control_message(message, now_ns)

    def _process_exited(self, pid: int, reason: str, now_ns: int) -> None:
        self._core.process_exited(pid, reason, now_ns)
        if self._cache is not None:
            self._cache.process_exited(pid)
        self._reports.process_exited(pid)
        # The pid is remembered, because messages of the exited process may still arrive.
        self._exited_pids[pid] = None
        if len(self._exited_pids) > REMEMBERED_EXITS:
            del self._exited_pids[next(iter(self._exited_pids))]
        for client in [client for client in self._clients.values() if client.pid == pid]:
            del self._clients[client.peer]
            self._core.disconnect(client, now_ns)

    def _stop(self, now_ns: int) -> None:
        self.has_stopped = True
        self._overload_log.write()
        for client in self._clients.values():
            for request in list(client.requests.values()):
                self._core.stop(request, now_ns)

    def metrics_reported(self, peer: bytes, message: MetricsReported) -> None:
        """Record the metrics of the model at the instance with this address."""
        pid = trailing_pid(peer)  # the pid of the instance's InstanceReady
        if not (pid and peer.partition(b".")[0].isdigit()):
            self.count_unexpected()
        elif pid not in self._exited_pids:
            self._reports.record_metrics(pid, message)

    # --- time and counts --------------------------------------------------------------------------

    def tick(self, now_ns: int) -> int:
        """Run the core's turn, write due log lines, and report the end of a drain.

        Returns:
            The time (monotonic ns) of the next call unless a message arrives before, or `NEVER`.
        """
        wake_ns = self._core.tick(now_ns)
        overload_log = self._overload_log
        if overload_log.due_ns != NEVER:
            if now_ns >= overload_log.due_ns:
                overload_log.tick(now_ns)
            wake_ns = min(wake_ns, overload_log.due_ns)
        if self._is_draining and not self._is_drained and not self._core.unfinished_count:
            self._is_drained = True
            self._reports.send_snapshot()
            self._control.post(Drained())
        return wake_ns

    def restore(self, snapshot: list[Any], alive_pids: list[int]) -> None:
        """Continue the counts of a predecessor.

        Args:
            snapshot: Its last StatisticsSnapshot, as [statistics, metrics].
            alive_pids: The pids of its instances.
        """
        self._reports.restore(snapshot, alive_pids)

    def count_unexpected(self) -> None:
        """Count a message that was dropped because its sender must not send it, ever or now."""
        self._reports.unexpected_messages += 1

    def _collect_gauges(self) -> dict[str, Any]:
        gauges = self._core.gauges()
        gauges["live"] = self._core.live_count
        gauges["cache"] = {} if self._cache is None else self._cache.gauges()
        gauges["malformed"] += self._links.malformed_messages + self._control.malformed_messages
        return gauges
