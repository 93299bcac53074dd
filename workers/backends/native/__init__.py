"""Backend `native`: a class whose annotated `predict` receives batches, without configuration.

The file is `default_model_filename` (model.py) in the version folder, and the class is the
parameter "class" (Model).

The class may have these attributes: `max_batch_size` (32; 0: no batch dimension),
`max_queue_delay_us` (0), `batching_strategy`, `target_p99_ms`, `ragged` (names of inputs),
`batch_input`, `batch_output`, `padding` and `sequence_batching` (as in a configuration), and
`instances` (a number) or `instance_group`. The supervisor reads `environment`. The class may have
the methods `load(self, context)`, `unload(self)` and `is_ready(self)`, plain or `async def`;
batches run while `is_ready` runs in another thread. A `torch.nn.Module` is moved to the device and
set to evaluation mode; without `predict`, its annotated `forward` is used.

A `predict` that yields its responses, annotated as `Iterator[...]` or `AsyncIterator[...]`, makes
the model decoupled. A call receives one request with its own arrays, and `max_batch_size` defaults
to 0. Up to `max_streams` (64) iterators run concurrently. Further requests wait in the scheduler
or, if the last batch had too many, in the worker. A generator runs in a thread of its own.
Asynchronous generators share one event loop. When its client disconnects, a generator is closed at
its next `yield` (GeneratorExit), and an asynchronous one is cancelled.
`shmserve.model.Context.cancelled` reports the disconnect earlier.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from shmserve.errors import Cancelled, InvalidArgument, suggestion
from shmserve.ipc.class_source import DEFAULT_CLASS_NAME, source_positions
from shmserve.ipc.model_spec import ENVIRONMENT, MAX_STREAMS, ModelSpec, TensorSpec
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.ipc.tensors.signature import Signature, shape_text, shapes_match
from shmserve.model import IS_CANCELLED, Context, TensorType
from shmserve.workers.backends import Backend, ModelContext, OutputStream, Request, Response
from shmserve.workers.backends.native import declaration
from shmserve.workers.batch.ragged import RaggedRules
from shmserve.workers.batch.runner import Runner
from shmserve.workers.device import import_torch, inference_mode, open_device
from shmserve.workers.memory.device_memory import is_module
from shmserve.workers.tensor_specs import generated_names, with_generated_tensors
from shmserve.workers.user_code import EventLoopThread, check_ready, import_file

logger = logging.getLogger(__name__)

_DEFAULT_MAX_BATCH_SIZE = 32
_DEFAULT_MAX_STREAMS = 64


class NativeBackend(Backend):
    """The backend of one object of the model's class."""

    device_inputs = True

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._device = open_device(context.device)
        self._model_class: type | None = None
        self._file = self._displayed_path = ""
        self._folder = context.version_dir
        self._positions: dict[str, str] = {}  # the position of each attribute in the file
        self._model: Any = None
        self._streams: GeneratorStreams | None = None
        self._exit_stack = contextlib.ExitStack()
        self._event_loop = EventLoopThread(inference_mode)

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add inputs and outputs from the annotations, and batching from the attributes."""
        spec = ModelSpec.of(config)
        model = self._find_class(spec)
        declaration.warn_of_misspelt_attributes(model, self._position_prefix)
        predict = declaration.check_class(model, self._position_prefix)
        result = dict(config)
        class_parameters = declaration.parameters(model)
        configured_parameters = config.get("parameters") or {}
        if ENVIRONMENT in class_parameters and ENVIRONMENT not in configured_parameters:
            raise InvalidArgument(
                f"'{model.__name__}.{ENVIRONMENT}' was not found in '{self._file}', which is "
                "parsed before it is executed; write it into the body of the class as a string"
            )
        result["parameters"] = {**class_parameters, **configured_parameters}
        inputs, outputs = declaration.as_config(predict)
        if not spec.has_scheduler and hasattr(model, "sequence_batching"):
            result["sequence_batching"] = model.sequence_batching
        for field_name in ("batch_input", "batch_output"):
            if not config.get(field_name) and hasattr(model, field_name):
                result[field_name] = declaration.batch_mappings(model, field_name)
        instance_groups = declaration.instance_groups(model)
        if instance_groups:
            result["instance_group"] = instance_groups
        completed_spec = ModelSpec.of(result)
        generated_tensors = generated_names(completed_spec)
        result["input"] = config.get("input") or declaration.client_inputs(
            model, inputs, generated_tensors, self._position_prefix
        )
        client_outputs = [output for output in outputs if output["name"] not in generated_tensors]
        result["output"] = config.get("output") or client_outputs
        if not config.get("max_batch_size"):
            # Without inputs the number of rows of a batch is unknown.
            default_size = _DEFAULT_MAX_BATCH_SIZE if result["input"] and not predict.yields else 0
            result["max_batch_size"] = declaration.whole_number(
                model, "max_batch_size", default_size
            )
        if predict.yields:
            result["model_transaction_policy"] = {"decoupled": True}
            # The scheduler queues requests beyond this number.
            limit = max(1, declaration.whole_number(model, MAX_STREAMS, _DEFAULT_MAX_STREAMS))
            result["parameters"].setdefault(MAX_STREAMS, {"string_value": str(limit)})
        elif result["max_batch_size"] > 1 and not completed_spec.has_scheduler:
            result["dynamic_batching"] = {}
            if hasattr(model, "max_queue_delay_us"):  # otherwise the server's default applies
                delay_us = declaration.whole_number(model, "max_queue_delay_us", 0)
                result["dynamic_batching"]["max_queue_delay_microseconds"] = delay_us
        return result

    def load(self, config: ModelSpec) -> None:
        """Create the object.

        Raises:
            InvalidArgument: Configuration and annotations disagree.
        """
        context = self.context
        model_class = self._find_class(config)
        predict = declaration.read_signature(model_class)
        signature = Signature(with_generated_tensors(config), context.version)
        _check(signature, predict)
        if predict.yields != config.decoupled:
            behaviour = "yields its responses" if predict.yields else "returns its one response"
            raise InvalidArgument(
                f"'predict' of model '{signature.name}' {behaviour}, but its configuration has the "
                f"'decoupled' transaction policy {str(config.decoupled).lower()}"
            )
        self._to_outputs = predict.to_outputs
        numpy_inputs = frozenset(p.name for p in predict.parameters if p.is_numpy)
        self.read_only_inputs = bool(numpy_inputs)
        self._runner = Runner(context, signature, self._device, numpy_inputs, RaggedRules(config))
        self._model = model_class()
        if is_module(self._model):
            self._model.to(self._device.torch).eval()
        if predict.yields:
            max_streams = int(config.parameters.get(MAX_STREAMS, _DEFAULT_MAX_STREAMS))
            # `predict` is looked up at each call, because `load` may replace or compile it.
            self._streams = GeneratorStreams(
                lambda **inputs: self._model.predict(**inputs),
                self._respond,
                max_streams,
                self._event_loop,
            )
            self._exit_stack.callback(self._streams.close)
        if hasattr(self._model, "load"):
            self._await(
                self._model.load(
                    Context(
                        context.model_name,
                        context.version,
                        context.device,
                        self._folder,
                        config.parameters,
                        partial(context.workspace.lease, convert=_as_tensor),
                    )
                )
            )
        plan = None if predict.yields else self._runner.memory_plan(config, self._model)
        if plan is not None:
            plan.log(signature.name)
        self.checks_ready = callable(getattr(self._model, "is_ready", None))

    def execute(self, requests: list[Request]) -> list[Response]:
        """Call `predict` once for the whole batch."""
        inputs = self._runner.inputs(requests)
        with inference_mode():
            with self._runner.detecting_writes():
                result = self._await(self._model.predict(**inputs))
            return self._runner.responses(requests, self._to_outputs(result))

    def execute_decoupled(self, streams: list[OutputStream]) -> None:
        """Start or queue each request; the iterators that `predict` returns outlast this call."""
        assert self._streams is not None
        for stream in streams:
            self._streams.start(stream, self._runner.copied_inputs(stream.request))

    def _respond(self, request: Request, result: Any) -> Response:
        return self._runner.response(request, self._to_outputs(result))

    def is_ready(self) -> bool:
        """Return the result of the model's `is_ready`, which may be a coroutine function.

        Raises:
            Internal: The result is not a bool. Exceptions of the model are passed on.
        """
        with inference_mode():
            return check_ready(self._model, self._await)

    def _await(self, result: Any) -> Any:
        """Return the result of a method; a coroutine runs in the event loop of `predict`."""
        if not isinstance(result, Coroutine):
            return result
        # `is_ready` runs beside batches, in a thread that cannot use their `asyncio.Runner`.
        if self._streams is not None or hasattr(self._model, "is_ready"):
            return self._event_loop.wait(result)
        return self._coroutines.run(result)

    @cached_property
    def _coroutines(self) -> asyncio.Runner:
        return self._exit_stack.enter_context(asyncio.Runner())

    def unload(self) -> None:
        """Call the model's `unload`, if it has one."""
        unload = getattr(self._model, "unload", None)
        needs_loop = asyncio.iscoroutinefunction(unload)
        if unload is not None and needs_loop:
            self._await(unload())
        self._event_loop.close()
        self._exit_stack.close()
        if unload is not None and not needs_loop:
            unload()

    def _find_class(self, config: ModelSpec) -> type:
        if self._model_class is None:
            file = config.default_model_filename or "model.py"
            context = self.context
            path = context.model_file([file], file)
            name = config.parameters.get("class") or DEFAULT_CLASS_NAME
            module = import_file(path, f"shmserve_model_{context.model_name}")
            model = getattr(module, name, None)
            if not isinstance(model, type):
                classes = {key: v for key, v in vars(module).items() if isinstance(v, type)}
                own_classes = [key for key, v in classes.items() if v.__module__ == module.__name__]
                found_text = f" (it has {', '.join(own_classes)})" if own_classes else ""
                hint = suggestion(name, classes) or found_text
                raise InvalidArgument(f"'{file}' does not define a class '{name}'{hint}")
            declaration.adopt_forward(model)
            self._model_class = model
            self._file = file
            # The file that `shmserve.serve` generates sets `__file__` to the user's file.
            is_generated = module.__file__ != str(path)
            folder = Path(str(module.__file__)).parent if is_generated else context.version_dir
            self._folder = folder.resolve()
            self._displayed_path = f"{context.model_name}/{context.version}/{file}"
            if model.__module__ != module.__name__:  # the file imports the class
                defining_file = getattr(sys.modules.get(model.__module__), "__file__", None)
                path = Path(defining_file or path)
                self._displayed_path, name = str(path), model.__name__
            with contextlib.suppress(OSError):  # a module may be in an archive
                self._positions = source_positions(path.read_bytes(), name)
        return self._model_class

    def _position_prefix(self, name: str) -> str:
        """Return `FILE:LINE:COLUMN: ` of an attribute, for the start of a message.

        FILE is MODEL/VERSION/FILE, or the path of the file from which the model's file imports the
        class.
        """
        candidate_names = (name, name.partition(".")[0], "")
        positions = (self._positions[key] for key in candidate_names if key in self._positions)
        position = next(positions, "")
        return f"{self._displayed_path}:" + (f"{position}: " if position else " ")


