"""Batches and responses between the scheduler and its workers, and what these hear of requests."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from shmserve.ipc.messages import GenerationNews
from shmserve.ipc.messages.generation import Step, Stepped
from shmserve.ipc.messages.inference import (
    RESCHEDULED,
    BatchFinished,
    CancelExecution,
    CreditExecution,
    EndSequences,
    Execute,
    ExecutionResponded,
    InstanceReady,
    ReaderExited,
    Release,
    ReleaseOutputs,
    Reply,
    SequenceRow,
    Work,
)
from shmserve.scheduler.batchers.dynamic import (
    Batcher,
    Closed,
)
from shmserve.scheduler.batchers.recovery import Recovery
from shmserve.scheduler.instances.pool import Execution, Pool, Slot
from shmserve.scheduler.requests.request import (
    AT_WORK,
    Event,
    Peers,
    ScheduledRequest,
    State,
    Timing,
)
from shmserve.scheduler.requests.responses import Responses
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics import Statistics

logger = logging.getLogger(__name__)

_MOST_EARLY = 4096
_NS_PER_S = 1_000_000_000
_FIRST_GUESS_NS = 10_000_000
_MARGIN_NS = 1_000_000  # timers and messages on the way
_LONGEST_RETRY_S = 60
_AHEAD_NS = 500_000  # of computation that may be at a worker
_DEEPEST = 4
_SOON_NS = 20_000_000
_KNOWN = 16  # observations that say something about the next execution


@dataclass(slots=True, eq=False)
class ServiceTime:
    """The recent service time: when to come back, when to start to be done in time (pure). Moving
    averages, as TCP keeps them of round trips (RFC 6298): mean and mean deviation."""

    _mean_ns: float = 0.0
    _deviation_ns: float = 0.0
    _busy_ns: float = 0.0
    _requests: float = 0.0
    _observed: int = 0
    # How many batches a worker may have at a time: more than one where they are so short that it
    # would otherwise wait for messages as long as it computes.
    pipeline_depth: int = 1
    # Whether batches end so soon that what is cancelled or late behind one may wait for its end.
    ends_soon: bool = False
    # How long before a deadline an execution must start to be done in time.
    reserve_ns: int = _FIRST_GUESS_NS

    def observe(self, duration_ns: int, busy_ns: int, requests: int) -> None:
        """An execution of `requests` requests took this long, from dispatch to return, of which
        its worker was busy with it for `busy_ns`."""
        self._observed += 1
        if self._requests:
            self._busy_ns += (busy_ns - self._busy_ns) / 8
            error = duration_ns - self._mean_ns
            self._mean_ns += error / 8
            deviation_ns = error if error > 0 else -error
            self._deviation_ns += (deviation_ns - self._deviation_ns) / 4
            self._requests += (requests - self._requests) / 8
        else:
            self._mean_ns = duration_ns
            self._deviation_ns = duration_ns / 2
            self._requests = requests
            self._busy_ns = busy_ns
        self.reserve_ns = int(self._mean_ns + 4 * self._deviation_ns) + _MARGIN_NS
        if self._observed >= _KNOWN:
            depth = int(_AHEAD_NS / (self._busy_ns + 1))
            self.pipeline_depth = _DEEPEST if depth > _DEEPEST else depth or 1
            self.ends_soon = self._busy_ns < _SOON_NS

    def drain_s(self, waiting: int, instances: int) -> int:
        """Whole seconds, at least 1, until `waiting` requests are through `instances` instances."""
        if not self._requests:
            return 1
        executions = waiting / self._requests / max(instances, 1)
        seconds = executions * self._mean_ns / _NS_PER_S
        return max(1, min(_LONGEST_RETRY_S, int(seconds + 0.999)))


class Kind(Protocol):
    """The affairs of one kind of scheduling: its dispatcher, who starts executions."""

    def again(self, request: ScheduledRequest) -> bool:
        """A model asks for a request once more; whether it gets it."""

    def from_worker(self, slot: Slot, message: Any, now_ns: int) -> bool:
        """Take a message that only this kind knows; whether it makes sense."""


@dataclass(eq=False)
class Executions:
    """The handler of what instances do for requests. `misplaced` counts messages that made no
    sense; a `batcher` that learns is told of each execution; the `dispatcher` takes what is said of
    its own affairs."""

    _settings: Settings
    _pool: Pool
    _workers: Peers
    _responses: Responses
    _statistics: Statistics
    _recovery: Recovery
    _batcher: Batcher
    service_time: ServiceTime = field(default_factory=ServiceTime)
    misplaced: int = 0
    dispatcher: Kind = field(init=False)
    _ids: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    # What instances that are still to offer themselves are to hear of their outputs, by their pid.
    _early: dict[int, list[ReleaseOutputs | ReaderExited]] = field(default_factory=dict)
    # The same of processes that nobody has announced, and may never: the last of it, with the pid.
    _unknown: deque[tuple[int, ReleaseOutputs]] = field(
        default_factory=partial(deque, maxlen=_MOST_EARLY)
    )

    # --- to workers -------------------------------------------------------------------------------

    def start(
        self,
        requests: list[ScheduledRequest],
        reason: Closed,
        now_ns: int,
        wanted: Slot | None = None,
        rows: Sequence[SequenceRow] = (),
    ) -> None:
        """Send a batch to a free instance, or to the one that is `wanted`, ahead if it is busy."""
        if self._settings.padding is not None:
            padded = self._settings.padding.batch()
            for request in requests:
                padded.may_join(request.shape_key, request.units)
            self._statistics.executions.padded(padded.elements())
        gaps = len(rows) - len(requests) if rows else 0
        execution = Execution(next(self._ids), requests, reason, now_ns, now_ns, gaps)
        slot = self._pool.assign(execution, wanted)
        work = list(map(work_of, requests))
        self._workers.post(slot.peer, Execute(execution.id, work, self._responses.live, list(rows)))

    def post(self, slot: Slot, message: Any) -> None:
        """Tell an instance what its backend serves besides batches."""
        self._workers.post(slot.peer, message)

    def run_step(self, slot: Slot, step: Step, now_ns: int) -> None:
        """Send a step of a generative model to its instance, which is idle."""
        self._pool.assign(Execution(step.step, [], Closed.IDLE, now_ns, now_ns), slot)
        self._workers.post(slot.peer, step)

    def step_done(self, slot: Slot, message: Stepped, rows: int, now_ns: int) -> None:
        """An instance has returned its step, which had so many rows."""
        self._pool.finish(slot, now_ns)
        if not slot.served:
            self._recovery.served(slot)
        times = (message.gather_ns, message.forward_ns, message.sample_ns)
        timing = Timing(now_ns - sum(times), *times)
        self._statistics.executed(Closed.IDLE, rows, timing, now_ns)

    def cancel(self, request: ScheduledRequest, listening: bool = False) -> None:
        """Tell the worker that has this request that its outputs are not wanted, or, `listening`,
        that its model should end it."""
        if request.worker is not None:
            self._workers.post(request.worker.peer, CancelExecution(request.key, listening))

    def credit(self, request: ScheduledRequest, responses: int) -> None:
        """Tell the worker that has this request that its client has read so many responses; of what
        it has not been sent it has read none."""
        read = min(responses, request.responses - request.credited)
        if read > 0 and request.worker is not None:
            request.credited += read
            self._workers.post(request.worker.peer, CreditExecution(request.key, read))

    def end_sequences(self, peer: bytes, slots: list[int]) -> None:
        """Tell a worker that the sequences in these slots are over."""
        self._workers.post(peer, EndSequences(slots))

    def release(self, client_pid: int, message: Release) -> None:
        """Tell a worker that a client has read outputs of it."""
        slot = self._pool.by_pid(message.pid)
        if slot is not None:
            read = ReleaseOutputs(client_pid, message.offsets, message.memory)
            self._workers.post(slot.peer, read)
        elif (
            message.pid in self._pool.awaited()
        ):  # a predecessor's, which will come once it has time
            early = self._early.setdefault(message.pid, [])
            early += _each(client_pid, message)[: _MOST_EARLY - len(early)]
        else:  # which may be announced yet: clients may hear of a successor before that
            self._unknown += [(message.pid, read) for read in _each(client_pid, message)]

    def forget(self, pid: int) -> None:
        """A process is gone: workers may take back what they have lent it, now that nobody here
        reads what it was to have."""
        self._early.pop(pid, None)
        self._take_unknown(pid)
        for slot in self._pool.ready():
            self._workers.post(slot.peer, ReaderExited(pid))
        for awaited in self._pool.awaited():  # a predecessor's, perhaps, that was told nothing
            self._early.setdefault(awaited, []).append(ReaderExited(pid))

    # --- from workers -----------------------------------------------------------------------------

    def expect(self, index: int, pid: int) -> None:
        """An instance is announced, as `Pool.expect` says."""
        early = self._take_unknown(pid)
        if early:
            self._early.setdefault(pid, []).extend(early)
        self._arrived(self._pool.expect(index, pid))

    def _take_unknown(self, pid: int) -> list[ReleaseOutputs]:
        """What is kept for a process that was unknown until now."""
        taken = [read for of, read in self._unknown if of == pid]
        if taken:
            left = [each for each in self._unknown if each[0] != pid]
            self._unknown = deque(left, _MOST_EARLY)
        return taken

    def _arrived(self, slot: Slot | None) -> None:
        """An instance is there now, if one is: it hears what came for it before."""
        if slot is not None:
            for news in self._early.pop(slot.pid, ()):
                self._workers.post(slot.peer, news)

    def handle(
        self,
        peer: bytes,
        message: InstanceReady | BatchFinished | ExecutionResponded | GenerationNews,
        now_ns: int,
    ) -> None:
        """Handle a worker's message; what no worker of ours can have sent is dropped."""
        match message:
            case ExecutionResponded():
                self._responded(peer, message, now_ns)
            case BatchFinished():
                slot = self._pool.by_peer(peer)
                if slot is None or not slot.executions:
                    self.misplaced += 1
                elif (execution := slot.executions[0]).id != message.batch:
                    self.misplaced += 1
                    self._recovery.distrusted(slot, now_ns)
                else:
                    self._returned(slot, execution, message, now_ns)
            case InstanceReady():
                if peer == b"%d.%d" % (message.index, message.pid) and message.index >= 0:
                    self._arrived(self._pool.offer(message.index, peer, message.pid))
                else:
                    self.misplaced += 1
            case _:
                slot = self._pool.by_peer(peer)
                if slot is None:
                    self.misplaced += 1
                elif not self.dispatcher.from_worker(slot, message, now_ns):
                    self.misplaced += 1
                    self._recovery.distrusted(slot, now_ns)

    def _returned(
        self, slot: Slot, execution: Execution, message: BatchFinished, now_ns: int
    ) -> None:
        requests = execution.requests
        self._pool.finish(slot, now_ns)
        timing = Timing.of(message, execution.sent_ns, now_ns, execution.rows, execution.reason)
        if message.executed:
            self._observe(execution, timing, now_ns)
        if message.copied_in or message.copied_out:
            self._statistics.executions.copied(message.copied_in, message.copied_out)
        if self._settings.decoupled:
            self._returned_open(slot, execution, message.replies, timing, now_ns)
            return
        if message.executed and not slot.served:
            self._recovery.served(slot)
        replies = matched(requests, message.replies)
        if replies is None:
            self.misplaced += 1
            logger.error("an instance returned a batch with replies that do not fit it")
            replies = [Reply(0, "INTERNAL", "internal error", b"")] * len(requests)
        for request, reply in zip(requests, replies, strict=True):
            code, body = reply.code, reply.body
            del slot.requests[request.key]
            if code == RESCHEDULED and request.state in AT_WORK and self.dispatcher.again(request):
                continue
            if request.state is State.EXECUTING:
                self._responses.finish(request, code, reply.message, body, timing, now_ns)
            else:
                if not code:
                    self._responses.drop_outputs(request, body)
                self._responses.close(request, now_ns)

    def _observe(self, execution: Execution, timing: Timing, now_ns: int) -> None:
        """Learn from an execution, whose requests are about to be answered."""
        count = len(execution.requests)
        self._statistics.executed(execution.reason, execution.rows, timing, now_ns)
        busy_ns = timing.input_ns + timing.infer_ns + timing.output_ns
        took_ns = now_ns - execution.started_ns
        if took_ns < busy_ns:
            took_ns = busy_ns
        self.service_time.observe(took_ns, busy_ns, count)
        if self._batcher.learns:
            left = self._responses.live - count
            latencies = [now_ns - request.arrived_ns for request in execution.requests]
            self._batcher.returned(now_ns, left, execution.rows, took_ns, latencies)

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
            elif (
                reply.code == RESCHEDULED
                and ended.state in AT_WORK
                and self.dispatcher.again(ended)
            ):
                del slot.requests[reply.key]
                self._pool.ended(slot)
            else:
                self._ended(slot, ended, reply, now_ns)
        for request in execution.requests:
            if request.state is State.EXECUTING:
                request.meet(Event.RESPOND)
        if slot.execution is not None:  # which waited for this one
            for request in slot.execution.requests:
                request.responded_ns = now_ns

    # --- responses of a decoupled model -----------------------------------------------------------

    def _responded(self, peer: bytes, message: ExecutionResponded, now_ns: int) -> None:
        """A request has a response, or its end."""
        slot = self._pool.by_peer(peer)
        request = None if slot is None else slot.requests.get(message.key)
        if slot is None or request is None or not self._settings.decoupled:
            self.misplaced += 1
            return
        if message.copied_out:
            self._statistics.executions.copied(0, message.copied_out)
        if message.final:
            self._ended(slot, request, message, now_ns)
        elif request.state in AT_WORK:
            self._statistics.responded(request, message, now_ns)
            self._responses.relay(request, message)
        elif message.body:
            self._responses.drop_outputs(request, message.body)

    def _ended(
        self, slot: Slot, request: ScheduledRequest, last: ExecutionResponded | Reply, now_ns: int
    ) -> None:
        del slot.requests[request.key]
        self._pool.ended(slot)
        if not slot.served:
            self._recovery.served(slot)
        if request.state in AT_WORK:
            self._statistics.responded(request, last, now_ns)
            self._responses.end(request, last, _so_far(slot.execution, now_ns), now_ns)
        else:
            self._statistics.cancelled(request, now_ns)
            if last.body:
                self._responses.drop_outputs(request, last.body)
            self._responses.close(request, now_ns)


