"""Checks of the host: installed software, limits of processes, user and clock."""

from __future__ import annotations

import configparser
import os
import platform
import pwd
import re
import resource
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path

import shmserve
from shmserve.common import fd_limits
from shmserve.common.host import cgroup_limit, processors
from shmserve.config.server import ServerConfig
from shmserve.supervisor.checks import Verdict, installed_version, ok, warning, wrong

_FILE_LIMIT_FIX = (
    "set LimitNOFILE=65536 in the unit, or run ulimit -Hn 65536, or docker run "
    "--ulimit nofile=65536"
)
_MIN_TASKS = 1024  # a limit on processes and threads below this number is reported
_TASKS_PER_MODEL = 16  # the two processes of a model, and their threads
_SYSTEM_UIDS = range(1000)
_DYNAMIC_UIDS = range(61184, 65520)  # the user ids of systemd's DynamicUser=
_FAST_CLOCKS = ("", "tsc", "kvm-clock", "arch_sys_counter", "hyperv", "xen")
_DAY_S = 86400
_REPORTED_PACKAGES = ("aiohttp", "pyzmq", "torch", "numpy")
_UNIT_FOLDER = Path("/etc/systemd/system")
# The highest exposure, in tenths, with which `systemd-analyze security` accepts a unit.
_MAX_EXPOSURE = "15"
_ANALYZE_TIMEOUT_S = 30

# By package: the installed version ("": none), and the minimum.
Versions = dict[str, tuple[str, str]]


def gather_packages(_: ServerConfig) -> Versions:
    """Return the versions of the required packages; empty if shmserve itself is not installed."""
    try:
        lines = "\n".join(metadata.requires("shmserve") or [])
    except metadata.PackageNotFoundError:
        return {}
    requirements = re.findall(r"^([\w.-]+)[^;\n]*?>=([\w.]+)[^;\n]*$", lines, re.MULTILINE)
    return {name: (installed_version(name) or "", minimum) for name, minimum in requirements}


def judge_packages(versions: Versions) -> Verdict:
    """Compare versions with the minimum versions of pyproject.toml.

    Older versions have known vulnerabilities.
    """
    if not versions:
        return warning("shmserve is not installed", "pip install shmserve")
    old_packages = [
        name
        for name, (installed_version, minimum) in versions.items()
        if _version_numbers(installed_version) < _version_numbers(minimum)
    ]
    if old_packages:
        finding = ", ".join(f"{name} {versions[name][0] or 'is missing'}" for name in old_packages)
        packages = " ".join(f"'{name}>={versions[name][1]}'" for name in old_packages)
        return wrong(f"too old or missing: {finding}", f"pip install --upgrade {packages}")
    lines = (f"{name} {versions[name][0]}" for name in _REPORTED_PACKAGES if name in versions)
    return ok(", ".join((f"Python {platform.python_version()}", *lines)))


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def gather_parser(_: ServerConfig) -> bool:
    """Return whether aiohttp parses HTTP in C."""
    from aiohttp import http_parser

    return http_parser.HttpRequestParser is not http_parser.HttpRequestParserPy


def judge_parser(is_c_parser: bool) -> Verdict:
    """Return WRONG without the C parser: the one in Python has often allowed request smuggling."""
    if is_c_parser:
        return ok("aiohttp's parser in C")
    fix = (
        "unset AIOHTTP_NO_EXTENSIONS, or run pip install --force-reinstall --only-binary :all: "
        "aiohttp"
    )
    return wrong("aiohttp's parser in Python, which is slow and has allowed request smuggling", fix)


def gather_units(_: ServerConfig) -> tuple[int, str]:
    """Return the number of installed systemd units, and the problems that systemd-analyze finds."""
    units = sorted(map(str, _UNIT_FOLDER.glob("shmserve*.service")))
    report = ""
    if units and shutil.which("systemd-analyze"):
        report = _analyze("verify", "--man=no", *units)[1]
        for unit in units:
            options = ("--offline=true", f"--threshold={_MAX_EXPOSURE}")
            status, output = _analyze("security", "--no-pager", *options, unit)
            report += output.strip().splitlines()[-1] if status else ""
    return len(units), report.strip()


def _analyze(*arguments: str) -> tuple[int, str]:
    command, output = ["systemd-analyze", *arguments], subprocess.PIPE
    result = subprocess.run(
        command, stdout=output, stderr=subprocess.STDOUT, text=True, timeout=_ANALYZE_TIMEOUT_S
    )
    return result.returncode, result.stdout


def judge_units(facts: tuple[int, str]) -> Verdict:
    """Return a warning if systemd-analyze has printed anything.

    The output is checked because the exit status does not report unknown keys.
    """
    count, report = facts
    if report:
        return warning(report, "run shmserve systemd install, and check your drop-ins")
    return ok(f"{count}, verified" if count else "none are installed")


