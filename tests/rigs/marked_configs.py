"""Configurations with marks, for tests of the positions that errors name."""

from pathlib import Path

from shmserve.errors import InvalidArgument
from shmserve.model_config import ModelConfig, detect_backend, normalise, read_pbtxt, validate

TENSORS = """
input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "O" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PYTHON = 'name: "m" backend: "python"\n'


def problems(text: str, *, complete: bool = True, gpus: int = 0, folder: Path | None = None) -> str:
    """Return the problems that `validate` finds in a configuration, or ""; "@" marks positions."""
    config, source = read_pbtxt(text.replace("@", ""), "f")
    config = normalise(detect_backend(config, "m", []), "m", gpus)
    try:
        validate(config, gpu_count=gpus, is_complete=complete, model_dir=folder, source=source)
    except InvalidArgument as error:
        return error.message
    return ""


def positions(text: str) -> list[str]:
    """Return the position of each "@" in a text, as the line of a problem begins with it."""
    parts = text.split("@")
    prefixes = ["".join(parts[:end]) for end in range(1, len(parts))]
    return [f"f:{part.count(chr(10)) + 1}:{len(part) - part.rfind(chr(10))}: " for part in prefixes]


def place(text: str) -> str:
    """Return the only one of `positions`, or the position of the whole file if there is no mark."""
    (only_position,) = positions(text) or ["f: "]
    return only_position


def parse_pbtxt(text: str, file_name: str = "config.pbtxt") -> ModelConfig:
    """Return the configuration in a protobuf text; raise InvalidArgument for its mistakes."""
    config, source = read_pbtxt(text, file_name)
    source.raise_for_problems(config)
    return config
