"""A package's docstring is a map of it: each of its modules and folders is there, and nothing that
is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3] / "shmserve"


def named(package: Path) -> set[str]:
    """The files, and the folders with a slash behind them, that a package's docstring names."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    return set(re.findall(r"\b\w+\.py\b|\b\w+/(?=[\s,;]|$)", text))


@pytest.mark.parametrize("package", ["gateway", "gateway/grpc", "scheduler", "client"])
def test_a_map_names_every_module(package: str) -> None:
    folder = ROOT / package
    there = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    there |= {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert named(folder) == there


def test_the_first_map_names_what_is_there() -> None:
    text = ast.get_docstring(ast.parse((ROOT / "__init__.py").read_text())) or ""
    for name in re.findall(r"[\w/]+\.py\b", text):
        assert (ROOT / name).exists(), name
