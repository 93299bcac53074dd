"""The table of checks, and how they run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from shmserve.config.server import ServerConfig
from shmserve.errors import InvalidArgument
from shmserve.supervisor.checks import OK, WRONG, Verdict, access, host, memory, warning

logger = logging.getLogger(__name__)


class HostCheck(NamedTuple):
    """A check, whose verdict is `judge(gather(config))`.

    Attributes:
        at_start: The effect at the start of a server. With "refuse", the server does not start if
            the verdict is WRONG. With "log", the server logs a verdict that is not OK. With "",
            only `shmserve doctor` runs the check.
    """

    name: str
    gather: Callable[[ServerConfig], Any]
    judge: Callable[[Any], Verdict]
    at_start: str = ""


CHECKS: tuple[HostCheck, ...] = (
    HostCheck("packages", host.gather_packages, host.judge_packages),
    HostCheck("HTTP parser", host.gather_parser, host.judge_parser),
    HostCheck("open files", host.gather_files, host.judge_files, "refuse"),
    HostCheck("processes", host.gather_tasks, host.judge_tasks, "log"),
    HostCheck("processors", host.gather_processors, host.judge_processors, "log"),
    HostCheck("memory", memory.gather_memory, memory.judge_memory),
    HostCheck("locked memory", memory.gather_locked, memory.judge_locked),
    HostCheck("/dev/shm", memory.gather_shm, memory.judge_shm, "log"),
    HostCheck("shm objects", memory.gather_objects, memory.judge_objects),
    HostCheck("accelerators", memory.gather_devices, memory.judge_devices, "log"),
    HostCheck("device memory", memory.gather_sharing, memory.judge_sharing),
    HostCheck("user", host.gather_user, host.judge_user, "log"),
    HostCheck("debuggers", host.gather_tracing, host.judge_tracing),
    HostCheck("clock", host.gather_clock, host.judge_clock),
    HostCheck("run directory", access.gather_run_directory, access.judge_run_directory),
    HostCheck("ports", access.gather_ports, access.judge_ports),
    HostCheck("models", access.gather_repositories, access.judge_repositories),
    HostCheck("systemd units", host.gather_units, host.judge_units),
)


def run_checks(
    config: ServerConfig, checks: Iterable[HostCheck] = CHECKS
) -> Iterator[tuple[HostCheck, Verdict]]:
    """Yield the verdict of each check. A check that raises an exception yields a warning."""
    for check in checks:
        try:
            yield check, check.judge(check.gather(config))
        except Exception as error:
            yield check, warning(f"the check failed: {error}", "inspect the host manually")


def check_at_start(config: ServerConfig) -> None:
    """Log the problems of this host; run directory and ports are checked when they are opened.

    Raises:
        InvalidArgument: A check with the effect "refuse" has the verdict WRONG.
    """
    checks = (check for check in CHECKS if check.at_start)
    for check, (state, finding, fix) in run_checks(config, checks):
        text = f"{check.name}: {finding} ({fix})"
        if state == WRONG and check.at_start == "refuse":
            raise InvalidArgument(text)
        if state != OK:
            logger.warning("%s", text)
