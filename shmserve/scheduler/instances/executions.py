"""Batches at workers: start, return, loss, overrun; and what workers hear of their requests."""

from __future__ import annotations

import itertools
import logging
from typing import Any, Protocol, assert_never

from shmserve.ipc.messages import (
    BatchFinished,
    CancelExecution,
    Execute,
    ExecutionResponded,
    GrantExecution,
    InstanceReady,
    KillInstance,
    ReleaseOutputs,
    Reply,
    Work,
)
from shmserve.ipc.tensors.aliasing import runs_once
from shmserve.scheduler.batchers.dynamic import Closed
from shmserve.scheduler.instances.pool import Execution, Lost, Pool, Slot, SlotState
from shmserve.scheduler.instances.service_time import ServiceTime
from shmserve.scheduler.requests.queue import RequestQueue
from shmserve.scheduler.requests.request import AT_WORK, Event, Request, State
from shmserve.scheduler.requests.responses import Outcome, Peers, Responses
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics.counters import Reason, Statistics
from shmserve.scheduler.statistics.timing import Timing

logger = logging.getLogger(__name__)

_MOST_EARLY = 4096
_DIED_OPEN = "the model's worker died before this request's last response"


class ControlLink(Protocol):
    """Queues messages to the supervisor; `malformed` counts unreadable ones from it."""

    malformed: int

    def post(self, message: Any) -> None:
        """Queue a message."""


