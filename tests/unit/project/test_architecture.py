"""The architecture page: every file and every name in it exists."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "shmserve" / "architecture.md").read_text()
NAMED_OBJECTS = re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", PAGE)
FOLDERS = re.findall(r"`([\w/]+/)`", PAGE)
MAX_LINES, MAX_CHARACTERS = 150, 140


def path(name: str) -> Path:
    return (ROOT if name.startswith("tests/") else ROOT / "shmserve") / name


@functools.cache
def names(file: Path) -> set[str]:
    """Return the names that a module defines, with the methods of its classes."""
    classes: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.ClassDef(name=name):
                classes |= {name} | {f"{name}.{member}" for member in _members(node)}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                classes.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                classes.add(name)
    return classes


def _members(node: ast.ClassDef) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {definition.name for definition in node.body if isinstance(definition, kinds)}


def test_the_page_is_short() -> None:
    lines = PAGE.splitlines()
    assert len(lines) <= MAX_LINES
    assert not [line for line in lines if len(line) > MAX_CHARACTERS]


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED_OBJECTS)))
def test_every_named_file_and_function_exists(file: str, name: str) -> None:
    assert path(file).is_file()
    assert not name or name in names(path(file))


@pytest.mark.parametrize("folder", sorted(set(FOLDERS) - {"shmserve/"}))
def test_named_folders_exist(folder: str) -> None:
    assert (ROOT / "shmserve" / folder).is_dir() or (ROOT / folder).is_dir()
