"""Requests of generative models: their parameters, encoded in the input, and the expected texts."""

from __future__ import annotations

import functools
from array import array
from random import Random
from typing import NamedTuple

from shmserve.ipc.messages.generation import BeamSearch
from shmserve.scheduler.generative.sequences import Generation
from tests.simulation.generative import reference_beam_search
from tests.support.generative_worker import END_TOKEN, VOCABULARY_SIZE, generate_alone

STOP_TOKEN = 7  # the token that ends a text like a stop string
_TOO_MANY = 5_000  # number of tokens that exceeds every pool
_BEGINNINGS = [[1 + (number * index) % 60 for index in range(1, 40)] for number in (7, 11, 13)]


class TextRequest(NamedTuple):
    """A request. With `streams`, it has a response whenever there is new text."""

    prompt: array[int]
    max_tokens: int
    samples: int
    streams: bool
    priority: int
    is_whole: bool
    search: BeamSearch | None

    @property
    def fits(self) -> bool:
        return self.max_tokens < _TOO_MANY and self.samples == 1 and self.search is None


class Piece(NamedTuple):
    """A part of a sample's text: the index of its first token, tokens, end reason."""

    sample: int
    begin: int
    tokens: list[int]
    reason: str

    def packed(self) -> bytes:
        tokens = ".".join(map(str, self.tokens))
        return f"{self.sample}:{self.begin}:{tokens}:{self.reason}".encode()


def pieces(packed: bytes) -> list[Piece]:
    pieces: list[Piece] = []
    for part in packed.decode().split(";"):
        sample, begin, text, reason = part.split(":")
        pieces.append(
            Piece(int(sample), int(begin), [*map(int, filter(None, text.split(".")))], reason)
        )
    return pieces


@functools.lru_cache(1 << 14)
def request_of(content: bytes) -> TextRequest:
    draw = Random(content)
    prompt = draw.choice(_BEGINNINGS)[: draw.randint(1, 30)]
    if draw.random() < 0.5:
        prompt = prompt + draw.choices(range(1, VOCABULARY_SIZE), k=draw.randint(1, 9))
    search = None
    if draw.random() < 0.1:
        search = BeamSearch(draw.randint(2, 3), 1.0, "false", [END_TOKEN, 9, 19])
    max_tokens = draw.randint(1, 24) if draw.random() < 0.97 else _TOO_MANY
    return TextRequest(
        array("i", prompt),
        max_tokens,
        1 if search else draw.choice((1, 1, 1, 2, 3)),
        search is None and draw.random() < 0.7,
        draw.randint(0, 2),
        draw.random() < 0.1,
        search,
    )


@functools.lru_cache(1 << 14)
def texts(content: bytes) -> list[tuple[list[int], str]]:
    request = request_of(content)
    if request.search is not None:
        generation: Generation[None] = Generation(
            None, 0, 0, request.prompt, request.max_tokens, beams=request.search
        )
        return reference_beam_search(generation)
    samples: list[tuple[list[int], str]] = []
    for sample in range(request.samples):
        tokens, reason = generate_alone(request.prompt, sample, request.max_tokens)
        if STOP_TOKEN in tokens:
            tokens, reason = tokens[: tokens.index(STOP_TOKEN) + 1], "stop"
        samples.append((tokens, reason))
    return samples


def problem(content: bytes, received_positions: set[tuple[int, int]], packed: bytes) -> str:
    """Return the error in a response, or ""; its entries join `received_positions`."""
    for piece in pieces(packed):
        tokens, reason = texts(content)[piece.sample]
        end = piece.begin + len(piece.tokens)
        positions = {(piece.sample, index) for index in range(piece.begin, end)}
        if piece.reason:
            positions.add((piece.sample, -1))
        if tokens[piece.begin : end] != piece.tokens or piece.reason not in ("", reason):
            return f"has {piece}, and its text is {tokens}, {reason}"
        if positions & received_positions:
            return f"has {piece} twice"
        received_positions |= positions
    return ""


def missing(content: bytes, received_positions: set[tuple[int, int]]) -> set[tuple[int, int]]:
    return {
        (sample, index)
        for sample, (tokens, _) in enumerate(texts(content))
        for index in range(-1, len(tokens))
    } - received_positions
