"""The invariants of a run: a ledger of all requests, and a trace of each scheduler.

The ledger follows a request from its client to its end. The trace derives the allowed actions of a
scheduler from the messages that it has received and sent.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from operator import mul
from typing import Any

from shmserve.errors import InvalidArgument
from shmserve.ipc.messages import generation
from shmserve.ipc.messages import inference as m
from shmserve.ipc.scheduler_client import NO_SCHEDULER
from shmserve.ipc.tensors.signature import stopping_text
from shmserve.ipc.transport.router import leading_pid
from shmserve.scheduler.settings import Settings
from tests.simulation import texts
from tests.simulation.models import Model
from tests.simulation.world import Violation, World

MAX_STARTS = 3  # a generation may begin on this many workers, because workers die


@dataclass(eq=False)
class Request:
    """A request from the view of its client.

    Attributes:
        content: The input.
        step: The index of the request in its sequence, after `earlier_requests`.
        ending: The message that ended the request.
        is_freed: Whether no process may read the input any more.
        expected: The announced number of responses of a decoupled model.
        responses: The number of received responses.
        unread: Whether the client reads no responses.
        received: See `texts.problem`.
    """

    uid: str
    model: Model
    content: bytes
    units: int
    deadline_ns: int = 0
    step: int = -1
    earlier_requests: tuple[Request, ...] = ()
    cancelled: bool = False
    ending: Any = None
    is_freed: bool = False
    responses: int = 0
    expected: int = 0
    unread: bool = False
    received: set[tuple[int, int]] = field(default_factory=set)
    received_numbers: set[int] = field(default_factory=set)
    client: Any = None

    def is_skipped(self, outputs: dict[str, bytes]) -> bool:
        """Return whether a condition skipped all outputs; raise Violation for wrong steps."""
        model = self.model
        skipped_steps = model.skipped_steps(self.content)
        if bool(outputs) == (len(model.steps) - 1 in skipped_steps):
            self.fail(f"has the outputs {outputs}, and no steps {skipped_steps}")
        for number in skipped_steps if outputs else ():
            if b"|%s." % model.steps[number].name.encode() in outputs["OUT"]:
                self.fail(f"has the outputs {outputs}, and no steps {skipped_steps}")
        if outputs and not skipped_steps:
            for step in model.steps:
                if b"|%s." % step.name.encode() not in outputs["OUT"]:
                    self.fail(f"has the outputs {outputs}, and all steps")
        return not outputs

    def expected_source(self, source: bytes, number: int) -> bytes:
        """Return the expected input of this response; raise Violation for an impossible state."""
        if self.model.is_generative:
            packed = source.rpartition(b"#")[2]
            problem = texts.problem(self.content, self.received, packed)
            if problem:
                self.fail(problem)
            return b"%s#%s" % (self.content, packed)
        if self.model.is_decoupled:
            number_text, _, count = source.rpartition(b"#")[2].partition(b"/")
            if self.model.steps:  # later steps may overtake one another
                number = int(number_text)
                if number in self.received_numbers:
                    self.fail(f"has response {number} twice")
            self.received_numbers.add(number)
            self.expected = int(count)
            return b"%s#%d/%d" % (self.content, number, self.expected)
        if self.model.is_iterative:
            rounds = range(self.model.rounds(self.content))
            return self.content + b"".join(b".%d" % round_number for round_number in rounds)
        if self.step < 0:
            return self.content
        steps = source[len(self.content) :].split(b".")[1:]
        executed_steps = [int(step) for step in steps]
        succeeded_steps = {
            earlier.step
            for earlier in self.earlier_requests
            if isinstance(earlier.ending, m.Finished) and not earlier.cancelled
        }
        if (
            executed_steps != sorted({*executed_steps, *succeeded_steps})
            or executed_steps[-1:] != [self.step]
            or executed_steps[0] != 0
        ):
            self.fail(f"its sequence has the state {steps}, and {succeeded_steps} have succeeded")
        return self.content + b"".join(b"." + step for step in steps)

    def fail(self, text: str) -> None:
        """Raise Violation about this request."""
        raise Violation(f"request {self.uid} of model '{self.model.name}': {text}")


class Ledger:
    """All requests of a run by uid; `unloaded` models were not served for a while."""

    def __init__(self, world: World) -> None:
        self.requests: dict[str, Request] = {}
        self.unloaded: set[str] = set()
        self.endings: Counter[str] = Counter()
        self._world = world

    def add(self, request: Request) -> None:
        self.requests[request.uid] = request

    def record_response(self, request: Request, message: Any) -> None:
        """Record a message to the client; raise Violation if the request has ended before."""
        if request.ending is not None:
            request.fail(f"told {message} after it had ended with {request.ending}")
        if isinstance(message, m.Responded) and not message.final:
            request.responses += 1
            return
        request.responses += bool(getattr(message, "schema", b""))
        request.ending = message
        kind = type(message).__name__
        if isinstance(message, m.Failed) or (isinstance(message, m.Responded) and message.code):
            kind = message.code
            if request.model.steps and kind == InvalidArgument.code:
                request.fail(f"told {message}, and its tensors are in order")
            self._check_failure(request, message, kind)
            names = {request.model.name, *(step.name for step in request.model.steps)}
            text = message.message
            # The state of a sequence ends with its scheduler, so its later requests are rejected.
            is_refused = stopping_text("", of_sequence=True) in text and request.step <= 0
            if (NO_SCHEDULER in text or is_refused) and not names & self.unloaded:
                request.fail(f"told {message}, while another scheduler served each of its models")
        self.endings[kind] += 1

    @staticmethod
    def _check_failure(request: Request, message: Any, kind: str) -> None:
        if not request.model.is_generative:
            return
        if kind == InvalidArgument.code and texts.request_of(request.content).fits:
            request.fail(f"told {message}, and it fits")
        if "no response" in message.message and not request.unread:
            request.fail(f"told {message}, and its client takes them")

    def record_freed(self, request: Request) -> None:
        """Record that the client may reuse the memory of a request."""
        if request.is_freed:
            request.fail("its memory was given back twice")
        request.is_freed = True

    def check_complete(self) -> None:
        """Check that successful requests of decoupled models have all their responses."""
        for request in self.requests.values():
            is_success = isinstance(request.ending, m.Responded) and not request.ending.code
            if (
                is_success
                and request.model.is_generative
                and request.client.alive
                and not request.unread
            ):
                missing_tokens = texts.missing(request.content, request.received)
                if missing_tokens and not request.cancelled:
                    request.fail(f"has not had {missing_tokens}")
            if is_success and not request.cancelled and request.responses < request.expected:
                request.fail(f"has {request.responses} responses of {request.expected}")

    def open(self) -> list[Request]:
        """Return requests of live clients that have not ended or whose memory is in use."""
        return [
            request
            for request in self.requests.values()
            if request.client.alive
            and not (request.is_freed and (request.cancelled or request.ending is not None))
        ]


@dataclass(eq=False)
class Entry:
    """A request at one scheduler.

    Attributes:
        worker: The worker that executes the request.
        begin_count: The number of executions.
        lost_workers: The number of workers that died during an execution.
        has_ended: Whether the end was sent early, so that only `Settled` follows.
    """

    peer: bytes
    submit: m.Submit
    level: int
    begin_count: int = 0
    lost_workers: int = 0
    worker: bytes = b""
    has_ended: bool = False
    cancelled: bool = False


@dataclass(eq=False)
class SchedulerTrace:
    """The messages of a scheduler. `counts` contains the expected values of its counters."""

    world: World
    model: Model
    settings: Settings
    title: str
    entries: dict[tuple[bytes, int], Entry] = field(default_factory=dict)
    by_uid: dict[tuple[int, str, str], Entry] = field(default_factory=dict)
    waiting: dict[int, OrderedDict[Entry, None]] = field(default_factory=dict)
    batches: dict[tuple[bytes, int], m.Execute] = field(default_factory=dict)
    order: dict[bytes, list[Entry]] = field(default_factory=dict)
    dead_pids: set[int] = field(default_factory=set)
    steps: dict[bytes, int] = field(default_factory=dict)
    retiring: set[bytes] = field(default_factory=set)
    succeeded_by_another: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def _fail(self, text: str) -> None:
        raise Violation(f"{self.title}: {text}")

    # --- received messages ------------------------------------------------------------------------

    def from_client(self, peer: bytes, message: Any) -> None:
        key = (peer, getattr(message, "id", 0))
        if isinstance(message, m.Submit):
            if leading_pid(peer) in self.dead_pids:
                return
            level = self.settings.policies.level(message.priority)
            entry = self.entries[key] = Entry(peer, message, level)
            self.by_uid[_uid(leading_pid(peer), message)] = entry
            self.waiting.setdefault(level, OrderedDict())
        elif isinstance(message, m.Cancel) and key in self.entries:
            self.entries[key].cancelled = True

    def record_handled(self, peer: bytes, message: Any) -> None:
        """Record that a message was handled: an admitted request is queued."""
        entry = self.entries.get((peer, getattr(message, "id", 0)))
        if self.model.steps:
            return
        if isinstance(message, m.Submit) and entry is not None and not entry.begin_count:
            self.waiting[entry.level][entry] = None

    def process_exited(self, pid: int) -> None:
        """Record that the scheduler has handled the notification of an exit."""
        self.dead_pids.add(pid)
        for (peer, _), entry in list(self.entries.items()):
            if leading_pid(peer) == pid:
                if not entry.has_ended:
                    self.counts["failed"] += 1
                self._remove_entry(entry)

    def record_lost_worker(self, peer: bytes) -> None:
        is_running = True  # only the first batch was running; the others were queued at the worker
        for key in [key for key in self.batches if key[0] == peer]:
            for work in self.batches.pop(key).requests:
                entry = self.by_uid.get(_uid(work.client_pid, work))
                if is_running and entry is not None:
                    entry.lost_workers += 1
            is_running = False
        self.steps.pop(peer, None)
        for entry in self.by_uid.values():
            if entry.worker == peer:
                entry.worker = b""

    def record_returned(self, peer: bytes, message: m.BatchFinished) -> None:
        execute = self.batches.pop((peer, message.batch), None)
        if execute is None:
            return
        self.counts["executions"] += message.executed
        ended_keys = {reply.key for reply in message.replies}
        for work in execute.requests:
            entry = self.by_uid.get(_uid(work.client_pid, work))
            if entry is not None and (not self.model.is_decoupled or work.key in ended_keys):
                entry.worker = b""

    # --- sent messages ----------------------------------------------------------------------------

    def record_execute(self, peer: bytes, message: m.Execute) -> None:
        self.batches[peer, message.batch] = message
        if peer in self.retiring and not self.model.has_sequences:
            self._fail(f"a batch begins at {peer!r}, which is to retire")
        units = 0
        shapes = set()
        begun_entries: list[Entry] = []
        for work in message.requests:
            entry = self.by_uid.get(_uid(work.client_pid, work))
            if entry is None or entry.has_ended:
                self._fail(f"request {work.request_id} begins, which nobody waits for")
                return
            self._may_begin(entry)
            if entry.lost_workers and len(message.requests) > 1:
                self._fail(f"request {work.request_id} runs again, and not alone")
            properties = self.model.batch_properties(entry.submit.schema)
            shapes.add(properties.shape_key)
            units += properties.batch_size or 1
            entry.begin_count += 1
            entry.worker = peer
            begun_entries.append(entry)
        if self.settings.padding is not None:
            self._check_padding([entry.submit for entry in begun_entries])
        elif len(shapes) > 1:
            self._fail(f"a batch begins with the shapes {shapes}")
        if units > max(1, self.model.batches):
            self._fail(f"a batch of {units} begins, of at most {self.model.batches}")

    def prepares(self, peer: bytes, message: generation.Prepare) -> None:
        """Record that a generation begins, or resumes, at an instance."""
        (work,) = message.requests
        entry = self.by_uid.get(_uid(work.client_pid, work))
        if peer in self.retiring:
            self._fail(f"{work.request_id} begins at {peer!r}, which is to retire")
        if entry is None or entry.has_ended:
            self._fail(f"request {work.request_id} begins, which nobody waits for")
            return
        self._may_begin(entry)
        if entry.begin_count >= MAX_STARTS:
            self._fail(
                f"request {work.request_id} has ended {entry.begin_count} workers, and begins"
            )
        entry.begin_count += 1
        entry.worker = peer

    def record_step(self, peer: bytes, message: generation.Stepped) -> None:
        if self.steps.pop(peer, 0) == message.step:
            self.counts["executions"] += 1

    def _check_padding(self, batch: list[m.Submit]) -> None:
        """Check a batch whose requests are padded to the same length."""
        assert self.settings.padding is not None
        pad = self.settings.padding.pads["IN"]
        fits = [self.model.batch_properties(submit.schema) for submit in batch]
        shapes = {fit.shape_key[:-8] for fit in fits}
        lengths = [int.from_bytes(fit.shape_key[-8:], "little") for fit in fits]
        rows = [fit.batch_size for fit in fits]

        def padded_length(length: int) -> int | None:
            fit = [size for (size,) in pad.buckets if size >= length]
            return min(fit, default=None) if pad.buckets else length

        longest = padded_length(max(lengths))
        if len(batch) > 1 and (longest is None or len(shapes) > 1):
            self._fail(f"a batch begins with the lengths {lengths} and the shapes {shapes}")
        total = sum(rows) * (longest or max(lengths))
        true = sum(map(mul, rows, lengths))
        single = sum(map(mul, rows, (padded_length(length) or length for length in lengths)))
        if total > single and total - true > pad.max_waste * total:
            self._fail(f"a batch begins with the lengths {lengths}, of {pad.max_waste} padding")
        self.counts["elements"] += total
        self.counts["padding"] += total - true

    def _may_begin(self, entry: Entry) -> None:
        uid = entry.submit.request_id
        if entry.cancelled:
            self._fail(f"request {uid} begins after it was cancelled")
        if 0 < entry.submit.deadline_ns < self.world.now_ns and not self._delays(entry):
            self._fail(f"request {uid} begins after its deadline")
        if entry.worker:
            self._fail(f"request {uid} begins at two workers")
        if entry.lost_workers > 1:
            self._fail(f"request {uid} begins once more, after two workers died of it")
        if entry.begin_count:
            return  # it was retried before all others, because its worker died
        if not self.model.has_sequences:
            self._check_order(entry)
        self.waiting[entry.level].pop(entry, None)

    def _check_order(self, entry: Entry) -> None:
        uid = entry.submit.request_id
        for level in sorted(self.waiting):
            line = self.waiting[level]
            if not line:
                continue
            first_request = next(iter(line))
            overtakes = first_request is not entry and not self._delays(entry)
            if level < entry.level or overtakes:
                self._fail(f"request {uid} overtakes {first_request.submit.request_id}")
            return

    def _delays(self, entry: Entry) -> bool:
        return self.settings.policies.policy(entry.level).delays_expired

    def sent_to_client(self, peer: bytes, message: Any) -> None:
        is_ending = isinstance(message, m.Finished | m.Responded | m.Failed | m.Settled)
        if not is_ending or self.succeeded_by_another:
            return
        if leading_pid(peer) in self.dead_pids:
            self._fail(f"a dead client is told {type(message).__name__}")
        entry = self.entries.get((peer, message.id))
        if entry is None:
            self._fail(f"told {message} of a request that it does not have")
            return
        uid = entry.submit.request_id
        if isinstance(message, m.Settled) != entry.has_ended:
            self._fail(f"request {uid} is told {message} after its end")
        if isinstance(message, m.Responded) and not message.final:
            return
        if isinstance(message, m.Finished | m.Responded):
            self._check_success(entry, message)
        elif isinstance(message, m.Failed):
            self.counts["failed"] += message.code != "INVALID_ARG"
        if isinstance(message, m.Failed) and message.early:
            entry.has_ended = True
            self.waiting[entry.level].pop(entry, None)
        else:
            if entry.worker and not self.model.is_decoupled and not isinstance(message, m.Finished):
                worker_has = any(
                    _uid(work.client_pid, work) == _uid(leading_pid(peer), entry.submit)
                    for (worker, _), execute in self.batches.items()
                    if worker == entry.worker
                    for work in execute.requests
                )
                if worker_has:
                    self._fail(f"request {uid} ends with {message} while a worker has it")
            self._remove_entry(entry)

    def _check_success(self, entry: Entry, message: Any) -> None:
        if getattr(message, "code", ""):
            return
        self.counts["succeeded"] += 1
        if entry.begin_count:
            self.counts["inferences"] += (
                self.model.batch_properties(entry.submit.schema).batch_size or 1
            )
        if self.model.preserves_order:
            for other_entry in self.entries.values():
                if other_entry is entry:
                    break
                if not other_entry.has_ended and not other_entry.cancelled:
                    self._fail(
                        f"request {entry.submit.request_id} is told before "
                        f"{other_entry.submit.request_id}, which came first"
                    )

    def _remove_entry(self, entry: Entry) -> None:
        self.entries.pop((entry.peer, entry.submit.id), None)
        self.by_uid.pop(_uid(leading_pid(entry.peer), entry.submit), None)
        self.waiting[entry.level].pop(entry, None)

    @property
    def busy(self) -> int:
        return len({peer for peer, _ in self.batches})

    def check_before_stop(self) -> None:
        """Check that no request is left at `Stop`, except of open sequences and those retried."""
        if self.model.has_sequences or self.succeeded_by_another:
            return
        for entry in self.entries.values():
            self._fail(f"is stopped while it has request {entry.submit.request_id}")

    def check_turn_end(self) -> None:
        for level, line in self.waiting.items():
            max_queued = self.settings.policies.policy(level).max_queue_size
            if 0 < max_queued < len(line):
                self._fail(f"{len(line)} requests wait on level {level}, of at most {max_queued}")

    def check_counters(self, report: dict[str, Any]) -> None:
        statistics = report["inference_stats"]
        violations = {
            "succeeded": statistics["success"]["count"],
            "failed": statistics["fail"]["count"],
            "executions": report["execution_count"],
            "inferences": report["inference_count"],
        }
        if self.settings.padding is not None:
            padding = report["shmserve"]["padding"].get("IN", (0, 0))
            violations["elements"], violations["padding"] = padding
        for name, value in violations.items():
            if name == "failed" and self.model.is_decoupled:
                continue
            if name in ("executions", "inferences") and self.model.steps:
                continue  # ensembles have no executions of their own
            if value != self.counts[name]:
                self._fail(f"counts {value} {name}, and has {self.counts[name]}")


def _uid(pid: int, request: m.Submit | m.Work) -> tuple[int, str, str]:
    """Return a request's client and id, and for requests of an ensemble its input."""
    data = [datum if isinstance(datum, bytes) else tuple(datum) for datum in request.data]
    return pid, request.request_id, repr(data)
