"""What is cancelled and which instances leave cost no more the more requests and slots there are,
counted in operations of the interpreter."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from shmserve.ipc.messages import inference as m
from tests.rigs.sequence_rig import START, SequenceRig

FEW, MANY = 200, 4_000


def operations(work: Callable[[], None]) -> int:
    """How many instructions of Python run, loops over a list within one line included."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += 1
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


# Python 3.12 counts lines instead of opcodes until opcodes have been traced once.
operations(lambda: None)


def cancelling(numbers: slice, waiting: int, anew: int = 0) -> int:
    """What it costs to cancel these of so many requests of one sequence, where so many come after
    a START that begins it anew."""
    rig = SequenceRig(rows=1)
    rig.request(1, START)
    asked = [rig.request(1) for _ in range(waiting)]
    for index in range(anew):
        rig.request(1, 0 if index else START)

    def cancel() -> None:
        for number in asked[numbers]:
            rig.client(m.Cancel(number))

    return operations(cancel)


@pytest.mark.parametrize("anew", [False, True])
def test_a_cancellation_costs_no_more_with_many_waiting(anew: bool) -> None:
    """From the tail of a sequence, so that nothing behind leaves with it."""
    tail = slice(None, -20, -1)
    few, many = (cancelling(tail, each, each if anew else 0) for each in (FEW, MANY))
    assert many < few * 1.1


def test_all_that_is_behind_costs_once_for_each() -> None:
    few, many = (cancelling(slice(0, 1), each) / each for each in (FEW, MANY))
    assert many < few * 1.1


def test_an_instance_that_retires_costs_no_more_with_many_free_slots() -> None:
    """Of the others: it has as many itself."""

    def retiring(instances: int) -> int:
        dispatch: Any = SequenceRig(rows=8, instances=instances).core._dispatch
        table = dispatch._sequences
        gone = table._free[0][2]
        return operations(lambda: table.close(gone))

    few, many = retiring(2), retiring(200)
    assert many < few * 1.1
