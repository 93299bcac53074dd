"""The process that hosts schedulers, and the schedulers in it with their sockets.

The loop of `Host` waits, receives, ticks and sends for all schedulers in the process. The
supervisor opens and closes the schedulers.

Each model has a scheduler in a process of its own, but the steps of an ensemble are scheduled in
the ensemble's process. A message to such a step is a call (`ensemble/runner.py:InProcessLinks`).

    control          the supervisor's messages         ─┐
    clients          gateways, workers, ensembles       ├─> front ──> core
    local clients    programs outside the server       ─┘
    its own peers    workers, or the schedulers of steps ───────────> core

The endpoints of a scheduler derive from its number. `KINDS` has the class of each kind of
scheduler. A class defines the core, its peers, and the messages that the supervisor may send.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, assert_never, get_args

from shmserve import logs
from shmserve.errors import ShmserveError, from_code
from shmserve.ipc import endpoints, processes
from shmserve.ipc.endpoints import FIRST_LOCAL_CLIENT
from shmserve.ipc.memory.lent import LentMemory
from shmserve.ipc.messages.inference import (
    Failed,
    Finished,
    MetricsReported,
    Responded,
    SchedulerToClient,
    Submit,
)
from shmserve.ipc.messages.publications import Acknowledged, MemoryDropped, ProcessExited
from shmserve.ipc.messages.supervision import (
    CacheStart,
    Drain,
    HostStart,
    OpenScheduler,
    Ping,
    SchedulerClosed,
    SchedulerReady,
    SchedulerStart,
    SetLogging,
    SetTracing,
    Started,
    Stop,
    decode_start,
)
from shmserve.ipc.messages.unions import (
    ClientToScheduler,
    LocalClientToScheduler,
    SupervisorToBatching,
    SupervisorToEnsemble,
    SupervisorToHost,
    SupervisorToScheduler,
    WorkerToScheduler,
)
from shmserve.ipc.processes import SPIN_NS, BusyPoll, PreciseWait
from shmserve.ipc.tensors.schemas import Schemas
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport.router import PeerCredRouter, UntrustedRouter, leading_pid, trailing_pid
from shmserve.ipc.transport.zmtp import Dealer
from shmserve.scheduler.batching import BatchingCore
from shmserve.scheduler.ensemble.core import EnsembleCore
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.runner import InProcessLinks, StepLinks
from shmserve.scheduler.front import Core, Front
from shmserve.scheduler.hosting.local_clients import LocalClientListener, LocalTraces
from shmserve.scheduler.requests.scheduled import NEVER
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.settings import Settings

logger = logging.getLogger(__name__)

_LINGER_S = 0.3  # time for the delivery of the last responses
# The maximum number of times that sockets are read before a drain: a client may never stop sending.
_MAX_READS = 1024
# A sleeping thread wakes up late. Timers are therefore set earlier by the measured delay, which
# counts up to this maximum.
_MAX_WAKE_DELAY_NS = 60_000
# A client's deadline may be any number; no timer is longer than this.
_MAX_WAIT_NS = 3_600_000_000_000
_NS_PER_MS = 1_000_000
# epoll_wait(2) counts in whole ms: shorter waits use ppoll(2) on the epoll(7) descriptor.
_SHORT_WAIT_NS = 5 * _NS_PER_MS

ReadableHandler = Callable[[], None]
ReadyEvents = list[tuple[int, int]]  # (descriptor, epoll events)
# The links whose `pending` messages are sent by `flush` at the end of a turn.
Outbox = Dealer | PeerCredRouter | UntrustedRouter | StepLinks


class SchedulerParts(NamedTuple):
    """The parts of a scheduler that differ by kind.

    Attributes:
        core: The core.
        handlers_by_fd: The handlers of its own peers' messages, by descriptor.
        outboxes: All links, in the order of flushing.
    """

    core: Core[Any]
    handlers_by_fd: dict[int, ReadableHandler]
    outboxes: tuple[Outbox, ...]


class HostedScheduler(ABC):
    """A scheduler with its sockets.

    The scheduler adds itself to `active_schedulers` when it has received messages, and the host
    then runs its turn. After each turn, `wake_ns` is the time of the next turn (monotonic ns), and
    `live_count` the number of requests. If it `has_stopped`, the host only closes it.
    """

    control_messages: ClassVar[frozenset[type]]  # the messages that the supervisor may send

    def __init__(
        self,
        start: SchedulerStart,
        waiter: DescriptorWaiter,
        in_process_links: InProcessLinks,
        active_schedulers: dict[HostedScheduler, None],
    ) -> None:
        number, run_dir = start.number, start.run_dir
        self.number = number
        self.endpoint = endpoints.scheduler(run_dir, number)
        self.wake_ns = NEVER
        self.live_count = 0
        self.has_stopped = False
        self._active_schedulers = active_schedulers
        self._start = start
        self._waiter = waiter
        self._in_process_links = in_process_links
        self._settings = Settings.read(start.config, start.version, start.limits)
        self._control = Dealer(endpoints.control(run_dir), f"{start.kind}.{number}.{os.getpid()}")
        self._client_router = PeerCredRouter(self.endpoint, leading_pid)
        self._signature = Signature(start.config, start.version)
        self._local_clients = LocalClientListener.open(start, self._signature)
        self._traces = LocalTraces(self._settings.name, start.version, self._control)
        self._lent_memory = LentMemory(start.arena_byte_size)
        self._cache = _create_cache(start.cache, self._settings, self._lent_memory)
        self.core, peer_handlers, self.outboxes = self._create_parts()
        self.front: Front[Any] = Front(
            self.core, self, self._control, time.time_ns, self._settings.name, self._cache
        )
        if start.snapshot:
            self.front.restore(start.snapshot, start.worker_pids)
        # The supervisor's messages come first, because they announce instances and report exits.
        self._handlers_by_fd: dict[int, ReadableHandler] = {
            self._control.fd: self._read_control,
            **peer_handlers,
            self._client_router.fd: self._read_clients,
            self._local_clients.router.fd: self._read_local_clients,
        }
        for fd, handler in self._handlers_by_fd.items():
            waiter.watch(fd, handler)
        in_process_links.register(self.endpoint, self._handle_in_process_message)
        self._control.send(SchedulerReady(os.getpid()))
        active_schedulers[self] = None

    @abstractmethod
    def _create_parts(self) -> SchedulerParts:
        """Create the core, handlers and outboxes of this kind of scheduler."""

    # --- received messages

    def _read_control(self) -> None:
        self._active_schedulers[self] = None
        front, now_ns = self.front, time.monotonic_ns()
        for message in self._control.receive():
            if type(message) is Drain:
                self._catch_up()
            if type(message) is ProcessExited:
                self._local_clients.process_exited(message.process)
                self._traces.process_exited(message.process)
            if type(message) is SetTracing:
                self._traces.apply_settings(message)
            elif type(message) in self.control_messages:
                front.handle_control_message(message, now_ns)
            else:
                front.count_unexpected()
        self.has_stopped = front.has_stopped

    def _catch_up(self) -> None:
        """Handle the messages that clients sent here before they switched to the successor."""
        links = (self._client_router, self._local_clients.router)
        for _ in range(_MAX_READS):
            readable_fds = [link.fd for link in links if link.wait(0)]
            if not readable_fds:
                return
            for fd in readable_fds:
                self._handlers_by_fd[fd]()

    def _read_clients(self) -> None:
        self._active_schedulers[self] = None
        front, now_ns = self.front, time.monotonic_ns()
        for peer, message in self._client_router.receive():
            if type(message) in _FROM_CLIENT:
                front.handle_client_message(peer, message, now_ns)
            else:
                front.count_unexpected()

    def _handle_in_process_message(self, peer: bytes, message: Any) -> None:
        self._active_schedulers[self] = None
        self.front.handle_client_message(peer, message, time.monotonic_ns())

    def _read_local_clients(self) -> None:
        self._active_schedulers[self] = None
        front, now_ns = self.front, time.monotonic_ns()
        local_clients = self._local_clients
        for peer, message in local_clients.router.receive():
            if type(message) not in _FROM_LOCAL_CLIENT:
                front.count_unexpected()
                continue
            valid_message = local_clients.check(peer, message, now_ns)
            if valid_message is None:
                continue
            if self._traces.is_active and type(valid_message) is Submit:
                valid_message = self._traces.start_trace(peer, valid_message)
            front.handle_client_message(peer, valid_message, now_ns)

    # --- links to clients (see `ClientLinks`)

    @property
    def malformed_messages(self) -> int:
        """Return the number of clients' unreadable frames so far."""
        return (
            self._client_router.malformed_messages + self._local_clients.router.malformed_messages
        )

    def sender_of(self, peer: bytes) -> Callable[[Any], object]:
        """Return the function that queues a message for the client at this address.

        The client is a program on this host, a scheduler in this process, a gateway or a worker.
        """
        if leading_pid(peer) >= FIRST_LOCAL_CLIENT:
            return partial(self._send_to_local_client, peer)
        if self._in_process_links.is_registered(peer):
            return partial(self._in_process_links.post, peer, self.endpoint)
        return partial(self._client_router.post, peer)

    def _send_to_local_client(self, peer: bytes, message: Any) -> None:
        if self._traces.measured_requests:
            self._traces.end_trace(peer, message)
        if type(message) is not Finished and getattr(message, "code", None):
            self._log_failure(peer, message)
        self._local_clients.router.post(peer, message)

    def _log_failure(self, peer: bytes, message: Failed | Responded) -> None:
        """Log a failure of the server or the model as gateways do for their clients."""
        if from_code(message.code, message.message).server_fault:
            extra = self.front.ids_of(peer, message.id)
            log_args = self._settings.name, message.message
            logger.error("inference of model '%s' failed: %s", *log_args, extra=extra)

    def close(self) -> None:
        """Close every link, after waiting shortly for the delivery of its last messages."""
        self._in_process_links.remove(self.endpoint)
        for fd in self._handlers_by_fd:
            self._waiter.unwatch(fd)
        for outbox in self.outboxes:
            outbox.close(_LINGER_S)
        self._lent_memory.close()


