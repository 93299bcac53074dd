"""Checks of accelerators: devices and driver, and whether their memory can be shared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

from shmserve.common.accelerators import accelerators, cuda_devices
from shmserve.config.server import ServerConfig
from shmserve.supervisor.checks.verdict import Verdict, ok, warning, wrong

_DRIVER = Path("/proc/driver/nvidia")
_PROBE = [sys.executable, "-m", "shmserve.supervisor.checks.cuda_probe"]
_PATIENCE_S = 60
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_HIDDEN = (None, "", "-1")  # nobody meant to name devices


class DeviceList(NamedTuple):
    """The accelerators of a host: of `total`, `visible` may be used by CUDA_VISIBLE_DEVICES
    (`chosen`), and `closed` not be opened; `named` as the driver does; `partitions` are MIG's."""

    kind: str = ""
    total: int = 0
    visible: int = 0
    chosen: str | None = None
    closed: tuple[str, ...] = ()
    driver: str = ""
    named: tuple[str, ...] = ()
    partitions: int = 0
    torch: str = ""


def gather_devices(config: ServerConfig) -> DeviceList:
    """By files alone, without touching a device."""
    chosen, found = config.visible_devices, accelerators()
    nodes = map(str, Path("/dev").glob("nvidia[0-9]*" if found.kind == "cuda" else "davinci[0-9]*"))
    version = _DRIVER / "version"
    driver = re.search(r"\d+\.[\d.]+", version.read_text()) if version.is_file() else None
    return DeviceList(
        *(found.kind, found.count, accelerators(visible=chosen).count, chosen),
        closed=tuple(node for node in nodes if not os.access(node, os.R_OK | os.W_OK)),
        driver=driver[0] if driver else "",
        named=tuple(sorted(map(_named, _DRIVER.glob("gpus/*/information")))),
        partitions=len(list(_DRIVER.glob("capabilities/gpu*/mig/gi*"))),
        torch=metadata.version("torch"),
    )


def _named(information: Path) -> str:
    said = dict(re.findall(r"^([^:]+?)\s*:\s*(.*?)\s*$", information.read_text(), re.MULTILINE))
    return " ".join(said.get(key, "?") for key in ("Device Minor", "GPU UUID", "Model"))


def judge_devices(devices: DeviceList) -> Verdict:
    """Models of KIND_GPU load where one can be used."""
    if not devices.total:
        return ok("none: models run on the processors")
    found = f"{devices.total} of kind {devices.kind}"
    if devices.closed:
        fix = "DeviceAllow= in the unit and the files' group, docker run --gpus all"
        return wrong(f"{found}; this user may not open {', '.join(devices.closed)}", fix)
    if devices.kind == "cuda" and not devices.driver:
        return wrong(f"{found}, and no driver", "load the module nvidia (modprobe nvidia)")
    if devices.kind == "cuda" and devices.torch.endswith("+cpu"):
        fix = "a torch built for CUDA (https://pytorch.org/get-started)"
        return warning(f"{found}, which torch {devices.torch} cannot use", fix)
    if devices.visible < devices.total:
        found += f", {devices.visible} of them visible (CUDA_VISIBLE_DEVICES={devices.chosen})"
        if not devices.visible and devices.chosen not in _HIDDEN:
            return warning(found, "name devices by number or UUID, as nvidia-smi -L does")
    shown = (f"driver {devices.driver}" if devices.driver else "", *devices.named)
    parts = f"{devices.partitions} MIG instances" if devices.partitions else ""
    return ok("; ".join(filter(None, (found, *shown, parts))))


class DeviceSharing(NamedTuple):
    """What sharing device memory takes: `failed` is why two processes could not, "" where they
    could, None where there is no device to try it on."""

    bindings: bool
    allocator: str
    failed: str | None


def gather_sharing(config: ServerConfig) -> DeviceSharing:
    """Has a process export some memory, and another one open it."""
    bindings = util.find_spec("cuda") is not None
    failed = None
    if cuda_devices(config.visible_devices):
        done = subprocess.run(_PROBE, capture_output=True, text=True, timeout=_PATIENCE_S)
        failed = done.stderr.strip()[-300:] if done.returncode else ""
    return DeviceSharing(
        bindings, ",".join(os.environ.get(name, "") for name in _ALLOCATOR), failed
    )


def judge_sharing(sharing: DeviceSharing) -> Verdict:
    """Clients' regions on a device (CUDA IPC)."""
    if sharing.failed is None:
        return ok("no CUDA device to share memory of")
    if not sharing.bindings:
        return warning("refused: cuda-bindings is not installed", "pip install 'shmserve[cuda]'")
    if sharing.failed:
        fix = "docker run --ipc=host --pid=host; WSL and Jetson have no CUDA IPC"
        return warning(f"two processes could not share some: {sharing.failed}", fix)
    if "expandable_segments:true" in sharing.allocator.lower().replace(" ", ""):
        fix = f"{_ALLOCATOR[0]} without it, or memory that shmserve.client allocates"
        return warning("what torch allocates in expandable_segments cannot be shared", fix)
    return ok("two processes shared some")
