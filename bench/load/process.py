"""Load generators of ours, each in a process of its own, which prints its figures as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.load.perf import LoadFailed
from bench.system.servers import BENCH

_GRACE_S = 60.0


def generate(generator: str, *arguments: object, seconds: float) -> dict[str, float]:
    """The figures, by unit, of `python -m bench.load.GENERATOR ARGUMENTS SECONDS`.

    Raises LoadFailed when it fails, or is not done a minute after its time.
    """
    command = [sys.executable, "-m", f"bench.load.{generator}", *map(str, (*arguments, seconds))]
    try:
        done = subprocess.run(
            command,
            cwd=BENCH.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + _GRACE_S,
        )
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"the load generator '{generator}' did not end in time") from None
    if done.returncode != 0:
        end = done.stderr.strip()[-600:]
        raise LoadFailed(f"the load generator '{generator}' failed: {end}")
    found: dict[str, float] = json.loads(done.stdout)
    return found
