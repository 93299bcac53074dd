"""The table of checks, and how it is run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from shmserve.config.server import ServerConfig
from shmserve.errors import InvalidArgument
from shmserve.supervisor.checks import devices, limits, memory, places, software
from shmserve.supervisor.checks.verdict import OK, WRONG, Verdict, warning

logger = logging.getLogger(__name__)


class HostCheck(NamedTuple):
    """`judge(gather(config))` is its verdict. At a server's start: "refuse" ends it where something
    is wrong, "tell" logs what is not well, "" is for the doctor alone."""

    name: str
    gather: Callable[[ServerConfig], Any]
    judge: Callable[[Any], Verdict]
    at_start: str = ""


CHECKS: tuple[HostCheck, ...] = (
    HostCheck("packages", software.gather_packages, software.judge_packages),
    HostCheck("HTTP parser", software.gather_parser, software.judge_parser),
    HostCheck("open files", limits.gather_files, limits.judge_files, "refuse"),
    HostCheck("processes", limits.gather_tasks, limits.judge_tasks, "tell"),
    HostCheck("processors", limits.gather_processors, limits.judge_processors, "tell"),
    HostCheck("memory", memory.gather_memory, memory.judge_memory),
    HostCheck("locked memory", memory.gather_locked, memory.judge_locked),
    HostCheck("/dev/shm", memory.gather_shm, memory.judge_shm, "tell"),
    HostCheck("objects in it", memory.gather_objects, memory.judge_objects),
    HostCheck("accelerators", devices.gather_devices, devices.judge_devices, "tell"),
    HostCheck("device memory", devices.gather_sharing, devices.judge_sharing),
    HostCheck("user", limits.gather_user, limits.judge_user, "tell"),
    HostCheck("debuggers", limits.gather_tracing, limits.judge_tracing),
    HostCheck("clock", limits.gather_clock, limits.judge_clock),
    HostCheck("run directory", places.gather_run_directory, places.judge_run_directory),
    HostCheck("ports", places.gather_ports, places.judge_ports),
    HostCheck("models", places.gather_repositories, places.judge_repositories),
    HostCheck("systemd units", software.gather_units, software.judge_units),
)


def look(
    config: ServerConfig, checks: Iterable[HostCheck] = CHECKS
) -> Iterator[tuple[HostCheck, Verdict]]:
    """Every check's verdict; of one that fails itself, that."""
    for check in checks:
        try:
            yield check, check.judge(check.gather(config))
        except Exception as error:
            yield check, warning(f"cannot be looked at: {error}", "look at it by hand")


def look_at_start(config: ServerConfig) -> None:
    """Log what is not well with this host; run directory and ports are looked at where they are
    taken. Raises InvalidArgument where a server would be no use."""
    for check, (state, found, fix) in look(config, (each for each in CHECKS if each.at_start)):
        text = f"{check.name}: {found} ({fix})"
        if state == WRONG and check.at_start == "refuse":
            raise InvalidArgument(text)
        if state != OK:
            logger.warning("%s", text)
