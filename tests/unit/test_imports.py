"""The import rules: one direction between rooms, and no accidental heavy library."""

import ast
import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.servers import run_python

ROOT = Path(__file__).resolve().parents[2]
# Modules that every file may import.
LEAVES = ("shmserve.errors", "shmserve.logs")
ROOTS = ("shmserve", "ipc", "workers")
# Libraries that the files of a folder must not import (modules of the project: test_layers.py).
FORBIDDEN = {
    "shmserve": {"torch"},
    "shmserve/gateway/api": {"aiohttp", "grpc"},
    "shmserve/gateway/inference": {"aiohttp", "grpc"},
}
# Unpickling runs code from the pickle; these modules contain a pickle format.
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# A program may send a region to its own processes: its descriptor is duplicated.
DUPLICATED = ("shmserve/client/memory/region.py", "multiprocessing.reduction.DupFd")
PICKLING = {"multiprocessing", "concurrent.futures.process", "torch.multiprocessing"}


def sources(folder: str) -> list[Path]:
    """Return the Python files of a folder at the root; links to folders are not followed."""
    return [
        Path(path, name)
        for path, _, names in os.walk(ROOT / folder)
        for name in names
        if name.endswith(".py")
    ]


def imports(path: Path) -> Iterator[str]:
    """Return every module or name that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, modules: tuple[str, ...] | set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def find_imports(folders: Iterable[str], modules: set[str]) -> list[tuple[str, str]]:
    """Return the files of the folders that import one of the modules, and the names."""
    return [
        (str(path.relative_to(ROOT)), name)
        for folder in folders
        for path in sources(folder)
        for name in imports(path)
        if is_within(name, modules)
    ]


def test_the_folders_have_files_to_check() -> None:
    assert all(len(sources(folder)) > 5 for folder in ROOTS)
    assert all(len(sources(folder)) > 2 for folder in FORBIDDEN)
    assert set(imports(ROOT / "shmserve" / "__main__.py")) == {"signal", "sys", "shmserve.cli.main"}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_no_library_of_others(folder: str) -> None:
    assert find_imports([folder], FORBIDDEN[folder]) == []


def test_leaf_modules_import_nothing_of_shmserve() -> None:
    for leaf in (*LEAVES, "shmserve.model", "shmserve.__init__"):
        imported_modules = set(imports(ROOT / f"{leaf.replace('.', '/')}.py"))
        imported_modules.discard("shmserve.serving.serve")  # imported when a program asks for it
        assert not [name for name in imported_modules if is_within(name, {"shmserve"})], leaf


def test_nothing_pickles() -> None:
    """No module that unpickles is imported anywhere."""
    assert find_imports(ROOTS, PICKLES | PICKLING) == [DUPLICATED]


LIGHT = (
    "shmserve",
    "shmserve.ipc.messages",
    "shmserve.model",
    "shmserve.cli.client",
    "shmserve.cli",
)


@pytest.mark.parametrize(
    ("module", "libraries"),
    [
        *((module, {"torch", "aiohttp"}) for module in LIGHT),
        ("shmserve.gateway.grpc.main", {"aiohttp", "shmserve.gateway.http"}),
        # Each takes a tenth of a second, or more, before the first child process is started.
        ("shmserve.supervisor.main", {"torch", "numpy", "aiohttp", "uvloop"}),
    ],
)
def test_importing_a_module_loads_no_unneeded_library(module: str, libraries: set[str]) -> None:
    result = run_python("-c", f"import sys, {module}; print(*sys.modules)", check=True)
    assert [name for name in result.stdout.split() if is_within(name, libraries)] == []


PUBLIC = (
    *("shmserve", "shmserve.client", "shmserve.client.aio", "shmserve.errors", "shmserve.model"),
    *("shmserve.testing", "shmserve.workers.backends"),
)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_of_all_exists(name: str) -> None:
    """Otherwise `from MODULE import *` fails."""
    module = importlib.import_module(name)
    assert [
        exported_name
        for exported_name in getattr(module, "__all__", ())
        if not hasattr(module, exported_name)
    ] == []
