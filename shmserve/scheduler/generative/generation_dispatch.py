"""The dispatcher of a generative model: from the queue to one engine for each instance.

The worker of an instance tokenizes a prompt first.

    queue ── Prepare ──> preparing ── Prepared ──> engine ── Step, Stepped, ... ──> ended

The generations of an instance that died are prepared again on another instance and continue where
they were. Their clients only see a pause.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, assert_never

from shmserve.errors import QueueFull
from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import (
    Choose,
    Prepare,
    Prepared,
    ResponseSent,
    Resumed,
    Stepped,
    StopStringFound,
)
from shmserve.ipc.messages.inference import Submit
from shmserve.ipc.messages.unions import GenerationReport
from shmserve.ipc.tensors.signature import BatchProperties, id_prefix
from shmserve.scheduler.generative.engine import Engine
from shmserve.scheduler.generative.sequences import Beams, Generation, Sequence, SequenceStatus
from shmserve.scheduler.instances.dispatch import Dispatcher, SequenceKey, to_works
from shmserve.scheduler.instances.pool import LostWork, Slot
from shmserve.scheduler.requests.scheduled import (
    AT_WORK,
    NEVER,
    Client,
    ScheduledRequest,
    State,
    Timing,
)
from shmserve.scheduler.statistics import Reason
from shmserve.scheduler.tables import GenerationStats

logger = logging.getLogger(__name__)

_MAX_EXITS = 3  # a request fails after this many of its workers have died


@dataclass(slots=True, eq=False)
class AssignedRequest:
    """A request that was assigned to an instance (`slot`; None: the instance died).

    Attributes:
        last_reports: The last report of text sent to the client, by sample.
        ended_samples: The tokens and the finish reason of samples that have ended.
        replayed_tokens: The tokens from before the exit of a worker, for samples that another
            worker generates again from the prompt.
    """

    request: ScheduledRequest
    slot: Slot | None = None
    generation: Generation[AssignedRequest] | None = None
    last_reports: dict[int, ResponseSent] = field(default_factory=dict)  # by sample
    # The tokens and the finish reason, by sample.
    ended_samples: dict[int, tuple[array[int], str]] = field(default_factory=dict)
    replayed_tokens: dict[int, array[int]] = field(default_factory=dict)  # by sample

    @property
    def open_sample_tokens(self) -> dict[int, array[int]]:
        """Return the tokens generated so far for each sample that has not ended."""
        generation = self.generation
        if generation is None or generation.beams is not None:
            return {}
        prompt_length = len(generation.prompt)
        return {s.sample: s.tokens[prompt_length:] for s in generation.sequences}

    def resume_state(self) -> list[Resumed]:
        """Return the state from which another worker continues."""
        # A sample that is generated again has no new tokens until it begins. Until then, its
        # replayed tokens are used.
        open_tokens = self.replayed_tokens | self.open_sample_tokens
        samples = {s: (tokens, "") for s, tokens in open_tokens.items()} | self.ended_samples
        if len(samples) < (1 if self.generation is None else self.generation.samples):
            return []  # the other samples of the request had not begun
        resumed_samples: list[Resumed] = []
        for sample, (tokens, finish_reason) in samples.items():
            all_tokens = max(tokens, self.replayed_tokens.get(sample, tokens), key=len).tobytes()
            report = self.last_reports.get(sample, ResponseSent(0, sample, 0))
            fields = (report.sent_characters, finish_reason, report.is_end_sent, report.sent_tokens)
            resumed_samples.append(Resumed(sample, all_tokens, *fields))
        return resumed_samples


@dataclass(eq=False)
class GenerativeDispatcher(Dispatcher):
    """The dispatcher of a generative model, which runs the engine of each instance step by step."""

    _engine_settings: EngineSettings
    _counts: GenerationStats
    _clock: Callable[[], int]  # returns monotonic ns; measures the duration of planning

    def __post_init__(self) -> None:
        super().__post_init__()
        # The requests at instances by their key.
        self._assigned_requests: dict[int, AssignedRequest] = {}
        self._unassigned_requests: list[AssignedRequest] = []
        self._sequence_ids = itertools.count(1)

    # --- admission

    def admit(
        self, client: Client[ScheduledRequest], submit: Submit, properties: BatchProperties
    ) -> SequenceKey | None:
        """Return None: no request has a sequence. Raise QueueFull if too many requests wait."""
        if self._waiting_count >= self._engine_settings.max_waiting_requests:
            raise QueueFull(f"{id_prefix(submit.request_id)}Exceeds maximum queue size")
        return None

    @property
    def _waiting_count(self) -> int:
        """Return the number of requests and sequences beyond the rows of all instances' batches.

        A request that was not prepared yet, or that begins with the next step, counts as waiting
        only if no row is free for it.
        """
        engines = [self._engine(slot) for slot in self._pool.ready()]
        row_capacity = self._engine_settings.max_batch_size * len(engines)
        assigned_requests = self._assigned_requests.values()
        unprepared_count = sum(request.generation is None for request in assigned_requests)
        live_sequence_count = sum(engine.live_sequence_count for engine in engines)
        return max(len(self._queue) + unprepared_count + live_sequence_count - row_capacity, 0)

    def flush(self) -> None:
        """Do nothing: an engine never waits for further requests."""

    # --- turns

    def run(self, now_ns: int) -> int:
        self._remove_ended(now_ns)
        self._assign(now_ns)
        for slot in self._pool.ready():
            engine = self._engine(slot)
            if engine.running_step is None and slot.is_idle:
                began_ns = self._clock()
                step = engine.plan(now_ns)
                if step is not None:
                    planned_ns = self._clock() - began_ns
                    self._counts.scheduler_seconds.observe(planned_ns)
                    self._counts.phases["schedule"] += planned_ns
                    self._executions.run_step(slot, step, now_ns)
        return NEVER

    def _engine(self, slot: Slot) -> Engine[AssignedRequest]:
        if slot.engine is None:
            handlers = (self._on_sequence_end, self._on_search_end)
            slot.engine = Engine(self._engine_settings, self._counts, self._sequence_ids, *handlers)
        engine: Engine[AssignedRequest] = slot.engine
        return engine

    def _remove_ended(self, now_ns: int) -> None:
        """Remove requests that have ended, were cancelled, or cannot run on any instance."""
        for key, assigned_request in list(self._assigned_requests.items()):
            if assigned_request.request.state in AT_WORK and not (
                assigned_request.slot is None and self._pool.failure
            ):
                continue
            generation, slot = assigned_request.generation, assigned_request.slot
            if slot is None:
                self._unassigned_requests.remove(assigned_request)
                self._close(assigned_request.request, now_ns)
            elif generation is not None:
                engine = self._engine(slot)
                if engine.is_running(generation):
                    continue  # its last tokens are counted at the end of the step
                engine.cancel(generation)
            del self._assigned_requests[key]

    def _close(self, request: ScheduledRequest, now_ns: int) -> None:
        """End a request that no worker uses any more."""
        if request.state in AT_WORK:
            self._responses.fail(request, "UNAVAILABLE", self._pool.failure, Reason.BACKEND, now_ns)
        elif request.state is not State.DONE:
            self._responses.close(request, now_ns)

    def _assign(self, now_ns: int) -> None:
        """Assign requests without an instance; requests whose instance died come first."""
        slots = [slot for slot in self._pool.ready() if not slot.is_retiring]
        if not slots:
            return
        unassigned_requests, self._unassigned_requests = self._unassigned_requests, []
        for assigned_request in unassigned_requests:
            self._prepare(assigned_request, min(slots, key=_request_count), now_ns)
        while len(self._queue):
            (request,) = self._queue.take(1)
            assigned_request = self._assigned_requests[request.key] = AssignedRequest(request)
            self._prepare(assigned_request, min(slots, key=_request_count), now_ns)

    def _prepare(self, assigned_request: AssignedRequest, slot: Slot, now_ns: int) -> None:
        assigned_request.slot = slot
        self._pool.join(slot, assigned_request.request, now_ns)
        prepare = Prepare(to_works([assigned_request.request]), assigned_request.resume_state())
        self._executions.post(slot.peer, prepare)

    # --- workers

    def handle_worker_message(self, slot: Slot, message: Any, now_ns: int) -> bool:
        report: GenerationReport = message
        engine = self._engine(slot)
        match report:
            case Prepared():
                self._handle_prepared(engine, slot, report, now_ns)
            case Stepped():
                return self._handle_stepped(engine, slot, report, now_ns)
            case ResponseSent():
                assigned_request = self._assigned_requests.get(report.key)
                if assigned_request is not None and assigned_request.slot is slot:
                    assigned_request.last_reports[report.sample] = report
            case StopStringFound():
                engine.stop_sequence(report.sequence)
            case _:
                assert_never(report)
        return True

    def _handle_prepared(
        self, engine: Engine[AssignedRequest], slot: Slot, message: Prepared, now_ns: int
    ) -> None:
        assigned = self._assigned_requests.get(message.key)
        if assigned is None or assigned.slot is not slot or assigned.request.state not in AT_WORK:
            return
        request, resumed_tokens = assigned.request, assigned.open_sample_tokens
        generation: Generation[AssignedRequest] = Generation(
            assigned,
            message.key,
            request.arrived_ns,
            array("i", message.prompt),
            message.max_tokens,
            message.samples,
            message.priority,
            message.needs_whole_prompt,
            message.allows_drafts,
            message.beams[0] if message.beams else None,
        )
        if not engine.fits(generation):
            text = (
                f"{id_prefix(request.submit.request_id)}the prompt has {len(generation.prompt)} "
                f"tokens, and up to {message.max_tokens} follow in {generation.rows} sequences, "
                f"but the engine runs at most {self._engine_settings.max_batch_size} sequences "
                f"with {self._engine_settings.capacity} tokens in memory"
            )
            reason = Reason.REJECTED
            self._responses.fail(request, "INVALID_ARG", text, reason, now_ns, is_early=True)
            self._executions.cancel(request)
            return
        can_resume = len(resumed_tokens) + len(assigned.ended_samples) == generation.samples
        if message.replays_tokens:
            ended_samples = {s: tokens for s, (tokens, _) in assigned.ended_samples.items()}
            for sample, tokens in (resumed_tokens | ended_samples).items():
                previous_tokens = assigned.replayed_tokens.get(sample, tokens)
                assigned.replayed_tokens[sample] = max(tokens, previous_tokens, key=len)
            assigned.ended_samples.clear()
            can_resume = False
        assigned.generation = generation
        self._counts.prompt_tokens.observe(len(generation.prompt))
        if request.timing is None:
            request.timing = Timing(now_ns, 0, 0, 0)
        engine.add(generation, resumed_tokens if can_resume else None)

    def _handle_stepped(
        self, engine: Engine[AssignedRequest], slot: Slot, message: Stepped, now_ns: int
    ) -> bool:
        running_step = engine.running_step
        if running_step is None or slot.execution is None:
            return False
        try:
            engine.finish_step(message)
        except ValueError as error:
            text = "worker process %d returned an invalid result of a step: %s"
            logger.error(text, slot.pid, error)
            return False
        self._executions.record_step_done(slot, message, len(running_step.rows), now_ns)
        for sequence, row in running_step.rows.values():
            request = sequence.generation.owner.request
            if request.timing is not None:
                start_ns = request.timing.compute_start_ns
                request.timing = Timing(start_ns, 0, now_ns - start_ns, 0)
            if row.samples_next:
                self._record_latency(sequence, request, now_ns)
        return True

    def _record_latency(
        self, sequence: Sequence[AssignedRequest], request: ScheduledRequest, now_ns: int
    ) -> None:
        """Record the time since a sequence's previous tokens, or since the request's arrival."""
        if sequence.sampled_ns:
            self._counts.inter_token_seconds.observe(now_ns - sequence.sampled_ns)
        elif not sequence.sample:
            self._counts.first_token_seconds.observe(now_ns - request.arrived_ns)
        sequence.sampled_ns = now_ns

    def _on_sequence_end(self, sequence: Sequence[AssignedRequest], finish_reason: str) -> None:
        generation = sequence.generation
        tokens = sequence.tokens[len(generation.prompt) :]
        generation.owner.ended_samples[sequence.sample] = (tokens, finish_reason)
        self._counts.finished[finish_reason] += 1
        self._counts.generation_tokens.observe(len(tokens))

    def _on_search_end(
        self, generation: Generation[AssignedRequest], beams: Beams[AssignedRequest]
    ) -> None:
        self._counts.generated += sum(len(array("i", h.tokens)) for h in beams.hypotheses)
        slot = generation.owner.slot
        if slot is not None:
            self._executions.post(slot.peer, Choose(generation.key, beams.hypotheses))

    # --- counts

    def gauges(self) -> dict[str, Any]:
        engines = [self._engine(slot) for slot in self._pool.ready()]
        by_status = {str(s): sum(engine.count(s) for engine in engines) for s in SequenceStatus}
        rows = sum(len(engine.running_step.rows) for engine in engines if engine.running_step)
        row_capacity = len(engines) * self._engine_settings.max_batch_size
        return {
            "sequences": by_status,
            "blocks": {
                "free": sum(engine.pool.free_count for engine in engines),
                "cached": sum(engine.pool.cached_count for engine in engines),
                "used": sum(engine.pool.used_count for engine in engines),
                "host": sum(engine.host_pool.used_count for engine in engines),
            },
            "utilization": rows / row_capacity if row_capacity else 0.0,
        }

    # --- exits

    def exclude_continuing(self, lost_work: LostWork) -> LostWork:
        failed_requests: list[ScheduledRequest] = []
        for request in lost_work.open_requests:
            assigned_request = self._assigned_requests.get(request.key)
            request.worker_exits += 1
            has_failed = request.worker_exits >= _MAX_EXITS
            if assigned_request is None or request.state not in AT_WORK or has_failed:
                failed_requests.append(request)
            else:
                assigned_request.slot = request.worker = None
                self._unassigned_requests.append(assigned_request)
        return LostWork(lost_work.executions, failed_requests)


def _request_count(slot: Slot) -> int:
    return len(slot.requests)
