"""Two minutes of `python -m bench.chaos`: random load, random faults, no wrong or lost answer."""

from tests.support.servers import run_python

_MINUTES = 2
_PATIENCE_S = 420


def test_chaos() -> None:
    """Its faults and clients are drawn by a seed; what they meet is not."""
    command = ("-m", "bench.chaos", f"--minutes={_MINUTES}", "--seed=1")
    done = run_python(*command, timeout_s=_PATIENCE_S)
    assert done.returncode == 0, done.stdout[-30_000:] + done.stderr[-10_000:]
