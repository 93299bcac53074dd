"""The packages in pyproject.toml: ipc/ and workers/ are shmserve.ipc and shmserve.workers."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE_NAMES = {"shmserve": "shmserve", "ipc": "shmserve.ipc", "workers": "shmserve.workers"}


def test_exactly_the_packages_of_the_tree_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed_packages = [
        ".".join((package, *path.parent.relative_to(ROOT / folder).parts))
        for folder, package in PACKAGE_NAMES.items()
        for path in (ROOT / folder).rglob("__init__.py")
        if not any(parent.is_symlink() for parent in path.parents)
    ]
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(installed_packages)


def test_every_page_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = {
        path
        for package, patterns in project["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    assert installed >= set((ROOT / "shmserve").glob("**/*.md"))


def test_a_build_writes_nothing_beside_the_sources(tmp_path: Path) -> None:
    example = ROOT / "examples" / "table_backend"
    assert (example / "setup.py").read_text() == (ROOT / "setup.py").read_text()
    folder = tmp_path / "table_backend"
    names = sorted(["README.md", "pyproject.toml", "setup.py", "shmserve_table.py"])
    for name in names:
        folder.mkdir(exist_ok=True)
        shutil.copy(example / name, folder)
    build = f"import setuptools.build_meta as b; b.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    assert sorted(path.name for path in folder.iterdir()) == names
    assert len(list(tmp_path.glob("*.whl"))) == 1


@pytest.mark.parametrize("example", ["digits", "generation"])
def test_a_demo_prints_its_help(tmp_path: Path, example: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / example / "demo.py"), "--help"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert completed.stdout.startswith("usage: demo.py")
    assert not list(tmp_path.iterdir())