class BatchingScheduler(HostedScheduler):
    """The scheduler of a model that has instances; its peers are their workers."""

    control_messages = frozenset(get_args(SupervisorToScheduler) + get_args(SupervisorToBatching))

    def _create_parts(self) -> SchedulerParts:
        endpoint = endpoints.instances(self._start.run_dir, self._start.number)
        worker_router = PeerCredRouter(endpoint, trailing_pid)
        properties_by_schema = Schemas(self._signature.batch_properties)
        clock = time.perf_counter_ns
        core = BatchingCore(
            self._settings, properties_by_schema, worker_router, self._control, clock, self._cache
        )

        def read_workers() -> None:
            self._active_schedulers[self] = None
            now_ns = time.monotonic_ns()
            for peer, message in worker_router.receive():
                if type(message) is MetricsReported:
                    self.front.metrics_reported(peer, message)
                elif type(message) in _FROM_WORKER:
                    core.results.handle(peer, message, now_ns)
                else:
                    self.front.count_unexpected()

        outboxes = (self._control, worker_router, self._client_router, self._local_clients.router)
        return SchedulerParts(core, {worker_router.fd: read_workers}, outboxes)


class EnsembleScheduler(HostedScheduler):
    """The scheduler of an ensemble.

    Its peers are the schedulers of its steps, in this process or others.
    """

    control_messages = frozenset(get_args(SupervisorToScheduler) + get_args(SupervisorToEnsemble))

    def _create_parts(self) -> SchedulerParts:
        start, control = self._start, self._control
        own_address = b"%d.%d" % (os.getpid(), start.number)

        def handle_step_message(endpoint: str, message: Any) -> None:
            self._active_schedulers[self] = None
            if type(message) in _FROM_STEP:
                core.step_runner.receive(endpoint, message, time.monotonic_ns())
            else:
                self.front.count_unexpected()

        def report_dropped(memory_id: int) -> None:
            control.post(MemoryDropped(memory_id))

        waiter, in_process_links = self._waiter, self._in_process_links
        links = StepLinks(
            waiter.watch, waiter.unwatch, in_process_links, own_address, handle_step_message
        )
        self._memory = EnsembleMemory(self._lent_memory, report_dropped)
        core = EnsembleCore(self._settings, start.config, links, control, self._memory, self._cache)
        # The steps come first: when a request ends, its steps are notified before its client.
        outboxes = (links, self._client_router, self._local_clients.router, control)
        return SchedulerParts(core, {}, outboxes)

    def close(self) -> None:
        super().close()
        self._memory.close()


