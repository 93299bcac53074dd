"""The backend interface, and the registry of backends by name (entry points)."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from shmserve.errors import InvalidArgument, Unavailable, Unsupported, missing_package, suggestion
from shmserve.ipc.model_spec import BACKEND_GROUP, BUILT_IN_BACKENDS, ModelSpec
from shmserve.workers.batch.backend_request import Input, Output, Request, Response, Unpacker
from shmserve.workers.batch.response_stream import OutputStream, ResponseWriter
from shmserve.workers.context import ModelContext, Stopwatch
from shmserve.workers.links import HandlerTable

__all__ = [
    "Backend",
    "Input",
    "ModelContext",
    "Output",
    "OutputStream",
    "Request",
    "Response",
    "Stopwatch",
    "find",
]

# The extras of shmserve that install the packages of a backend.
_EXTRAS = {"llm": "llm", "pytorch": "torch", "vllm": "vllm"}  # pip extras by backend


class Backend(ABC):
    """The base class of backends. A backend runs one kind of model.

        class Table(Backend):
            def load(self, config):
                self.rows = np.load(self.context.version_dir / "table.npy")

            def execute(self, requests):
                return [self.response(request.inputs["INDEX"].numpy()) for request in requests]

            def response(self, index):
                return Response([Output("ROWS", "FP32", self.rows[index])])

    Each instance of a model has one object of the class in its own process, and one thread calls
    the object. The order of calls is complete_config (at most once), load, execute (repeated),
    unload. The entry point group `shmserve.backends` maps names to classes.

    Attributes:
        strict_outputs: Whether outputs must have the configured datatype and shape. Triton's Python
            backend accepts any output, and so must a backend that runs its models.
        strict_shapes: Whether `strict_outputs` applies to shapes, too. Triton's backends for files
            return outputs with their true shape.
        device_inputs: Whether inputs in clients' device memory are passed as uint8 tensors on that
            device; otherwise they are copied to host memory.
        read_only_inputs: Whether arrays over shared memory (`Input.numpy`) are read-only. A request
            that fails with them is retried with copies, since its model may write to its inputs.
        checks_ready: Set in `load` if the model implements a readiness check.
    """

    strict_outputs = True  # outputs must match the configuration
    strict_shapes = True  # the shapes of outputs must match, too
    device_inputs = False  # inputs in device memory are passed without a copy to the host
    checks_ready = False  # the model has a readiness check
    read_only_inputs = True  # arrays over shared memory are read-only

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self._report_metrics: Callable[[bool], None] | None = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a configuration completed with the information in the model's files.

        This may run the user's code.

        Args:
            config: The configuration, as `GET /v2/models/NAME/config` shows it.

        Returns:
            The completed configuration. Fields that the author of the model has written take
            precedence.

        Raises:
            Exception: Any exception makes the load fail with its message.
        """
        return config

    @abstractmethod
    def load(self, config: ModelSpec) -> None:
        """Make the instance ready.

        Args:
            config: The completed configuration.

        Raises:
            Exception: Any exception makes the load fail with its message.
        """

    @abstractmethod
    def execute(self, requests: list[Request]) -> list[Response]:
        """Execute one batch.

        Outputs may be views of inputs or of the backend's buffers; they are copied before the next
        call.

        Args:
            requests: The requests of the batch.

        Returns:
            One response for each request, in order. `Response(error=...)` fails one request.

        Raises:
            Exception: An exception of the model. The batch is then retried request by request, or
                with writable inputs.
        """

    def execute_decoupled(self, streams: list[OutputStream]) -> None:
        """Execute one batch of a decoupled model; a backend without this method refuses the model.

        Args:
            streams: The response stream of each request (`stream.request`). Any thread may send
                responses, also after this method has returned. End each stream by
                `send(..., final=True)`, `fail` or `abandon`.

        Raises:
            Exception: An exception of the model, which ends the open streams. Nothing is retried.
        """
        raise NotImplementedError

    def serve(self, writer: ResponseWriter, unpacker: Unpacker) -> HandlerTable | None:
        """Return the handlers of scheduler messages, for a backend with a protocol of its own.

        The handlers run in the instance's only loop and must not block it. For each request
        `open_request` of a message, `unpacker.request(open_request.work)` returns the backend's
        request, and `OutputStream(writer, open_request, request)` accepts its responses.

        Args:
            writer: The writer of responses; `writer.link` is the link to the scheduler.
            unpacker: The unpacker of requests.

        Returns:
            The handlers by message, or None for a backend that executes batches.
        """
        return None

    def metrics(self) -> list[list[Any]] | None:
        """Return all families of the model's own metrics if they changed since the last call.

        Call `context.control.wake()` when metrics change outside of `execute`. To report them
        immediately, call `metrics_changed(True)` in any thread that may call `metrics`.

        Returns:
            The families as `shmserve.workers.backends.python.metrics.changes` returns them, or None
            if nothing has changed.
        """
        return None

    def report_metrics_by(self, report: Callable[[bool], None]) -> None:
        """Set the function that `metrics_changed` calls; the instance sets it after `load`."""
        self._report_metrics = report

    def metrics_changed(self, at_once: bool) -> None:
        """Report changed metrics.

        Args:
            at_once: Whether this thread reports them now; otherwise a timer does so later.
        """
        if self._report_metrics is not None:
            self._report_metrics(at_once)

    def is_ready(self) -> bool:
        """Check whether the model is ready.

        This method is called in a thread of its own, and only if `load` has set `checks_ready`. An
        exception means that the model is not ready.
        """
        return True

    def unload(self) -> None:  # noqa: B027 - most have nothing to do
        """Release the model's resources, before the instance's process exits."""


