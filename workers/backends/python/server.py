"""The server's API for a running model: calls of other models, model control, the log.

Triton's interface consists of functions and classes of a module, without a reference to the server.
A process therefore has a single server, which `install` sets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import Any

import numpy as np

from shmserve.errors import Cancelled, Internal, NotFound, ShmserveError, Unavailable
from shmserve.ipc.messages.control_requests import AskReady, FindModel, LoadModel, UnloadModel
from shmserve.ipc.messages.inference import Caller
from shmserve.workers.backends import ModelContext
from shmserve.workers.backends.python.errors import TritonModelException, as_text
from shmserve.workers.batch.backend_request import Request
from shmserve.workers.bls.router import C, CallRouter, unsubmitted_error
from shmserve.workers.memory.workspace import LeasedWorkspace

logger = logging.getLogger(__name__)


class ServerApi:
    """The API of the server for the model of a worker.

    Attributes:
        can_call: Whether the model may call other models.
        executing_requests: The requests of the running execution; empty between executions.
    """

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        byte_size = context.arena.memory.byte_size
        self.calls = CallRouter(context.control, byte_size, context.spans.append)
        self.can_call = False  # whether the model may call other models
        self.executing_requests: Sequence[Request] = ()
        self._executing_thread = 0

    @contextlib.contextmanager
    def decoupled_execution(self, requests: Sequence[Request]) -> Iterator[None]:
        """Record `requests` as the origins of calls of other models in the `with` block.

        Calls that are made by coroutines started in the block are included. The instance waits only
        for calls that this thread makes.
        """
        self.executing_requests, self._executing_thread = requests, threading.get_ident()
        token = _ORIGINS.set(requests)
        try:
            yield
        finally:
            self.executing_requests = ()
            _ORIGINS.reset(token)

    def origins(self) -> Sequence[Request]:
        """Return the requests that the model is executing in this thread or coroutine."""
        return _ORIGINS.get() or self.executing_requests

    def deadline_ns(self) -> int:
        """Return the latest deadline of the executing requests, or 0 if a request has none."""
        deadlines = [request.work.deadline_ns for request in self.origins()]
        return max(deadlines, default=0) if all(deadlines) else 0

    def trace(self) -> str:
        """Return the trace of the request that the running code executes, or "" for several."""
        origins = self.origins()
        return origins[0].work.trace if len(origins) == 1 else ""

    def caller_lines(self) -> str:
        """Return the executions that wait for a call made by this code, as in `Submit.callers`."""
        works_of_origins = [request.work for request in self.origins()]
        lines = [line for work in works_of_origins for line in work.callers.split("\n") if line]
        if self.executing_requests and self._executing_thread in (0, threading.get_ident()):
            name = self.context.model_name
            lines.append(Caller(os.getpid(), self.executing_requests[0].work.key, name).line)
        return "\n".join(dict.fromkeys(lines))

    def submit(self, call: C, future: asyncio.Future[Any] | None = None) -> C:
        """Submit a call of another model.

        Args:
            call: The call.
            future: The call's future if a coroutine of the running event loop awaits the call.
                Cancelling the future cancels the call.

        Raises:
            ShmserveError: The call cannot be submitted.
        """
        try:
            if not self.can_call:
                raise Internal("BLS is only supported during the 'execute' function.")
            if call.request.cancelled:
                raise Cancelled("request cancelled")
            if future is None:
                self.calls.submit_now(call)
            else:
                self.calls.submit_soon(call, future)
        except ShmserveError as error:
            raise unsubmitted_error(call.request.model, error) from None
        return call


_server: ServerApi | None = None
_ORIGINS: ContextVar[Sequence[Request]] = ContextVar("origins", default=())


def install(server: ServerApi | None) -> None:
    """Set the server's API that the model's code uses in this process, or remove it."""
    global _server
    _server = server


def current_server() -> ServerApi:
    """Return the server of this process's model.

    Raises:
        TritonModelException: This process is not a worker.
    """
    if _server is None:
        raise TritonModelException("this call is only possible in a model that a server runs")
    return _server


def refusal_text(reason: str) -> str:
    """Return the error text for a refusal of the server, in Triton's words."""
    if _server is None:
        return reason
    name = _server.context.instance_name
    return f"Failed to process the request for model '{name}', message: {reason}"


