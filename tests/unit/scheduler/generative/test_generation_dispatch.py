"""Requests of a generative model in the scheduler: prepared, run, cancelled, and restarted."""

from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest

from shmserve.ipc.engine_settings import ENGINE_PARAMETER, EngineSettings
from shmserve.ipc.messages import generation as g
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.messages.supervision import (
    Drain,
    Drained,
    InstanceGone,
    KillInstance,
    RetireInstance,
)
from tests.rigs.scheduler_rig import GATEWAY, MS, PLANNING_NS, Rig
from tests.support.generative_worker import GenerativeWorker, generate_alone

PROMPT = array("i", [3, 1, 4, 1, 5, 9, 2, 6])


class LlmRig(Rig):
    def __init__(self, **settings: Any) -> None:
        small = {
            "block_size": 4,
            "kv_cache_blocks": 16,
            "max_waiting_requests": 3,
            "max_batch_size": 2,
        }
        self.settings = EngineSettings.of({**small, **settings})
        parameters = {ENGINE_PARAMETER: self.settings.json_text}
        super().__init__(decoupled=True, backend="llm", parameters=parameters, max_batch_size=0)


@dataclass
class FakeLlmWorker:
    """A fake worker that handles its messages one at a time."""

    rig: LlmRig
    index: int = 0
    pid: int = 100
    most: int = 6
    samples: int = 1
    replays: bool = False
    inbox: list[Any] = field(default_factory=list)
    told: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.rig.settings
        self.worker = GenerativeWorker(s.block_size, s.kv_cache_blocks, s.swap_blocks)
        self.peer = self.rig.start(self.index, self.pid)
        self.open: dict[int, int] = {}

    def receive(self) -> list[Any]:
        posted = self.rig.workers.take()
        self.rig.workers.posted_messages = [item for item in posted if item[0] != self.peer]
        self.inbox += [message for peer, message in posted if peer == self.peer]
        return self.inbox

    def turn(self) -> bool:
        """Handle one message; return whether there was one."""
        self.receive()
        if not self.inbox:
            return False
        message = self.inbox.pop(0)
        match message:
            case g.Prepare():
                self._prepare(message)
            case g.Step():
                self._step(message)
            case m.CancelExecution():
                self._end(message.key, "CANCELLED")
        return True

    def run(self) -> None:
        """Handle messages until there is none."""
        while self.turn():
            pass

    def _prepare(self, message: g.Prepare) -> None:
        (request,) = message.requests
        self.worker.prompts[request.key] = PROMPT
        self.worker.max_tokens_by_key[request.key] = self.most
        replays = self.replays and bool(message.resumed)
        for resumed in message.resumed if not replays else ():
            self.worker.resumed_tokens[request.key, resumed.sample] = array("i", resumed.tokens)
        ended = 0 if replays else sum(bool(resumed.finish_reason) for resumed in message.resumed)
        self.open[request.key] = self.samples - ended
        done = g.Prepared(
            request.key, PROMPT.tobytes(), self.most, self.samples, replays_tokens=replays
        )
        self.rig.worker(self.peer, done)

    def _step(self, message: g.Step) -> None:
        known_sequences = {new.sequence: (new.key, new.sample) for new in message.new_sequences}
        sequences = {
            n: (sequence.key, sequence.sample) for n, sequence in self.worker.sequences.items()
        } | known_sequences
        stepped_message = self.worker.step(message)
        self.rig.now += MS
        self.rig.worker(self.peer, stepped_message)
        for result in stepped_message.results:
            key, sample = sequences[result.sequence]
            tokens = self.worker.sequences[result.sequence].slots[len(PROMPT) :]
            self.rig.worker(self.peer, g.ResponseSent(key, sample, len(tokens)))
            if result.finish_reason:
                self.open[key] -= 1
                if not self.open[key]:
                    self._end(key)

    def _end(self, key: int, code: str = "") -> None:
        self.open.pop(key, None)
        self.rig.respond(self.peer, key, b"" if code else b"text", code=code, final=True)


