"""The environment of a model: a Python interpreter and packages other than the server's.

`EXECUTION_ENV_PATH` names a folder or an archive of conda-pack. A worker that was forked from the
zygote replaces itself by the environment's interpreter, and keeps its pid and its parent:

    fork -> unpack the archive -> check the interpreter -> exec -> `workers.main:resume`

The environment's packages come before the server's, which remain importable. An archive is unpacked
once into the run directory. Each worker that uses the copy holds a shared lock on it, and the
supervisor removes copies without a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shmserve import errors
from shmserve.errors import InvalidArgument
from shmserve.ipc import endpoints
from shmserve.ipc.messages.supervision import WorkerStart, encode_start

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_OLDEST = (3, 11)
_OLDEST_NUMPY = (1, 26)
_PATIENCE_S = 60.0
# Runs in any version of Python 3. Site packages may print lines before the last one.
_PROBE = """
import json, sys
sys.path += sys.argv[1:]
try:
    import numpy
    found = numpy.__version__
except BaseException as error:
    found = type(error).__name__
print("\\n" + json.dumps([list(sys.version_info[:3]), found]))
"""
# The environment may contain a different version of shmserve.
_BOOT = """
import importlib.util, sys
fd, package, *behind = sys.argv[1:]
sys.path += behind
spec = importlib.util.spec_from_file_location("shmserve", package)
sys.modules["shmserve"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from shmserve.workers.main import resume
resume(int(fd))
"""


def enter(start: WorkerStart) -> None:
    """Continue this worker in the interpreter of its environment.

    Raises:
        InvalidArgument: The environment cannot be used; the message has the remedy.
    """
    python = _checked(_interpreter(_located(start), endpoints.environments(start.run_dir)))
    root = str(python.parent.parent)
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    kind = "VIRTUAL_ENV" if os.path.exists(f"{root}/pyvenv.cfg") else "CONDA_PREFIX"
    variables |= {kind: root, "PATH": f"{root}/bin:{os.environ.get('PATH', os.defpath)}"}
    with open(os.memfd_create("shmserve-start", 0), "w+b", closefd=False) as file:
        file.write(encode_start(replace(start, environment="")))
        file.flush()
        package = str(Path(errors.__file__).resolve().with_name("__init__.py"))
        arguments = [str(python), "-I", "-c", _BOOT, str(file.fileno()), package, *_own_packages()]
        os.execve(python, arguments, variables)


def _located(start: WorkerStart) -> Path:
    setting = start.environment.replace(_MODEL_DIRECTORY, str(start.model_dir))
    folders = (start.model_dir / start.version, start.model_dir, Path.cwd())
    for folder in folders:
        path = folder / os.path.expanduser(setting)
        if path.exists():
            return path
    text = f"environment '{setting}' does not exist (a relative path is looked up in the folders of"
    raise InvalidArgument(f"{text} the version and the model, and in the server's)")


def _own_packages() -> Iterator[str]:
    """Yield the folders of the server's packages, without those of the standard library."""
    stdlib = sysconfig.get_path("stdlib")
    yield str(Path(errors.__file__).resolve().parent.parent)
    for path in sys.path:
        if path and path not in (stdlib, f"{stdlib}/lib-dynload") and os.path.isdir(path):
            yield path


def _interpreter(path: Path, copies: Path) -> Path:
    """Return the interpreter in a folder, or in an archive that is unpacked below `copies`."""
    if path.name.startswith("python") and path.is_file() and os.access(path, os.X_OK):
        return path.absolute()
    root = path.absolute() if path.is_dir() else _unpacked(path, copies)
    # Standalone builds of Python are packed with the folder that contains `bin`.
    below = list(root.iterdir())
    for folder in [root, *below] if len(below) == 1 else [root]:
        for python in (folder / "bin" / "python3", folder / "bin" / "python"):
            if python.exists():
                return python
            if python.is_symlink():
                text = f"environment '{path}': {python.name} is a link to '{os.readlink(python)}',"
                raise InvalidArgument(f"{text} which is missing: install it, or use conda-pack")
    raise InvalidArgument(
        f"environment '{path}' has no bin/python: name the folder of an environment (python -m venv"
        " or conda create), or an archive of one that conda-pack or venv-pack has made"
    )


def _checked(python: Path) -> Path:
    """Return the interpreter, whose version and packages a worker can use."""
    where = f"environment '{python.parent.parent}'"
    try:
        ended = subprocess.run(
            [python, "-I", "-c", _PROBE, *_own_packages()],
            capture_output=True,
            timeout=_PATIENCE_S,
        )
        version, numpy = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidArgument(f"{where}: {python.name} cannot be run: {error}") from None
    except (IndexError, ValueError):
        last_line = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        text = (
            f"{where}: {python.name} ended with status {ended.returncode} at its start: {last_line}"
        )
        raise InvalidArgument(text) from None
    shown, oldest = ".".join(map(str, version)), ".".join(map(str, _OLDEST))
    if tuple(version) < _OLDEST:
        text = f"{where} has Python {shown}, and a worker needs {oldest} or later: create the"
        raise InvalidArgument(f"{text} environment with a later Python")
    release = tuple(map(int, re.findall(r"\d+", numpy)[:2]))
    if release < _OLDEST_NUMPY:
        problem = f"has numpy {numpy}" if release else f"has no numpy for its Python {shown}"
        needed = ".".join(map(str, _OLDEST_NUMPY))
        raise InvalidArgument(
            f"{where} {problem}, and a worker needs {needed} or later: install it there"
            f" ('{python} -m pip install \"numpy>={needed}\"'; pack an archive again)"
        )
    return python


# --- archives


def _unpacked(archive: Path, copies: Path) -> Path:
    """Return the folder with the contents of an archive, which this process keeps locked."""
    status = archive.stat()
    key = f"{archive.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
    copy = copies / hashlib.sha256(os.fsencode(key)).hexdigest()[:16]
    try:
        copies.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(copy.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(lock, True)
        fcntl.flock(lock, fcntl.LOCK_SH)
        with copy.with_suffix(".turn").open(
            "w"
        ) as turn:  # of the workers that start together, one unpacks the archive
            fcntl.flock(turn, fcntl.LOCK_EX)
            if not copy.is_dir():
                part = copy.with_suffix(".part")
                shutil.rmtree(part, ignore_errors=True)
                _extract(archive, part)
                part.rename(copy)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        text = f"environment '{archive}' cannot be unpacked to '{copies}': {error} (--run-dir names"
        raise InvalidArgument(f"{text} a folder on a disk with free space)") from None
    return copy


def _extract(archive: Path, root: Path) -> None:
    """Unpack an archive below `root`.

    Python 3.11.2 has no filters of tarfile. Symbolic links are created last, so that no file is
    written through one. Only the interpreter of a virtual environment may be a link to the outside.
    """
    links: list[tuple[Path, str]] = []
    with tarfile.open(archive) as packed:
        for member in packed:
            path = _inside(root, member.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.isdir():
                path.mkdir(exist_ok=True)
            elif member.issym():
                outside = os.path.relpath(path.parent / member.linkname, root).startswith("..")
                if outside and not re.fullmatch(r"(.*/)?bin/python[\d.]*", member.name):
                    raise tarfile.TarError(f"'{member.name}' is a link to a file outside")
                links.append((path, member.linkname))
            elif member.islnk():
                os.link(_inside(root, member.linkname), path, follow_symlinks=False)
            elif (content := packed.extractfile(member)) is not None:
                with path.open("wb") as file:
                    shutil.copyfileobj(content, file)
                path.chmod(member.mode & 0o755 | 0o600)
                # Compiled modules contain the modification times of their sources.
                os.utime(path, (member.mtime, member.mtime))
            else:
                raise tarfile.TarError(f"'{member.name}' is neither a file nor a folder nor a link")
    for path, target in links:
        path.unlink(missing_ok=True)
        path.symlink_to(target)


def _inside(root: Path, name: str) -> Path:
    path = os.path.normpath(name.lstrip("/"))
    if path.split("/")[0] == "..":
        raise tarfile.TarError(f"'{name}' is outside of the archive")
    return root / path