@contextlib.contextmanager
def _converted_refusals(operation: str) -> Iterator[None]:
    """Raise TritonModelException if the server rejects an operation of the block."""
    try:
        yield
    except ShmserveError as error:
        text = f"Failed to {operation}: {refusal_text(error.message)}"
        raise TritonModelException(text) from None


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load or reload a model, as POST /v2/repository/models/NAME/load does.

    Args:
        model_name: The model.
        config: A JSON configuration that replaces the model's own.
        files: The contents of files by name, such as "file:1/model.py".

    Raises:
        TritonModelException: The server has rejected the request.
    """
    model_name, config = as_text(model_name, "model_name"), as_text(config, "config")
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and "
            "file contents"
        )
    contents: dict[str, bytes] = {}
    for key, content in (files or {}).items():
        if not isinstance(content, bytes):
            raise TypeError(f"the contents of '{key}' must be bytes, not {type(content).__name__}")
        path = as_text(key, "the name of a file")
        if not path.startswith("file:"):
            text = f"Failed to load model: the name of a file must begin with 'file:', got '{path}'"
            raise TritonModelException(text)
        contents[path.removeprefix("file:")] = content
    api = current_server()
    with _converted_refusals("load model"):
        api.context.control.ask(LoadModel, model_name, config, contents)
        api.calls.invalidate(model_name)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload all versions of a model.

    Raises:
        TritonModelException: The server has rejected the request.
    """
    model_name, api = as_text(model_name, "model_name"), current_server()
    with _converted_refusals("unload model"):
        api.context.control.ask(UnloadModel, model_name, bool(unload_dependents))
        api.calls.invalidate(model_name)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Check whether a model can run inferences now; version "" is the latest.

    Raises:
        TritonModelException: The version is not a number.
    """
    model_name = as_text(model_name, "model_name")
    model_version = as_text(model_version, "model_version")
    if model_version and not (model_version.isdecimal() and int(model_version)):
        reason = (
            f"failed to get model version from specified version string '{model_version}' "
            "(details: stol), version should be an integral value > 0"
        )
        raise TritonModelException("Failed to check model readiness: " + refusal_text(reason))
    control = current_server().context.control
    with _converted_refusals("check model readiness"):
        try:
            found_model = control.ask(FindModel, model_name, model_version)
        except (NotFound, Unavailable):
            return False
        if not (found_model["ready"] and found_model.get("checks_ready")):
            return bool(found_model["ready"])
        return bool(control.ask(AskReady, model_name, found_model["version"])["ready"])


def get_model_dir() -> str:
    """Return the folder of the model's version."""
    return str(current_server().context.version_dir)


class SharedMemory:
    """The shared memory for inputs of this model's calls of other models."""

    def free_memory(self) -> int:
        """Return the number of free bytes in the shared memory for inputs of calls."""
        return current_server().calls.free_bytes


shared_memory = SharedMemory()


def workspace(byte_size: int) -> _Workspace:
    """Lease bytes of the device's shared workspace for a `with` or `async with` block.

    The block waits until the pool has enough free bytes. The value of the block is a numpy array of
    uint8, or on a GPU a torch tensor, with undefined contents. Triton does not have this function.
    Use one lease for all bytes of an execution, and call no other model in the block.

    Raises:
        TritonModelException: There is no pool (--workspace-byte-size), the pool is smaller, or the
            execution already has a workspace.
    """
    return _Workspace(current_server().context.workspace, byte_size, _as_array)


def _as_array(view: Any) -> Any:
    return np.frombuffer(view, np.uint8) if isinstance(view, memoryview) else view


class _Workspace(LeasedWorkspace):
    """A workspace lease that raises errors of this API."""

    def __enter__(self) -> Any:
        try:
            return super().__enter__()
        except ShmserveError as error:
            raise TritonModelException(error.message) from None

    async def __aenter__(self) -> Any:
        try:
            return await super().__aenter__()
        except ShmserveError as error:
            raise TritonModelException(error.message) from None


class Logger:
    """A writer to the server's log."""

    class LogLevel(int, Enum):
        """The severity of a line of the log."""

        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        """Write a line to the log.

        Raises:
            TypeError: The message is not a string, or the level is invalid.
        """
        if not isinstance(level, Logger.LogLevel):
            raise TypeError(f"the level of a log message must be a Logger.LogLevel, not {level!r}")
        logger.log(_LEVELS[level], "%s", as_text(message, "a log message"))

    @staticmethod
    def log_info(message: str) -> None:
        """Write a line with the level INFO."""
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a line with the level WARNING."""
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Write a line with the level ERROR."""
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write a line with the level VERBOSE, for --log-verbose."""
        Logger.log(message, Logger.VERBOSE)


_LEVELS = {
    Logger.INFO: logging.INFO,
    Logger.WARNING: logging.WARNING,
    Logger.ERROR: logging.ERROR,
    Logger.VERBOSE: logging.DEBUG,
}