def submit(rig: Rig, count: int = 1, **fields: Any) -> list[int]:
    return rig.submit(count, batch_size=0, **fields)


def take_ended(rig: Rig) -> dict[int, str]:
    """Return the codes of requests that have ended since the last call, by number."""
    codes = {}
    for answer in rig.answers():
        if isinstance(answer, m.Failed) or (isinstance(answer, m.Responded) and answer.final):
            codes[answer.id] = answer.code
    return codes


def test_requests_are_prepared_and_run_to_their_end() -> None:
    rig = LlmRig()
    llm = FakeLlmWorker(rig)
    numbers = submit(rig, 3)
    llm.run()
    assert take_ended(rig) == dict.fromkeys(numbers, "")
    statistics = rig.snapshot()
    assert (statistics["success"], statistics["executing"]) == (3, 0)
    assert statistics["execution_count"] > 3
    # Steps of a generative model do not count as batches.
    assert not any(statistics["batches_closed"].values())
    plans = statistics["scheduler_seconds"]["count"]
    assert statistics["phases"]["schedule"] == plans * PLANNING_NS > 0


def test_waiting_requests_are_prepared_once_an_instance_is_ready() -> None:
    rig = LlmRig()
    (number,) = submit(rig)
    llm = FakeLlmWorker(rig)
    llm.run()
    assert take_ended(rig) == {number: ""}


def test_too_many_requests_that_wait_are_refused() -> None:
    rig = LlmRig()
    numbers = submit(rig, 4)
    assert take_ended(rig) == {numbers[3]: "UNAVAILABLE"}


def test_a_request_that_can_never_run_is_rejected_and_other_requests_continue() -> None:
    rig = LlmRig(kv_cache_blocks=4)
    llm = FakeLlmWorker(rig, most=20)
    (too_long,) = submit(rig)
    llm.receive()
    llm.turn()
    (refusal,) = rig.answers()
    assert (refusal.id, refusal.code, refusal.early) == (too_long, "INVALID_ARG", True)
    assert "the prompt has 8 tokens, and up to 20 follow" in refusal.message
    llm.most = 4
    (fitting_request,) = submit(rig)
    llm.run()
    assert take_ended(rig) == {fitting_request: ""}


@pytest.mark.parametrize("turns", range(12))
def test_a_cancelled_request_leaks_nothing_in_any_state(turns: int) -> None:
    rig = LlmRig()
    llm = FakeLlmWorker(rig)
    first_request, second_request = submit(rig, 2)
    for _ in range(turns):
        llm.turn()
    rig.client(m.Cancel(first_request))
    llm.run()
    codes = take_ended(rig)
    assert codes[second_request] == "" and codes[first_request] in ("CANCELLED", "")
    assert rig.snapshot()["executing"] == 0
    assert not llm.worker.sequences


def test_a_burst_fills_the_batch_and_the_queue() -> None:
    rig = LlmRig(max_waiting_requests=4, max_batch_size=2)
    llm = FakeLlmWorker(rig)
    numbers = submit(rig, 8)
    assert take_ended(rig) == dict.fromkeys(numbers[6:], "UNAVAILABLE")
    llm.turn()
    (surplus_request,) = submit(rig)
    assert take_ended(rig) == {surplus_request: "UNAVAILABLE"}
    llm.run()
    assert take_ended(rig) == dict.fromkeys(numbers[:6], "")


