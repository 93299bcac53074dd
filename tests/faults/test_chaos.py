"""Two minutes of `python -m bench.chaos`: random load, random faults, no wrong or lost answer."""

import subprocess
import sys

from tests.support.servers import ROOT

_MINUTES = 2
_PATIENCE_S = 420


def test_chaos() -> None:
    """Its faults and clients are drawn by a seed; what they meet is not."""
    command = [sys.executable, "-m", "bench.chaos", f"--minutes={_MINUTES}", "--seed=1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-30_000:] + done.stderr[-10_000:]
