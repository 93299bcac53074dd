"""A server for a script, a test or a notebook: `with shmserve.serve(Blur) as server:`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shmserve.class_file import Sources, write_class_file
from shmserve.client import discovery, sync
from shmserve.client.session import check_number, open_session
from shmserve.errors import (
    KINDS,
    Disconnected,
    Internal,
    InvalidArgument,
    ShmserveError,
    Unavailable,
)

Models = type | str | os.PathLike[str] | Sequence[type | str | os.PathLike[str]]

_STOP_TIMEOUT_S = 40.0
# A run directory has at most 85 bytes, since the paths of sockets are limited.
_LONGEST_TMPDIR = 85 - len("/shmserve-12345678/run")
_POLL_PAUSE_S = 0.05
# The program of the server's process. When its parent exits, the kernel sends it SIGTERM. After the
# server's end it then removes the temporary folder, which its parent may have left.
_PROGRAM = """
import os, shutil, signal, sys
from shmserve.ipc.processes import signal_at_parents_death
parent, folder = os.getppid(), sys.argv.pop(1)
signal_at_parents_death(signal.SIGTERM)
from shmserve.cli import main
status = main(sys.argv[1:])
if os.getppid() != parent:
    shutil.rmtree(folder, ignore_errors=True)
sys.exit(status)
"""
_IN_SERVER_VARIABLE = "SHMSERVE_IN_SERVER"


class LocalServer(sync.Server):
    """The client of a server that `serve` has started: a `shmserve.client.Server`.

    Attributes:
        url: The URL of the server's HTTP listener.
        run_dir: The server's run directory, for `shmserve.client.connect` in other processes.
        log: The path of the server's log.
        sources: The original file of each file that `serve` has generated from it, by path.
    """

    url: str
    run_dir: Path
    log: Path
    sources: Sources


@contextlib.contextmanager
def serve(
    models: Models, *, port: int = 0, timeout: float = 60.0, token: str = "", **flags: Any
) -> Iterator[LocalServer]:
    """Run a server in a `with` block, which is entered once all models are ready.

        class Double:
            def predict(self, x: FP32[np.ndarray, -1]) -> FP32[np.ndarray, -1]:
                return 2 * x
        with shmserve.serve(Double) as server:
            print(server.infer("double", x=[[1, 2, 3]])["output"])
        # [[2. 4. 6.]]

    Args:
        models: A class with `predict`, "path/model.py:Class", a model repository, the folder of a
            model, or a list of these. For a class in a script or a notebook, the server also
            receives the definitions that the class uses.
        port: The port of HTTP; 0 chooses a free one.
        timeout: Seconds until all models must be ready.
        token: The token of the client, if the server has `auth_token_file`.
        **flags: Flags of `shmserve serve` with underscores: `allow_grpc=True`. A flag that may be
            repeated takes a list, and None is the flag's default.

    Yields:
        The client, which also has the attributes `url`, `run_dir` and `log`.

    Raises:
        InvalidArgument: An argument is invalid, or the source of a class cannot be found.
        ShmserveError: The error of a model that could not be loaded.
        Internal: The block did not handle this error of a model; its note has the traceback.
        Unavailable: The server did not become ready in time.
    """
    if os.environ.get(_IN_SERVER_VARIABLE):
        raise InvalidArgument(
            "a model called shmserve.serve() while the server imported its file; call it below "
            "`if __name__ == '__main__':`"
        )
    check_number("timeout", timeout)
    is_single = isinstance(models, type | str | os.PathLike) or not isinstance(models, Iterable)
    items: list[Any] = [models] if is_single else list(models)  # type: ignore[arg-type]
    sources: Sources = {}
    is_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TMPDIR
    folder = Path(tempfile.mkdtemp(prefix="shmserve-", dir="/tmp" if is_long else None))
    owner_pid = os.getpid()
    try:
        arguments = [word for model in items for word in _model_arguments(model, folder, sources)]
        run_dir = Path(flags.get("run_dir") or folder / "run")
        options = {"allow_grpc": False, "allow_metrics": False, "http_port": port, **flags}
        options["run_dir"] = run_dir
        arguments += [word for name, value in options.items() for word in _format_flag(name, value)]
        with _server_process(arguments, folder / "log") as process:
            server = _connect_when_ready(process, run_dir, folder / "log", timeout, token, sources)
            try:
                yield server
            except Internal as error:
                failures = _ERROR_LINE.findall(user_log(folder / "log", sources))
                for text in [text for text in failures if "Traceback" in text][-1:]:
                    error.add_note(f"The latest traceback in the server's log:\n{text.rstrip()}")
                raise
            finally:
                server.close()
    finally:
        if os.getpid() == owner_pid:  # not in a forked process that leaves the block
            shutil.rmtree(folder, ignore_errors=True)


def _format_flag(name: str, value: Any) -> list[str]:
    """Return the arguments for a flag: none for None, one for each element of a list."""
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in values]
    return [f"--{name.replace('_', '-')}={text}" for text in texts]


@contextlib.contextmanager
def _server_process(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    paths = [path or os.getcwd() for path in sys.path]  # "" is the working directory
    environment = {**os.environ, _IN_SERVER_VARIABLE: "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", _PROGRAM, str(log.parent), "serve", *arguments]
    # The kernel signals the server when the thread that started it ends, so this thread must last
    # as long as the server.
    starter = ThreadPoolExecutor(1)
    with log.open("wb") as file:
        process = starter.submit(
            lambda: subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                # A new session, so that Ctrl-C in Jupyter or a terminal does not interrupt it.
                start_new_session=True,
            )
        ).result()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        starter.shutdown()


def _connect_when_ready(
    process: subprocess.Popen[bytes],
    run_dir: Path,
    log: Path,
    timeout: float,
    token: str,
    sources: Sources,
) -> LocalServer:
    deadline, session = time.monotonic() + timeout, None
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(Disconnected):
            # The server accepts clients once its models are loaded, then publishes its readiness.
            session = session or open_session(run_dir, 1 << 30, None, token)
            url = next(iter(discovery.addresses(run_dir)), "")
            is_http_ready = not url.startswith("http") or session.ready()
            if session.connection().models.ready and is_http_ready:
                server = LocalServer(session)
                server.url = url
                server.run_dir, server.log, server.sources = run_dir, log, sources
                return server
        time.sleep(_POLL_PAUSE_S)
    if session is not None:
        session.close()
    raise _start_error(user_log(log, sources), process.poll(), timeout)


def user_log(log: Path, sources: Sources) -> str:
    """Return the server's log; paths of the user's files replace those of generated files."""
    text = log.read_text(errors="replace")
    for generated_path, source in sources.items():
        text = text.replace(str(generated_path), str(source))
        stem = generated_path.stem
        text = re.sub(rf"\b(?:{stem}/\d+/)?{stem}\.py:(?=\d)", f"{source.name}:", text)
    return text


# A line of the log: the level, the time, the process, the text.
_ERROR_LINE = re.compile(r"(?m)^E \S+ \S+ (.*(?:\n(?![A-Z] \d{4}-).*)*)")
_LOAD_FAILED = re.compile(r"(?s)failed to load '[^']*' version \d+: ([A-Z][a-z ]+): (.*)")


def _start_error(log: str, status: int | None, timeout: float) -> ShmserveError:
    """Return the error of a server that has ended, or that is not ready in time."""
    lines = [line.strip() for line in _ERROR_LINE.findall(log)]
    error_classes = {error_class.title: error_class for error_class in KINDS}
    matches = [match for match in map(_LOAD_FAILED.match, lines) if match]
    if matches:
        error_class = error_classes.get(matches[0][1], ShmserveError)
        return error_class("\n".join(dict.fromkeys(match[2] for match in matches)))
    if status is None:
        return Unavailable(f"the server is not ready after {timeout} s:\n" + log[-2000:])
    log_text = re.sub(r"(?m)^shmserve: ", "", log.strip())  # by a command that ended before its log
    text = "\n".join(lines) or log_text or f"the server exited with status {status}"
    return InvalidArgument(text)


# --- models


def _model_arguments(
    model: type | str | os.PathLike[str], folder: Path, sources: Sources
) -> list[str]:
    """Return the arguments of `shmserve serve` for a model."""
    if isinstance(model, type):
        return [f"{write_class_file(model, folder, sources)}:{model.__name__}"]
    if not isinstance(model, str | os.PathLike):
        message = f"serve() accepts a class, a path or a list of these, not {_describe_type(model)}"
        raise InvalidArgument(message)
    text = os.fspath(model)
    path = Path(text)
    if not path.is_dir():
        return [text]
    has_versions = any(entry.name.isdecimal() for entry in path.iterdir() if entry.is_dir())
    if not has_versions and not (path / "config.pbtxt").is_file():
        return [text] if (path / "config.json").is_file() else [f"--model-repository={text}"]
    repository = folder / "models"
    copy = repository / path.resolve().name
    if copy.exists():
        raise InvalidArgument(f"two models have the name '{copy.name}': rename one of the folders")
    shutil.copytree(path, copy)
    return [f"--model-repository={repository}"]


def _describe_type(model: Any) -> str:
    name = type(model).__name__
    is_named = hasattr(model, "__name__") or model is None
    return f"a {name}" if is_named else f"an instance of '{name}'"
