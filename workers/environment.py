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
import lzma
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
_OLDEST_PYTHON = (3, 11)
_OLDEST_NUMPY = (1, 26)
_PROBE_TIMEOUT_S = 60.0
# Runs in any version of Python 3. Its last line is the result; packages may print other lines.
_PROBE_SCRIPT = """
import json, sys
sys.path += sys.argv[1:]
try:
    import numpy
    numpy_version = numpy.__version__
except BaseException as error:
    numpy_version = type(error).__name__
print("\\n" + json.dumps([list(sys.version_info[:3]), numpy_version]))
"""
# Loads the server's shmserve: the environment may contain another version.
_BOOT_SCRIPT = """
import importlib.util, sys
fd, package, *server_folders = sys.argv[1:]
sys.path += server_folders
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
    environments_dir = endpoints.environments_dir(start.run_dir)
    python = _check_interpreter(_find_interpreter(_locate_environment(start), environments_dir))
    root = str(python.parent.parent)
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    root_variable = "VIRTUAL_ENV" if os.path.exists(f"{root}/pyvenv.cfg") else "CONDA_PREFIX"
    variables |= {root_variable: root, "PATH": f"{root}/bin:{os.environ.get('PATH', os.defpath)}"}
    with open(os.memfd_create("shmserve-start", 0), "w+b", closefd=False) as file:
        file.write(encode_start(replace(start, environment="")))
        file.flush()
        package = str(Path(errors.__file__).resolve().with_name("__init__.py"))
        arguments = [str(python), "-I", "-c", _BOOT_SCRIPT, str(file.fileno()), package]
        arguments += _server_package_folders()
        os.execve(python, arguments, variables)


def _locate_environment(start: WorkerStart) -> Path:
    given_path = start.environment.replace(_MODEL_DIRECTORY, str(start.model_dir))
    for folder in (start.model_dir / start.version, start.model_dir, Path.cwd()):
        path = folder / os.path.expanduser(given_path)
        if path.exists():
            return path
    hint = (
        f"write {_MODEL_DIRECTORY}, with two dollar signs"
        if _MODEL_DIRECTORY.strip("$") in given_path
        else "a relative path begins in the folder of the version or of the model, or in the "
        "server's working directory"
    )
    raise InvalidArgument(f"environment '{given_path}' does not exist ({hint})")


def _server_package_folders() -> Iterator[str]:
    """Yield the folders of the server's packages, without the standard library's folders."""
    stdlib = sysconfig.get_path("stdlib")
    yield str(Path(errors.__file__).resolve().parent.parent)
    for path in sys.path:
        if path and path not in (stdlib, f"{stdlib}/lib-dynload") and os.path.isdir(path):
            yield path


def _find_interpreter(path: Path, copies_folder: Path) -> Path:
    """Return the interpreter in a folder, or in an archive, unpacked below `copies_folder`."""
    if path.name.startswith("python") and path.is_file() and os.access(path, os.X_OK):
        return path.absolute()
    root = path.absolute() if path.is_dir() else _unpack_once(path, copies_folder)
    # Standalone builds of Python are packed with the folder that contains `bin`.
    children = [child for child in root.iterdir() if (child / "bin").is_dir()]
    for folder in [root, *children] if len(children) == 1 else [root]:
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


def _check_interpreter(python: Path) -> Path:
    """Return the interpreter, after checking that a worker can use its version and packages."""
    subject = f"environment '{python.parent.parent}'"
    try:
        command = [str(python), "-I", "-c", _PROBE_SCRIPT, *_server_package_folders()]
        process = subprocess.run(command, capture_output=True, timeout=_PROBE_TIMEOUT_S)
        version, numpy_version = json.loads(process.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidArgument(f"{subject}: {python.name} cannot be run: {error}") from None
    except (IndexError, ValueError):
        last_line = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise InvalidArgument(
            f"{subject}: {python.name} ended with status {process.returncode} at its start: "
            f"{last_line}"
        ) from None
    version_text, oldest_text = ".".join(map(str, version)), ".".join(map(str, _OLDEST_PYTHON))
    if tuple(version) < _OLDEST_PYTHON:
        raise InvalidArgument(
            f"{subject} has Python {version_text}, and a worker needs {oldest_text} or later: "
            "create the environment with a later Python"
        )
    numpy_release = tuple(map(int, re.findall(r"\d+", numpy_version)[:2]))
    if numpy_release < _OLDEST_NUMPY:
        problem = f"has no numpy for its Python {version_text}"
        if numpy_release:
            problem = f"has numpy {numpy_version}"
        oldest_numpy = ".".join(map(str, _OLDEST_NUMPY))
        raise InvalidArgument(
            f"{subject} {problem}, and a worker needs {oldest_numpy} or later: install it there"
            f" ('{python} -m pip install \"numpy>={oldest_numpy}\"'; pack an archive again)"
        )
    return python


# --- archives


def _unpack_once(archive: Path, copies_folder: Path) -> Path:
    """Return the folder, locked by this process, with the contents of an archive."""
    status = archive.stat()
    copy_key = f"{archive.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
    copy_folder = copies_folder / hashlib.sha256(os.fsencode(copy_key)).hexdigest()[:16]
    try:
        copies_folder.mkdir(mode=0o700, exist_ok=True)
        copy_lock = os.open(copy_folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(copy_lock, True)
        fcntl.flock(copy_lock, fcntl.LOCK_SH)
        # One of the workers that start together unpacks the archive.
        with copy_folder.with_suffix(".turn").open("w") as unpack_lock:
            fcntl.flock(unpack_lock, fcntl.LOCK_EX)
            if not copy_folder.is_dir():
                partial_copy = copy_folder.with_suffix(".part")
                shutil.rmtree(partial_copy, ignore_errors=True)
                _extract(archive, partial_copy)
                partial_copy.rename(copy_folder)
    except OSError as error:
        raise InvalidArgument(
            f"environment '{archive}' cannot be unpacked to '{copies_folder}': {error} (--run-dir "
            "names a folder on a disk with free space)"
        ) from None
    except (EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        raise InvalidArgument(f"environment '{archive}' cannot be unpacked: {error}") from None
    return copy_folder


def _extract(archive: Path, root: Path) -> None:
    """Unpack an archive below `root`.

    Python 3.11.2 has no filters of tarfile. Symbolic links are created last, so that no file is
    written through one.
    """
    root.mkdir()
    links: list[tuple[Path, str]] = []  # (path, target)
    if not tarfile.is_tarfile(archive):
        raise tarfile.TarError("expected a tar archive, possibly compressed with gzip, bzip2 or xz")
    with tarfile.open(archive) as tar:
        for member in tar:
            path = _path_inside(root, member.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.isdir():
                path.mkdir(exist_ok=True)
            elif member.issym():
                links.append((path, member.linkname))
            elif member.islnk():
                os.link(_path_inside(root, member.linkname), path, follow_symlinks=False)
            elif (content := tar.extractfile(member)) is not None:
                with path.open("wb") as file:
                    shutil.copyfileobj(content, file)
                path.chmod(member.mode & 0o755 | 0o600)
                # Compiled modules are valid only with the modification times of their sources.
                os.utime(path, (member.mtime, member.mtime))
            else:
                raise tarfile.TarError(f"'{member.name}' is neither a file nor a folder nor a link")
    for path, target in links:
        path.unlink(missing_ok=True)
        path.symlink_to(target)


def _path_inside(root: Path, name: str) -> Path:
    path = os.path.normpath(name.lstrip("/"))
    if path.split("/")[0] == "..":
        raise tarfile.TarError(f"'{name}' would be unpacked outside of the environment")
    return root / path
