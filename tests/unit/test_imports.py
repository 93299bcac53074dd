"""The import rules: one direction between rooms, and no accidental heavy library."""

import ast
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import run_python

ROOT = Path(__file__).resolve().parents[2]
# Modules that every file may import.
LEAVES = ("shmserve.errors", "shmserve.logs")
PACKAGES = {
    "ipc": (*LEAVES, "shmserve.ipc"),
    # shmserve.model is the annotations that a user's model imports; it imports nothing of ours.
    "workers": (*LEAVES, "shmserve.ipc", "shmserve.workers", "shmserve.model"),
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


def test_every_package_has_files_to_check() -> None:
    assert all(len(sources(package)) > 5 for package in PACKAGES)
    assert len(sources("shmserve")) > 20
    assert set(imports(ROOT / "shmserve" / "__main__.py")) == {"signal", "sys", "shmserve.cli.main"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_lower_packages(package: str) -> None:
    wrong_cases = [
        (str(path.relative_to(ROOT)), name)
        for path in sources(package)
        for name in imports(path)
        if is_within(name, {"shmserve", *PACKAGES}) and not is_within(name, PACKAGES[package])
    ]
    assert wrong_cases == []


def test_the_control_plane_does_not_import_workers() -> None:
    wrong_cases = [
        (str(path.relative_to(ROOT)), name)
        for path in sources("shmserve")
        for name in imports(path)
        if is_within(name, {"shmserve.workers", "torch", *PACKAGES})
    ]
    assert wrong_cases == []


def test_leaf_modules_import_nothing_of_shmserve() -> None:
    for leaf in (*LEAVES, "shmserve.model", "shmserve.__init__"):
        imported_modules = set(imports(ROOT / f"{leaf.replace('.', '/')}.py"))
        imported_modules.discard("shmserve.serving.serve")  # imported when a program asks for it
        assert not [name for name in imported_modules if is_within(name, {"shmserve"})], leaf


def test_nothing_pickles() -> None:
    """No module that unpickles is imported anywhere."""
    files = [*sources("shmserve"), *(path for package in PACKAGES for path in sources(package))]
    wrong_cases = [
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name in imports(path)
        if is_within(name, PICKLES | PICKLING)
    ]
    assert wrong_cases == [DUPLICATED]


@pytest.mark.parametrize(
    "module",
    ["shmserve", "shmserve.ipc.messages", "shmserve.model", "shmserve.cli.client", "shmserve.cli"],
)
def test_importing_loads_neither_torch_nor_aiohttp(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    result = run_python("-c", program, check=True)
    assert not {"torch", "aiohttp"} & set(result.stdout.split())


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


def test_the_grpc_gateway_does_without_aiohttp() -> None:
    program = "import sys, shmserve.gateway.grpc.main; print(*sys.modules)"
    loaded = run_python("-c", program, check=True).stdout.split()
    assert [name for name in loaded if is_within(name, {"aiohttp", "shmserve.gateway.http"})] == []


@pytest.mark.parametrize("package", ["api", "inference", "links"])
def test_common_listener_modules_import_no_listener(package: str) -> None:
    """No type of HTTP or gRPC is in it."""
    protocols = {"aiohttp", "grpc", "shmserve.gateway.http", "shmserve.gateway.grpc"}
    wrong_cases = [
        (str(path.relative_to(ROOT)), name)
        for path in sources(f"shmserve/gateway/{package}")
        for name in imports(path)
        if is_within(name, protocols)
    ]
    assert wrong_cases == []
