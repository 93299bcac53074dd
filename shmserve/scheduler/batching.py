"""The core of a batching scheduler: the queue, the batcher and the pool of instances.

    admit, cancel, ...       messages of clients, from the front
    handle_control_message   messages of the supervisor (`results` handles those of workers)
    tick                     expire, dispatch, release

Messages to send are posted to outboxes, which the event loop flushes once per iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, assert_never

from shmserve.errors import Internal, InvalidArgument, QueueFull, ShmserveError, Unavailable
from shmserve.ipc.messages.control_requests import (
    CallDeadlocked,
    CallsWaiting,
    CheckHolders,
    ResourcesHeld,
    TicketGranted,
)
from shmserve.ipc.messages.inference import Caller, Release, Submit
from shmserve.ipc.messages.supervision import (
    CountChange,
    InstanceExpected,
    InstanceGone,
    InstanceRetired,
    RetireInstance,
)
from shmserve.ipc.messages.unions import SupervisorToBatching
from shmserve.ipc.tensors.schemas import Schemas
from shmserve.ipc.tensors.signature import BatchProperties, id_prefix, stopping_text
from shmserve.ipc.transport.frames import MalformedMessage
from shmserve.scheduler.batchers.sequence_dispatch import SequenceDispatcher
from shmserve.scheduler.front import Core
from shmserve.scheduler.generative.generation_dispatch import GenerativeDispatcher
from shmserve.scheduler.instances.dispatch import (
    BatchDispatcher,
    Dispatcher,
    Executions,
    batcher_of,
)
from shmserve.scheduler.instances.pool import InstanceTickets, Pool
from shmserve.scheduler.instances.results import Results
from shmserve.scheduler.requests.queue import RequestQueue, expired_text
from shmserve.scheduler.requests.responses import Responses
from shmserve.scheduler.requests.scheduled import (
    CACHED,
    NEVER,
    Client,
    ControlLink,
    Event,
    Lookup,
    ScheduledRequest,
    State,
    Timing,
    WorkerLinks,
)
from shmserve.scheduler.response_cache import ResponseCache
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics import Reason, Statistics

logger = logging.getLogger(__name__)

_CALL_REPORT_NS = 200_000_000  # time until a waiting call is reported, and between its reports


class BatchingCore(Core[ScheduledRequest]):
    """The core of a model version with instances.

    `executions` sends batches to workers, `results` handles their messages. `properties_by_schema`
    has the batching properties of the requests of each schema.
    """

    def __init__(
        self,
        settings: Settings,
        properties_by_schema: Schemas[BatchProperties],
        workers: WorkerLinks,
        control: ControlLink,
        clock: Callable[[], int],
        cache: ResponseCache | None = None,
    ) -> None:
        self._workers = workers
        self._control = control
        self._name = settings.name
        self._properties_by_schema = properties_by_schema
        self._preserves_order = settings.preserve_ordering
        self.statistics = Statistics(settings)
        self._responses = Responses(workers, self.statistics, self._preserves_order, cache)
        self._queue = RequestQueue(settings)
        self._tickets = InstanceTickets(control) if settings.rate_limited else None
        self._pool = Pool(settings.execution_limit_ns, self._tickets, settings.max_open_requests)
        self.executions = Executions(
            settings, self._pool, workers, control, self._responses, self.statistics
        )
        batcher = batcher_of(settings)
        common_parts = (self._queue, self._pool, self.executions, self._responses, self._tickets)
        self._dispatcher: Dispatcher
        if settings.engine is not None:
            self._dispatcher = GenerativeDispatcher(
                settings, *common_parts, settings.engine, self.statistics.generation, clock
            )
        elif settings.sequences is not None:
            self._dispatcher = SequenceDispatcher(settings, *common_parts)
        else:
            self._dispatcher = BatchDispatcher(settings, *common_parts, batcher)
        self.results = Results(
            settings,
            self._pool,
            control,
            self._queue,
            self._responses,
            self.statistics,
            self.executions,
            batcher,
            self._dispatcher,
        )
        self._drain_awaits_sequences = False
        self._next_call_report_ns = NEVER  # the time of the next report of waiting calls
        self._last_report_has_calls = False  # whether the last report had calls

    # --- clients ----------------------------------------------------------------------------------

    def check(self, submit: Submit, now_ns: int) -> None:
        if self._pool.failure:
            raise Unavailable(self._pool.failure)
        self._queue.check(submit, now_ns)

    def admit(
        self, client: Client[ScheduledRequest], submit: Submit, lookup: Lookup | None, now_ns: int
    ) -> None:
        if self._pool.failure:
            raise Unavailable(self._pool.failure)
        queue, dispatcher = self._queue, self._dispatcher
        may_be_full = queue.in_order.count >= queue.min_bound
        if may_be_full and self._pool.free_slots and queue.is_full(submit.priority):
            self._expire(now_ns)
            dispatcher.run(now_ns)
        by_schema, schema = self._properties_by_schema, submit.schema
        properties = by_schema[schema] if schema in by_schema else self._derive_properties(submit)
        sequence_key = (
            dispatcher.admit(client, submit, properties) if dispatcher.tracks_requests else None
        )
        request = queue.enqueue(client, submit, properties, now_ns)
        request.lookup = lookup
        self._responses.register(request)
        if dispatcher.tracks_requests:
            dispatcher.on_enqueued(request, sequence_key)
        if submit.callers:
            self._check_callers(request, now_ns)

    def _check_callers(self, request: ScheduledRequest, now_ns: int) -> None:
        """Fail a call from another model if its callers occupy all instances of this model.

        The callers of all waiting calls count, because several calls together may deadlock
        although each call alone would not.
        """
        chains = [Caller.parse(call.submit.callers) for call in self._queue.calls()]
        caller_ids = {(caller.pid, caller.key) for chain in chains for caller in chain}
        instance_slots = getattr(request.sequence, "instance_slots", None)
        slot = None if instance_slots is None else self._pool.find_by_peer(instance_slots.peer)
        if self._pool.are_blocked(caller_ids, [slot] if slot else [], self._preserves_order):
            self._fail_blocked_call(request, "its instances", now_ns)
            return
        if self._next_call_report_ns == NEVER:
            self._next_call_report_ns = now_ns + _CALL_REPORT_NS
        if self._tickets is not None:
            self._control.post(CheckHolders(request.key, sorted({pid for pid, _ in caller_ids})))

    def _report_calls(self, now_ns: int) -> None:
        """Report the calls that have waited long to the supervisor, which detects deadlocks."""
        calls = self._queue.calls()
        self._next_call_report_ns = now_ns + _CALL_REPORT_NS if calls else NEVER
        executions_by_peer = self._pool.executions_by_peer()
        occupants_by_instance: list[list[int]] = list(executions_by_peer.values())
        unbound_calls: list[Any] = []  # calls that any instance may execute
        waits: list[Any] = []  # [calls, the requests that occupy their instances]
        for request in calls:
            if request.enqueued_ns > now_ns - _CALL_REPORT_NS:
                continue
            instance_slots = getattr(request.sequence, "instance_slots", None)
            call = [request.key, request.submit.callers]
            if instance_slots is None:
                unbound_calls.append(call)
            elif instance_slots.peer in executions_by_peer:
                waits.append([[call], [executions_by_peer[instance_slots.peer]]])
        if unbound_calls and self._preserves_order:  # the response waits for earlier responses
            waits += [[unbound_calls, [occupant]] for occupant in occupants_by_instance]
        elif unbound_calls:
            waits.append([unbound_calls, occupants_by_instance])
        if waits or self._last_report_has_calls:
            self._control.post(CallsWaiting(self._name, waits))
        self._last_report_has_calls = bool(waits)

    def _fail_blocked_call(self, request: ScheduledRequest, reason: str, now_ns: int) -> None:
        callers = [caller.model for caller in Caller.parse(request.submit.callers)]
        chain = " -> ".join([*callers, self._name])
        self._fail_call(request, f"{reason}, which its callers hold ({chain})", now_ns)

    def _fail_call(self, request: ScheduledRequest, reason: str, now_ns: int) -> None:
        text = f"deadlock: the call of model '{self._name}' waits for {reason}"
        self._withdraw(request, now_ns)
        self._responses.fail(request, "INTERNAL", text, Reason.OTHER, now_ns)

    def _derive_properties(self, submit: Submit) -> BatchProperties:
        """Return the batching properties of the requests of a new schema.

        Raises:
            InvalidArgument, Internal: The schema does not fit the model.
        """
        try:
            return self._properties_by_schema[submit.schema]
        except InvalidArgument as error:
            raise InvalidArgument(id_prefix(submit.request_id) + error.message) from None
        except MalformedMessage as error:
            logger.error("model '%s': a request is malformed and fails: %s", self._name, error)
            raise Internal() from None

    def serve_cached(
        self, client: Client[ScheduledRequest], submit: Submit, lookup: Lookup, now_ns: int
    ) -> None:
        # The request is registered, because the responses to earlier requests may have to be sent
        # before its response.
        by_schema, schema = self._properties_by_schema, submit.schema
        properties = by_schema[schema] if schema in by_schema else self._derive_properties(submit)
        request = self._queue.enqueue(client, submit, properties, now_ns, is_cached=True)
        request.lookup = lookup
        self._responses.register(request)
        timing = Timing(now_ns, 0, 0, 0, close_reason=CACHED)
        self._responses.finish(request, "", "", lookup.response, timing, now_ns)

    def retry_after_s(self, error: ShmserveError) -> int:
        if not isinstance(error, QueueFull):
            return 0
        return self.executions.service_time.drain_s(len(self._queue), self._pool.ready_count)

    def cancel(self, request: ScheduledRequest, now_ns: int, keeps_reading: bool = False) -> None:
        match request.state:
            case State.QUEUED | State.HELD:
                self._withdraw(request, now_ns)
                self._responses.fail(
                    request, "CANCELLED", "request cancelled", Reason.CANCELED, now_ns
                )
            case State.EXECUTING | State.RESPONDING:
                if not keeps_reading:
                    request.transition(Event.CANCEL)
                self.executions.cancel(request, keeps_reading)
            case _:
                pass  # the outcome is decided already

    def _withdraw(self, request: ScheduledRequest, now_ns: int) -> None:
        if request.state is State.QUEUED:
            self._queue.remove(request)
            self._dispatcher.on_removed(request, now_ns)

    def credit(self, request: ScheduledRequest, read_count: int, now_ns: int) -> None:
        if request.state is State.RESPONDING:
            self.executions.credit(request, read_count)

    def release(self, client: Client[ScheduledRequest], message: Release) -> None:
        self.executions.release(client.pid, message)

    def disconnect(self, client: Client[ScheduledRequest], now_ns: int) -> None:
        for request in list(client.requests.values()):
            match request.state:
                case State.DONE:
                    continue  # this request ended with an earlier request of its sequence
                case State.QUEUED | State.HELD:
                    self._withdraw(request, now_ns)
                case State.EXECUTING | State.RESPONDING:
                    self.executions.cancel(request)
                case _:
                    pass
            self._responses.abandon(request, now_ns)

    def accepts_while_draining(self, submit: Submit) -> bool:
        return self._dispatcher.accepts_while_draining(submit)

    def stop(self, request: ScheduledRequest, now_ns: int) -> None:
        if request.state is State.FAILED_EARLY:
            self._responses.close(request, now_ns)
        else:
            text = stopping_text(request.submit.request_id)
            self._responses.fail(request, "UNAVAILABLE", text, Reason.OTHER, now_ns)

    # --- supervisor -------------------------------------------------------------------

    def handle_control_message(self, message: SupervisorToBatching, now_ns: int) -> None:
        match message:
            case InstanceExpected():
                self.executions.announce(message.index, message.process)
            case InstanceGone():
                self._pool.instance_failed(message.index, message.reason)
            case RetireInstance():
                self._pool.retire(message.index)
                # Retired instances are removed before the next message announces a successor.
                self._release_retired()
            case CountChange():
                self.statistics.instance_changes["more" if message.is_increase else "fewer"] += 1
            case TicketGranted():
                if self._tickets is not None:
                    self._tickets.record_grant(message.ticket)
            case ResourcesHeld() | CallDeadlocked():
                for request in self._queue.calls():
                    if request.key != message.key:
                        continue
                    if isinstance(message, ResourcesHeld):
                        reason = "resources of the rate limiter"
                        self._fail_blocked_call(request, reason, now_ns)
                    else:
                        reason = f"requests that wait for its callers ({message.chain})"
                        self._fail_call(request, reason, now_ns)
            case _:
                assert_never(message)

    def _release_retired(self) -> None:
        for pid in self._pool.take_retired(self._dispatcher.has_work):
            self._control.post(InstanceRetired(pid))

    def process_exited(self, pid: int, reason: str, now_ns: int) -> None:
        self.results.process_exited(pid, reason, now_ns)
        self.executions.process_exited(pid)

    def drain(self, awaits_sequences: bool) -> None:
        self._drain_awaits_sequences = awaits_sequences
        if awaits_sequences and self._dispatcher.open_sequence_count:
            logger.info(
                "model '%s': waiting until all open sequences (%d) have ended",
                self._name,
                self._dispatcher.open_sequence_count,
            )
        self._dispatcher.flush()

    @property
    def unfinished_count(self) -> int:
        sequences = self._dispatcher.open_sequence_count if self._drain_awaits_sequences else 0
        return self._responses.live_count or sequences

    @property
    def live_count(self) -> int:
        return self._responses.live_count

    # --- time -------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> int:
        pool, timers = self._pool, self._queue.timers
        if now_ns >= timers.due_ns:
            self._expire(now_ns)
        if now_ns >= pool.due_ns:
            for slot in pool.overdue_slots(now_ns):
                self.results.kill_overrun(slot, now_ns)
        if pool.failure:
            self._fail_waiting(pool.failure, now_ns)
        wake_ns = self._dispatcher.run(now_ns)
        if now_ns >= self._next_call_report_ns:
            self._report_calls(now_ns)
        if self._tickets is not None:
            self._tickets.end_turn()
        if pool.retiring_slots:
            self._release_retired()
        if self._preserves_order:
            self._responses.send_held_outcomes(now_ns)
            self._responses.sweep()
        for due_ns in (timers.due_ns, pool.due_ns, self._next_call_report_ns):
            if due_ns < wake_ns:
                wake_ns = due_ns
        return wake_ns

    def _expire(self, now_ns: int) -> None:
        for request in self._queue.take_expired(now_ns):
            self._time_out(request, now_ns)

    def _time_out(self, request: ScheduledRequest, now_ns: int) -> None:
        fails_early, reason = False, Reason.OTHER
        text = expired_text(request.submit, request.arrived_ns, request.deadline_ns)
        match request.state:
            case State.QUEUED:
                text = self._dispatcher.expired_text(request, now_ns)
                self._queue.remove(request)
                self._dispatcher.on_removed(request, now_ns, has_expired=True)
                reason = Reason.REJECTED
            case State.EXECUTING | State.RESPONDING:
                self.executions.cancel(request)
                fails_early = True
            case State.HELD:
                pass
            case _:
                return  # the request's other timer has ended it
        self._responses.fail(request, "UNAVAILABLE", text, reason, now_ns, fails_early)

    def _fail_waiting(self, reason: str, now_ns: int) -> None:
        for request in self._queue.all():
            self._queue.remove(request)
            self._dispatcher.on_removed(request, now_ns, keep_dependents=True)
            self._responses.fail(request, "UNAVAILABLE", reason, Reason.OTHER, now_ns)

    def gauges(self) -> dict[str, Any]:
        return {
            "pending": len(self._queue),
            "executing": self._pool.executing_count,
            "instances": self._pool.counts(),
            "open_sequences": self._dispatcher.open_sequence_count,
            "generation": self._dispatcher.gauges(),
            "malformed": self._workers.malformed_messages + self.results.unexpected_messages,
        }
