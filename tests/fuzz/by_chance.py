"""Inputs by chance, many more in the same time, for targets that read nearly all bytes."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_MAX_INPUT_LENGTH = 200


def search(target: Callable[[bytes], object], seeds: list[bytes], seconds: float, seed: int) -> int:
    """Try inputs until the time is over, and return their number.

    An input that breaks the target is stored as crash-SEED-NUMBER in the current folder, and the
    error is raised.
    """
    end = time.monotonic() + seconds
    for count, data in enumerate(_inputs(seeds, random.Random(seed))):
        try:
            target(data)
        except BaseException:
            Path(f"crash-{seed}-{count}").write_bytes(data)
            raise
        if time.monotonic() > end:
            return count + 1
    raise AssertionError("inputs do not end")


def _inputs(corpus: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Yield random bytes and slightly changed corpus inputs in turn."""
    for number in itertools.count():
        if number % 2 or not corpus:
            yield rng.randbytes(rng.randrange(1, _MAX_INPUT_LENGTH))
            continue
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randrange(1, 6)):
            position = rng.randrange(len(data) + 1)
            mutation = rng.randrange(4)
            if mutation == 0 and position < len(data):
                data[position] = rng.randrange(256)
            elif mutation == 1:
                data[position:position] = rng.randbytes(rng.randrange(1, 5))
            elif mutation == 2:
                del data[position : position + rng.randrange(1, 5)]
            else:
                other_input = rng.choice(corpus)
                data[position:] = other_input[rng.randrange(len(other_input) + 1) :]
        yield bytes(data)
