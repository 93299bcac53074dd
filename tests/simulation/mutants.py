"""`python -m tests.simulation.mutants [NAME ...]`: check that the simulation finds defects.

Each mutant of `mutants.txt` (and `lifecycle/mutants.txt`) replaces a text in the code under test,
in a copy of the tree. The simulation must find the defect within a minute of CPU time. A mutant is
stale if its text does not occur exactly once, or uses a name that the code does not have any more.
Stale mutants are listed and count as failures.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
_CAUGHT_S = 60
_MUTANT_LISTS: dict[str, list[str]] = {"mutants.txt": [], "lifecycle/mutants.txt": ["--lifecycle"]}
_SEARCHED_PATHS = (
    "shmserve/supervisor/models",
    *("shmserve/scheduler", "ipc/scheduler_client.py", "ipc/timers.py"),
    *("ipc/memory/lent.py", "ipc/tensors/padding.py"),
    "shmserve/supervisor/resources/rate_limiter.py",
)
_COPIED_PATHS = ("shmserve", "ipc", "workers", "tests", "pyproject.toml")


class Mutant(NamedTuple):
    """A defect: `old` is replaced by `new`. The simulation with these flags must find it."""

    name: str
    old: str
    new: str
    flags: list[str]


def read() -> list[Mutant]:
    """Return the mutants of the lists; a block has a name, and lines before (-) and after (+)."""
    mutants: list[Mutant] = []
    for path, flags in _MUTANT_LISTS.items():
        for block in re.split("^== ", (FOLDER / path).read_text(), flags=re.MULTILINE)[1:]:
            name, *lines = block.splitlines()
            old, new = ("\n".join(ln[1:] for ln in lines if ln.startswith(sign)) for sign in "-+")
            mutants.append(Mutant(name, old, new, flags))
    return mutants


def main() -> int:
    """Run mutants; return 1 if a mutant survives or is stale."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of those to try; none: all")
    arguments = parser.parse_args()
    tried_mutants = [
        mutant
        for mutant in read()
        if not arguments.names or any(name in mutant.name for name in arguments.names)
    ]
    results = {mutant.name: _try(mutant) for mutant in tried_mutants}
    live = {name: result for name, result in results.items() if not result.startswith("caught")}
    print(f"{len(tried_mutants) - len(live)} of {len(tried_mutants)} mutants were caught")
    for name, result in live.items():
        print(f"  {result}: {name}")
    return int(bool(live))


def occurrences(mutant: Mutant) -> list[Path]:
    """Return the files that contain the mutant's text, one entry per occurrence."""
    return [path for path, text in _code() for _ in range(text.count(mutant.old))]


@cache
def _code() -> list[tuple[Path, str]]:
    paths = [ROOT / name for name in _SEARCHED_PATHS]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return [(file, file.read_text()) for file in files]


def _try(mutant: Mutant) -> str:
    count = occurrences(mutant)
    if len(count) != 1:
        print(f"stale   {mutant.name} (in {len(count)} places)", flush=True)
        return "stale"
    start_s = _cpu_time_s()
    with tempfile.TemporaryDirectory(prefix="shmserve-mutant-") as folder:
        tree = Path(folder)
        for name in _COPIED_PATHS:
            _copy(ROOT / name, tree / name)
        changed_file = tree / count[0].relative_to(ROOT)
        changed_file.write_text(changed_file.read_text().replace(mutant.old, mutant.new))
        command = ["-m", "tests.simulation", "--seeds", "100000", "--seconds", str(_CAUGHT_S)]
        result = subprocess.run(
            [sys.executable, *command, *mutant.flags],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    seed_line = next((line for line in result.stdout.splitlines() if line.startswith("seed ")), "")
    word = "caught" if result.returncode and seed_line else "LIVES"
    if "has no attribute" in seed_line or "is not defined" in seed_line:
        word = "stale"  # the mutant's own text uses a name that was renamed
    print(
        f"{word} in {_cpu_time_s() - start_s:4.1f} s  {mutant.name}: {seed_line[:110]}",
        flush=True,
    )
    return word


def _cpu_time_s() -> float:
    """Return the CPU time of the simulations so far, because the limit is one of CPU time."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, symlinks=True, ignore=ignored)
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    sys.exit(main())
