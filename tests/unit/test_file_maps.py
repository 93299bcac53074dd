"""The maps in packages' docstrings name files that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    path
    for top in ("shmserve", "ipc", "workers")
    for path in (ROOT / top).rglob("__init__.py")
    if "shmserve/ipc" not in str(path) and "shmserve/workers" not in str(path)
)


FILES = {
    "/" + str(path.relative_to(ROOT))
    for top in ("shmserve", "ipc", "workers")
    for path in (ROOT / top).rglob("*.py")
}
FOLDERS = {name.rpartition("/")[0] + "/" for name in FILES}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_map_names_what_is_there(package: Path) -> None:
    """A path's end is enough: maps are read in their folder."""
    text = ast.get_docstring(ast.parse(package.read_text())) or ""
    for name in re.findall(r"[\w/]+\.py\b", text):
        assert any(file.endswith(f"/{name}") for file in FILES), name
    for name in re.findall(r"(?<![\w/.])(?:\w+/)+(?!\w)", text):
        assert any(folder.endswith(f"/{name}") for folder in FOLDERS), name