def _create_cache(start: CacheStart, settings: Settings, lent: LentMemory) -> ResponseCache | None:
    if not settings.caches_responses or not start.byte_size:
        return None
    return ResponseCache(settings.name, settings.version, start, lent)


KINDS: dict[str, type[HostedScheduler]] = {
    "scheduler": BatchingScheduler,
    "ensemble": EnsembleScheduler,
}

# The messages that each kind of peer may send; others count as malformed.
_FROM_WORKER = frozenset(get_args(WorkerToScheduler))
_FROM_CLIENT = frozenset(get_args(ClientToScheduler))
_FROM_LOCAL_CLIENT = frozenset(get_args(LocalClientToScheduler))
_FROM_STEP = frozenset(get_args(SchedulerToClient))
_FROM_SUPERVISOR = frozenset(get_args(SupervisorToHost))


def run(start_record: bytes) -> None:
    """Host schedulers as an encoded `HostStart` describes, until the supervisor sends `Stop`."""
    start = decode_start(HostStart, start_record)
    processes.set_up(start.title, start.title, start.log)
    processes.disable_timer_slack()
    processes.unmap_large_blocks_on_free()
    Host(start).run()


class DescriptorWaiter:
    """A waiter for readable descriptors, which sleeps in the kernel or polls (`BusyPoll`).

    `handlers` has the handler of each watched descriptor.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, ReadableHandler] = {}
        self._epoll = select.epoll()
        self._short_wait = PreciseWait(self._epoll.fileno())
        self._mean_wake_delay_ns = 0
        self._busy_poll = BusyPoll()

    def watch(self, fd: int, handler: ReadableHandler) -> None:
        """Watch a descriptor; it is handled after the descriptors watched before."""
        self.handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Remove a descriptor."""
        del self.handlers[fd]
        self._epoll.unregister(fd)

    def wait(self, wake_ns: int, live_count: int) -> ReadyEvents:
        """Wait for readable descriptors until about `wake_ns`, with `live_count` live requests.

        Returns:
            The descriptors in order, with epoll(7)'s events; none after a timeout.
        """
        began_ns = now_ns = time.monotonic_ns()
        ready_events: ReadyEvents = []
        if self._busy_poll.should_spin[live_count > 0]:
            ready_events = self._spin_until(min(wake_ns, began_ns + SPIN_NS))
            now_ns = time.monotonic_ns()
        if not ready_events:
            left_ns = wake_ns - now_ns
            if left_ns < _SHORT_WAIT_NS:
                ready_events = self._wait_until(wake_ns)
            else:
                if left_ns > _MAX_WAIT_NS:
                    left_ns = _MAX_WAIT_NS
                # The timeout is rounded down to ms; the caller's next wait is precise.
                ready_events = self._epoll.poll((left_ns // _NS_PER_MS - 1) / 1000)
        self._busy_poll.observe(live_count, time.monotonic_ns() - began_ns)
        if len(ready_events) > 1:
            watched_fds = list(self.handlers)
            ready_events.sort(key=lambda event: watched_fds.index(event[0]))
        return ready_events

    def _spin_until(self, until_ns: int) -> ReadyEvents:
        while time.monotonic_ns() < until_ns:
            ready_events = self._epoll.poll(0)
            if ready_events:
                return ready_events
            os.sched_yield()
        return []

    def _wait_until(self, wake_ns: int) -> ReadyEvents:
        timer_ns = wake_ns - self._mean_wake_delay_ns
        timeout_ns = max(0, timer_ns - time.monotonic_ns())
        is_readable = self._short_wait.wait(timeout_ns)
        if timeout_ns and not is_readable:
            delay_ns = min(max(0, time.monotonic_ns() - timer_ns), _MAX_WAKE_DELAY_NS)
            self._mean_wake_delay_ns += (delay_ns - self._mean_wake_delay_ns) // 8
        return self._epoll.poll(0) if is_readable else []


class Host:
    """The event loop of schedulers."""

    def __init__(self, start: HostStart) -> None:
        self._waiter = DescriptorWaiter()
        self._in_process_links = InProcessLinks()
        self._schedulers: list[HostedScheduler] = []
        # Schedulers with received messages, in the order of their next turns.
        self._active_schedulers: dict[HostedScheduler, None] = {}
        self._is_stopped = False
        self._control = Dealer(endpoints.control(start.run_dir), f"host.{os.getpid()}")
        self._waiter.watch(self._control.fd, self._read_supervisor)
        self._control.send(Started())

    def run(self) -> None:
        """Run until the supervisor sends `Stop`."""
        waiter, schedulers = self._waiter, self._schedulers
        wake_ns = NEVER
        try:
            while not self._is_stopped:
                # The maximum, because a request of an ensemble is also a request of its steps.
                live_count = max([scheduler.live_count for scheduler in schedulers], default=0)
                for fd, _ in waiter.wait(wake_ns, live_count):
                    handler = waiter.handlers.get(fd)
                    if handler is not None:
                        handler()
                self._run_turns(wake_ns)
                wake_ns = min([scheduler.wake_ns for scheduler in schedulers], default=NEVER)
        finally:
            for scheduler in schedulers:
                scheduler.close()
            self._control.close()

    def _run_turns(self, wake_ns: int) -> None:
        """Run the turns that are due and send the resulting messages.

        `wake_ns` is the earliest turn that a scheduler requires (monotonic ns).
        """
        active_schedulers, in_process_links = self._active_schedulers, self._in_process_links
        now_ns = time.monotonic_ns()
        if now_ns >= wake_ns:
            due_schedulers = (s for s in self._schedulers if now_ns >= s.wake_ns)
            active_schedulers.update(dict.fromkeys(due_schedulers))
        turned_schedulers: list[HostedScheduler] = []  # a scheduler may occur twice
        while active_schedulers or in_process_links.queued_messages:
            # Delivered first, so that an ensemble and its steps handle messages in the same turn.
            if in_process_links.queued_messages:
                in_process_links.deliver()
                now_ns = time.monotonic_ns()
            schedulers = list(active_schedulers)
            active_schedulers.clear()
            turned_schedulers += schedulers
            for scheduler in schedulers:
                scheduler.wake_ns = scheduler.front.tick(now_ns)
                scheduler.live_count = scheduler.core.live_count
            if active_schedulers:
                now_ns = time.monotonic_ns()
        # Flushed together after all turns: a receiver that one flush wakes up may occupy this core
        # and delay the other flushes.
        for scheduler in turned_schedulers:
            for outbox in scheduler.outboxes:
                if outbox.pending:
                    outbox.flush()
        for scheduler in turned_schedulers:
            if scheduler.has_stopped and scheduler in self._schedulers:
                self._schedulers.remove(scheduler)
                scheduler.close()
                self._control.send(SchedulerClosed(scheduler.number, ""))

    def _read_supervisor(self) -> None:
        for message in self._control.receive():
            if type(message) in _FROM_SUPERVISOR:
                self._handle(message)
            else:
                logger.warning("unexpected message %s from the supervisor", type(message).__name__)

    def _handle(self, message: SupervisorToHost) -> None:
        match message:
            case OpenScheduler():
                self._open_scheduler(decode_start(SchedulerStart, message.start))
            case SetLogging():
                logs.apply(logs.LogSettings(**message.settings))
            case Ping(number):
                self._control.send(Acknowledged(number))
            case Stop():
                self._is_stopped = True
            case _:
                assert_never(message)

    def _open_scheduler(self, start: SchedulerStart) -> None:
        try:
            scheduler = KINDS[start.kind](
                start, self._waiter, self._in_process_links, self._active_schedulers
            )
        except (ShmserveError, OSError) as error:
            # The process has too few descriptors or too little memory. Other schedulers continue.
            reason = error.message if isinstance(error, ShmserveError) else str(error)
            logger.error("the scheduler of model '%s' cannot start: %s", start.config.name, reason)
            self._control.send(SchedulerClosed(start.number, reason))
            return
        self._schedulers.append(scheduler)
        gc.freeze()  # the scheduler's objects are permanent and need no collection
