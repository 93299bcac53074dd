"""`python -m tests [PYTEST OPTIONS]`: all tests, in pytest processes side by side.

Most tests wait for other processes rather than compute, so that two lanes take little more than
half of one's time. What a piece has to say is shown when it ends; the last line counts the tests of
all; exit status 0: nothing failed anywhere.

Many tests hold the server to times, such as a recovery within a second, that a machine which others
use too may miss. So what has failed is run once more with nothing beside it, and said to have been:
it counts as failed if it fails again.
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
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
# Two lanes, and how many pieces of each folder they take: small enough for the lanes to end
# together, and large enough that what the tests of a piece share (servers, torch) is not started
# too often. Recovering from faults in time is done beside what needs one processor at most.
LANES = ({"faults": 3}, {"unit": 3, "integration": 4})

_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped|xfailed)")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py::.+?)(?: - .*)?$", re.MULTILINE)
_NOTHING_COLLECTED = 5
_showing = threading.Lock()


def pieces(lane: dict[str, int]) -> deque[list[str]]:
    """The test files of a lane, each in one piece."""
    found: deque[list[str]] = deque()
    for folder, count in lane.items():
        files = sorted(map(str, (HERE / folder).glob("test_*.py")))
        found += [files[first::count] for first in range(count)]
    return found


class Result(NamedTuple):
    """How a pytest process ended: its status, what it counted, and which tests failed."""

    status: int
    counts: Counter[str]
    failed: set[str]

    @property
    def ended_well(self) -> bool:
        """Whether all that it ran is accounted for."""
        return self.status in (0, _NOTHING_COLLECTED) or bool(self.failed)


def run_all(own: deque[list[str]], other: deque[list[str]]) -> list[Result]:
    """One lane's pieces one after the other, and then what the other has not begun."""
    results = []
    while own or other:
        with contextlib.suppress(IndexError):  # the other lane was faster
            results.append(run((own or other).popleft()))
    return results


def run(tests: list[str]) -> Result:
    """One pytest process, for files or single tests."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests, *sys.argv[1:]],
        cwd=HERE.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    with _showing:
        names = " ".join(test.removeprefix(f"{HERE}/") for test in tests)
        print(f"== {names}\n{done.stdout}", flush=True)
    counts: Counter[str] = Counter()
    for number, what in _COUNT.findall((done.stdout.splitlines() or [""])[-1]):
        counts[what] += int(number)
    return Result(done.returncode, counts, set(_FAILED.findall(done.stdout)))


def main() -> int:
    """Run every piece; 0 when nothing failed."""
    began = time.monotonic()
    first, second = map(pieces, LANES)
    with ThreadPoolExecutor(len(LANES)) as lanes:
        done = [lanes.submit(run_all, first, second), lanes.submit(run_all, second, first)]
    results = [result for lane in done for result in lane.result()]
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    again = sorted(set().union(*(result.failed for result in results)))
    bad = sum(not result.ended_well for result in results)
    failed = 0
    if again:
        alone = run(again)
        failed = len(alone.failed) if alone.ended_well else len(again)
        counts["passed"] += len(again) - failed
        print(f"{len(again)} failed beside others; alone {failed} of them did: {', '.join(again)}")
    failed += bad  # a piece that ended badly without a test that failed counts as one
    print(
        f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped "
        f"in {time.monotonic() - began:.0f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