def test_a_burst_during_a_step_fills_the_batch_and_the_queue() -> None:
    rig = LlmRig(max_waiting_requests=4, max_batch_size=2)
    llm = FakeLlmWorker(rig)
    submit(rig)
    llm.turn()
    submit(rig, 4)
    llm.receive().sort(key=lambda message: isinstance(message, g.Step))
    for _ in range(4):  # the requests are prepared while the step of the first one runs
        llm.turn()
    submit(rig)
    assert take_ended(rig) == {}
    (surplus_request,) = submit(rig)
    assert take_ended(rig) == {surplus_request: "UNAVAILABLE"}


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("turns", range(1, 14))
def test_generations_of_a_dead_instance_resume_at_their_position(turns: int, samples: int) -> None:
    rig = LlmRig()
    llm = FakeLlmWorker(rig, samples=samples)
    (number,) = submit(rig)
    for _ in range(turns):
        llm.turn()
    ended_before = take_ended(rig)
    rig.supervisor(ProcessExited(100, "killed"))
    successor = FakeLlmWorker(rig, pid=101, samples=samples)
    prepares = [message for message in successor.receive() if isinstance(message, g.Prepare)]
    if not ended_before:
        (prepare,) = prepares
        for resumed_sample in prepare.resumed:
            expected, _ = generate_alone(PROMPT, resumed_sample.sample, llm.most)
            tokens = list(array("i", resumed_sample.tokens))
            assert tokens == expected[: len(tokens)]
            # Each token is reported in the step that generates it.
            assert resumed_sample.sent_characters == len(tokens)
    successor.run()
    assert ended_before | take_ended(rig) == {number: ""}
    assert not successor.worker.sequences


@pytest.mark.parametrize("second_turns", [1, 3, 5, 40])
@pytest.mark.parametrize("first_turns", [4, 7, 40])
def test_restarted_samples_keep_their_tokens(first_turns: int, second_turns: int) -> None:
    """The next worker generates the same tokens. It receives the tokens from before all deaths."""
    rig = LlmRig()
    (number,) = submit(rig)
    known_tokens: dict[int, bytes] = {}
    codes: dict[int, str] = {}
    for pid, turns in enumerate((first_turns, second_turns, 10_000), 100):
        llm = FakeLlmWorker(rig, pid=pid, most=20, samples=2, replays=True)
        for prepare in [message for message in llm.receive() if isinstance(message, g.Prepare)]:
            assert known_tokens.keys() <= {resumed.sample for resumed in prepare.resumed}
            for resumed in prepare.resumed:
                assert resumed.tokens.startswith(known_tokens.get(resumed.sample, b""))
                known_tokens[resumed.sample] = resumed.tokens
        for _ in range(turns):
            if not llm.turn():
                break
        codes |= take_ended(rig)
        if pid < 102:
            rig.supervisor(ProcessExited(pid, "killed"))
    assert codes == {number: ""}


def test_a_finished_sample_is_not_restarted() -> None:
    rig = LlmRig()
    llm = FakeLlmWorker(rig, most=20, samples=2)
    (number,) = submit(rig)
    while list(llm.open.values()) != [1]:
        assert llm.turn()
    rig.supervisor(ProcessExited(100, "killed"))
    successor = FakeLlmWorker(rig, pid=101, most=20, samples=2)
    (prepare,) = successor.receive()
    assert {
        resumed_sample.sample: resumed_sample.finish_reason for resumed_sample in prepare.resumed
    } == {0: "stop", 1: ""}
    successor.run()
    assert take_ended(rig) == {number: ""}


def test_samples_that_have_ended_are_not_generated_again_if_their_client_reads_late() -> None:
    rig = LlmRig()
    llm = FakeLlmWorker(rig)
    (number,) = submit(rig)
    llm._end = lambda key, code="": None  # type: ignore[method-assign]
    while 0 not in llm.open.values():
        assert llm.turn()
    rig.supervisor(ProcessExited(100, "killed"))
    successor = FakeLlmWorker(rig, pid=101)
    (prepare,) = successor.receive()
    successor.run()
    assert [resumed.finish_reason for resumed in prepare.resumed] == ["length"]
    assert not successor.worker.sequences and rig.snapshot()["finished"]["length"] == 1
    successor._end(next(iter(successor.open)))
    assert take_ended(rig) == {number: ""}


