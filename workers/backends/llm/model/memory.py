"""Sizes of a KV cache, as memory allows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from shmserve.errors import InvalidArgument
from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.model_spec import InstanceGroup
from shmserve.workers.backends.llm.model.architecture import Architecture

_SHARE = 0.5  # of what is available, for keys and values
_FLOAT = 4  # bytes
_HOST = -1  # beside the numbers of GPUs


def sized(
    settings: EngineSettings, made: Architecture, device: str, instances: int
) -> EngineSettings:
    """The settings with the sizes that a model and its part of the memory of its device, which so
    many `instances` share, give; those that are set stay. Raises InvalidArgument where they
    contradict one another."""
    longest = settings.max_model_len or made.positions
    if longest > made.positions:
        raise InvalidArgument(
            f"max_model_len: {longest} is more than the {made.positions} positions of the model"
        )
    block_bytes = settings.block_size * made.kv_floats * _FLOAT
    blocks = settings.kv_cache_blocks
    if not blocks:
        weights = sum(math.prod(shape) for shape in made.weights().values()) * _FLOAT
        room = max(_available(device) / instances - weights, 0) * _SHARE
        wanted = settings.max_batch_size * -(-longest // settings.block_size)
        blocks = max(min(int(room / block_bytes), wanted), 1)
    swap = settings.swap_blocks or int(settings.swap_space_gb * 1e9 / block_bytes)
    return settings.sized(blocks, min(longest, blocks * settings.block_size), swap)


def most_on_one_device(groups: Iterable[InstanceGroup]) -> int:
    """The number of instances on the device that has most of them."""
    counts: Counter[int] = Counter()
    for group in groups:
        for device in group.gpus if group.kind == "KIND_GPU" else (_HOST,):
            counts[device] += group.count
    return max(counts.values(), default=1)


def _available(device: str) -> int:
    """The bytes of a device's memory that nobody uses."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
    return int(sizes["MemAvailable"]) * 1024
