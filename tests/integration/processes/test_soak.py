"""A short run of the soak test: no resource grows, and no request fails."""

from tests.support.servers import run_python


def test_a_short_soak() -> None:
    result = run_python("-m", "bench.soak", "--minutes=0.3", "--rate=10", timeout_s=300)
    assert result.stdout.endswith("0 grew, 0 requests failed\n"), result.stdout + result.stderr
    assert result.returncode == 0
