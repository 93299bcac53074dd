"""A package's docstring is a map of it: each of its modules is there, and nothing that is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3] / "shmserve"


def named(package: Path) -> set[str]:
    """The files that a package's docstring names."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    return set(re.findall(r"[\w/]+\.py\b", text))


@pytest.mark.parametrize("package", ["gateway", "gateway/grpc", "scheduler", "client"])
def test_a_map_names_every_module(package: str) -> None:
    modules = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
    assert named(ROOT / package) == modules


def test_the_first_map_names_files_that_are_there() -> None:
    files = {
        path.name for room in (ROOT, ROOT / "workers") for path in room.resolve().rglob("*.py")
    }
    for name in named(ROOT):
        assert (ROOT / name).exists() or name in files, name
