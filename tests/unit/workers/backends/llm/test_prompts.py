"""Long texts of prompts: they are decoded in slices, and only their endings are kept."""

import time

import pytest

from shmserve.errors import InvalidArgument
from shmserve.workers.backends.llm import prompts
from shmserve.workers.backends.llm.prompts import LongText


@pytest.mark.parametrize("text", ["abc" * 50, "é" * 70, "a" + "東京" * 40, "🐙x" * 33, "a", ""])
@pytest.mark.parametrize("most", [1, 5, 16, 17, 1000])
@pytest.mark.parametrize("slice_size", [4, 7, 16, 1 << 17])
def test_the_ending_of_a_text(
    monkeypatch: pytest.MonkeyPatch, text: str, most: int, slice_size: int
) -> None:
    monkeypatch.setattr(prompts, "_SLICE", slice_size)
    long_text = LongText("text_input", memoryview(text.encode()))
    assert len(long_text) == len(text.encode())
    assert long_text.ending(most) == (text[-most:], len(text))
    assert long_text.whole() == text


@pytest.mark.parametrize("raw", [b"\xff" + b"a" * 99, b"a" * 99 + b"\xff", b"a" * 99 + b"\xe6\x9d"])
def test_a_text_that_is_not_utf_8_is_refused(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(prompts, "_SLICE", 16)
    with pytest.raises(InvalidArgument, match=r"^text_input: b'.* is not UTF-8"):
        LongText("text_input", memoryview(raw)).ending(1)


def test_a_text_is_decoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    text = "a" * (10 * prompts._SLICE)
    assert LongText("text_input", memoryview(text.encode())).ending(3) == ("aaa", len(text))
    assert pauses == [0] * 10
