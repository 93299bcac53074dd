"""`python -m tests.generation CHECK [--size N] [--first SEED]`: a long check of any size."""

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.generation import sampling, schedules, schemas, speculation, trained


class Check(NamedTuple):
    """A check, and its size by default."""

    run: Callable[[int, int], str]
    size: int


CHECKS = {
    "schedules": Check(schedules.run, 10_000),
    "sampling": Check(sampling.run, 20_000),
    "speculation": Check(speculation.run, 200_000),
    "schemas": Check(schemas.run, 200),
    "trained": Check(trained.run, 60),
}


def main() -> int:
    """Exit status 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.generation", description=__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--size", type=int, help="how much of it")
    parser.add_argument("--first", type=int, default=0, help="the first seed [0]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    check = CHECKS[arguments.check]
    start_s = time.monotonic()
    try:
        report = check.run(arguments.size or check.size, arguments.first)
    except AssertionError as error:
        print(f"{arguments.check}: {error}")
        return 1
    print(f"{report} ({time.monotonic() - start_s:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
