"""Checks of what a process may have: descriptors, processes, processors; whose it is; the clock."""

from __future__ import annotations

import configparser
import os
import pwd
import resource
import time
from pathlib import Path

import shmserve
from shmserve.common import fd_limits
from shmserve.common.host import cgroup_limit, processors
from shmserve.config.server import ServerConfig
from shmserve.supervisor.checks.verdict import Verdict, ok, warning, wrong

_MORE_FILES = "LimitNOFILE=65536 in the unit, ulimit -Hn 65536, docker --ulimit nofile=65536"
_FEW_TASKS = 1024
_TASKS_OF_A_MODEL = 16  # two processes and their threads
_SYSTEM_UIDS = range(1000)
_DYNAMIC_UIDS = range(61184, 65520)  # of systemd's DynamicUser=
_FAST_CLOCKS = ("", "tsc", "kvm-clock", "arch_sys_counter", "hyperv", "xen")
_DAY_S = 86400


def gather_files(config: ServerConfig) -> tuple[int, int]:
    """How many descriptors a server would have, and how many regions it is to hold."""
    return fd_limits.attainable(), config.shm.max_regions


def judge_files(facts: tuple[int, int]) -> Verdict:
    """Each region, connection and model takes some."""
    limit, regions = facts
    found = f"a process may have {limit}"
    if limit < fd_limits.FEWEST:
        return wrong(f"{found}, at least {fd_limits.FEWEST} are needed", _MORE_FILES)
    if (held := fd_limits.for_regions(limit)) < regions:
        return warning(f"{found}: {held} regions, --shm-max-regions is {regions}", _MORE_FILES)
    return ok(found)


def gather_tasks(_: ServerConfig) -> int:
    """How many processes and threads there may be; -1: any number."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    limit = cgroup_limit("pids", "pids.max", "pids.max")
    return hard if limit is None else limit if hard < 0 else min(hard, limit)


def judge_tasks(limit: int) -> Verdict:
    """Every model takes some."""
    if 0 <= limit < _FEW_TASKS:
        fix = "TasksMax= in the unit, ulimit -u, docker run --pids-limit"
        found = f"{limit} with their threads, enough for {limit // _TASKS_OF_A_MODEL} models"
        return warning(found, fix)
    return ok("any number" if limit < 0 else f"{limit} with their threads")


def gather_processors(_: ServerConfig) -> tuple[int, float | None]:
    """The processors that may be used, and what a quota leaves of them; None: all."""
    return processors()


def judge_processors(facts: tuple[int, float | None]) -> Verdict:
    """Workers compute in as many threads as there are processors, whatever the quota."""
    count, quota = facts
    if quota is not None and quota <= count - 1:
        fix = "AllowedCPUs=, docker run --cpuset-cpus or taskset in the place of the quota"
        found = f"{count}, and a quota of {quota:g} (cpu.max), at which threads of all are stopped"
        return warning(found, fix)
    return ok(str(count))


def gather_tracing(_: ServerConfig) -> int:
    """kernel.yama.ptrace_scope; 0 where the kernel has no Yama."""
    file = Path("/proc/sys/kernel/yama/ptrace_scope")
    return int(file.read_text()) if file.is_file() else 0


def judge_tracing(scope: int) -> Verdict:
    """The server itself traces nobody."""
    who = {0: "any process of the same user", 1: "root, or a parent", 2: "root"}
    return ok(f"for {who.get(scope, 'nobody')} (kernel.yama.ptrace_scope={scope})")


def gather_user(_: ServerConfig) -> tuple[int, bool]:
    """The uid, and whether logind deletes what that user shares when its last session ends."""
    uid = os.getuid()
    names = [each.pw_name for each in pwd.getpwall() if each.pw_uid == uid]
    lingers = any(Path("/var/lib/systemd/linger", name).exists() for name in names)
    return uid, Path("/run/systemd/seats").is_dir() and not lingers and _removes_ipc()


def _removes_ipc() -> bool:
    files = [Path("/etc/systemd/logind.conf")]
    for root in ("/usr/lib", "/run", "/etc"):
        files += sorted(Path(root, "systemd/logind.conf.d").glob("*.conf"))
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(files, encoding="utf-8")
    return parser.getboolean("Login", "RemoveIPC", fallback=True)


def judge_user(facts: tuple[int, bool]) -> Verdict:
    """Objects of a system user stay; those of others go with their last session, in use or not."""
    uid, removed = facts
    if uid in _DYNAMIC_UIDS:
        found = f"uid {uid}, a dynamic one: what it shares goes when its unit stops"
        return warning(found, "User= with a system user (shmserve systemd install makes one)")
    if uid not in _SYSTEM_UIDS and removed:
        found = f"uid {uid}, whose objects in /dev/shm logind deletes when its last session ends"
        fix = "RemoveIPC=no in /etc/systemd/logind.conf, or loginctl enable-linger"
        return warning(found, fix)
    return ok(f"uid {uid}")


def gather_clock(_: ServerConfig) -> tuple[float, float, str]:
    """(now, when shmserve was installed, what the kernel reads the time from)."""
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    installed = Path(shmserve.__file__).stat().st_mtime
    return time.time(), installed, source.read_text().strip() if source.is_file() else ""


def judge_clock(facts: tuple[float, float, str]) -> Verdict:
    """It is read some ten times for a request."""
    now, installed, source = facts
    if now < installed - _DAY_S:
        found = "before the day when shmserve was installed: certificates are not valid yet"
        return warning(found, "timedatectl set-ntp true")
    if source not in _FAST_CLOCKS and not source.startswith("hyperv"):
        found = f"read from {source}, which takes microseconds each time"
        return warning(found, "clocksource=tsc on the kernel's command line, where that is stable")
    return ok(source or "as the kernel has it")
