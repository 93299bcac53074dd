"""Backend `python`: a `TritonPythonModel` in model.py, as in Triton's Python backend.

This file has the backend and the calls of the model's `execute`.

request.py tensor.py errors.py      the objects of its API
server.py metrics.py                the functions of its API: other models, logs, metrics
importable/                         the module that models import
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any

from shmserve.errors import Internal, InvalidArgument, Unavailable
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers.backends import Backend, ModelContext, OutputStream, Request, Response
from shmserve.workers.backends.python import metrics, server
from shmserve.workers.backends.python.importable import triton_python_backend_utils as pb_utils
from shmserve.workers.backends.python.importable.triton_python_backend_utils import ModelConfig
from shmserve.workers.backends.python.request import (
    MORE_THAN_ONE,
    DecoupledRequest,
    InferenceResponse,
    InferenceResponseSender,
    ReceivedRequest,
    SingleResponse,
    to_response,
)
from shmserve.workers.backends.python.tensor import Lender
from shmserve.workers.context import WrongResponseCount, found_files
from shmserve.workers.user_code import EventLoopThread, check_ready

logger = logging.getLogger(__name__)

_NOT_ITERATIVE_TEXT = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
    "configured to handle such a flag."
)
# The reference count of an object that only a list refers to.
_LIST_REFCOUNT = (lambda items: sys.getrefcount(items[0]))([object()])

# The modules that models import; the second one is internal to Triton, but some models use it.
_MODULE_NAMES = ("triton_python_backend_utils", "c_python_backend_utils")
# Characters that Triton's Python backend refuses in model names, since it passes them to a shell.
_FORBIDDEN_CHARACTERS = ";|&$`<>()[]{}\\\"'*?~#!"


class PythonBackend(Backend):
    """The backend of one `TritonPythonModel` object."""

    strict_outputs = False
    metrics = staticmethod(metrics.changes)  # the families created with `pb_utils.MetricFamily`

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        for name in _MODULE_NAMES:
            sys.modules[name] = pb_utils
        self._server = server.ServerApi(context)
        server.install(self._server)
        self._execution: PythonExecution | None = None
        self._decoupled_execution: DecoupledExecution | None = None
        self._class: Any = None
        self._model: Any = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return `config` completed by the model's `auto_complete_config`; pass on its errors.

        Raises:
            Internal: The method did not return a `ModelConfig`.
        """
        class_ = self._find_class(ModelSpec.of(config))
        completed_config = ModelConfig(json.dumps(config))
        if hasattr(class_, "auto_complete_config"):
            completed_config = class_.auto_complete_config(completed_config)
        if not isinstance(completed_config, ModelConfig):
            raise Internal(
                f"auto_complete_config function in model '{self.context.model_name}' must return "
                "a valid pb.ModelConfig object."
            )
        # Converted through JSON like in Triton, which rejects values such as numpy's numbers.
        json_config: dict[str, Any] = json.loads(json.dumps(completed_config.as_dict()))
        return json_config

    def load(self, config: ModelSpec) -> None:
        """Create the model and call its `initialize`, whose errors are passed on.

        Raises:
            InvalidArgument: The model has no method `execute`.
        """
        context = self.context
        metrics.set_listener(self._metrics_changed)
        self.device_inputs = config.parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS") == "no"
        class_ = self._find_class(config)
        if not hasattr(class_, "execute"):
            raise InvalidArgument(
                f"Python model {context.version}/{file_name(config)} does not implement `execute` "
                "method."
            )
        self._model = class_()
        if hasattr(self._model, "initialize"):
            self._model.initialize(
                {
                    "model_config": json.dumps(config.source, separators=(",", ":")),
                    "model_instance_kind": context.kind,
                    "model_instance_name": context.instance_name,
                    "model_instance_device_id": str(context.device_id),
                    "model_repository": str(context.model_dir),
                    "model_version": context.version,
                    "model_name": context.model_name,
                }
            )
        batching = config.sequence_batching
        is_iterative = batching is not None and batching.iterative_sequence
        if config.decoupled:
            self._decoupled_execution = DecoupledExecution(context, self._model, is_iterative)
        else:
            self._execution = PythonExecution(context, self._model, is_iterative)
        self.checks_ready = callable(getattr(self._model, "is_ready", None))
        self._server.can_call = True

    def execute(self, requests: list[Request]) -> list[Response]:
        """Call the model's `execute`.

        Pass on its errors, and raise Internal for an invalid result.
        """
        assert self._execution is not None
        self._server.executing_requests = requests
        try:
            return self._execution.execute(requests)
        finally:
            self._server.executing_requests = ()

    def execute_decoupled(self, streams: list[OutputStream]) -> None:
        """Call the model's `execute`, which sends responses itself and must return None.

        Errors of the model are passed on.
        """
        assert self._decoupled_execution is not None
        with self._server.decoupled_execution([stream.request for stream in streams]):
            self._decoupled_execution.execute(streams)

    def is_ready(self) -> bool:
        """Return the result of the model's `is_ready`, which may be a coroutine function.

        Errors of the model are passed on.

        Raises:
            Internal: The result is not a bool.
        """
        execution = self._decoupled_execution or self._execution
        assert execution is not None
        return check_ready(self._model, execution.run)

    def _metrics_changed(self, at_once: bool) -> None:
        self.context.control.wake()
        self.metrics_changed(at_once)

    def unload(self) -> None:
        """Call the model's `finalize`, whose errors are passed on."""
        self._server.can_call = False
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        finally:
            self._model = None
            for execution in (self._execution, self._decoupled_execution):
                if execution is not None:
                    execution.close()
            self._server.calls.close()
            server.install(None)

    # --- loading

    def _find_class(self, config: ModelSpec) -> Any:
        if self._class is None:
            if not set(_FORBIDDEN_CHARACTERS).isdisjoint(self.context.model_name):
                raise InvalidArgument(
                    "Invalid stub name: contains invalid characters (the name of a Python model "
                    f"must not contain any of {' '.join(_FORBIDDEN_CHARACTERS)})"
                )
            self._class = model_class(config, self.context.model_dir, self.context.version_dir)
        return self._class


