"""One run of `shmserve perf`, in a process of its own, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.load.perf import LoadFailed
from bench.system.servers import BENCH

_GRACE_S = 60.0
# As for perf_analyzer: always three windows, whether or not they agree.
_WINDOWS = 3
_WARM_UP_S = 0.5


def ours(*arguments: object, seconds: float) -> dict[str, Any]:
    """Run `shmserve perf ARGUMENTS` for some seconds, and return the point of its report.

    Raises LoadFailed when it fails, has errors to report, or is not done a minute after its time.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "shmserve", "perf", *map(str, arguments)]
        command += [f"--windows={_WINDOWS}", f"--window={seconds / _WINDOWS}"]
        command += [f"--warm-up={_WARM_UP_S}", f"--json={report}"]
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
            raise LoadFailed("shmserve perf did not end in time") from None
        if done.returncode != 0:
            raise LoadFailed(f"shmserve perf failed: {done.stderr.strip()[-600:]}")
        found: dict[str, Any] = json.loads(report.read_text())["points"][0]
    if found["errors"]:
        raise LoadFailed(f"{found['errors']} requests failed: {found['error']}")
    return found