def test_generations_of_a_dead_instance_are_spread_over_the_remaining_instances() -> None:
    rig = LlmRig(max_waiting_requests=9)
    rig.start(2, 102)
    submit(rig)
    rig.supervisor(RetireInstance(2))
    rig.workers.take()
    first = rig.start(3, 103)
    submit(rig, 3)
    assert {peer for peer, sent in rig.workers.take() if isinstance(sent, g.Prepare)} == {first}
    remaining = [rig.start(index, 100 + index) for index in (0, 1)]
    rig.supervisor(ProcessExited(103, "killed"))
    peers = [peer for peer, sent in rig.workers.take() if isinstance(sent, g.Prepare)]
    assert sorted(peers) in ([*remaining, remaining[1]], [remaining[0], *remaining])


@pytest.mark.parametrize("end", [ProcessExited(100, "killed"), RetireInstance(0)])
def test_a_replacement_instance_has_no_cached_blocks(end: ProcessExited | RetireInstance) -> None:
    """The kernel reuses pids, so a new worker may have the address of an earlier one."""
    rig = LlmRig()
    for _ in range(2):
        llm = FakeLlmWorker(rig)
        (number,) = submit(rig)
        llm.run()
        assert take_ended(rig) == {number: ""}
        rig.supervisor(end)


def test_a_request_that_kills_workers_fails_eventually() -> None:
    rig = LlmRig()
    (number,) = submit(rig)
    codes: dict[int, str] = {}
    for pid in range(100, 103):
        assert not codes
        FakeLlmWorker(rig, pid=pid).turn()
        rig.supervisor(ProcessExited(pid, "killed"))
        codes = take_ended(rig)
    assert codes == {number: "INTERNAL"}


def test_running_generations_fail_if_no_instance_will_return() -> None:
    rig = LlmRig()
    llm = FakeLlmWorker(rig)
    (number,) = submit(rig)
    llm.turn()
    rig.supervisor(ProcessExited(100, "killed"), InstanceGone(0, "it cannot load"))
    assert take_ended(rig) == {number: "UNAVAILABLE"}
    assert rig.snapshot()["executing"] == 0


def test_an_exited_client_does_not_affect_other_clients() -> None:
    rig = LlmRig()
    llm = FakeLlmWorker(rig)
    submit(rig, peer=b"7001.ab")
    (other_request,) = submit(rig, peer=GATEWAY)
    llm.turn()
    llm.turn()
    rig.supervisor(ProcessExited(7001, ""))
    llm.run()
    assert take_ended(rig) == {other_request: ""}
    assert not llm.worker.sequences


def test_results_of_another_step_end_the_worker() -> None:
    rig = LlmRig()
    llm = FakeLlmWorker(rig)
    submit(rig)
    llm.turn()
    rig.worker(llm.peer, g.Stepped(99, [], 0, 0, 0))
    kills = rig.take_supervisor_messages(KillInstance)
    assert [kill.process for kill in kills] == [100]


def test_a_drain_waits_for_running_generations() -> None:
    rig = LlmRig()
    llm = FakeLlmWorker(rig)
    submit(rig)
    rig.supervisor(Drain(False))
    assert not rig.take_supervisor_messages(Drained)
    llm.run()
    assert rig.take_supervisor_messages(Drained)


def test_a_step_that_failed_fails_its_requests_alone() -> None:
    rig = LlmRig()
    llm = FakeLlmWorker(rig)
    (number,) = submit(rig)
    llm.turn()
    (step,) = llm.receive()
    llm.inbox.clear()
    (row,) = step.rows
    (key,) = llm.open
    rig.respond(llm.peer, key, b"", code="INTERNAL", final=True, request_failed=True)
    rig.worker(llm.peer, g.Stepped(step.step, [], 0, 0, 0, skipped=[row.sequence]))
    assert take_ended(rig) == {number: "INTERNAL"}
    (next_number,) = submit(rig)
    llm.worker.sequences.clear()
    llm.run()
    assert take_ended(rig) == {next_number: ""}