# The texts of boolean parameters that Triton accepts.
_BOOLEANS = {"0": False, "1": True, "false": False, "true": True, "off": False, "on": True}


def parse_boolean(parameters: Mapping[str, str], key: str, default: bool) -> bool:
    """Return a boolean parameter; raise InvalidArgument for a text that is not in `_BOOLEANS`."""
    value = parameters.get(key)
    if value is None:
        return default
    if value.lower() not in _BOOLEANS:
        raise InvalidArgument(f"parameter '{key}': failed to convert '{value}' to boolean")
    return _BOOLEANS[value.lower()]


def parse_integer(parameters: Mapping[str, str], key: str, default: int) -> int:
    """Return an integer parameter; raise InvalidArgument for another text or a number >= 2**31."""
    value = parameters.get(key, str(default)).strip()
    if not value.isdecimal() or int(value) >= 1 << 31:
        text = f"parameter '{key}' must be an integer from 0 to {(1 << 31) - 1}, got '{value}'"
        raise InvalidArgument(text)
    return int(value)


def find(config: ModelSpec) -> type[Backend]:
    """Return the backend class for a configuration.

    Raises:
        InvalidArgument: The backend is unknown, or cannot be imported.
        Unavailable: A package that the backend needs is not installed.
        Unsupported: The backend cannot run decoupled models.
    """
    backend = _find_class(config)
    if config.decoupled and backend.execute_decoupled is Backend.execute_decoupled:
        raise Unsupported(
            f"backend '{config.backend}' does not support the 'decoupled' transaction "
            f"policy, required by model '{config.name}'"
        )
    return backend


def _find_class(config: ModelSpec) -> type[Backend]:
    name = config.backend
    class_path = BUILT_IN_BACKENDS.get(name)
    if class_path is not None:
        path, _, attribute = class_path.partition(":")
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            extra_name = _EXTRAS.get(name)
            if extra_name is None or (error.name or "").startswith("shmserve"):
                raise
            raise Unavailable(missing_package(f"backend '{name}'", error, extra_name)) from None
        return _check_class(name, getattr(module, attribute))
    for entry_point in entry_points(group=BACKEND_GROUP, name=name):
        return _check_class(name, entry_point.load())
    raise InvalidArgument(
        f"unable to find backend '{name}' for model '{config.name}', "
        f"known are {', '.join(sorted(names()))}{suggestion(name, names())}"
    )


def names() -> set[str]:
    """Return the names of the built-in backends and of those that other packages register."""
    return {entry.name for entry in entry_points(group=BACKEND_GROUP)} | BUILT_IN_BACKENDS.keys()


def _check_class(name: str, backend: Any) -> type[Backend]:
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise InvalidArgument(
            f"the entry point '{name}' is not a backend: expected a subclass of "
            "shmserve.workers.backends.Backend"
        )
    return backend
