"""The results of executions: responses and ends of requests, and recovery from lost workers.

A worker is lost if it died, executed for longer than the limit, or returned a batch that it was not
given. A request of a lost worker runs again, once and alone, on three conditions. The
worker must have died while the request ran, no response may have been sent, and the dispatcher must
allow the retry (a sequence loses its state with its worker). A request that had a response, or was
open after `execute`, fails.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from operator import attrgetter

from shmserve.errors import Internal
from shmserve.ipc.messages.inference import (
    RESCHEDULED,
    BatchFinished,
    ExecutionResponded,
    InstanceReady,
    Reply,
)
from shmserve.ipc.messages.supervision import KillInstance
from shmserve.ipc.messages.unions import GenerationReport
from shmserve.ipc.tensors.schemas import runs_once
from shmserve.scheduler.batchers import Batcher
from shmserve.scheduler.instances.dispatch import Dispatcher, Executions
from shmserve.scheduler.instances.pool import Execution, Pool, Slot, SlotState
from shmserve.scheduler.requests.queue import RequestQueue
from shmserve.scheduler.requests.responses import Responses
from shmserve.scheduler.requests.scheduled import (
    AT_WORK,
    EMPTY_RESPONSE,
    ControlLink,
    Event,
    ScheduledRequest,
    State,
    Timing,
)
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics import Reason, Statistics

logger = logging.getLogger(__name__)

_KEY = attrgetter("key")
_DIED_WHILE_OPEN = "the model's worker died before this request's last response"


@dataclass(eq=False)
class Results:
    """The handler of workers' messages and exits.

    `unexpected_messages` counts messages that their sender must not send now. A batcher that learns
    is notified of each execution. The dispatcher handles messages that only its kind receives.
    """

    _settings: Settings
    _pool: Pool
    _control: ControlLink
    _queue: RequestQueue
    _responses: Responses
    _statistics: Statistics
    _executions: Executions
    _batcher: Batcher
    _dispatcher: Dispatcher
    unexpected_messages: int = 0

    # --- messages of workers ----------------------------------------------------------------------

    def handle(
        self,
        peer: bytes,
        message: InstanceReady | BatchFinished | ExecutionResponded | GenerationReport,
        now_ns: int,
    ) -> None:
        """Handle a worker's message; an unexpected message is counted and dropped."""
        match message:
            case ExecutionResponded():
                self._handle_responded(peer, message, now_ns)
            case BatchFinished():
                slot = self._pool.find_by_peer(peer)
                if slot is None or not slot.executions:
                    self.unexpected_messages += 1
                elif (execution := slot.executions[0]).id != message.batch:
                    self.unexpected_messages += 1
                    self._kill_untrusted(slot, now_ns)
                else:
                    self._handle_finished(slot, execution, message, now_ns)
            case InstanceReady():
                if peer == b"%d.%d" % (message.index, message.pid) and message.index >= 0:
                    self._executions.register_worker(message.index, peer, message.pid)
                else:
                    self.unexpected_messages += 1
            case _:
                slot = self._pool.find_by_peer(peer)
                if slot is None:
                    self.unexpected_messages += 1
                elif not self._dispatcher.handle_worker_message(slot, message, now_ns):
                    self.unexpected_messages += 1
                    self._kill_untrusted(slot, now_ns)

    def _handle_finished(
        self, slot: Slot, execution: Execution, message: BatchFinished, now_ns: int
    ) -> None:
        requests = execution.requests
        self._pool.finish(slot, now_ns)
        timing = Timing.from_worker(
            message, execution.sent_ns, now_ns, execution.rows, execution.reason or ""
        )
        if message.executed:
            self._observe(execution, timing, now_ns)
        if message.copied_input_bytes or message.copied_output_bytes:
            copied_bytes = (message.copied_input_bytes, message.copied_output_bytes)
            self._statistics.executions.count_copied(*copied_bytes)
        if self._settings.decoupled:
            self._handle_decoupled(slot, execution, message.replies, timing, now_ns)
            return
        if message.executed and not slot.has_served:
            self._executions.report_served(slot)
        replies = match_replies(requests, message.replies)
        if replies is None:
            self.unexpected_messages += 1
            logger.error(
                "worker process %d returned replies that do not match its batch; all requests of "
                "the batch fail",
                slot.pid,
            )
            replies = [Reply(request.key, "INTERNAL", Internal().message) for request in requests]
        for reply in replies:
            code, request = reply.code, slot.requests[reply.key]
            del slot.requests[reply.key]
            if code == RESCHEDULED and self._reschedule(request):
                continue
            if request.state is State.EXECUTING:
                response = (reply.schema, reply.data)
                self._responses.finish(request, code, reply.message, response, timing, now_ns)
            else:
                if not code:
                    self._responses.release_outputs(request, reply.data)
                self._responses.close(request, now_ns)

    def _reschedule(self, request: ScheduledRequest) -> bool:
        """Requeue a request that its model has rescheduled; return False if that is not possible.

        A request whose client no longer waits is not requeued.
        """
        return request.state in AT_WORK and self._dispatcher.requeue(request)

    def _observe(self, execution: Execution, timing: Timing, now_ns: int) -> None:
        """Update the estimates from an execution whose requests are about to end."""
        count = len(execution.requests)
        self._statistics.count_execution(execution.reason, execution.rows, timing, now_ns)
        busy_ns = timing.input_ns + timing.infer_ns + timing.output_ns
        took_ns = now_ns - execution.started_ns
        if took_ns < busy_ns:
            took_ns = busy_ns
        self._executions.service_time.observe(took_ns, busy_ns, count)
        if self._batcher.is_learning:
            live_count = self._responses.live_count - count
            latencies = [now_ns - request.arrived_ns for request in execution.requests]
            self._batcher.record_batch(now_ns, live_count, execution.rows, took_ns, latencies)

    def _handle_decoupled(
        self, slot: Slot, execution: Execution, replies: list[Reply], timing: Timing, now_ns: int
    ) -> None:
        """Handle the return of a decoupled model's `execute`.

        Some of its requests have ended before, some end now, and the others stay open.
        """
        for request in execution.requests:
            request.timing = timing
            if request.succeeded_early:
                self._statistics.count_times(request, timing, now_ns)
        for reply in replies:
            open_request = slot.requests.get(reply.key)
            if open_request is None:
                self.unexpected_messages += 1
            elif reply.code == RESCHEDULED and self._reschedule(open_request):
                del slot.requests[reply.key]
                self._pool.update_free(slot)
            else:
                self._end_request(slot, open_request, reply, now_ns)
        for request in execution.requests:
            if request.state is State.EXECUTING:
                request.transition(Event.RESPOND)
        if slot.execution is not None:  # the next execution waited for the returned one
            for request in slot.execution.requests:
                request.responded_ns = now_ns

    # --- responses of a decoupled model -----------------------------------------------------------

    def _handle_responded(self, peer: bytes, message: ExecutionResponded, now_ns: int) -> None:
        """Handle a response, or the end of the responses."""
        slot = self._pool.find_by_peer(peer)
        request = None if slot is None else slot.requests.get(message.key)
        if slot is None or request is None or not self._settings.decoupled:
            self.unexpected_messages += 1
            return
        if message.copied_output_bytes:
            self._statistics.executions.count_copied(0, message.copied_output_bytes)
        if message.final:
            self._end_request(slot, request, message, now_ns)
        elif request.state in AT_WORK:
            self._statistics.count_response(request, message, now_ns)
            self._responses.relay(request, message)
        elif message.data:
            self._responses.release_outputs(request, message.data)

    def _end_request(
        self,
        slot: Slot,
        request: ScheduledRequest,
        final_message: ExecutionResponded | Reply,
        now_ns: int,
    ) -> None:
        del slot.requests[request.key]
        self._pool.update_free(slot)
        if not slot.has_served:
            self._executions.report_served(slot)
        if request.state in AT_WORK:
            self._statistics.count_response(request, final_message, now_ns)
            timing = _unfinished_timing(slot.execution, now_ns)
            self._responses.end(request, final_message, timing, now_ns)
        else:
            self._statistics.count_cancelled(request, now_ns)
            if final_message.data:
                self._responses.release_outputs(request, final_message.data)
            self._responses.close(request, now_ns)

    # --- exits of workers -------------------------------------------------------------------------

    def process_exited(self, pid: int, reason: str, now_ns: int) -> None:
        """Retry or fail the requests of a worker that died.

        The requests of its running execution run once more, alone, if they can. The requests of
        executions that it had not begun return to the front of the queue. A request fails if it
        has had a response, or if its execution had returned and only responses were to come.
        """
        lost_work = self._pool.process_exited(pid)
        if lost_work is None:
            return
        self._statistics.workers_lost += 1
        lost_work = self._dispatcher.exclude_continuing(lost_work)
        suffix = f" ({reason})" if reason else ""
        for request in lost_work.open_requests:
            self._fail_lost(request, _DIED_WHILE_OPEN + suffix, now_ns)
        for execution in reversed(lost_work.executions[1:]):
            for request in reversed(execution.requests):
                if request.state is State.EXECUTING:
                    self._queue.put_back(request)
                else:
                    self._fail_lost(request, _DIED_WHILE_OPEN + suffix, now_ns)
        for execution in lost_work.executions[:1]:
            for request in execution.requests:
                self._retry_or_fail(request, suffix, now_ns)

    def _retry_or_fail(self, request: ScheduledRequest, suffix: str, now_ns: int) -> None:
        if request.state is not State.EXECUTING:
            self._fail_lost(request, _DIED_WHILE_OPEN + suffix, now_ns)
            return
        lost_text = self._dispatcher.lost_text(request)
        if lost_text:
            self._fail_lost(request, lost_text + suffix, now_ns)
            return
        request.worker_exits += 1
        runs_once_only = runs_once(request.submit.schema, request.submit.data)
        if request.worker_exits == 1 and not runs_once_only:
            self._statistics.retried += 1
            self._queue.retry(request)
        else:
            text = "the model's worker died while running this request" + suffix
            if runs_once_only:
                text += "; its outputs overlap its inputs, which may have changed"
            self._fail_lost(request, text, now_ns)

    def _fail_lost(self, request: ScheduledRequest, text: str, now_ns: int) -> None:
        """Fail a request whose worker died; if it had ended before, only remove it."""
        if request.state in AT_WORK:
            self._responses.finish(request, "INTERNAL", text, EMPTY_RESPONSE, None, now_ns)
        elif request.state is not State.DONE:
            self._responses.close(request, now_ns)

    def kill_overrun(self, slot: Slot, now_ns: int) -> None:
        """Kill a worker whose batch exceeded the limit, and fail a request that was alone in it.

        The requests of a larger batch wait for the exit of the worker, which still uses their
        memory, and run again alone.
        """
        assert slot.execution is not None
        self._statistics.overruns += 1
        limit_s = self._settings.execution_limit_ns / 1e9
        exceeded_text = f"exceeded the limit of {limit_s:g} seconds"
        requests = slot.execution.requests
        requests_text = f"{len(requests)} request{'s' * (len(requests) != 1)}"
        self._kill_instance(slot, f"an execution of {requests_text} {exceeded_text}")
        if len(requests) == 1 and requests[0].state in AT_WORK:
            text = f"execution of the request {exceeded_text}"
            self._fail_before_return(requests[0], text, now_ns)

    def _kill_untrusted(self, slot: Slot, now_ns: int) -> None:
        """Kill a worker that returned a batch that it was not given: its state is unknown."""
        if slot.state is SlotState.BUSY:
            self._kill_instance(slot, "it returned a batch that was not sent to it")
            for request in slot.requests.values():
                if request.state in AT_WORK:
                    self._fail_before_return(request, Internal().message, now_ns)

    def _kill_instance(self, slot: Slot, reason: str) -> None:
        slot.transition("doom")
        self._control.post(KillInstance(slot.pid, reason))

    def _fail_before_return(self, request: ScheduledRequest, text: str, now_ns: int) -> None:
        self._responses.fail(request, "INTERNAL", text, Reason.BACKEND, now_ns, is_early=True)


def _unfinished_timing(execution: Execution | None, now_ns: int) -> Timing:
    """Return the phases of an unfinished execution; all its time so far counts as inference."""
    if execution is None:
        return Timing(now_ns, 0, 0, 0)
    began_ns = execution.started_ns
    return Timing(began_ns, 0, now_ns - began_ns, 0, execution.rows, execution.reason or "")


def match_replies(requests: list[ScheduledRequest], replies: list[Reply]) -> list[Reply] | None:
    """Return the replies in the order of `requests`, or None unless there is one for each."""
    keys = list(map(_KEY, requests))
    if list(map(_KEY, replies)) == keys:
        return replies
    replies_by_key = {reply.key: reply for reply in replies}
    if len(replies) != len(keys) or replies_by_key.keys() != set(keys):
        return None
    return [replies_by_key[key] for key in keys]
