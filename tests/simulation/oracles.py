"""What must hold, whatever happens: a ledger of all requests, and a trace of each scheduler.

The ledger follows a request from its client to its end. The trace follows what one scheduler was
told and has said, and knows from that alone what it may do next.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from shmserve.ipc.messages import inference as m
from shmserve.ipc.transport.router import first_number
from shmserve.scheduler.settings import Settings
from tests.simulation.models import Model
from tests.simulation.world import Violation, World


@dataclass(eq=False)
class Request:
    """A request as its client knows it. `content` is its input; of a sequence, it is number `step`,
    behind those `before` it. `ending`: the message that it ended with; `freed`: nobody may read its
    input any more."""

    uid: str
    model: Model
    content: bytes
    units: int
    deadline_ns: int = 0
    step: int = -1
    before: tuple[Request, ...] = ()
    cancelled: bool = False
    ending: Any = None
    freed: bool = False
    responses: int = 0
    client: Any = None

    def made_of(self, made: bytes, number: int) -> bytes:
        """What the response with this number must be made of, if it is `made` of that; raises
        Violation for a state that its sequence cannot have."""
        if self.model.decoupled:
            return b"%s#%d/%s" % (self.content, number, made.rpartition(b"/")[2])
        if self.step < 0:
            return self.content
        steps = made[len(self.content) :].split(b".")[1:]
        ran = [int(step) for step in steps]
        succeeded = {
            each.step
            for each in self.before
            if isinstance(each.ending, m.Finished) and not each.cancelled
        }
        if ran != sorted({*ran, *succeeded}) or ran[-1:] != [self.step] or ran[0] != 0:
            self.fail(f"its sequence has the state {steps}, and {succeeded} have succeeded")
        return self.content + b"".join(b"." + step for step in steps)

    def fail(self, text: str) -> None:
        """Raise Violation about it."""
        raise Violation(f"request {self.uid} of model '{self.model.name}': {text}")


class Ledger:
    """All requests of a run, by their uid."""

    def __init__(self, world: World) -> None:
        self.requests: dict[str, Request] = {}
        self.endings: Counter[str] = Counter()
        self._world = world

    def add(self, request: Request) -> None:
        """A client is about to submit it."""
        self.requests[request.uid] = request

    def responded(self, request: Request, message: Any) -> None:
        """Its client is told something; raises Violation after its end."""
        if request.ending is not None:
            request.fail(f"told {message} after it had ended with {request.ending}")
        if isinstance(message, m.Responded) and not message.final:
            request.responses += 1
            return
        request.ending = message
        kind = type(message).__name__
        if isinstance(message, m.Failed) or (isinstance(message, m.Responded) and message.code):
            kind = message.code
        self.endings[kind] += 1

    def freed(self, request: Request) -> None:
        """Its memory is its client's again."""
        if request.freed:
            request.fail("its memory was given back twice")
        request.freed = True

    def open(self) -> list[Request]:
        """Those of living clients whose memory is not back, or that somebody still waits for."""
        return [
            each
            for each in self.requests.values()
            if each.client.alive
            and not (each.freed and (each.cancelled or each.ending is not None))
        ]


@dataclass(eq=False)
class Entry:
    """A request at one scheduler. `at`: the worker that has it; `begun` so often, of which workers
    `died` while they ran it; `ended`: its end was told, and only `Settled` is owed."""

    peer: bytes
    submit: m.Submit
    level: int
    begun: int = 0
    died: int = 0
    at: bytes = b""
    ended: bool = False
    cancelled: bool = False


