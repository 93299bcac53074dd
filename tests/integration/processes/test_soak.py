"""A short run of the soak test: no resource grows, and no request fails."""

from tests.support.servers import run_python


def test_a_short_soak() -> None:
    done = run_python("-m", "bench.soak", "--minutes=0.3", "--rate=10", timeout_s=300)
    assert done.stdout.endswith("0 grew, 0 requests failed\n"), done.stdout + done.stderr
    assert done.returncode == 0
