"""Accelerator discovery, by device files, without touching one: the control plane never loads a
driver."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from shmserve.errors import InvalidArgument

# Why CUDA memory is refused, in Triton's words.
CUDA_INVALID = "failed to register shared memory region: invalid args"


@dataclass(frozen=True, slots=True)
class Accelerators:
    """`kind` is the device type in torch's words ("cuda", "npu"), or "" when the host has none."""

    kind: str
    count: int


def accelerators(device_folder: Path = Path("/dev"), visible: str | None = None) -> Accelerators:
    """The host's accelerators, by their device files; `visible` is CUDA_VISIBLE_DEVICES where it
    is set."""
    for kind, pattern in (("cuda", r"nvidia\d+"), ("npu", r"davinci\d+")):
        count = sum(bool(re.fullmatch(pattern, entry.name)) for entry in device_folder.iterdir())
        if count:
            if kind == "cuda" and visible is not None:
                count = _visible(visible, count)
            return Accelerators(kind if count else "", count)
    return Accelerators("", 0)


def _visible(listed: str, count: int) -> int:
    # As the driver reads it: what follows a name that is no device's is not visible ("-1": none).
    names = [part.strip() for part in listed.split(",")]

    def is_device(name: str) -> bool:
        return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count)

    return min(count, len(list(itertools.takewhile(is_device, names))))


def cuda_devices(visible: str | None = None) -> int:
    """The number of the host's accelerators that are CUDA devices."""
    found = accelerators(visible=visible)
    return found.count if found.kind == "cuda" else 0


def cuda_not_supported(name: str) -> InvalidArgument:
    """The refusal of region `name` where there is no CUDA device: in the words of a Triton that
    finds none, and of one that was built for none."""
    return InvalidArgument(
        f"{CUDA_INVALID} (failed to register CUDA shared memory region: '{name}', GPUs not "
        "supported)"
    )
