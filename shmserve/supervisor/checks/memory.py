"""Checks of host memory and of accelerators, and whether two processes can share device memory.

`python -m shmserve.supervisor.checks.memory` tries to share device memory with a second process. It
exits with status 0, or prints the reason in one line.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
import tempfile
from importlib import util
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from shmserve.common.host import accelerators, cgroup_limit, cuda_devices
from shmserve.config.server import ServerConfig
from shmserve.errors import ShmserveError, how_to_install
from shmserve.ipc.memory.cuda_ipc import CudaError, DeviceAllocation, Driver
from shmserve.supervisor.checks import Verdict, installed_version, megabytes, ok, warning, wrong

_SHM = Path("/dev/shm")
_TOO_SMALL_BYTES = 64 * 2**20  # Docker's default size of /dev/shm, too small for regions
_LARGE_OBJECT_BYTES = 2**20  # smaller objects are not reported
_MOUNT_COMMAND = "run mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
_ENLARGE_COMMANDS = (
    "run mount -o remount,size=2G /dev/shm; docker run --shm-size=2g or --ipc=host; or an emptyDir"
)
_DRIVER_FOLDER = Path("/proc/driver/nvidia")
_PROBE_COMMAND = [sys.executable, "-m", "shmserve.supervisor.checks.memory"]
_PROBE_TIMEOUT_S = 60
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NO_DEVICE_VALUES = (None, "", "-1")  # values of CUDA_VISIBLE_DEVICES that name no device
_TEST_DATA = bytes(range(256)) * 16


class ShmFolder(NamedTuple):
    """The facts about /dev/shm.

    `filesystem` is "" if the folder is missing. `is_used` is whether the configuration lets clients
    use shared memory.
    """

    is_used: bool
    filesystem: str = ""
    options: str = ""
    mode: int = 0
    total_bytes: int = 0
    free_bytes: int = 0
    is_writable: bool = False


def gather_shm(config: ServerConfig) -> ShmFolder:
    """Return the state of /dev/shm in this process's mount namespace."""
    is_used = config.shm.allow is not False
    if not _SHM.is_dir():
        return ShmFolder(is_used)
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    _, filesystem, options = max(mount[1:4] for mount in mounts if _SHM.is_relative_to(mount[1]))
    size, free_bytes = filesystem_space(_SHM)
    is_writable = False
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=_SHM):
        is_writable = True
    mode = _SHM.stat().st_mode & 0o7777
    return ShmFolder(is_used, filesystem, options, mode, size, free_bytes, is_writable)


def filesystem_space(folder: Path) -> tuple[int, int]:
    """Return the size and the free space of a folder's filesystem in bytes."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def judge_shm(shm: ShmFolder) -> Verdict:
    """Return WRONG unless /dev/shm is a writable tmpfs, and WARNING if its space is short."""
    if not shm.is_used:
        return ok("not used, because of --allow-client-shm=false")
    if shm.filesystem != "tmpfs":
        finding = f"is on {shm.filesystem}, not on tmpfs" if shm.filesystem else "does not exist"
        return wrong(finding, _MOUNT_COMMAND)
    if not shm.is_writable:
        fix = f"run chmod 1777 /dev/shm, or {_MOUNT_COMMAND}"
        return wrong("this user cannot create an object in it", fix)
    finding = f"{megabytes(shm.total_bytes)}, {megabytes(shm.free_bytes)} free"
    if shm.mode != 0o1777:
        return warning(f"has mode {shm.mode:04o}; {finding}", "run chmod 1777 /dev/shm")
    least_free_bytes = max(_TOO_SMALL_BYTES, shm.total_bytes // 20)
    if shm.total_bytes <= _TOO_SMALL_BYTES or shm.free_bytes < least_free_bytes:
        return warning(f"too little space for clients' regions: {finding}", _ENLARGE_COMMANDS)
    return ok(f"{finding}{', noexec' if 'noexec' in shm.options.split(',') else ''}")


class ShmObject(NamedTuple):
    """A file in /dev/shm. `in_use`: a visible process has it open or mapped."""

    name: str
    byte_size: int
    uid: int
    in_use: bool


def gather_objects(_: ServerConfig) -> list[ShmObject]:
    """Return the files in /dev/shm of 1 MiB and more that this user may delete, largest first."""
    large_files, own_uid = [], os.geteuid()
    for entry in os.scandir(_SHM):
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            # Other users' files are skipped: their processes cannot be searched for a use.
            is_deletable = own_uid in (0, status.st_uid)
            if is_deletable and status.st_blocks * 512 >= _LARGE_OBJECT_BYTES:
                large_files.append((entry.name, status.st_blocks * 512, status.st_uid))
    used_files = _used_files() if large_files else set()
    objects = (ShmObject(*fields, f"{_SHM}/{fields[0]}" in used_files) for fields in large_files)
    return sorted(objects, key=attrgetter("byte_size"), reverse=True)


def _used_files() -> set[str]:
    """Return the paths that processes have open or mapped. Raises OSError without /proc."""
    os.readlink("/proc/self")
    paths = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            map_lines = (process / "maps").read_text().splitlines()
            paths |= {line[line.index("/dev/shm/") :] for line in map_lines if "/dev/shm/" in line}
            for fd in os.scandir(process / "fd"):
                with contextlib.suppress(OSError):
                    paths.add(os.readlink(fd))
    return paths


def judge_objects(objects: list[ShmObject]) -> Verdict:
    """Warn about files in /dev/shm that no process uses, since they occupy memory."""
    leftovers = [shm_object for shm_object in objects if not shm_object.in_use]
    total = megabytes(sum(shm_object.byte_size for shm_object in leftovers or objects))
    if leftovers:
        names = (f"{shm.name} ({megabytes(shm.byte_size)}, uid {shm.uid})" for shm in leftovers[:3])
        examples = ", ".join(names)
        ellipsis = ", ..." if leftovers[3:] else ""
        fix = f"if no container uses it: rm /dev/shm/{leftovers[0].name}{ellipsis}"
        count = len(leftovers)
        return warning(
            f"{count} objects ({total}) that no visible process uses: {examples}{ellipsis}", fix
        )
    return ok(f"{len(objects)} objects of 1 MB or more, {total}, all in use" if objects else "none")


def gather_memory(_: ServerConfig) -> tuple[int, int, int]:
    """Return in bytes the host's memory, the control group's limit, and the size of /dev/shm."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_bytes = cgroup_limit("memory", "memory.max", "memory.limit_in_bytes")
    return host, min(host, limit_bytes or host), filesystem_space(_SHM)[0] if _SHM.is_dir() else 0


