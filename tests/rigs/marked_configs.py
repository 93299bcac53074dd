"""Configurations with marks in them, for tests of what is said about which place."""

from pathlib import Path

from shmserve.errors import InvalidArgument
from shmserve.model_config import detect_backend, normalise, read_pbtxt, validate

IO = """
input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "O" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PYTHON = 'name: "m" backend: "python"\n'


def problems(text: str, *, complete: bool = True, gpus: int = 0, folder: Path | None = None) -> str:
    """What `validate` says of a configuration, "" when nothing; "@" in it marks places."""
    config, source = read_pbtxt(text.replace("@", ""), "f")
    config = normalise(detect_backend(config, "m", []), "m", gpus)
    try:
        validate(config, gpu_count=gpus, complete=complete, model_dir=folder, source=source)
    except InvalidArgument as error:
        return error.message
    return ""


def positions(text: str) -> list[str]:
    """What the line of a problem begins with for each "@" in a text, in their order."""
    parts = text.split("@")
    before = ["".join(parts[:end]) for end in range(1, len(parts))]
    return [f"f:{part.count(chr(10)) + 1}:{len(part) - part.rfind(chr(10))}: " for part in before]


def place(text: str) -> str:
    """The only one of `positions`; that of the whole file where nothing is marked."""
    (only,) = positions(text) or ["f: "]
    return only
