"""`python -m tests [PYTEST OPTIONS]`: all tests, in pytest processes side by side.

Most tests wait for other processes rather than compute, so that two lanes take little more than
half of one's time. What a piece has to say is shown when it ends; the last line counts the tests of
all; exit status 0: nothing failed anywhere.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Two lanes, and how many pieces of each folder they take: small enough for the lanes to end
# together, and large enough that what the tests of a piece share (servers, torch) is not started
# too often. Recovering from faults in time is done beside what needs one processor at most.
LANES = ({"faults": 3}, {"unit": 3, "integration": 6})

_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped|xfailed)")
_NOTHING_COLLECTED = 5
_showing = threading.Lock()


def pieces(lane: dict[str, int]) -> deque[list[str]]:
    """The test files of a lane, each in one piece."""
    found: deque[list[str]] = deque()
    for folder, count in lane.items():
        files = sorted(map(str, (HERE / folder).rglob("test_*.py")))
        found += [files[first::count] for first in range(count)]
    return found


def run_all(own: deque[list[str]], other: deque[list[str]]) -> list[tuple[int, Counter[str]]]:
    """One lane's pieces one after the other, and then what the other has not begun."""
    results = []
    while own or other:
        with contextlib.suppress(IndexError):  # the other lane was faster
            results.append(run((own or other).popleft()))
    return results


def run(files: list[str]) -> tuple[int, Counter[str]]:
    """One pytest process: its exit status and what it counted."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *files, *sys.argv[1:]],
        cwd=HERE.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    with _showing:
        names = " ".join(str(Path(file).relative_to(HERE)) for file in files)
        print(f"== {names}\n{done.stdout}", flush=True)
    counts: Counter[str] = Counter()
    for number, what in _COUNT.findall((done.stdout.splitlines() or [""])[-1]):
        counts[what] += int(number)
    return done.returncode, counts


def main() -> int:
    """Run every piece; 0 when nothing failed."""
    began = time.monotonic()
    first, second = map(pieces, LANES)
    with ThreadPoolExecutor(len(LANES)) as lanes:
        done = [lanes.submit(run_all, first, second), lanes.submit(run_all, second, first)]
    results = [result for lane in done for result in lane.result()]
    counts: Counter[str] = sum((found for _, found in results), Counter())
    bad = sum(status not in (0, _NOTHING_COLLECTED) for status, _ in results)
    # A piece that ended badly without a test that failed counts as one.
    failed = max(counts["failed"] + counts["error"], bad)
    print(
        f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped "
        f"in {time.monotonic() - began:.0f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
