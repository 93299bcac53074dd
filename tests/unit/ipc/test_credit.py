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
def test_unread_responses_are_bounded(has_place: bool, steps: list[tuple[int, int]]) -> None:
    sender, reader = SendWindow(has_place), ReadWindow(has_place)
    unread_sizes: list[int] = []
    for size, read_count in steps:
        if sender.is_open:
            sender.record_sent(size)
            unread_sizes.append(size)
        assert len(sender._unread) <= (1 if has_place else FIRST_CREDIT)
        for _ in range(min(read_count, len(unread_sizes))):
            credit = reader.record_read(unread_sizes.pop(0))
            assert sender.record_credit(credit) == credit
    while unread_sizes:
        sender.record_credit(reader.record_read(unread_sizes.pop(0)))
    assert sender.is_open, "who has read all gets the next"


@pytest.mark.parametrize(
    ("has_place", "size", "message_count"),
    [(False, 1, FIRST_CREDIT), (True, 1, 1), (False, MAX_UNREAD_BYTES // 4, 4)],
)
def test_a_window_closes(has_place: bool, size: int, message_count: int) -> None:
    window = SendWindow(has_place)
    for _ in range(message_count):
        assert window.is_open
        window.record_sent(size)
    assert not window.is_open
    assert (window.record_credit(message_count + 7), len(window._unread)) == (message_count, 0)
    assert window.is_open and window.record_credit(1) == 0


@pytest.mark.parametrize(
    ("has_place", "size", "credit_batch"),
    [(False, 1, RESPONSES_PER_CREDIT), (True, 1, 1), (False, BYTES_PER_CREDIT, 1)],
)
def test_small_responses_share_a_credit(has_place: bool, size: int, credit_batch: int) -> None:
    window = ReadWindow(has_place)
    credit_counts = [window.record_read(size) for _ in range(2 * credit_batch)]
    assert credit_counts == [*[0] * (credit_batch - 1), credit_batch] * 2
