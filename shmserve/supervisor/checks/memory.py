"""Checks of memory: /dev/shm, what is left in it, and what the server may use and lock."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from shmserve.common.accelerators import cuda_devices
from shmserve.common.host import cgroup_limit
from shmserve.config.server import ServerConfig
from shmserve.supervisor.checks.verdict import Verdict, megabytes, ok, warning, wrong

_SHM = Path("/dev/shm")
_LITTLE = 64 * 2**20  # Docker's default for all of it
_WORTH_TELLING = 2**20
_MOUNT = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
_LARGER = "mount -o remount,size=2G /dev/shm, docker run --shm-size=2g or --ipc=host, an emptyDir"


class ShmFolder(NamedTuple):
    """/dev/shm: `filesystem` is "" where there is none, `used` whether clients may share memory."""

    used: bool
    filesystem: str = ""
    options: str = ""
    mode: int = 0
    size: int = 0
    free: int = 0
    writable: bool = False


def gather_shm(config: ServerConfig) -> ShmFolder:
    """As this process sees it."""
    used = config.shm.allow is not False
    if not _SHM.is_dir():
        return ShmFolder(used)
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    _, filesystem, options = max(mount[1:4] for mount in mounts if _SHM.is_relative_to(mount[1]))
    size, free = room(_SHM)
    writable = False
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=_SHM):
        writable = True
    mode = _SHM.stat().st_mode & 0o7777
    return ShmFolder(used, filesystem, options, mode, size, free, writable)


def room(folder: Path) -> tuple[int, int]:
    """Of the filesystem of a folder: its size, and what is free; bytes. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def judge_shm(shm: ShmFolder) -> Verdict:
    """The room for clients' regions."""
    if not shm.used:
        return ok("clients share none (--allow-client-shm=false)")
    if shm.filesystem != "tmpfs":
        found = f"is on {shm.filesystem}, a disk" if shm.filesystem else "there is none"
        return wrong(found, _MOUNT)
    if not shm.writable:
        return wrong("no object can be made there", f"chmod 1777 /dev/shm, or {_MOUNT}")
    found = f"{megabytes(shm.size)}, {megabytes(shm.free)} free"
    if shm.mode != 0o1777:
        return warning(f"has mode {shm.mode:04o}; {found}", "chmod 1777 /dev/shm")
    if shm.size <= _LITTLE or shm.free < max(_LITTLE, shm.size // 20):
        return warning(f"{found}: clients' regions need more", _LARGER)
    return ok(f"{found}{', noexec' if 'noexec' in shm.options.split(',') else ''}")


class ShmObject(NamedTuple):
    """A file in /dev/shm: bytes, and whether a process that can be seen has it open or mapped."""

    name: str
    byte_size: int
    uid: int
    in_use: bool


def gather_objects(_: ServerConfig) -> list[ShmObject]:
    """Those that are worth telling of, the largest first."""
    large = []
    for entry in os.scandir(_SHM):
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if status.st_blocks * 512 >= _WORTH_TELLING:
                large.append((entry.name, status.st_blocks * 512, status.st_uid))
    used = _in_use() if large else set()
    found = (ShmObject(name, size, uid, f"{_SHM}/{name}" in used) for name, size, uid in large)
    return sorted(found, key=attrgetter("byte_size"), reverse=True)


def _in_use() -> set[str]:
    paths = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mapped = (process / "maps").read_text().splitlines()
            paths |= {line[line.index("/dev/shm/") :] for line in mapped if "/dev/shm/" in line}
            for fd in os.scandir(process / "fd"):
                with contextlib.suppress(OSError):
                    paths.add(os.readlink(fd))
    return paths


def judge_objects(objects: list[ShmObject]) -> Verdict:
    """What killed programs left takes memory until somebody deletes it."""
    left = [each for each in objects if not each.in_use]
    total = megabytes(sum(each.byte_size for each in left or objects))
    if left:
        shown = (f"{each.name} ({megabytes(each.byte_size)}, uid {each.uid})" for each in left[:3])
        more = ", ..." if left[3:] else ""
        found = f"{len(left)} objects, {total}, that no process seen from here has: "
        fix = f"if no container has it: rm /dev/shm/{left[0].name}{more}"
        return warning(f"{found}{', '.join(shown)}{more}", fix)
    return ok(f"{len(objects)} objects of 1 MB or more, {total}, all in use" if objects else "none")


def gather_memory(_: ServerConfig) -> tuple[int, int, int]:
    """Bytes: the host's memory, this control group's limit (or the same), and /dev/shm's size."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_limit("memory", "memory.max", "memory.limit_in_bytes")
    return host, min(host, limit or host), room(_SHM)[0] if _SHM.is_dir() else 0


def judge_memory(facts: tuple[int, int, int]) -> Verdict:
    """Pages of an object count for the control group of whoever touches them first: what the server
    writes to a client's region is the server's."""
    host, limit, shm = facts
    if limit < min(shm, host):
        found = f"{megabytes(limit)} for the server (memory.max), less than /dev/shm has: pages of "
        fix = "a higher MemoryMax=, or a smaller /dev/shm; clients that write before they register"
        return warning(f"{found}regions that it touches first count, and it may be killed", fix)
    return ok(f"{megabytes(limit)}, {'of the host' if limit == host else 'by memory.max'}")


def gather_locked(config: ServerConfig) -> tuple[int, bool]:
    """How many bytes may be locked (-1: any), and whether there is a device to pin them for."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return hard, cuda_devices(config.visible_devices) > 0


def judge_locked(facts: tuple[int, bool]) -> Verdict:
    """Pinned regions are locked."""
    limit, wanted = facts
    found = "any number of bytes" if limit < 0 else megabytes(limit)
    if wanted and 0 <= limit < _LITTLE:
        fix = "LimitMEMLOCK=infinity in the unit, ulimit -l unlimited, docker --ulimit memlock=-1"
        return warning(f"{found}: larger regions cannot be pinned for the device", fix)
    return ok(found)
