"""Random load and random faults by `python -m bench.chaos`: no response is wrong or lost.

`SHMSERVE_CHAOS_MINUTES` sets the duration.
"""

import os

from tests.support.servers import run_python

_MINUTES = float(os.environ.get("SHMSERVE_CHAOS_MINUTES", "1"))
_START_AND_END_S = 300


def test_chaos() -> None:
    """Faults and requests are drawn from a seed, but their order in time is not reproducible."""
    command = ("-m", "bench.chaos", f"--minutes={_MINUTES}", "--seed=1")
    result = run_python(*command, timeout_s=60 * _MINUTES + _START_AND_END_S)
    assert result.returncode == 0, result.stdout[-30_000:] + result.stderr[-10_000:]