def file_name(config: ModelSpec) -> str:
    """Return the name of a model's Python file: model.py unless the configuration names another."""
    return config.default_model_filename or "model.py"


def model_class(config: ModelSpec, model_dir: Path, version_dir: Path) -> Any:
    """Return the `TritonPythonModel` of a model's file. Errors of the file are passed on.

    Raises:
        Unavailable: The file does not exist.
        InvalidArgument: The file is not a Python file, or has no `TritonPythonModel`.
    """
    file = file_name(config)
    if not file.endswith(".py"):
        raise InvalidArgument(f"Model name must end with '.py'. Model name is \"{file}\".")
    if not (path := version_dir / file).is_file():
        found_hint = ": it is a folder" if path.is_dir() else found_files(version_dir)
        raise Unavailable(f"Python model file '{version_dir.name}/{file}' not found{found_hint}")
    module = _import_model(model_dir, version_dir, file)
    if not hasattr(module, "TritonPythonModel"):
        raise InvalidArgument(
            f"'{file}' has no class TritonPythonModel{_missing_class_hint(module, file)}"
        )
    return module.TritonPythonModel


def _missing_class_hint(module: Any, file: str) -> str:
    """Return advice for a model file without a `TritonPythonModel`, or ""."""
    torch = sys.modules.get("torch")
    hint = ""
    for name, class_ in vars(module).items():
        if not isinstance(class_, type) or class_.__module__ != module.__name__:
            continue
        hint = f". A class with a method 'predict' is served, too, but its class {name} has none"
        if torch is not None and issubclass(class_, torch.nn.Module):
            return (
                f'. Its class {name} is an nn.Module: write backend: "pytorch", '
                f'runtime: "{file}", and the inputs and outputs into config.pbtxt'
            )
        if hasattr(class_, "predict"):
            return (
                f". Its class {name} has a method 'predict': write backend: \"native\" and "
                f'parameters {{ key: "class" value {{ string_value: "{name}" }} }} into '
                "config.pbtxt"
            )
    return hint


def _import_model(model_dir: Path, version_dir: Path, file: str) -> ModuleType:
    """Import a model's file as `VERSION.NAME`, and pass on its errors.

    The version's folder is a package of its own name, so that `from . import` works. Modules in
    that folder and in the model's folder can be imported.
    """
    package = version_dir.name
    # Processes that the model starts with `multiprocessing` get this path, too.
    for folder in (str(version_dir), str(model_dir), str(Path(pb_utils.__file__).parent)):
        if folder not in sys.path:
            sys.path.append(folder)
    init_file = version_dir / "__init__.py"
    if init_file.is_file():
        spec = importlib.util.spec_from_file_location(
            package, init_file, submodule_search_locations=[str(version_dir)]
        )
        assert spec is not None
    else:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(version_dir)]
    module = importlib.util.module_from_spec(spec)
    # In sys.modules, because sys.path may contain another folder named like this version.
    sys.modules[package] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)
    return importlib.import_module(f"{package}.{Path(file).stem}")


