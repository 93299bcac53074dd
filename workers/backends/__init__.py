"""The backend interface, and the registry of backends by name (entry points)."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from shmserve.errors import InvalidArgument, Unsupported, suggestion
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers.batch.request import Input, Output, Request, Response
from shmserve.workers.batch.response_stream import ResponseStream, ResponseWriter
from shmserve.workers.batch.unpack import Unpacker
from shmserve.workers.context import ModelContext, Stopwatch
from shmserve.workers.links.scheduler import MessageTable

__all__ = [
    "Backend",
    "Input",
    "ModelContext",
    "Output",
    "Request",
    "Response",
    "ResponseStream",
    "Stopwatch",
    "find",
    "has_scheduler",
    "is_decoupled",
    "parameters",
]

GROUP = "shmserve.backends"
# Known without a look at what is installed, which takes longer than the import.
_BUILT_IN = {
    "ascend": "shmserve.workers.backends.ascend:AscendBackend",
    "llm": "shmserve.workers.backends.llm:LlmBackend",
    "native": "shmserve.workers.backends.native:NativeBackend",
    "onnxruntime": "shmserve.workers.backends.onnx:OnnxBackend",
    "python": "shmserve.workers.backends.python:PythonBackend",
    "pytorch": "shmserve.workers.backends.pytorch:PytorchBackend",
}
# Triton's older `platform` field for the same.
_PLATFORMS = {"pytorch_libtorch": "pytorch", "onnxruntime_onnx": "onnxruntime"}


class Backend(ABC):
    """Runs one kind of model. One object an instance, used from one thread.

    The order of calls is complete_config (perhaps), load, execute (many), unload.

    `strict_outputs`: an output must have the datatype and shape that the configuration says.
    Triton's Python backend lets any pass to the client as it is, and so must whoever runs its
    models.

    `device_inputs`: inputs in clients' device memory are given as they are, as tensors of uint8 on
    whatever device they are; else as copies in host memory.

    `read_only_inputs`: arrays over shared memory, as `Input.numpy` gives them, cannot be written. A
    request that fails with them is run again with copies: perhaps its model writes into its inputs.

    `checks_ready`, set in `load`: the model itself says whether it is ready.
    """

    strict_outputs = True
    device_inputs = False
    checks_ready = False
    read_only_inputs = True

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self._report: Callable[[bool], None] | None = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """`config`, as `GET /v2/models/NAME/config` shows it, completed with what the model's files
        say; may run the user's code.

        Raises ShmserveError, or anything: the model fails to load with its text.
        """
        return config

    @abstractmethod
    def load(self, config: ModelSpec) -> None:
        """Make the instance ready.

        Raises ShmserveError, or anything: the model fails to load with its text.
        """

    @abstractmethod
    def execute(self, requests: list[Request]) -> list[Response]:
        """Run one batch, and return one response for each request, in order.

        An exception of the model must be passed on: the batch is then run again one by one, or with
        inputs that may be written. The error of a single request is its response. Outputs may be
        views of inputs or of the backend's buffers; they are copied before the next call.
        """

    def execute_decoupled(self, streams: list[ResponseStream]) -> None:
        """Run one batch of a decoupled model: the responses to each `stream.request`, any number of
        them, are sent by its stream, from any thread, also after this has returned.

        Every stream needs an end: the last `send`, `fail`, or `abandon`. What is raised ends those
        that have none yet; nothing is run again. Without one of its own a backend gives one
        response to each request.
        """
        responses = self.execute([stream.request for stream in streams])
        for stream, response in zip(streams, responses, strict=True):
            stream.send(response, final=True)

    def serve(self, writer: ResponseWriter, unpacker: Unpacker) -> MessageTable | None:
        """The messages of its scheduler that a backend serves which knows more than batches, or
        something else; None: batches, through `execute` and `execute_decoupled`.

        `writer.link` is the way to the scheduler. Of each `opened` request that a message brings,
        `unpacker.request(opened.work)` is what a backend is asked (raises as it says), and
        `ResponseStream(writer, opened, request)` takes the responses. A handler runs in the
        instance's only loop, which must get on: nothing else is received meanwhile.
        """
        return None

    def metrics(self) -> list[list[Any]] | None:
        """Return all families of the model's own metrics if they changed since the last call.

        `shmserve.workers.backends.python.metrics.changes` documents their form. Call
        `context.control.wake()` when they change outside of `execute`, and `metrics_changed(True)`
        for a report at once, in any thread that may call `metrics`.
        """
        return None

    def report_metrics_by(self, report: Callable[[bool], None]) -> None:
        """Register the function that reports changed metrics, once an instance serves."""
        self._report = report

    def metrics_changed(self, at_once: bool) -> None:
        """Have `metrics` called and reported: in this thread, or `at_once` False, by a timer."""
        if self._report is not None:
            self._report(at_once)

    def is_ready(self) -> bool:
        """Check whether the model is ready; called only with `checks_ready`, in its own thread.

        An exception means that the model is not ready.
        """
        return True

    def unload(self) -> None:  # noqa: B027 - most have nothing to do
        """Let the model clean up, because the instance ends."""


def backend_name(config: ModelSpec) -> str:
    """Return the name of the backend in a configuration, or ""."""
    return config.backend or _PLATFORMS.get(config.platform, "")


def find(config: ModelSpec) -> type[Backend]:
    """Return the backend class for a configuration.

    Raises:
        InvalidArgument: The backend is unknown, or cannot be imported.
        Unsupported: The backend cannot run decoupled models.
    """
    found = _named(config)
    if config.decoupled and found.execute_decoupled is Backend.execute_decoupled:
        raise Unsupported(
            f"backend '{backend_name(config)}' does not support the 'decoupled' transaction "
            f"policy, required by model '{config.name}'"
        )
    return found


def _named(config: ModelSpec) -> type[Backend]:
    name = backend_name(config)
    target = _BUILT_IN.get(name)
    if target is not None:
        module, _, attribute = target.partition(":")
        return _checked(name, getattr(importlib.import_module(module), attribute))
    for entry in entry_points(group=GROUP, name=name):
        return _checked(name, entry.load())
    raise InvalidArgument(
        f"unable to find backend '{name}' for model '{config.name}', "
        f"known are {', '.join(sorted(names()))}{suggestion(name, names())}"
    )


def names() -> set[str]:
    """Return the names of all known backends."""
    return {entry.name for entry in entry_points(group=GROUP)} | set(_BUILT_IN)


def _checked(name: str, found: Any) -> type[Backend]:
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise InvalidArgument(f"what is installed as backend '{name}' is no backend")
    return found