def _as_tensor(data: Any) -> Any:
    import_torch("a workspace")
    from shmserve.workers.memory.tensors import as_bytes

    return as_bytes(data)


def _check(signature: Signature, predict: declaration.PredictSignature) -> None:
    input_types = {parameter.name: parameter.type for parameter in predict.parameters}
    required_inputs = {parameter.name for parameter in predict.parameters if not parameter.optional}
    sides: tuple[tuple[str, dict[str, TensorSpec], dict[str, TensorType], set[str]], ...] = (
        ("input", signature.inputs, input_types, required_inputs),
        ("output", signature.outputs, predict.outputs, set()),
    )
    for side, specs, types, required_names in sides:
        for name, spec in specs.items():
            tensor_type = types.get(name)
            dims = spec.model_dims
            if (
                tensor_type is None
                or tensor_type.datatype != spec.datatype
                or not shapes_match(dims, tensor_type.dims)
            ):
                actual_type = "no"
                if tensor_type is not None:
                    actual_type = (
                        f"{TO_CONFIG[tensor_type.datatype]} {shape_text(tensor_type.dims)} for"
                    )
                raise InvalidArgument(
                    f"{side} '{name}' of model '{signature.name}' is {TO_CONFIG[spec.datatype]} "
                    f"{shape_text(dims)} in the configuration, but 'predict' has {actual_type} "
                    f"'{name}'"
                )
        missing_names = sorted(required_names - set(specs))
        if missing_names:
            raise InvalidArgument(
                f"'predict' of model '{signature.name}' has '{missing_names[0]}', which is not an "
                f"{side} of the configuration"
            )


