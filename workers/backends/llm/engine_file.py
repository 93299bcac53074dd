"""`engine.yaml`: the settings of a generative model's engine, and defaults for its sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from shmserve.errors import InvalidArgument, convert_os_errors
from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.model_spec import InstanceGroup
from shmserve.workers.backends.llm.model.architecture import Architecture

FILE_NAME = "engine.yaml"


def read(folder: Path) -> EngineSettings:
    """Return the settings in the file in a model's folder, or the defaults if there is no file.

    Raises:
        InvalidArgument: The file has mistakes. The message has a line for each:
            `engine.yaml:LINE:COLUMN: KEY: ...`.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return EngineSettings.of({})
    with convert_os_errors(FILE_NAME, "it is not UTF-8 text"):
        text = path.read_text(encoding="utf-8")
    return parse(text)


def parse(text: str) -> EngineSettings:
    """Return the settings in the text of a file; raise errors like `read`."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f"{FILE_NAME}:{_format_mark(mark)}" if mark else FILE_NAME
        reason = getattr(error, "problem", None) or str(error)
        raise InvalidArgument(f"{position}: invalid YAML: {reason}") from None
    if root is None:
        return EngineSettings.of({})
    if not isinstance(document, dict):
        type_name = type(document).__name__
        raise InvalidArgument(f"{FILE_NAME}: expected a mapping (NAME: VALUE), found a {type_name}")
    return EngineSettings.of(document, FILE_NAME, _positions(root))


def _positions(root: yaml.Node) -> dict[str, str]:
    """Return the position of each key; raise InvalidArgument for duplicate keys."""
    positions: dict[str, str] = {}
    duplicates = []
    for key, mark in _keys(root, ""):
        if key in positions:
            line = positions[key].partition(":")[0]
            mark_text = _format_mark(mark)
            duplicates.append(f"{FILE_NAME}:{mark_text}: {key}: already set in line {line}")
        positions.setdefault(key, _format_mark(mark))
    if duplicates:
        raise InvalidArgument("\n".join(duplicates))
    return positions


def _keys(node: yaml.Node, prefix: str) -> Iterator[tuple[str, yaml.Mark]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{prefix}{key.value}"
        yield name, key.start_mark
        yield from _keys(value, f"{name}.")


def _format_mark(mark: yaml.Mark) -> str:
    return f"{mark.line + 1}:{mark.column + 1}"


_KV_CACHE_SHARE = 0.5  # share of the memory that the weights leave free
_FLOAT_BYTES = 4
_HOST_DEVICE = -1  # represents the host among the numbers of GPUs


def with_default_sizes(
    settings: EngineSettings, model: Architecture, device: str, instance_count: int
) -> EngineSettings:
    """Return the settings with defaults for sizes that are not set.

    The defaults depend on the model and on the available memory.

    Args:
        settings: The settings.
        model: The model's architecture.
        device: The device.
        instance_count: The number of instances that share the device's memory.

    Raises:
        InvalidArgument: The sizes are inconsistent.
    """
    max_length = settings.max_model_len or model.positions
    if max_length > model.positions:
        raise InvalidArgument(
            f"max_model_len: {max_length} is more than the {model.positions} positions of the model"
        )
    if 0 < model.window < max_length:
        raise InvalidArgument(
            f"max_model_len: {max_length} is more than the sliding_window of config.json, "
            f"{model.window}; windows are not supported, so set max_model_len in engine.yaml to at "
            f"most {model.window}"
        )
    block_bytes = settings.block_size * model.kv_floats_per_token * _FLOAT_BYTES
    blocks = settings.kv_cache_blocks
    if not blocks:
        weight_bytes = sum(math.prod(shape) for shape in model.weights().values()) * _FLOAT_BYTES
        free_bytes = _available_bytes(device) / instance_count - weight_bytes
        available_bytes = max(free_bytes, 0) * _KV_CACHE_SHARE
        max_blocks = settings.max_batch_size * -(-max_length // settings.block_size)
        blocks = max(min(int(available_bytes / block_bytes), max_blocks), 1)
    swap = settings.swap_blocks or int(settings.swap_space_gb * 1e9 / block_bytes)
    max_length = min(max_length, blocks * settings.block_size)
    return replace(settings, kv_cache_blocks=blocks, max_model_len=max_length, swap_blocks=swap)


def max_instances_per_device(groups: Iterable[InstanceGroup]) -> int:
    """Return the maximum number of instances on one device."""
    counts: Counter[int] = Counter()
    for group in groups:
        for device in group.gpus if group.kind == "KIND_GPU" else (_HOST_DEVICE,):
            counts[device] += group.count
    return max(counts.values(), default=1)


def _available_bytes(device: str) -> int:
    """Return the number of available bytes of a device's memory."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kib_sizes = {name: kib.split()[0] for name, _, kib in (line.partition(":") for line in lines)}
    return int(kib_sizes["MemAvailable"]) * 1024