def judge_memory(facts: tuple[int, int, int]) -> Verdict:
    """Warn if /dev/shm may exceed the server's memory limit. `gather_memory` returns `facts`.

    A page counts for the control group that touches it first, so pages of clients' regions may
    count for the server.
    """
    host_bytes, limit_bytes, shm_bytes = facts
    if limit_bytes < min(shm_bytes, host_bytes):
        finding = (
            f"the server's limit, {megabytes(limit_bytes)} (memory.max), is less than the size of "
            "/dev/shm; regions that the server touches first count, and the kernel may kill it"
        )
        fix = (
            "raise MemoryMax=, or reduce /dev/shm, or let clients write to a region before "
            "they register it"
        )
        return warning(finding, fix)
    source = "all of the host" if limit_bytes == host_bytes else "the limit memory.max"
    return ok(f"{megabytes(limit_bytes)}, {source}")


def gather_locked(config: ServerConfig) -> tuple[int, bool]:
    """Return the limit on locked bytes (-1: none), and whether there is a CUDA device."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return hard_limit, cuda_devices(config.visible_devices) > 0


def judge_locked(facts: tuple[int, bool]) -> Verdict:
    """Warn if the limit on locked memory is too small for pinned regions."""
    limit, has_cuda = facts
    finding = "no limit" if limit < 0 else megabytes(limit)
    if has_cuda and 0 <= limit < _TOO_SMALL_BYTES:
        fix = (
            "set LimitMEMLOCK=infinity in the unit, or run ulimit -l unlimited, or docker run "
            "--ulimit memlock=-1"
        )
        return warning(f"{finding}: larger memory regions cannot be pinned for the device", fix)
    return ok(finding)


class DeviceList(NamedTuple):
    """The accelerators of a host.

    CUDA_VISIBLE_DEVICES (`visible_devices`) allows `visible_count` of `total` devices. This user
    cannot open the device files `inaccessible_files`. `gpus` are the driver's descriptions.
    """

    kind: str = ""
    total: int = 0  # number of devices of the host
    visible_count: int = 0
    visible_devices: str | None = None
    inaccessible_files: tuple[str, ...] = ()  # device files that this user cannot open
    driver: str = ""
    gpus: tuple[str, ...] = ()  # the driver's descriptions
    mig_instances: int = 0
    torch: str | None = ""  # the version of torch; None if torch is not installed


def gather_devices(config: ServerConfig) -> DeviceList:
    """Collect the facts about accelerators from files, without opening a device."""
    visible_devices, devices = config.visible_devices, accelerators()
    pattern = "nvidia[0-9]*" if devices.kind == "cuda" else "davinci[0-9]*"
    device_files = map(str, Path("/dev").glob(pattern))
    version = _DRIVER_FOLDER / "version"
    driver = re.search(r"\d+\.[\d.]+", version.read_text()) if version.is_file() else None
    visible_count = accelerators(visible_devices=visible_devices).count
    return DeviceList(
        *(devices.kind, devices.count, visible_count, visible_devices),
        inaccessible_files=tuple(f for f in device_files if not os.access(f, os.R_OK | os.W_OK)),
        driver=driver[0] if driver else "",
        gpus=tuple(sorted(map(_describe_gpu, _DRIVER_FOLDER.glob("gpus/*/information")))),
        mig_instances=len(list(_DRIVER_FOLDER.glob("capabilities/gpu*/mig/gi*"))),
        torch=installed_version("torch"),
    )


def _describe_gpu(information: Path) -> str:
    values = dict(re.findall(r"^([^:]+?)\s*:\s*(.*?)\s*$", information.read_text(), re.MULTILINE))
    return " ".join(values.get(key, "?") for key in ("Device Minor", "GPU UUID", "Model"))


def judge_devices(devices: DeviceList) -> Verdict:
    """Return WRONG or WARNING if models of KIND_GPU cannot use the devices."""
    if not devices.total:
        return ok("none: models run on CPUs")
    finding = f"{devices.total} of kind {devices.kind}"
    if devices.inaccessible_files:
        fix = (
            "set DeviceAllow= in the unit and join the group of the files, or use docker run "
            "--gpus all"
        )
        files_text = ", ".join(devices.inaccessible_files)
        return wrong(f"{finding}; this user may not open {files_text}", fix)
    if devices.kind == "cuda" and not devices.driver:
        return wrong(f"{finding}, but no driver is loaded", "run modprobe nvidia")
    if devices.torch is None:
        text = f"{finding}, but torch, which models need for them, is not installed"
        return warning(text, how_to_install("torch", "torch"))
    if devices.kind == "cuda" and devices.torch.endswith("+cpu"):
        fix = "install a torch built for CUDA (https://pytorch.org/get-started)"
        return warning(f"{finding}, but torch {devices.torch} is built for CPUs only", fix)
    if devices.visible_count < devices.total:
        variable = f"CUDA_VISIBLE_DEVICES={devices.visible_devices}"
        finding += f", {devices.visible_count} of them visible ({variable})"
        if not devices.visible_count and devices.visible_devices not in _NO_DEVICE_VALUES:
            return warning(finding, "use the numbers or UUIDs that nvidia-smi -L prints")
    details = (f"driver {devices.driver}" if devices.driver else "", *devices.gpus)
    mig = f"{devices.mig_instances} MIG instances" if devices.mig_instances else ""
    return ok("; ".join(filter(None, (finding, *details, mig))))


class DeviceSharing(NamedTuple):
    """The facts about sharing device memory.

    `has_bindings` is whether cuda-bindings is installed, `allocator` the configuration of torch's
    allocator. `failure` is the reason why a test could not share memory, "" if it could, and None
    if there is no CUDA device.
    """

    has_bindings: bool  # whether cuda-bindings is installed
    allocator: str  # the configuration of torch's allocator
    failure: str | None  # "": memory was shared; None: there is no CUDA device


def gather_sharing(config: ServerConfig) -> DeviceSharing:
    """Let one process export device memory, and another process open it; return the facts."""
    has_bindings = util.find_spec("cuda") is not None
    failure = None
    if cuda_devices(config.visible_devices):
        result = subprocess.run(
            _PROBE_COMMAND, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
        )
        failure = result.stderr.strip()[-300:] if result.returncode else ""
    allocator = ",".join(os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES)
    return DeviceSharing(has_bindings, allocator, failure)


def judge_sharing(sharing: DeviceSharing) -> Verdict:
    """Warn if clients cannot share regions on a device by CUDA IPC."""
    if sharing.failure is None:
        return ok("not used: there is no CUDA device")
    if not sharing.has_bindings:
        fix = "pip install 'shmserve[cuda]'"
        return warning("CUDA shared memory is not available: cuda-bindings is not installed", fix)
    if sharing.failure:
        fix = "use docker run --ipc=host --pid=host; WSL and Jetson do not support CUDA IPC"
        text = f"a test could not share memory between two processes: {sharing.failure}"
        return warning(text, fix)
    if "expandable_segments:true" in sharing.allocator.lower().replace(" ", ""):
        fix = f"unset it in {_ALLOCATOR_VARIABLES[0]}, or allocate memory with shmserve.client"
        return warning("memory that torch allocates with expandable_segments cannot be shared", fix)
    return ok("a test shared memory between two processes")


def export_test_memory() -> None:
    """Print the handle of memory that contains the test data, and hold it until stdin is closed."""
    cuda = Driver()
    memory = DeviceAllocation(cuda, 0, len(_TEST_DATA))
    cuda.write(memory.pointer, memoryview(bytearray(_TEST_DATA)), 0)
    print(memory.handle.raw.hex(), flush=True)
    sys.stdin.read()


def read_memory(handle: bytes) -> bytes:
    """Return the contents of the memory that a handle opens."""
    cuda = Driver()
    pointer = cuda.open(handle, 0)
    buffer = bytearray(len(_TEST_DATA))
    cuda.read(pointer, memoryview(buffer), 0)
    cuda.close(pointer, 0)
    return bytes(buffer)


def probe() -> str | None:
    """Return the reason why device memory could not be shared, or None, for `sys.exit`."""
    pipe = subprocess.PIPE
    command = [*_PROBE_COMMAND, "export"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as exporter:
        assert exporter.stdout is not None
        line = exporter.stdout.readline().strip()
        try:
            is_shared = bool(line) and read_memory(bytes.fromhex(line)) == _TEST_DATA
        except (ShmserveError, CudaError) as error:
            return str(error)
    return None if is_shared else "the data read differ from the data written" if line else ""


if __name__ == "__main__":
    if sys.argv[1:]:
        export_test_memory()
    else:
        sys.exit(probe())
