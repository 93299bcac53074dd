"""A package's docstring is a map of it: all that is in it is named, and nothing else."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3] / "shmserve"
MAPS = (
    *("protocols", "client", "gateway", "gateway/grpc", "ipc", "scheduler"),
    *("supervisor", "workers"),
)


def listed_names(package: Path) -> set[str]:
    """Return the files and folders (with a slash) that a package's docstring names."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    return set(re.findall(r"\b\w+\.py\b|\b\w+/(?=[\w\s,;:.]|$)", text))


def entries(folder: Path) -> set[str]:
    packages = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    return {path.name for path in folder.glob("*.py")} | packages


def all_entries() -> set[str]:
    packages = (ROOT, ROOT / "ipc", ROOT / "workers")
    return {name for p in packages for path in p.resolve().rglob("") for name in entries(path)}


@pytest.mark.parametrize("package", ["gateway", "gateway/grpc", "scheduler", "client", "protocols"])
def test_a_map_names_every_module(package: str) -> None:
    folder = ROOT / package
    assert listed_names(folder) >= entries(folder) - {"__init__.py"}


@pytest.mark.parametrize(
    "package", ["", "gateway", "gateway/grpc", "scheduler", "client", "protocols"]
)
def test_a_map_names_only_existing_files(package: str) -> None:
    assert listed_names(ROOT / package) <= all_entries()