def _so_far(execution: Execution | None, now_ns: int) -> Timing:
    """The times of an execution that has not returned: all of it was inference."""
    if execution is None:
        return Timing(now_ns, 0, 0, 0)
    began_ns = execution.started_ns
    return Timing(began_ns, 0, now_ns - began_ns, 0, execution.rows, execution.reason)


def _each(client_pid: int, message: Release) -> list[ReleaseOutputs]:
    """A message for each output that was read: what is kept is bounded by their number."""
    offsets = message.offsets[:_MOST_EARLY]
    return [ReleaseOutputs(client_pid, [offset], message.memory) for offset in offsets]


def work_of(request: ScheduledRequest) -> Work:
    """A request as its worker gets it."""
    submit = request.submit
    return Work(
        request.key,
        request.client.pid,
        submit.work,
        submit.request_id,
        submit.flags,
        submit.correlation_id,
        submit.correlation_text,
        submit.timeout_us,
        submit.priority,
        request.deadline_ns,
        submit.trace,
    )


def matched(requests: list[ScheduledRequest], replies: list[Reply]) -> list[Reply] | None:
    """The replies in the order of `requests`, or None: not one each."""
    try:
        for request, reply in zip(requests, replies, strict=True):
            if request.key != reply.key:
                break
        else:
            return replies
    except ValueError:  # one of them has more
        return None
    by_key = {reply.key: reply for reply in replies}
    if len(replies) != len(requests) or any(each.key not in by_key for each in requests):
        return None
    return [by_key[request.key] for request in requests]
