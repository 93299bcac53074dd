"""The packages in pyproject.toml: ipc/ and workers/ are shmserve.ipc and shmserve.workers."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROOMS = {"shmserve": "shmserve", "ipc": "shmserve.ipc", "workers": "shmserve.workers"}


def test_every_package_is_installed_and_no_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = [
        ".".join((package, *path.parent.relative_to(ROOT / folder).parts))
        for folder, package in ROOMS.items()
        for path in (ROOT / folder).rglob("__init__.py")
        if not any(parent.is_symlink() for parent in path.parents)
    ]
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(found)
