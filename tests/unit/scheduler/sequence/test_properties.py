"""Properties that hold for batches of sequences with any requests in any order."""

import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.ipc.messages import inference as m
from tests.rigs.scheduler_rig import MS, schema_of
from tests.rigs.sequence_rig import END, START, SequenceRig

ROWS, INSTANCES = 2, 2

FLAGS = [0, 0, START, END, START | END]
requests = st.tuples(st.just("ask"), st.integers(1, 6), st.sampled_from(FLAGS))
return_steps = st.tuples(st.just("done"), st.integers(0, INSTANCES - 1), st.just(0))
cancels = st.tuples(st.just("cancel"), st.integers(1, 40), st.just(0))
time_steps = st.tuples(st.just("time"), st.sampled_from([1, 400, 1100]), st.just(0))
deaths = st.tuples(st.just("die"), st.integers(0, INSTANCES - 1), st.just(0))
steps = st.lists(
    st.one_of(
        requests, requests, requests, return_steps, return_steps, cancels, time_steps, deaths
    ),
    max_size=60,
)


class WatchedRig(SequenceRig):
    """A rig that records where requests run and checks each batch."""

    def __init__(self, strategy: str) -> None:
        super().__init__(strategy, ROWS, INSTANCES)
        self.sequence_of: dict[int, int] = {}  # the sequence of each request, by number
        self.answer_counts: Counter[int] = Counter()
        self.pids = 200
        self.sequences: dict[int, Any] = {}  # the sequence of each request, by the request's key
        self.slot_of: dict[Any, tuple[bytes, int]] = {}  # sequence -> its instance and slot
        self.last_request: dict[Any, int] = {}  # sequence -> its last request

    def take_batches(self) -> list[tuple[bytes, m.Execute]]:
        executable = super().take_batches()
        for client in self.scheduler._clients.values():
            for request in client.requests.values():
                self.sequences[request.key] = request.sequence
        for peer, batch in executable:
            self.check(peer, batch)
        return executable

    def check(self, peer: bytes, batch: m.Execute) -> None:
        used_rows = [row for row in batch.rows if row.key]
        assert [row.key for row in used_rows] == [request.key for request in batch.requests]
        assert used_rows and len(used_rows) <= ROWS
        assert len({row.slot for row in batch.rows}) == len(batch.rows)
        for row in used_rows:
            sequence = self.sequences[row.key]
            assert sequence.id == row.correlation_id
            # All requests of a sequence run in the same slot, in order of arrival.
            assert self.slot_of.setdefault(sequence, (peer, row.slot)) == (peer, row.slot)
            assert self.last_request.get(sequence, 0) < row.key
            self.last_request[sequence] = row.key
        assert len({self.sequences[row.key] for row in used_rows}) == len(used_rows)

    def record_messages(self) -> None:
        for answer in self.answers():
            self.answer_counts[answer.id] += 1

    def step(self, kind: str, value: int, flags: int) -> None:
        if kind == "ask":
            self.sequence_of[self.request(value, flags)] = value
        elif kind == "done" and self.is_running(value):
            self.finish_batch(value)
        elif kind == "cancel":
            self.client(m.Cancel(value))
        elif kind == "time":
            self.pass_time(value * MS)
        elif kind == "die":
            self.end_process(value)
            self.pids += 1
            self.peers[value] = self.start(value, self.pids)
        self._take()
        self.record_messages()


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
@settings(max_examples=150, deadline=None)
@given(events=steps)
def test_every_request_ends_once_and_batches_are_in_order(strategy: str, events: list[Any]) -> None:
    rig = WatchedRig(strategy)
    for event in events:
        rig.step(*event)
    for _ in range(400):
        busy_instances = [index for index in range(INSTANCES) if rig.is_running(index)]
        if not busy_instances:
            rig.step("time", 1100, 0)
            if not any(rig.is_running(index) for index in range(INSTANCES)):
                break
        for index in busy_instances:
            rig.step("done", index, 0)
    assert set(rig.answer_counts) == set(rig.sequence_of) and set(rig.answer_counts.values()) <= {1}
    assert rig.core.live_count == 0
    # No state remains: after the idle timeout of unfinished sequences, all slots are free.
    rig.step("time", 1100, 0)
    for sequence in range(11, 11 + ROWS * INSTANCES):
        rig.step("ask", sequence, START | END)
    for index in range(INSTANCES):
        while rig.is_running(index):
            rig.step("done", index, 0)
    assert rig.core.live_count == 0


def test_a_decision_costs_the_same_however_many_sequences_wait() -> None:
    """The cost is the number of executed lines of code."""

    def count_lines(waiting_count: int) -> int:
        rig = SequenceRig("oldest", rows=2)
        for sequence in range(1, waiting_count + 1):
            submit = m.Submit(*(sequence, schema_of(), [b"w"], 0, 0, 0, 0, "", START, sequence, ""))
            rig.scheduler.handle_client_message(b"7009.ab", submit, rig.now)
        rig.pass_time(0)
        rig._take()
        line_count = 0

        def count_line(*_: Any) -> Any:
            nonlocal line_count
            line_count += 1
            return count_line

        sys.settrace(count_line)
        try:
            rig.finish_batch()
        finally:
            sys.settrace(None)
        return line_count

    few_lines, many_lines = count_lines(10), count_lines(10_000)
    assert many_lines < few_lines * 1.5
