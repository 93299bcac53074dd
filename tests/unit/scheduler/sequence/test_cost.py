"""The cost of cancelling and retiring, in instructions, for any number of requests."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from shmserve.ipc.messages import inference as m
from tests.rigs.sequence_rig import START, SequenceRig

FEW, MANY = 200, 4_000


def count_operations(action: Callable[[], None]) -> int:
    """Return the number of executed Python instructions, including loops within one line."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += 1
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


# Python 3.12 counts lines instead of opcodes until opcodes have been traced once.
count_operations(lambda: None)


def cancellation_cost(numbers: slice, waiting_count: int, new_count: int = 0) -> int:
    """Return the cost of cancelling the requests in a slice of one sequence.

    Args:
        numbers: The requests to cancel.
        waiting_count: The number of requests of the sequence.
        new_count: The number of requests after a START that restarts the sequence.
    """
    rig = SequenceRig(rows=1)
    rig.request(1, START)
    requests = [rig.request(1) for _ in range(waiting_count)]
    for index in range(new_count):
        rig.request(1, 0 if index else START)

    def cancel() -> None:
        for number in requests[numbers]:
            rig.client(m.Cancel(number))

    return count_operations(cancel)


@pytest.mark.parametrize("adds_new", [False, True])
def test_a_cancellation_costs_no_more_with_many_waiting(adds_new: bool) -> None:
    """The last requests of the sequence are cancelled, so that no later request ends with them."""
    tail_slice = slice(None, -20, -1)
    few_cost, many_cost = (
        cancellation_cost(tail_slice, count, count if adds_new else 0) for count in (FEW, MANY)
    )
    assert many_cost < few_cost * 1.1


def test_cancelling_all_later_requests_takes_linear_time() -> None:
    few, many = (cancellation_cost(slice(0, 1), count) / count for count in (FEW, MANY))
    assert many < few * 1.1


def test_an_instance_that_retires_costs_no_more_with_many_free_slots() -> None:
    """The free slots belong to other instances; the retiring instance has equally many slots."""

    def retirement_cost(instances: int) -> int:
        dispatcher: Any = SequenceRig(rows=8, instances=instances).core._dispatcher
        table = dispatcher._sequences
        freed_number = table._free_slots[0][2]
        return count_operations(lambda: table.close(freed_number))

    few_cost, many_cost = retirement_cost(2), retirement_cost(200)
    assert many_cost < few_cost * 1.1
