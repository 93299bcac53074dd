"""The credit of streams, for all interleavings of a sender and a reader."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.credit import (
    BYTES_PER_CREDIT,
    FIRST_CREDIT,
    MAX_UNREAD_BYTES,
    RESPONSES_PER_CREDIT,
    ReadWindow,
    SendWindow,
)

SIZES = st.sampled_from([0, 1, 1000, BYTES_PER_CREDIT - 1, MAX_UNREAD_BYTES, 2 * MAX_UNREAD_BYTES])


@given(st.booleans(), st.lists(st.tuples(SIZES, st.integers(0, 40)), max_size=200))
def test_unread_responses_are_bounded_and_never_stuck(
    placed: bool, steps: list[tuple[int, int]]
) -> None:
    sender, reader = SendWindow(placed), ReadWindow(placed)
    in_flight_sizes: list[int] = []
    for size, reads in steps:
        if sender.is_open:
            sender.record_sent(size)
            in_flight_sizes.append(size)
        assert sender.unread <= (1 if placed else FIRST_CREDIT)
        for _ in range(min(reads, len(in_flight_sizes))):
            credit = reader.record_read(in_flight_sizes.pop(0))
            assert sender.record_credit(credit) == credit
    while in_flight_sizes:
        sender.record_credit(reader.record_read(in_flight_sizes.pop(0)))
    assert sender.is_open, "who has read all gets the next"


@pytest.mark.parametrize(
    ("placed", "size", "most"),
    [(False, 1, FIRST_CREDIT), (True, 1, 1), (False, MAX_UNREAD_BYTES // 4, 4)],
)
def test_a_window_closes(placed: bool, size: int, most: int) -> None:
    window = SendWindow(placed)
    for _ in range(most):
        assert window.is_open
        window.record_sent(size)
    assert not window.is_open
    assert (window.record_credit(most + 7), window.unread) == (most, 0)
    assert window.is_open and window.record_credit(1) == 0


@pytest.mark.parametrize(
    ("placed", "size", "together"),
    [(False, 1, RESPONSES_PER_CREDIT), (True, 1, 1), (False, BYTES_PER_CREDIT, 1)],
)
def test_small_responses_are_credited_together(placed: bool, size: int, together: int) -> None:
    window = ReadWindow(placed)
    credited = [window.record_read(size) for _ in range(2 * together)]
    assert credited == [*[0] * (together - 1), together] * 2