class Executions:
    """What instances do for requests. `misplaced` counts messages that made no sense."""

    def __init__(
        self,
        settings: Settings,
        workers: Peers,
        control: ControlLink,
        queue: RequestQueue,
        answers: Responses,
        statistics: Statistics,
    ) -> None:
        self.pool = Pool(settings.execution_limit_ns)
        self.service_time = ServiceTime()
        self.misplaced = 0
        self._decoupled = settings.decoupled
        self._limit_s = settings.execution_limit_ns / 1e9
        self._workers = workers
        self._control = control
        self._queue = queue
        self._answers = answers
        self._statistics = statistics
        self._ids = itertools.count(1)
        # Releases of outputs of instances that are still to offer themselves, by their pid.
        self._early: dict[int, list[tuple[int, int]]] = {}

    # --- to workers -------------------------------------------------------------------------------

    def start(self, requests: list[Request], reason: Closed, now_ns: int) -> None:
        """Send a batch to a free instance, or ahead to one that has room."""
        execution = Execution(next(self._ids), requests, reason, now_ns)
        slot = self.pool.assign(execution)
        work = [Work(request.key, request.client.pid, request.work) for request in requests]
        self._workers.post(slot.peer, Execute(execution.id, work, self._answers.live))

    def cancel(self, request: Request) -> None:
        """Tell the worker that has this request that its outputs are not wanted."""
        if request.worker is not None:
            self._workers.post(request.worker.peer, CancelExecution(request.key))

    def grant(self, request: Request, responses: int) -> None:
        """Tell the worker that has this request that its client has read so many responses; of what
        it has not been sent it has read none."""
        read = min(responses, request.responses - request.granted)
        if read > 0 and request.worker is not None:
            request.granted += read
            self._workers.post(request.worker.peer, GrantExecution(request.key, read))

    def release(self, client_pid: int, pid: int, offsets: list[int]) -> None:
        """Tell worker `pid` that a client has read these outputs."""
        slot = self.pool.by_pid(pid)
        if slot is not None:
            self._workers.post(slot.peer, ReleaseOutputs(client_pid, offsets))
        elif self.pool.awaits(pid):  # a predecessor's, which will come once it has time
            early = self._early.setdefault(pid, [])
            early += [(client_pid, offset) for offset in offsets[: _MOST_EARLY - len(early)]]

    def forget(self, pid: int) -> None:
        """A process is gone."""
        self._early.pop(pid, None)

    # --- from workers -----------------------------------------------------------------------------

    def handle(self, peer: bytes, message: InstanceReady | BatchFinished, now_ns: int) -> None:
        """Handle a worker's message; what no worker of ours can have sent is dropped."""
        match message:
            case InstanceReady():
                if peer == b"%d.%d" % (message.index, message.pid) and message.index >= 0:
                    self.pool.offer(message.index, peer, message.pid)
                    if message.pid in self._early and self.pool.by_peer(peer) is not None:
                        for client_pid, offset in self._early.pop(message.pid):
                            self._workers.post(peer, ReleaseOutputs(client_pid, [offset]))
                else:
                    self.misplaced += 1
            case BatchFinished():
                slot = self.pool.by_peer(peer)
                if slot is None or slot.execution is None:
                    self.misplaced += 1
                elif slot.execution.id != message.batch:
                    self._distrust(slot, slot.execution, now_ns)
                else:
                    self._returned(slot, slot.execution, message, now_ns)
            case _:
                assert_never(message)

    def _returned(
        self, slot: Slot, execution: Execution, message: BatchFinished, now_ns: int
    ) -> None:
        requests = execution.requests
        self.pool.finish(slot, now_ns)
        timing = Timing.of(message, execution.sent_ns, now_ns)
        if message.executed:
            units = sum([request.units for request in requests])
            self._statistics.executed(execution.reason, units, timing, now_ns)
            took_ns = max(now_ns - execution.started_ns, timing.total_ns)
            self.service_time.observe(took_ns, timing.total_ns, len(requests))
        self._statistics.copied(message.copied_in, message.copied_out)
        if self._decoupled:
            self._returned_open(slot, execution, message.replies, timing, now_ns)
            return
        replies = matched(requests, message.replies)
        if replies is None:
            self.misplaced += 1
            logger.error("an instance returned a batch with answers that do not fit it")
            replies = [Reply(0, "INTERNAL", "internal error", b"")] * len(requests)
        for request, reply in zip(requests, replies, strict=True):
            code, text, body = reply.code, reply.message, reply.body
            del slot.requests[request.key]
            if request.state is State.EXECUTING:
                self._answers.finish(request, Outcome(code, text, body, timing), now_ns)
            else:
                if not code:
                    self._answers.drop_outputs(request, body)
                self._answers.close(request, now_ns)

    def _returned_open(
        self,
        slot: Slot,
        execution: Execution,
        replies: list[Reply],
        timing: Timing,
        now_ns: int,
    ) -> None:
        """`execute` of a decoupled model has returned; some of its requests have ended before, some
        end by this, and others go on."""
        for request in execution.requests:
            request.timing = timing
            if request.untimed:
                self._statistics.timed(request, timing, now_ns)
        for reply in replies:
            ended = slot.requests.get(reply.key)
            if ended is None:
                self.misplaced += 1
            else:
                self._ended(slot, ended, reply, now_ns)
        for request in execution.requests:
            if request.state is State.EXECUTING:
                request.meet(Event.RESPOND)
        if slot.execution is not None:  # which waited for this one
            for request in slot.execution.requests:
                request.responded_ns = now_ns

    # --- responses of a decoupled model -----------------------------------------------------------

    def responded(self, peer: bytes, message: ExecutionResponded, now_ns: int) -> None:
        """A request has a response, or its end."""
        slot = self.pool.by_peer(peer)
        request = None if slot is None else slot.requests.get(message.key)
        if slot is None or request is None or not self._decoupled:
            self.misplaced += 1
            return
        if message.copied_out:
            self._statistics.copied(0, message.copied_out)
        if message.final:
            self._ended(slot, request, message, now_ns)
        elif request.state in AT_WORK:
            self._statistics.responded(request, message, now_ns)
            self._answers.relay(request, message)
        elif message.body:
            self._answers.drop_outputs(request, message.body)

    def _ended(
        self, slot: Slot, request: Request, last: ExecutionResponded | Reply, now_ns: int
    ) -> None:
        del slot.requests[request.key]
        if request.state in AT_WORK:
            self._statistics.responded(request, last, now_ns)
            self._answers.end(request, last, now_ns)
        else:
            self._statistics.cancelled(request, now_ns)
            if last.body:
                self._answers.drop_outputs(request, last.body)
            self._answers.close(request, now_ns)

    def _distrust(self, slot: Slot, execution: Execution, now_ns: int) -> None:
        """A worker that answers what it was not asked is in no state that we know."""
        self.misplaced += 1
        if slot.state is SlotState.BUSY:
            self._doom(slot, "it returned a batch that it was not given")
            for request in slot.requests.values():
                if request.state in AT_WORK:
                    self._fail_early(request, "internal error", now_ns)

    # --- ends -------------------------------------------------------------------------------------

    def exited(self, lost: Lost, reason: str, now_ns: int) -> None:
        """A worker died with these: whoever was in the first execution runs once more, alone, if it
        can; those in the others, which it had not begun, go back to where they were in the queue.
        Who has had a response does not run again, and neither does who was open: what it was is
        told already, or may be.
        """
        if not (lost.executions or lost.open):
            return
        self._statistics.workers_lost += 1
        why = f" ({reason})" if reason else ""
        for request in lost.open:
            self._lost(request, _DIED_OPEN + why, now_ns)
        for execution in reversed(lost.executions[1:]):
            for request in reversed(execution.requests):
                if request.state is State.EXECUTING:
                    self._queue.put_back(request)
                else:
                    self._lost(request, _DIED_OPEN + why, now_ns)
        for execution in lost.executions[:1]:
            for request in execution.requests:
                self._died_running(request, why, now_ns)

    def _died_running(self, request: Request, why: str, now_ns: int) -> None:
        if request.state is not State.EXECUTING:
            self._lost(request, _DIED_OPEN + why, now_ns)
            return
        request.deaths += 1
        once = runs_once(request.work)
        if request.deaths == 1 and not once:
            self._statistics.retried += 1
            self._queue.retry(request)
        else:
            text = "the model's worker died while running this request" + why
            if once:
                text += "; its outputs go over its inputs, which may be changed"
            self._lost(request, text, now_ns)

    def _lost(self, request: Request, text: str, now_ns: int) -> None:
        """It ended with its worker, unless it had ended before."""
        if request.state in AT_WORK:
            self._answers.finish(request, Outcome("INTERNAL", text, b"", None), now_ns)
        elif request.state is not State.DONE:
            self._answers.close(request, now_ns)

    def overrun(self, slot: Slot, now_ns: int) -> None:
        """A batch passed the limit: its worker is killed, and a request that was alone in it fails.

        Members of a larger batch wait for the end of the worker, which still uses their memory, and
        run again alone.
        """
        assert slot.execution is not None
        self._statistics.overruns += 1
        limit = f"exceeded the limit of {self._limit_s:g} seconds"
        requests = slot.execution.requests
        self._doom(slot, f"an execution of {len(requests)} requests {limit}")
        if len(requests) == 1 and requests[0].state in AT_WORK:
            self._fail_early(requests[0], f"execution of the request {limit}", now_ns)

    def _doom(self, slot: Slot, reason: str) -> None:
        self.pool.doom(slot)
        self._control.post(KillInstance(slot.index, reason, slot.pid))

    def _fail_early(self, request: Request, text: str, now_ns: int) -> None:
        self._answers.fail(request, "INTERNAL", text, Reason.BACKEND, now_ns, early=True)


def matched(requests: list[Request], replies: list[Reply]) -> list[Reply] | None:
    """The replies in the order of `requests`, or None: not one each."""
    if len(replies) != len(requests):
        return None
    if all(map(_answers, requests, replies)):
        return replies
    by_key = {reply.key: reply for reply in replies}
    if any(request.key not in by_key for request in requests):
        return None
    return [by_key[request.key] for request in requests]


def _answers(request: Request, reply: Reply) -> bool:
    return request.key == reply.key
