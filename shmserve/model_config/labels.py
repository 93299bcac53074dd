"""The labels of a model's outputs: the texts that classification shows for indices."""

from __future__ import annotations

from pathlib import Path

from shmserve.errors import InvalidArgument
from shmserve.proto.model_config_pb2 import ModelConfig

_LARGEST_FILE = 4 * 1024 * 1024


def read_labels(config: ModelConfig, model_dir: Path) -> dict[str, list[str]]:
    """What the label files of a validated configuration have, by output: a label a line, by index;
    an empty line is no label.

    Raises InvalidArgument for a file that cannot be read or has more than 4 MiB.
    """
    return {
        output.name: _read(model_dir / output.label_filename, output.name)
        for output in config.output
        if output.label_filename
    }


def _read(path: Path, output: str) -> list[str]:
    what = f"label file '{path.name}' of output '{output}'"
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise InvalidArgument(f"{what} cannot be read: {error.strerror}") from None
    if len(raw) > _LARGEST_FILE:
        raise InvalidArgument(f"{what} has more than {_LARGEST_FILE} bytes")
    lines = raw.decode(errors="replace").split("\n")
    return [line.removesuffix("\r") for line in lines]
