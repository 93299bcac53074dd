"""The checks of a host. `shmserve doctor` prints all of them; a server runs some when it starts.

    table.py    the checks in their order, and how they run
    host.py     installed software, limits of processes, processors, user, clock
    memory.py   /dev/shm, memory limits, accelerators, and whether processes can share their memory
    access.py   run directory, ports, model repositories, and whether another process can reach them

A check has two functions: `gather` collects facts, and the pure `judge` returns a verdict.
"""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple

OK, WARNING, WRONG = "ok", "warning", "wrong"


class Verdict(NamedTuple):
    """The result of a check.

    `state` is OK, WARNING or WRONG. `found` describes the facts. `fix` is what to do ("": nothing).
    """

    state: str
    found: str
    fix: str = ""


def ok(finding: str) -> Verdict:
    """Return the verdict that nothing needs to be done; `finding` describes the facts."""
    return Verdict(OK, finding)


def warning(finding: str, fix: str) -> Verdict:
    """Return the verdict that the server runs with limitations.

    Args:
        finding: The text that describes what the check has found.
        fix: The text that describes how to remove the limitation.
    """
    return Verdict(WARNING, finding, fix)


def wrong(finding: str, fix: str) -> Verdict:
    """Return the verdict that the server does not start, or would be useless.

    Args:
        finding: The text that describes what the check has found.
        fix: The text that describes how to remove the problem.
    """
    return Verdict(WRONG, finding, fix)


def megabytes(byte_count: int) -> str:
    """Return a number of bytes as text, in MB or GB."""
    return f"{byte_count / 1e9:,.1f} GB" if byte_count >= 1e9 else f"{byte_count / 1e6:,.0f} MB"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