def gather_files(config: ServerConfig) -> tuple[int, int]:
    """Return the attainable number of descriptors, and the configured maximum of regions."""
    return fd_limits.hard_limit(), config.shm.max_regions


def judge_files(facts: tuple[int, int]) -> Verdict:
    """Return WRONG if a process may open too few files, and WARNING if regions need more."""
    limit, regions = facts
    finding = f"a process may open {limit} files"
    if limit < fd_limits.MIN_FDS:
        return wrong(f"{finding}, but at least {fd_limits.MIN_FDS} are required", _FILE_LIMIT_FIX)
    if (regions_limit := fd_limits.regions_share(limit)) < regions:
        text = f"{finding}, enough for {regions_limit} regions, but --shm-max-regions is {regions}"
        return warning(text, _FILE_LIMIT_FIX)
    return ok(finding)


def gather_tasks(_: ServerConfig) -> int:
    """Return the limit on processes and threads; -1 means unlimited."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    limit = cgroup_limit("pids", "pids.max", "pids.max")
    return hard_limit if limit is None else limit if hard_limit < 0 else min(hard_limit, limit)


def judge_tasks(limit: int) -> Verdict:
    """Warn if the limit on processes and threads allows few models."""
    if 0 <= limit < _MIN_TASKS:
        fix = "raise TasksMax= in the unit, ulimit -u, or docker run --pids-limit"
        models = limit // _TASKS_PER_MODEL
        return warning(f"at most {limit} processes and threads, enough for {models} models", fix)
    return ok("no limit" if limit < 0 else f"at most {limit} processes and threads")


def gather_processors(_: ServerConfig) -> tuple[int, float | None]:
    """Return the number of usable processors, and the quota of CPU time in processors, or None."""
    return processors()


def judge_processors(facts: tuple[int, float | None]) -> Verdict:
    """Warn about a quota of CPU time: workers still compute with a thread for each processor."""
    count, quota = facts
    if quota is not None and quota <= count - 1:
        fix = (
            "assign CPUs instead of a quota: AllowedCPUs= in the unit, docker run "
            "--cpuset-cpus, or taskset"
        )
        finding = (
            f"{count} CPUs and a quota of {quota:g} (cpu.max), which pauses all threads when "
            "it is used up"
        )
        return warning(finding, fix)
    return ok(str(count))


def gather_tracing(_: ServerConfig) -> int:
    """Return kernel.yama.ptrace_scope, or 0 if the kernel has no Yama."""
    file = Path("/proc/sys/kernel/yama/ptrace_scope")
    return int(file.read_text()) if file.is_file() else 0


def judge_tracing(scope: int) -> Verdict:
    """Report which processes may attach a debugger; the server needs none."""
    users = {0: "any process of the same user", 1: "root and parent processes", 2: "root"}
    return ok(f"allowed for {users.get(scope, 'no process')} (kernel.yama.ptrace_scope={scope})")


def gather_user(_: ServerConfig) -> tuple[int, bool]:
    """Return the uid, and whether logind deletes the user's shared memory at the last logout."""
    uid = os.getuid()
    names = [user.pw_name for user in pwd.getpwall() if user.pw_uid == uid]
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
    """Warn if logind deletes shared memory that is in use; it keeps system users' memory."""
    uid, removes_shm = facts
    if uid in _DYNAMIC_UIDS:
        finding = f"uid {uid} is a dynamic user: its shared memory is removed when its unit stops"
        return warning(finding, "set User= to a system user (shmserve systemd install creates one)")
    if uid not in _SYSTEM_UIDS and removes_shm:
        finding = f"logind deletes the objects of uid {uid} in /dev/shm when its last session ends"
        fix = "set RemoveIPC=no in /etc/systemd/logind.conf, or run loginctl enable-linger"
        return warning(finding, fix)
    return ok(f"uid {uid}")


def gather_clock(_: ServerConfig) -> tuple[float, float, str]:
    """Return the time now, the time when shmserve was installed, and the kernel's clock source."""
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    installed_at = Path(shmserve.__file__).stat().st_mtime
    return time.time(), installed_at, source.read_text().strip() if source.is_file() else ""


def judge_clock(facts: tuple[float, float, str]) -> Verdict:
    """Warn about an implausible time, or a slow clock: each request reads it about ten times."""
    clock_time, installed_at, source = facts
    if clock_time < installed_at - _DAY_S:
        text = "the time is before the installation of shmserve: certificates may not be valid yet"
        return warning(text, "run timedatectl set-ntp true")
    if source not in _FAST_CLOCKS and not source.startswith("hyperv"):
        text = f"{source}, which takes microseconds for each reading"
        fix = "set clocksource=tsc on the kernel's command line if that clock is stable"
        return warning(text, fix)
    return ok(source or "the kernel names no clock source")
