"""Whatever happens in whatever order: every request ends once, and nothing is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.messages.supervision import (
    Drain,
    Drained,
    InstanceExpected,
    InstanceGone,
    KillInstance,
)
from shmserve.scheduler.requests.request import (
    LIFE,
    OVER,
    Client,
    Event,
    IllegalEvent,
    ScheduledRequest,
    State,
)
from tests.rigs.scheduler_rig import MS, Rig, ok

MOST = 4
POLICY = {"max_queue_size": 12, "default_timeout_microseconds": 4000}


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_an_event_moves_as_the_table_says_or_changes_nothing(state: State, event: Event) -> None:
    request = ScheduledRequest(1, Client(b"1.a", print), 1, 1, b"", 0, 0, 0, 0, 0, OVER)
    request.state = state
    if event in LIFE[state]:
        request.meet(event)
        assert request.state is LIFE[state][event]
    else:
        with pytest.raises(IllegalEvent):
            request.meet(event)
        assert request.state is state


def test_every_way_through_the_table_ends() -> None:
    assert LIFE[State.DONE] == {}
    for state in State:
        seen, left = set(), [state]
        while left:
            at = left.pop()
            seen.add(at)
            left += [after for after in LIFE[at].values() if after not in seen]
        assert State.DONE in seen


@dataclass
class Story:
    """What a client knows of one request."""

    units: int
    shape: bytes
    told: list[Any] = field(default_factory=list)
    executions: int = 0


@dataclass
class FakeWorker:
    """A worker with at most one batch, and the requests that it has not ended."""

    index: int
    pid: int
    batch: m.Execute | None = None
    open: set[int] = field(default_factory=set)

    @property
    def peer(self) -> bytes:
        """Its address."""
        return b"%d.%d" % (self.index, self.pid)


class Life(RuleBasedStateMachine):
    """Clients, workers and a supervisor that do anything they may, in any order."""

    @initialize(
        delay_us=st.sampled_from([0, 500]),
        ordered=st.booleans(),
        dynamic=st.booleans(),
        limit_s=st.sampled_from([0, 0.005]),
        decoupled=st.booleans(),
    )
    def begin(
        self, delay_us: int, ordered: bool, dynamic: bool, limit_s: float, decoupled: bool
    ) -> None:
        """A model with two instances, none of them here yet."""
        block = {
            "max_queue_delay_microseconds": delay_us,
            "preserve_ordering": ordered,
            "default_queue_policy": POLICY,
        }
        self.dynamic = dynamic
        self.decoupled = decoupled
        self.rig = Rig(
            block if dynamic else None,
            MOST,
            decoupled=decoupled,
            max_queue_size=12,
            execution_timeout_s=limit_s,
        )
        self.pids = iter(range(100, 10**9))
        self.peers = [b"%d.a" % (7000 + index) for index in range(3)]
        self.stories: dict[tuple[bytes, int], Story] = {}
        self.by_work: dict[bytes, tuple[bytes, int]] = {}
        self.workers: dict[int, FakeWorker] = {}
        self.drained = False

    # --- what clients do --------------------------------------------------------------------------

    @rule(
        who=st.integers(0, 2),
        units=st.integers(1, MOST),
        shape=st.sampled_from([b"a", b"b"]),
        timeout_us=st.sampled_from([0, 0, 700, 3000, 20_000]),
    )
    def submit(self, who: int, units: int, shape: bytes, timeout_us: int) -> None:
        """One request."""
        peer = self.peers[who]
        (number,) = self.rig.submit(
            peer=peer, batch_size=units, shape_key=shape, timeout_ns=timeout_us * 1000
        )
        self.stories[peer, number] = Story(units, shape)
        self.by_work[b"w%d" % number] = (peer, number)
        self.look()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A cancel, of a request that may be answered already."""
        if self.stories:
            peer, number = data.draw(st.sampled_from(sorted(self.stories)))
            self.rig.client(m.Cancel(number), peer)
            self.look()

    @rule(data=st.data(), responses=st.sampled_from([-1, 0, 1, 1 << 62]))
    def grant(self, data: st.DataObject, responses: int) -> None:
        """A client says that it has read some."""
        if self.stories:
            peer, number = data.draw(st.sampled_from(sorted(self.stories)))
            self.rig.client(m.Credit(number, responses), peer)
            self.look()

    @rule(who=st.integers(0, 2))
    def client_dies(self, who: int) -> None:
        """A gateway dies; another one takes its place."""
        gone = self.peers[who]
        self.rig.supervisor(ProcessExited(int(gone.partition(b".")[0]), ""))
        self.peers[who] = b"%d.a" % next(self.pids)
        self.look(gone)

    # --- what workers do --------------------------------------------------------------------------

    @rule(index=st.integers(0, 1), early=st.booleans())
    def worker_comes(self, index: int, early: bool) -> None:
        """An instance is announced and offers itself, in either order."""
        if index not in self.workers:
            worker = self.workers[index] = FakeWorker(index, next(self.pids))
            ready = m.InstanceReady(index, worker.pid)
            if early:
                self.rig.worker(worker.peer, ready)
            self.rig.supervisor(InstanceExpected(index, worker.pid))
            if not early:
                self.rig.worker(worker.peer, ready)
            self.look()

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), errors=st.booleans())
    def worker_finishes(self, data: st.DataObject, errors: bool) -> None:
        """A batch comes back, some of it perhaps with errors."""
        worker = data.draw(st.sampled_from(self.busy()))
        self.finish(worker, errors)

    @precondition(lambda self: any(worker.open for worker in self.workers.values()))
    @rule(data=st.data(), code=st.sampled_from(["", "", "INTERNAL"]), final=st.booleans())
    def worker_responds(self, data: st.DataObject, code: str, final: bool) -> None:
        """A request that is open at a worker has a response, or ends."""
        worker = data.draw(st.sampled_from([w for w in self.workers.values() if w.open]))
        key = data.draw(st.sampled_from(sorted(worker.open)))
        self.respond(worker, key, code, final)

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), wrong=st.sampled_from(["batch", "none", "twice", "stranger"]))
    def worker_talks_nonsense(self, data: st.DataObject, wrong: str) -> None:
        """A batch comes back wrong."""
        worker = data.draw(st.sampled_from(self.busy()))
        batch = worker.batch
        assert batch is not None
        if self.decoupled:
            self.rig.respond(worker.peer, -1, final=wrong == "batch")
            return
        replies = [ok(each.key) for each in batch.requests]
        number = batch.batch + (wrong == "batch")
        spoiled = {"none": [], "twice": replies * 2, "stranger": [*replies[1:], ok(-1)]}
        if wrong != "batch":
            worker.batch = None
        message = m.BatchFinished(number, 0, 0, 0, 0, spoiled.get(wrong, replies))
        self.rig.worker(worker.peer, message)
        self.look()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        """A worker dies."""
        self.exit(data.draw(st.sampled_from(sorted(self.workers))))

    @rule(index=st.integers(0, 1))
    def instance_is_given_up(self, index: int) -> None:
        """The supervisor gives up."""
        if index not in self.workers:
            self.rig.supervisor(InstanceGone(index, "no instance could be started"))
            self.look()

    # --- what time does ---------------------------------------------------------------------------

    @rule(us=st.sampled_from([1, 400, 1500, 6000]))
    def time_passes(self, us: int) -> None:
        """The loop comes back when the scheduler asked for it, as often as it asked."""
        until = self.rig.now + us * 1000
        while self.rig.wake_ns <= until:
            assert self.rig.wake_ns > self.rig.now
            self.rig.pass_time(self.rig.wake_ns - self.rig.now)
            self.look()
        self.rig.pass_time(until - self.rig.now)
        self.look()

    # --- what must hold ---------------------------------------------------------------------------

    def busy(self) -> list[FakeWorker]:
        """Workers with a batch."""
        return [worker for worker in self.workers.values() if worker.batch is not None]

    def exit(self, index: int) -> None:
        """A worker's process ends."""
        worker = self.workers.pop(index)
        self.rig.supervisor(ProcessExited(worker.pid, "signal 9"))
        self.look()

    def finish(self, worker: FakeWorker, errors: bool) -> None:
        """A batch comes back."""
        batch, worker.batch = worker.batch, None
        assert batch is not None
        if self.decoupled:
            failed = [each.key for each in batch.requests if each.key in worker.open][:errors]
            worker.open.difference_update(failed)
            replies = [m.Reply(key, "INTERNAL", "the model says no", b"") for key in failed]
            self.rig.returned(worker.peer, batch, *replies)
            self.look()
            return
        replies = [ok(each.key) for each in batch.requests]
        if errors:
            replies[0] = m.Reply(replies[0].key, "INTERNAL", "the model says no", b"")
        self.rig.finish(worker.peer, batch, *replies)
        self.look()

    def respond(self, worker: FakeWorker, key: int, code: str, final: bool) -> None:
        """A response to a request that is open."""
        if final:
            worker.open.discard(key)
        self.rig.respond(worker.peer, key, code=code, final=final)
        self.look()

    def look(self, gone: bytes = b"") -> None:
        """Take what was sent and check it."""
        for peer, batch in self.rig.executes():
            self.check_batch(peer, batch)
        for peer, message in self.rig.clients.take():
            if peer != gone:
                self.stories[peer, message.id].told.append(message)
                self.check_story(self.stories[peer, message.id])
        for key in [key for key in self.stories if key[0] == gone]:
            del self.stories[key]
        for _, message in self.rig.control.take():
            if isinstance(message, Drained):
                self.drained = True
            elif isinstance(message, KillInstance):
                for index in [i for i, w in self.workers.items() if w.pid == message.process]:
                    self.exit(index)

    def check_batch(self, peer: bytes, batch: m.Execute) -> None:
        """A batch is legal, its worker free and its requests wanted."""
        (worker,) = [worker for worker in self.workers.values() if worker.peer == peer]
        assert worker.batch is None
        worker.batch = batch
        if self.decoupled:
            worker.open.update(each.key for each in batch.requests)
        known = [self.by_work[work] for work in (each.work for each in batch.requests)]
        stories = [self.stories[key] for key in known if key in self.stories]
        assert len({story.shape for story in stories}) <= 1
        assert sum(story.units for story in stories) <= MOST
        assert self.dynamic or len(batch.requests) == 1
        for story in stories:
            story.executions += 1
            assert not story.told and story.executions <= 2
            assert story.executions == 1 or len(batch.requests) == 1

    def check_story(self, story: Story) -> None:
        """One end, after any number of responses of a decoupled model, and `Settled` after an early
        one only."""
        more = [each for each in story.told if isinstance(each, m.Responded) and not each.final]
        assert story.told[: len(more)] == more
        assert self.decoupled or not more
        answer, *rest = story.told[len(more) :] or [None]
        if answer is None:
            return
        if self.decoupled:
            assert isinstance(answer, m.Responded | m.Failed)
        else:
            assert isinstance(answer, m.Finished | m.Failed)
        early = isinstance(answer, m.Failed) and answer.early
        assert not rest or (early and [type(message) for message in rest] == [m.Settled])

    def teardown(self) -> None:
        """Drain: with workers that work, everything ends."""
        if not hasattr(self, "rig"):
            return
        self.rig.supervisor(Drain())
        self.look()
        for _ in range(200):
            if self.drained:
                break
            for index in (0, 1):
                self.worker_comes(index, False)
            for worker in self.busy():
                self.finish(worker, False)
            for worker in list(self.workers.values()):
                for key in sorted(worker.open):
                    self.respond(worker, key, "", True)
            self.rig.pass_time(MS)
            self.look()
        assert self.drained
        for story in self.stories.values():
            self.check_story(story)
            ends = [each for each in story.told if not isinstance(each, m.Settled)]
            assert not isinstance(ends[-1], m.Responded) or ends[-1].final
            early = isinstance(ends[-1], m.Failed) and ends[-1].early
            assert len(story.told) == len(ends) + early
        core, scheduler = self.rig.core, self.rig.scheduler
        assert core._responses.live == 0 and len(core._queue) == 0
        assert not any(client.requests for client in scheduler._clients.values())
        self.check_counts()

    def check_counts(self) -> None:
        """The statistics agree with what the clients were told."""
        report = self.rig.report()
        counted = report["inference_stats"]
        assert counted["fail"]["count"] == sum(report["shmserve"]["failures"].values())
        ends = [story.told[-1] for story in self.stories.values()]
        won = [e for e in ends if isinstance(e, m.Finished | m.Responded) and not error(e)]
        assert counted["success"]["count"] >= len(won)
        assert report["shmserve"]["pending"] == 0 == report["shmserve"]["executing"]
        assert all(row["compute_infer"]["count"] for row in report["batch_stats"])


def error(end: m.Finished | m.Responded) -> bool:
    """Whether a request ended with an error."""
    return isinstance(end, m.Responded) and bool(end.code)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