def _misuse_error(instance: str, problem: str) -> Internal:
    """Return the error for clients of a model that violates the API, in Triton's words."""
    return Internal(f"Failed to process the request(s) for model '{instance}', message: {problem}")


class _Execution:
    """The calls of a model, whose coroutines run in an event loop with a thread of its own.

    An `iterative` model may reschedule a request once.
    """

    def __init__(self, context: ModelContext, model: Any, is_iterative: bool = False) -> None:
        self._context = context
        self._model = model
        self._is_iterative = is_iterative
        self._loop = EventLoopThread()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine of the model; return its result or raise its exception."""
        return self._loop.wait(coroutine)

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()


class PythonExecution(_Execution):
    """The execution of a model that is not decoupled.

    If its `execute` is a coroutine function, one event loop runs the coroutines.
    """

    def __init__(self, context: ModelContext, model: Any, is_iterative: bool = False) -> None:
        super().__init__(context, model, is_iterative)
        self._instance_name = context.instance_name
        self._lender = Lender(context.model_name, context.mappings, context.copy_counter)
        self._runner: asyncio.Runner | None = None
        # A readiness check cannot use the `asyncio.Runner` of the thread of the batches.
        is_ready = getattr(model, "is_ready", None)
        self._runs_in_loop_thread = inspect.iscoroutinefunction(is_ready)

    def execute(self, requests: list[Request]) -> list[Response]:
        """Call the model, and return a response for each request.

        Raises:
            Internal: The model did not return a list.
            WrongResponseCount: The model did not return one response for each request.
            BaseException: Any exception of the model.
        """
        received_requests = list(map(ReceivedRequest, requests, repeat(self._lender)))
        try:
            responses = self._execute(received_requests)
        except BaseException as error:
            responses = (
                self._sent_responses(received_requests) if isinstance(error, Exception) else []
            )
            if not responses:
                self._lender.discard_loans()
                raise
            logger.exception(
                "model '%s' failed after it had sent its responses", self._context.model_name
            )
        self._lender.check_loans(responses)
        _detach_kept_inputs(requests, received_requests)
        return responses

    def _run_in_batch(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine of `execute`; return its result or raise its exception."""
        if self._runs_in_loop_thread:
            return self.run(coroutine)
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def close(self) -> None:
        super().close()
        if self._runner is not None:
            self._runner.close()

    def _execute(self, received_requests: list[ReceivedRequest]) -> list[Response]:
        # A copy, because a model may empty its list.
        returned_responses = self._model.execute(list(received_requests))
        if type(returned_responses) is not list:
            returned_responses = self._as_list(returned_responses, received_requests)
        try:
            pairs = list(zip(received_requests, returned_responses, strict=True))
        except ValueError:
            raise WrongResponseCount(len(received_requests), returned_responses) from None
        outboxes: list[SingleResponse] = []
        for request, response in pairs:
            if request.outbox and response is None:
                outboxes.append(request.outbox)
        if outboxes:
            self._await_senders(outboxes)
        self._context.stopwatch.output_start_ns = time.monotonic_ns()
        return [
            to_response(response)
            if type(response) is InferenceResponse
            and not request.outbox
            and not request.is_rescheduled
            else self._convert_response(request, response)
            for request, response in pairs
        ]

    def _as_list(self, result: Any, received_requests: list[ReceivedRequest]) -> list[Any]:
        """Return the list that `execute`, or its coroutine, has returned."""
        if isinstance(result, Coroutine):
            result = self._run_in_batch(result)
        if result is None and all(
            request.outbox is not None or request.is_rescheduled for request in received_requests
        ):
            return [None] * len(received_requests)
        if not isinstance(result, list):
            problem = f"Expected a list in the execute return, found type '{type(result)}'."
            raise _misuse_error(self._instance_name, problem)
        return result

    def _convert_response(self, request: ReceivedRequest, response: Any) -> Response:
        if request.is_rescheduled:
            if self._is_iterative and response is None:
                return Response(is_rescheduled=True)
            return self._reschedule_error(response)
        outbox = request.outbox
        if outbox is not None and outbox.response is not None:
            # As in Triton, a second response is an error unless the final flag was sent.
            if isinstance(response, InferenceResponse) and not outbox.is_closed:
                problem = f"TritonModelException: {MORE_THAN_ONE}"
                return Response(error=_misuse_error(self._instance_name, problem))
            return outbox.response
        if isinstance(response, InferenceResponse):
            return to_response(response)
        problem = (
            "Expected an 'InferenceResponse' object in the execute function return list, found "
            f"type '{type(response)}'."
        )
        return Response(error=_misuse_error(self._instance_name, problem))

    def _reschedule_error(self, response: Any) -> Response:
        """Return the error of a request that its model must not reschedule but has rescheduled."""
        if response is None:
            return Response(error=Internal(_NOT_ITERATIVE_TEXT))
        problem = (
            "Expected a None object in the execute function return list for reschduled request, "
            f"found type '{type(response)}'."
        )
        return Response(error=_misuse_error(self._instance_name, problem))

    def _await_senders(self, outboxes: Sequence[SingleResponse]) -> None:
        """Wait for responses that threads of the model, or tasks of its loop, send."""
        if self._runner is not None and not all(outbox.done_event.is_set() for outbox in outboxes):
            self._runner.run(_wait_for_senders(outboxes))
        for outbox in outboxes:
            outbox.done_event.wait()
        for outbox in outboxes:
            if outbox.response is None and outbox.error is not None:
                raise outbox.error

    @staticmethod
    def _sent_responses(received_requests: Sequence[ReceivedRequest]) -> list[Response]:
        """Return the responses that the model has sent; [] unless every request has one."""
        sent_responses = [r.outbox.response for r in received_requests if r.outbox is not None]
        responses = [response for response in sent_responses if response is not None]
        return responses if len(responses) == len(received_requests) else []


