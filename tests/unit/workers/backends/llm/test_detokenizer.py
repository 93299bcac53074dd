"""Text from tokens: all of it, whole characters, and nothing of a stop string."""

import random

import pytest
from tokenizers import Tokenizer

from shmserve.workers.backends.llm.answers import Detokenizer, StopStrings
from tests.support.hf_folders import tokenizer_text

TEXTS = ["naïve café — 東京 und Köln 😀👩‍👩‍👧", "the quick brown fox", "🏳️‍🌈" * 3, " a  b\n\tc "]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tests' tokenizer of bytes and pairs."""
    return Tokenizer.from_str(tokenizer_text())


def told(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """The pieces in which tokens are told."""
    detokenizer = Detokenizer(tokenizer, True)
    return [*[detokenizer.add(token) for token in tokens], detokenizer.flush()]


def test_texts_are_whole_wherever_they_are_cut(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        tokens = tokenizer.encode(text).ids
        for end in range(len(tokens) + 1):
            pieces = told(tokenizer, tokens[:end])
            assert "".join(pieces) == tokenizer.decode(tokens[:end])
            assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_any_tokens_are_told_as_they_are_decoded(tokenizer: Tokenizer) -> None:
    chance = random.Random(0)
    differ = 0
    for _ in range(300):
        tokens = [chance.randrange(320) for _ in range(chance.randrange(1, 40))]
        differ += "".join(told(tokenizer, tokens)) != tokenizer.decode(tokens)
    assert differ == 0


def test_bytes_without_a_character_are_not_held_for_ever(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("é").ids[:1] * 40
    assert sum(map(bool, told(tokenizer, broken)[:-1])) >= 2


def test_nothing_of_a_stop_string_is_told() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        text = "".join(chance.choice("abc") for _ in range(chance.randrange(1, 30)))
        count = chance.randrange(1, 4)
        stops = ["".join(chance.choice("abc") for _ in range(chance.randrange(1, 5)))
                 for _ in range(count)]  # fmt: skip
        included = chance.random() < 0.5
        filtered, given, found, place = StopStrings(stops, included), "", False, 0
        while place < len(text) and not found:
            size = chance.randrange(1, 4)
            piece, found = filtered.add(text[place : place + size])
            given += piece
            place += size
        given += filtered.flush()
        assert given == expected(text, stops, included), (text, stops)


def expected(text: str, stops: list[str], included: bool) -> str:
    """A text up to the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if included else end - len(stop)]
    return text
