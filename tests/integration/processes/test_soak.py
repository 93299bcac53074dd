"""The long run, for a moment: nothing grows, and nothing fails."""

import subprocess
import sys

from tests.support.servers import ROOT


def test_a_short_soak() -> None:
    command = [sys.executable, "-m", "bench.soak", "--minutes=0.3", "--rate=10"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.endswith("0 grew, 0 requests failed\n"), done.stdout + done.stderr
    assert done.returncode == 0
