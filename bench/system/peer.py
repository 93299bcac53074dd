"""Triton's programs, as peer_setup.sh installs them: their paths, and errors if they do not run."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SITE = "triton/lib/python3.11/site-packages"


class Missing(Exception):
    """A Triton program is missing or does not run; the message has the remedy."""


@dataclass(frozen=True)
class TritonFiles:
    """A Triton server with the Python backend, in the folder that peer_setup.sh filled."""

    folder: Path
    libpython: str

    @property
    def binary(self) -> Path:
        """Return the path of tritonserver."""
        return self.folder / _SITE / "pytriton/tritonserver/bin/tritonserver"

    @property
    def backends(self) -> Path:
        """Return the folder for tritonserver's --backend-directory."""
        return self.folder / "backends"

    def environment(self) -> dict[str, str]:
        """Return the environment variables: Triton's own Python, and the libraries of its wheel."""
        venv = self.folder / "triton"
        return os.environ | {
            "PATH": f"{venv / 'bin'}:{os.environ.get('PATH', '')}",
            "VIRTUAL_ENV": str(venv),
            "LD_LIBRARY_PATH": f"{self.folder / _SITE / 'nvidia_pytriton.libs'}:{self.libpython}",
        }


@dataclass(frozen=True)
class Analyzer:
    """Triton's load generator, perf_analyzer."""

    binary: Path
    libraries: Path
    version: str

    def environment(self) -> dict[str, str]:
        """Return the environment variables.

        They name the CUDA runtime that perf_analyzer links against, also without a GPU.
        """
        return os.environ | {"LD_LIBRARY_PATH": str(self.libraries)}


def find_triton(folder: Path) -> TritonFiles:
    """Return the Triton in `folder`; raise Missing if it is incomplete."""
    python = folder / "triton/bin/python"
    if not (folder / "ready").exists() or not python.exists():
        raise Missing(f"no Triton in {folder}: run `bench/peer_setup.sh {folder}` once")
    script = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    process = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    if process.returncode != 0:
        error = process.stderr[-300:]
        raise Missing(f"the Python of the Triton in {folder} does not run: {error}")
    files = TritonFiles(folder, process.stdout.strip())
    if not files.binary.exists():
        raise Missing(f"{files.binary} is missing: remove {folder} and set it up again")
    return files


def find_analyzer(folder: Path) -> Analyzer:
    """Return the perf_analyzer in `folder`; raise Missing if it is incomplete."""
    analyzer = Analyzer(folder / "perf_analyzer", folder / "lib", "")
    if not analyzer.binary.exists():
        raise Missing(f"no perf_analyzer in {folder}: run `bench/peer_setup.sh {folder}` once")
    completed_process = subprocess.run(
        [analyzer.binary, "--version"],
        env=analyzer.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    output = (completed_process.stdout + completed_process.stderr).strip()
    if completed_process.returncode != 0 or not output:
        hint = " (Debian: apt-get install libb64-0d)" if "libb64" in output else ""
        raise Missing(f"perf_analyzer does not run: {output[-300:]}{hint}")
    return Analyzer(
        analyzer.binary, analyzer.libraries, output.removeprefix("Perf Analyzer Version ")
    )
