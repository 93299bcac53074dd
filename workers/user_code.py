"""Code of users: its files as modules, its readiness, its exceptions as text, its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from shmserve import model as tensor_types
from shmserve.errors import Internal, how_to_install, suggestion

T = TypeVar("T")

_JOIN_TIMEOUT_S = 5.0
_MAX_ERROR_CHARACTERS = 16384  # an exception's text may contain a whole file or tensor
_IMPORTLIB_FOLDER = f"{Path(importlib.__file__).parent}/"
_LIBRARY_PATHS = re.compile(rf"{re.escape(str(Path(os.__file__).parent))}/|.*/site-packages/|<")
_PACKAGE_FOLDER = f"{Path(str(tensor_types.__file__)).parent}/"


def import_file(path: Path, name: str) -> ModuleType:
    """Run the file at `path` as module `name`; modules beside it can be imported.

    A file in a package, whose folder has an `__init__.py`, may use relative imports.

    Raises:
        Exception: Any exception that the file raises.
    """
    folders = path.resolve().parents
    packages = [*itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), folders)]
    name = ".".join([*(folder.name for folder in reversed(packages)), name])
    for folder in map(str, (folders[len(packages)], folders[0])):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"'{path.name}' is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and annotations look their module up by name.
    sys.modules[name] = module
    module_spec.loader.exec_module(module)
    return module


def check_ready(model: Any, run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any]) -> bool:
    """Return the result of a model's `is_ready`; `run_coroutine` runs it if it is a coroutine.

    Raises:
        Internal: The result is not a bool. Exceptions of the model are passed on.
    """
    is_ready = model.is_ready()
    if isinstance(is_ready, Coroutine):
        is_ready = run_coroutine(is_ready)
    if not isinstance(is_ready, bool):
        raise Internal(f"`is_ready` must return a bool, found type '{type(is_ready)}'")
    return is_ready


def source_location(error: BaseException, model_dir: Path) -> str:
    """Return ` (FILE:LINE)` of the last frame in the model's folder, or "" if there is none."""
    roots = {model_dir, model_dir.resolve()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if roots.intersection(file.parents):
            return f" ({file.name}:{frame.lineno})"
    return ""


def model_traceback(error: BaseException, model_dir: Path) -> str:
    """Return the traceback of `format_error` without its message, or "" if there is no frame.

    The traceback of a SyntaxError shows the line with the error.
    """
    traceback_report = _model_report(error, model_dir)
    if isinstance(error, SyntaxError):  # the lines before the last one show its position
        message_lines = 1
    elif traceback_report.stack:
        message_lines = len("".join(traceback_report.format_exception_only()).splitlines())
    else:
        return ""
    return "\n".join("".join(traceback_report.format()).splitlines()[:-message_lines])


def format_error(error: BaseException, model_dir: Path) -> str:
    """Return an exception with its traceback, or "" if no frame is the model's.

    The frames of the server and of libraries (asyncio and torch call a model) before the model's
    first frame, and frames of the import system, are left out. If the model was given by its file,
    the traceback shows the user's path of this file, not the link in the run directory.
    """
    traceback_report = _model_report(error, model_dir)
    return "".join(traceback_report.format()).rstrip("\n") if traceback_report.stack else ""


def _model_report(error: BaseException, model_dir: Path) -> traceback.TracebackException:
    user_folder = _user_path(model_dir)
    traceback_report = traceback.TracebackException.from_exception(error)
    exception: traceback.TracebackException | None = traceback_report
    while exception is not None:
        frames = list(itertools.dropwhile(_is_server_frame, exception.stack))
        model_frames = itertools.dropwhile(lambda f: _LIBRARY_PATHS.match(f.filename), frames)
        frames = list(model_frames) or frames
        exception.stack[:] = [frame for frame in frames if not frame.filename.startswith("<frozen")]
        for frame in exception.stack:
            frame.filename = frame.filename.replace(f"{model_dir}/", f"{user_folder}/")
        if getattr(exception, "filename", None):  # a SyntaxError has a file name
            exception.filename = exception.filename.replace(f"{model_dir}/", f"{user_folder}/")
        exception = exception.__cause__ or exception.__context__
    return traceback_report


def traceback_line(text: str, model: str, model_dir: Path) -> str:
    """Return a line of a traceback for the first position in an error text, or ""."""
    match = re.search(rf"\b{re.escape(f'{model}/{model_dir.name}')}/([^\s:]+):(\d+)", text)
    return f'  File "{_user_path(model_dir)}/{match[1]}", line {match[2]}' if match else ""


def _user_path(model_dir: Path) -> str:
    return os.readlink(model_dir) if model_dir.is_symlink() else str(model_dir)


def _is_server_frame(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith((_PACKAGE_FOLDER, _IMPORTLIB_FOLDER, "<frozen"))


def describe_error(error: BaseException) -> str:
    """Return `Kind: text` of an exception, or only its kind if it has no text."""
    error_type = type(error).__name__
    try:
        if isinstance(error, ImportError) and error.name == tensor_types.__name__:
            name = str(error).split("'")[1]
            hint = suggestion(name, tensor_types.__all__)
            return f"{error_type}: there is no '{name}' in {error.name}{hint}"
        missing_module = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing_module == "torch":
            return f"{error_type}: {error}: {how_to_install('torch', 'torch')}"
        if missing_module == "triton_python_backend_utils":
            return f"{error_type}: {error}: serve the model's repository, not its file as a class"
        if error_type == "BdbQuit":  # the debugger has read the end of the worker's standard input
            return (
                f"{error_type}: a worker has no terminal for breakpoint(); "
                "see `shmserve guide debug`"
            )
        text = shorten_error(str(error))
        if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
            # The module may be another one than the file of this name in the model's folder.
            text += f" ({getattr(error.obj, '__file__', 'built-in')})"
        return f"{error_type}: {text}" if text else error_type
    except BaseException:  # a model may define the exception's `__str__`, too
        return error_type


def shorten_error(text: str) -> str:
    """Return the text of an error, truncated if it is too long for a log or a client."""
    if len(text) <= _MAX_ERROR_CHARACTERS:
        return text
    return f"{text[:_MAX_ERROR_CHARACTERS]}... ({len(text)} characters)"


class EventLoopThread:
    """An event loop in a thread of its own, for coroutines that outlast their batch.

    The first coroutine starts the thread. The thread runs in the context manager that
    `context_factory` returns, until `close`.
    """

    def __init__(
        self,
        context_factory: Callable[
            [], contextlib.AbstractContextManager[Any]
        ] = contextlib.nullcontext,
    ) -> None:
        self._context_factory = context_factory
        self._futures: set[Future[None]] = set()
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(
        self, coroutine: Coroutine[Any, Any, Any], on_error: Callable[[BaseException], None]
    ) -> Future[None]:
        """Start a coroutine; an exception that it raises is passed to `on_error`."""
        future = self._submit(_run_guarded(coroutine, on_error))
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, wait, and return its result or raise its exception."""
        errors: list[BaseException] = []
        result: T = self._submit(_run_guarded(coroutine, errors.append)).result()
        if errors:
            raise errors[0]
        return result

    def close(self) -> None:
        """Cancel all coroutines, and wait some seconds for the thread to end."""
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._start_lock:  # a batch and a readiness check may come at the same time
            if self._thread is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._serve, name="model event loop", daemon=True)
                thread.start()
                self._thread = thread
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with self._context_factory():
                self._loop.run_forever()
                self._loop.run_until_complete(asyncio.sleep(0))  # a new task runs until it waits
                tasks = asyncio.all_tasks(self._loop)
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()


async def _run_guarded(
    coroutine: Coroutine[Any, Any, Any], on_error: Callable[[BaseException], None]
) -> Any:
    try:
        return await coroutine
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit, too: a model must not end its worker
        on_error(error)