class DecoupledExecution(_Execution):
    """The execution of a decoupled model, whose responses may outlast the batch.

    If its `execute` is a coroutine function, the coroutines of several batches run concurrently.
    """

    def execute(self, streams: list[OutputStream]) -> None:
        """Call the model's `execute`.

        Raises:
            Internal: The model returned a value. Exceptions of the model are passed on.
        """
        for stream in streams:
            # Copied, because threads of the model may use the inputs at any later time.
            for tensor in stream.request.inputs.values():
                self._context.copy_counter.inputs += tensor.detach()
        received_requests = [DecoupledRequest(stream) for stream in streams]
        result = self._model.execute(list(received_requests))
        if isinstance(result, Coroutine):
            self._loop.run(result, partial(_fail_all, streams))
        elif result is not None:
            instance = self._context.instance_name
            raise _misuse_error(
                instance,
                f"Python model '{instance}' is using the decoupled mode and the execute function "
                "must return None.",
            )
        for request, stream in zip(received_requests, streams, strict=True):
            if request.is_rescheduled and self._is_iterative:
                stream.reschedule()
            elif request.is_rescheduled:
                stream.fail(Internal(_NOT_ITERATIVE_TEXT))


def _fail_all(streams: Sequence[OutputStream], error: BaseException) -> None:
    failure = streams[0].client_error(error)  # called once, because it logs the error
    for stream in streams:
        stream.fail(failure)


async def _wait_for_senders(outboxes: Sequence[SingleResponse]) -> None:
    loop = asyncio.get_running_loop()
    outbox_changed = asyncio.Event()

    def notify() -> None:
        loop.call_soon_threadsafe(outbox_changed.set)

    for outbox in outboxes:
        outbox.on_change = notify
    while not all(outbox.done_event.is_set() for outbox in outboxes):
        await outbox_changed.wait()
        outbox_changed.clear()


def _detach_kept_inputs(requests: Sequence[Request], received: Sequence[ReceivedRequest]) -> None:
    """Copy the inputs that the model keeps, because their memory is reused."""
    for index, request in enumerate(requests):
        if not request.has_shared_inputs:
            continue
        is_referenced = sys.getrefcount(received[index]) > _LIST_REFCOUNT
        tensors = received[index].tensors
        for name in tensors:
            if is_referenced or sys.getrefcount(tensors[name]) > _LIST_REFCOUNT:
                tensors[name].detach()


def log_thread_exception(args: threading.ExceptHookArgs) -> None:
    """Log an exception of a thread, and release the variables of its functions.

    This function is a `threading.excepthook`, which a model may replace.
    """
    if args.exc_type is not SystemExit and args.thread is not None:
        logger.error("thread '%s' of the model failed", args.thread.name, exc_info=args.exc_value)
    for frame, _ in traceback.walk_tb(args.exc_traceback):
        for referent in gc.get_referents(frame):
            if isinstance(referent, DecoupledRequest):
                referent = referent.get_response_sender()
            if isinstance(referent, InferenceResponseSender):
                referent._thread_error = args.exc_value
    # A variable that refers to the error would otherwise keep all variables alive, in a cycle.
    traceback.clear_frames(args.exc_traceback)
