"""File overrides: model folders that load requests carry, on disk until nothing of them runs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from google.protobuf import text_format

from shmserve.common.model_names import check_model_name
from shmserve.errors import InvalidArgument
from shmserve.model_config import read_json
from shmserve.supervisor.models.repository import CONFIG_FILE


def materialise(base_dir: Path, name: str, config_json: str, files: Mapping[str, bytes]) -> Path:
    """Write a model's folder from a load request and return it: `base_dir`/<unique>/`name`.

    `files` maps "1/model.py" to contents; `config_json` becomes its config.pbtxt. `base_dir` is the
    server's own. Raises InvalidArgument for a path that is absolute, has a ".." or is used twice,
    and as `read_json` does.
    """
    check_model_name(name)
    config, _ = read_json(config_json)
    contents = dict(files)
    contents[CONFIG_FILE] = text_format.MessageToString(config).encode()
    base_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    unique = Path(tempfile.mkdtemp(prefix="override-", dir=base_dir))
    try:
        for relative, content in contents.items():
            _write(unique / name, relative, content)
    except BaseException:
        shutil.rmtree(unique, ignore_errors=True)
        raise
    return unique / name


def discard(path: Path) -> None:
    """Remove what `materialise` returned."""
    shutil.rmtree(path.parent, ignore_errors=True)


def _write(root: Path, relative: str, content: bytes) -> None:
    parts = relative.split("/")
    safe = all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
    if not safe or "\0" in relative or "\\" in relative or len(parts) > 16:
        raise InvalidArgument(f"invalid file override path '{relative}'")
    path = root.joinpath(*parts)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "xb") as file:
            file.write(content)
    except (FileExistsError, NotADirectoryError):
        raise InvalidArgument(f"file override path '{relative}' is used twice") from None
