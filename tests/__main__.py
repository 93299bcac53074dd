"""`python -m tests [PYTEST OPTIONS]`: all tests, in pytest processes side by side.

Most tests wait for other processes rather than compute, so that four lanes keep two processors
busy. The output of a piece is shown when it ends. A failed test is run once more, alone, after the
rest, so that a noisy machine costs no run. Tests that passed only on the second try are listed at
the end, with the output of their first failure. The last line counts all tests. The exit status is
0 if no test failed twice.
"""

import compileall
import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.outcomes import Outcomes

FOLDER = Path(__file__).resolve().parent
# The lanes, and the number of pieces of each folder. Pieces are small enough for the lanes to end
# together, and large enough that shared servers and torch are not started too often. Folders that
# mostly wait are combined with folders that mostly compute. A lane without pieces takes those of
# the next lane.
LANES = (
    {"faults": 4, "integration/local_clients": 1, "integration/perf": 1},
    {"integration/processes": 4, "integration/generation": 1, "integration/resources": 1},
    {"integration/models": 4, "integration/ensembles": 1, "integration/memory": 1},
    {"integration/grpc": 2, "integration/http": 1, "simulation": 1, "unit": 4,
     "integration/cuda": 1},
)  # fmt: skip
# More failures than these are no accidents.
MAX_RETRIED = 20

_TEXT_LINES = 12
# pytest's exit statuses: all tests passed, some failed, no tests were collected.
_EXPECTED_STATUSES = (0, 1, 5)
_PYTEST = (sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors")
_showing = threading.Lock()


class Suite:
    """The tests below a folder, in lanes of pieces, each run by pytest with `options`."""

    def __init__(
        self,
        folder: Path = FOLDER,
        lanes: Sequence[dict[str, int]] = LANES,
        options: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._lanes = lanes
        self._options = options
        self._ended: list[tuple[list[str], Outcomes]] = []

    def pieces(self, lane: dict[str, int]) -> deque[list[str]]:
        """The test files of a lane, each in one piece."""
        chunks: deque[list[str]] = deque()
        for folder, count in lane.items():
            files = sorted(map(str, (self._folder / folder).rglob("test_*.py")))
            chunks += [files[offset::count] for offset in range(count)]
        return chunks

    def run(self) -> int:
        """Run every piece, and once more what failed; returns 0 when nothing failed twice."""
        start_s = time.monotonic()
        queues = [self.pieces(lane) for lane in self._lanes]
        with ThreadPoolExecutor(len(queues)) as lanes:
            list(lanes.map(self._run_lane, (queues[n:] + queues[:n] for n in range(len(queues)))))
        passed, failed_count, skipped, late_texts = self._settle()
        for line in late_table(late_texts):
            print(line)
        print(
            f"{passed} passed, {failed_count} failed, {skipped} skipped "
            f"in {time.monotonic() - start_s:.0f} s"
        )
        return int(failed_count > 0)

    def _run_lane(self, queues: list[deque[list[str]]]) -> None:
        """One lane's pieces one after the other, and then what the others have not begun."""
        while any(queues):
            with contextlib.suppress(IndexError, StopIteration):  # another lane was faster
                files = next(filter(None, queues)).popleft()
                if files:
                    self._ended.append((files, self._run_one(files)))

    def _settle(self) -> tuple[int, int, int, dict[str, str]]:
        """Try again what failed: how many passed, failed and were skipped, and what passed late."""
        outcomes = []
        retries: list[tuple[list[str], str]] = []
        for files, outcome in self._ended:
            if outcome.complete:
                outcomes.append(outcome)
                retries += [([test], text) for test, text in outcome.failed.items()]
            else:  # the tests that did not run have no outcome
                retries.append((files, "the process of these files did not come to its end"))
        if len(retries) > MAX_RETRIED:
            print(f"== {len(retries)} failures are no accident: nothing is tried again")
            return *_count_outcomes([outcome for _, outcome in self._ended]), {}
        failed_count, late_texts = 0, {}
        for tests, text in retries:
            second_outcome = self._run_one(tests)
            outcomes.append(second_outcome)
            if second_outcome.failed or not second_outcome.complete:
                failed_count += len(second_outcome.failed) or 1
            else:
                late_texts[" ".join(map(self._shown, tests))] = text
        passed, _, skipped = _count_outcomes(outcomes)
        return passed, failed_count, skipped, late_texts

    def _run_one(self, tests: list[str]) -> Outcomes:
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="shmserve-tests-") as folder:
            file = Path(folder) / "outcomes"
            plugin = ("-p", "tests.support.outcomes", f"--outcomes={file}")
            result = subprocess.run(
                [*_PYTEST, *plugin, *tests, *self._options],
                cwd=FOLDER.parent,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            outcomes = Outcomes.read(file)
        outcomes.complete &= result.returncode in _EXPECTED_STATUSES
        with _showing:
            names = " ".join(map(self._shown, tests))
            print(f"== {names}: {time.monotonic() - start_s:.0f} s\n{result.stdout}", flush=True)
        return outcomes

    def _shown(self, test: str) -> str:
        return test.removeprefix(f"{self._folder}/")


def _count_outcomes(outcomes: list[Outcomes]) -> tuple[int, int, int]:
    """How many passed, failed and were skipped; an incomplete process is one failure more."""
    return (
        sum(len(outcome.passed) for outcome in outcomes),
        sum(len(outcome.failed) + (not outcome.complete) for outcome in outcomes),
        sum(len(outcome.skipped) for outcome in outcomes),
    )


def late_table(late_texts: dict[str, str]) -> list[str]:
    """Return the tests that passed only on the second try, with the end of their first failure."""
    if not late_texts:
        return []
    lines = [f"== passed only on the second try: {len(late_texts)}"]
    for test, text in late_texts.items():
        lines.append(test)
        lines += [f"    | {line}" for line in text.splitlines()[-_TEXT_LINES:]]
    return lines


def compile_server() -> None:
    """Write the bytecode of the server's own code.

    Its processes read it also where PYTHONDONTWRITEBYTECODE is set, as in containers. Without it
    every server that is started would compile it all for half a second.
    """
    for folder in ("shmserve", "shmserve/ipc", "shmserve/workers"):  # two are links: not followed
        compileall.compile_dir(FOLDER.parent / folder, quiet=1, workers=0)


if __name__ == "__main__":
    # A shell's background job ignores SIGINT, and so would the processes that the tests
    # interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    compile_server()
    sys.exit(Suite(options=sys.argv[1:]).run())