@dataclass(eq=False)
class SchedulerTrace:
    """What a scheduler was told and has said. `counted` is what its counters must show."""

    world: World
    model: Model
    settings: Settings
    title: str
    entries: dict[tuple[bytes, int], Entry] = field(default_factory=dict)
    by_uid: dict[tuple[int, str], Entry] = field(default_factory=dict)
    waiting: dict[int, OrderedDict[Entry, None]] = field(default_factory=dict)
    batches: dict[tuple[bytes, int], m.Execute] = field(default_factory=dict)
    order: dict[bytes, list[Entry]] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    counted: Counter[str] = field(default_factory=Counter)

    def _fail(self, text: str) -> None:
        raise Violation(f"{self.title}: {text}")

    # --- in ---------------------------------------------------------------------------------------

    def from_client(self, peer: bytes, message: Any) -> None:
        """A client's message is about to be handled."""
        key = (peer, getattr(message, "id", 0))
        if isinstance(message, m.Submit):
            if first_number(peer) in self.dead:
                return
            level = self.settings.policies.level(message.priority)
            entry = self.entries[key] = Entry(peer, message, level)
            self.by_uid[first_number(peer), message.request_id] = entry
            self.waiting.setdefault(level, OrderedDict())
        elif isinstance(message, m.Cancel) and key in self.entries:
            self.entries[key].cancelled = True

    def handled(self, peer: bytes, message: Any) -> None:
        """It has been handled: a request that was not refused waits."""
        entry = self.entries.get((peer, getattr(message, "id", 0)))
        if self.model.steps:
            return
        if isinstance(message, m.Submit) and entry is not None and not entry.begun:
            self.waiting[entry.level][entry] = None

    def process_exited(self, pid: int) -> None:
        """The supervisor's word that a process is gone has been handled."""
        self.dead.add(pid)
        for (peer, _), entry in list(self.entries.items()):
            if first_number(peer) == pid:
                if not entry.ended:
                    self.counted["failed"] += 1
                self._forget(entry)

    def lost(self, peer: bytes) -> None:
        """A worker is gone, with what it had."""
        running = True  # the first; the others were sent ahead
        for key in [key for key in self.batches if key[0] == peer]:
            for work in self.batches.pop(key).requests:
                entry = self.by_uid.get((work.client_pid, work.request_id))
                if running and entry is not None:
                    entry.died += 1
            running = False
        for entry in self.by_uid.values():
            if entry.at == peer:
                entry.at = b""

    def returned(self, peer: bytes, message: m.BatchFinished) -> None:
        """A worker returns a batch."""
        execute = self.batches.pop((peer, message.batch), None)
        if execute is None:
            return
        self.counted["executions"] += message.executed
        ended = {reply.key for reply in message.replies}
        for work in execute.requests:
            entry = self.by_uid.get((work.client_pid, work.request_id))
            if entry is not None and (not self.model.decoupled or work.key in ended):
                entry.at = b""

    # --- out --------------------------------------------------------------------------------------

    def executes(self, peer: bytes, message: m.Execute) -> None:
        """A batch begins."""
        self.batches[peer, message.batch] = message
        units = 0
        shapes = set()
        for work in message.requests:
            entry = self.by_uid.get((work.client_pid, work.request_id))
            if entry is None or entry.ended:
                self._fail(f"request {work.request_id} begins, which nobody waits for")
                return
            self._may_begin(entry)
            if entry.died and len(message.requests) > 1:
                self._fail(f"request {work.request_id} runs again, and not alone")
            shapes.add(entry.submit.shape_key)
            units += entry.submit.batch_size or 1
            entry.begun += 1
            entry.at = peer
        if len(shapes) > 1:
            self._fail(f"a batch begins with the shapes {shapes}")
        if units > max(1, self.model.batches):
            self._fail(f"a batch of {units} begins, of at most {self.model.batches}")

    def _may_begin(self, entry: Entry) -> None:
        uid = entry.submit.request_id
        if entry.cancelled:
            self._fail(f"request {uid} begins after it was cancelled")
        if 0 < entry.submit.deadline_ns < self.world.now_ns and not self._delays(entry):
            self._fail(f"request {uid} begins after its deadline")
        if entry.at:
            self._fail(f"request {uid} begins at two workers")
        if entry.died > 1:
            self._fail(f"request {uid} begins once more, after two workers died of it")
        if entry.begun:
            return  # before all others, since its worker died
        if not self.model.sequences:
            self._in_turn(entry)
        self.waiting[entry.level].pop(entry, None)

    def _in_turn(self, entry: Entry) -> None:
        uid = entry.submit.request_id
        for level in sorted(self.waiting):
            line = self.waiting[level]
            if not line:
                continue
            first = next(iter(line))
            overtakes = first is not entry and not self._delays(entry)
            if level < entry.level or overtakes:
                self._fail(f"request {uid} overtakes {first.submit.request_id}")
            return

    def _delays(self, entry: Entry) -> bool:
        return self.settings.policies.of(entry.level).delays

    def told(self, peer: bytes, message: Any) -> None:
        """A client is told something."""
        if not isinstance(message, m.Finished | m.Responded | m.Failed | m.Settled):
            return
        if first_number(peer) in self.dead:
            self._fail(f"a dead client is told {type(message).__name__}")
        entry = self.entries.get((peer, message.id))
        if entry is None:
            self._fail(f"told {message} of a request that it does not have")
            return
        uid = entry.submit.request_id
        if isinstance(message, m.Settled) != entry.ended:
            self._fail(f"request {uid} is told {message} after its end")
        if isinstance(message, m.Responded) and not message.final:
            return
        if isinstance(message, m.Finished | m.Responded):
            self._succeeds(entry, message)
        elif isinstance(message, m.Failed):
            self.counted["failed"] += message.code != "INVALID_ARG"
        if isinstance(message, m.Failed) and message.early:
            entry.ended = True
            self.waiting[entry.level].pop(entry, None)
        else:
            if entry.at and not self.model.decoupled and not isinstance(message, m.Finished):
                worker_has = any(
                    work.request_id == uid
                    for (worker, _), execute in self.batches.items()
                    if worker == entry.at
                    for work in execute.requests
                )
                if worker_has:
                    self._fail(f"request {uid} ends with {message} while a worker has it")
            self._forget(entry)

    def _succeeds(self, entry: Entry, message: Any) -> None:
        if getattr(message, "code", ""):
            return
        self.counted["succeeded"] += 1
        if entry.begun:
            self.counted["inferences"] += entry.submit.batch_size or 1
        if self.model.ordered:
            for other in self.entries.values():
                if other is entry:
                    break
                if not other.ended and not other.cancelled:
                    self._fail(
                        f"request {entry.submit.request_id} is told before "
                        f"{other.submit.request_id}, which came first"
                    )

    def _forget(self, entry: Entry) -> None:
        self.entries.pop((entry.peer, entry.submit.id), None)
        self.by_uid.pop((first_number(entry.peer), entry.submit.request_id), None)
        self.waiting[entry.level].pop(entry, None)

    @property
    def busy(self) -> int:
        """How many workers have a batch."""
        return len({peer for peer, _ in self.batches})

    def stopped(self) -> None:
        """The supervisor's word to stop is about to be handled: nothing may be left, but for what
        an open sequence has sent since."""
        for entry in () if self.model.sequences else self.entries.values():
            self._fail(f"is stopped while it has request {entry.submit.request_id}")

    def turn_over(self) -> None:
        """A turn of the loop has ended: the bounds of the queue hold."""
        for level, line in self.waiting.items():
            most = self.settings.policies.of(level).max_queue_size
            if 0 < most < len(line):
                self._fail(f"{len(line)} requests wait on level {level}, of at most {most}")

    def check_counters(self, report: dict[str, Any]) -> None:
        """A report of the scheduler must agree with what it did."""
        shown = report["inference_stats"]
        found = {
            "succeeded": shown["success"]["count"],
            "failed": shown["fail"]["count"],
            "executions": report["execution_count"],
            "inferences": report["inference_count"],
        }
        for name, value in found.items():
            if name == "failed" and self.model.decoupled:
                continue
            if name in ("executions", "inferences") and self.model.steps:
                continue  # each is one of a step's
            if value != self.counted[name]:
                self._fail(f"counts {value} {name}, and has {self.counted[name]}")