_CANCELLED = Cancelled("request cancelled")

# Converts a value that `predict` has yielded to a response.
Respond = Callable[[Request, Any], Response]


class GeneratorStreams:
    """The running iterators, each returned by `predict` for one request.

    `respond(request, yielded)` returns the response for a yielded value. `event_loop` runs
    asynchronous iterators.
    """

    def __init__(
        self,
        predict: Callable[..., Any],
        respond: Respond,
        max_streams: int,
        event_loop: EventLoopThread,
    ) -> None:
        self._predict = predict
        self._respond = respond
        self._event_loop = event_loop
        self._free_slots = max_streams  # number of slots
        self._waiting_streams: deque[tuple[OutputStream, Mapping[str, Any]]] = deque()
        self._lock = threading.Lock()
        # One thread per stream that waits for credit, so that slow clients do not delay the
        # responses of other requests.
        self._sender_executor = ThreadPoolExecutor(max_streams, "send")

    def start(self, stream: OutputStream, inputs: Mapping[str, Any]) -> None:
        """Start a request, or queue it while `max_streams` requests run."""
        with self._lock:
            if not self._free_slots:
                self._waiting_streams.append((stream, inputs))
                return
            self._free_slots -= 1
        if not self._start_in_slot(stream, inputs):
            self._pass_on_slot()

    def _start_in_slot(self, stream: OutputStream, inputs: Mapping[str, Any]) -> bool:
        """Start a request that occupies one of the slots; return False if it has failed."""
        try:
            with inference_mode(), _cancellable(stream):
                iterator = self._predict(**inputs)
            if isinstance(iterator, AsyncIterator):
                relay_coroutine = self._relay_async(iterator, stream)
                future = self._event_loop.run(relay_coroutine, stream.fail_raised)
                stream.on_cancel(future.cancel)
                future.add_done_callback(lambda _: self._finish(stream))
            else:
                arguments = (iter(iterator), stream)
                threading.Thread(
                    target=self._run_generator, args=arguments, name="stream", daemon=True
                ).start()
        except BaseException as error:  # SystemExit, too: a model must not end its worker
            stream.fail_raised(error)
            return False
        return True

    def _pass_on_slot(self) -> None:
        """Pass the slot of an ended request to the next request in the queue."""
        while True:
            with self._lock:
                if not self._waiting_streams:
                    self._free_slots += 1
                    return
                stream, inputs = self._waiting_streams.popleft()
            if stream.is_cancelled():
                stream.fail(_CANCELLED)
            elif self._start_in_slot(stream, inputs):
                return

    def close(self) -> None:
        """End the sending threads."""
        self._sender_executor.shutdown(wait=False, cancel_futures=True)

    def _finish(self, stream: OutputStream) -> None:
        if stream.is_cancelled():
            stream.fail(_CANCELLED)  # `fail` is ignored if the stream has ended
        self._pass_on_slot()

    def _run_generator(self, iterator: Iterator[Any], stream: OutputStream) -> None:
        try:
            with inference_mode(), _cancellable(stream):
                self._relay(iterator, stream)
        except BaseException as error:  # SystemExit, too: a model must not end its worker
            stream.fail_raised(error)
        finally:
            self._finish(stream)

    def _relay(self, iterator: Iterator[Any], stream: OutputStream) -> None:
        try:
            for result in iterator:
                stream.send(self._respond(stream.request, result))
                if stream.is_cancelled():
                    return
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
        stream.send(final=True)

    async def _relay_async(self, iterator: AsyncIterator[Any], stream: OutputStream) -> None:
        loop = asyncio.get_running_loop()
        # Each stream has its own task, so the context variable is set for this stream only.
        with _cancellable(stream):
            try:
                async for result in iterator:
                    response = self._respond(stream.request, result)
                    if stream.may_send:
                        stream.send(response)
                    else:
                        await loop.run_in_executor(self._sender_executor, stream.send, response)
                    if stream.is_cancelled():
                        return
            finally:
                close = getattr(iterator, "aclose", None)
                if close is not None:
                    await close()
        stream.send(final=True)


@contextlib.contextmanager
def _cancellable(stream: OutputStream) -> Iterator[None]:
    token = IS_CANCELLED.set(stream.is_cancelled)
    try:
        yield
    finally:
        IS_CANCELLED.reset(token)
