"""Many sequences that are never ended: the table stays bounded, others are served."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.errors import InvalidArgument, QueueFull
from shmserve.ipc.model_spec import SequenceBatching
from shmserve.scheduler.batchers.sequences import InstanceSlots, Sequences
from shmserve.scheduler.requests.scheduled import Client, ScheduledRequest
from shmserve.scheduler.settings import Sequencing
from tests.rigs.sequence_rig import END, START

MANY_SEQUENCES, SLOTS, MAX_SEQUENCES, IDLE_NS = 100_000, 64, 1000, 1000


class Table:
    """A sequence table with one instance of `slots` slots."""

    def __init__(self) -> None:
        rules = Sequencing(SequenceBatching(), ("", ""), SLOTS, IDLE_NS, max_waiting=MAX_SEQUENCES)
        self.sequences = Sequences("m", rules)
        self.slots = InstanceSlots(b"0.100", (0, 0), SLOTS)
        self.sequences.join(self.slots)
        self.now = 0
        self.keys = itertools.count()
        self.executed: list[Any] = []

    def submit(self, client: Client[ScheduledRequest], sequence: int, flags: int) -> Any:
        self.sequences.check(sequence, flags, (client, 0))
        submit = SimpleNamespace(source=0)
        request: Any = SimpleNamespace(
            key=next(self.keys), client=client, flags=flags, sequence=None, submit=submit
        )
        self.sequences.enqueue(request, sequence)
        return request

    def turn(self) -> None:
        """Execute all slots with a request, after sequences that were idle too long have ended."""
        rows = [(slot, s) for slot, s in enumerate(self.slots.sequences) if s and s.waiting]
        self.executed = self.sequences.start_rows(self.slots, rows)
        self.sequences.finish_batch(self.slots, self.now)
        self.now += IDLE_NS
        self.sequences.expire_idle(self.now)

    def count_kept(self) -> int:
        """Return the number of sequences, slots and ids in the table."""
        table = self.sequences
        waiting_count = sum(1 for _ in table.backlog)
        return (
            table.open_count
            + waiting_count
            + len(table._free_slots)
            + len(table._idle_sequences)
            + len(table._lost_ids)
        )


def test_many_sequences_run_once_and_are_removed() -> None:
    """Each sequence has a slot until it has been idle for too long."""
    table = Table()
    greedy_client: Client[ScheduledRequest] = Client(b"7001.a", print)
    other_client: Client[ScheduledRequest] = Client(b"7002.a", print)
    opened_count = 0
    while opened_count < MANY_SEQUENCES:
        for _ in range(SLOTS):
            opened_count += 1
            table.submit(greedy_client, opened_count, START)
        if opened_count % (SLOTS * 1000) == 0:
            request = table.submit(other_client, -1, START | END)
            table.turn()
            table.turn()  # the new request runs after the requests that were already queued
            assert request in table.executed
        else:
            table.turn()
        assert table.count_kept() <= 3 * SLOTS
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        table.submit(greedy_client, 5, 0)


def test_the_number_of_waiting_sequences_is_bounded() -> None:
    """Further sequences are rejected and leave no state. Another client still has its turn."""
    table = Table()
    greedy_client: Client[ScheduledRequest] = Client(b"7001.a", print)
    other_client: Client[ScheduledRequest] = Client(b"7002.a", print)
    refusal_count = 0
    for sequence in range(MANY_SEQUENCES):
        try:
            table.submit(greedy_client, sequence, START)
        except QueueFull:
            refusal_count += 1
    assert refusal_count == MANY_SEQUENCES - SLOTS - MAX_SEQUENCES
    assert table.count_kept() == SLOTS + MAX_SEQUENCES + MAX_SEQUENCES
    request = table.submit(other_client, -1, START)
    for _ in range(2):
        table.turn()
    assert request in table.executed
