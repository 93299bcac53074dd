"""Backend `vllm`: vLLM's asynchronous engine, in repositories of Triton's vllm_backend.

`model.json` in the version folder has the arguments of the engine. The engine batches requests
itself, so all requests are passed to it immediately.

engine.py     the engine, and the conversion of requests to its calls
answers.py    the conversion of the engine's outputs to responses
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

from prometheus_client import REGISTRY

from shmserve.errors import Cancelled, Internal, InvalidArgument, Unsupported
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers.backends import Backend, ModelContext, Output, OutputStream, Request, Response
from shmserve.workers.backends.llm import INPUTS, OUTPUTS, complete, refuse_batches, tensor_config
from shmserve.workers.backends.llm.prompts import merged_parameters, read_inputs
from shmserve.workers.backends.vllm.answers import FLAGS, VllmAnswer
from shmserve.workers.backends.vllm.engine import Arguments, VllmEngine
from shmserve.workers.batch.response_stream import MAX_CREDIT_WAIT_S, WarmupStream, unread_responses
from shmserve.workers.user_code import EventLoopThread

logger = logging.getLogger(__name__)

_CHECK_PERIOD_S = 0.5  # seconds between checks of the engine and reports of its metrics

# The inputs and outputs of Triton's vllm_backend and of the OpenAI API.
_INPUTS = [
    *INPUTS,
    tensor_config("image", "STRING", -1, optional=True),
    tensor_config("embedding_request", "STRING", 1, optional=True),
    *(tensor_config(f"return_{name}", "BOOL", 1, optional=True) for name in FLAGS),
]
_OUTPUTS = [
    *OUTPUTS,
    tensor_config("cumulative_logprob", "FP32", -1),
    tensor_config("num_input_tokens", "UINT32", 1),
    tensor_config("num_output_tokens", "UINT32", -1),
]


class VllmBackend(Backend):
    """The backend of a model that vLLM executes."""

    _engine: VllmEngine  # set by `load`

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._loop = EventLoopThread()
        self._changed_metrics: list[list[Any]] | None = None
        self._request_numbers = itertools.count(1)

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add the missing inputs and outputs, and parameters that the gateway reads."""
        parses_messages = self._arguments.parses_messages
        outputs = [tensor for tensor in _OUTPUTS if parses_messages or tensor["name"] != "message"]
        # The gateway rejects longer prompts, and serves each adapter as a model of OpenAI's API.
        adapters = "\n".join(self._arguments.adapters)
        parameters = {"max_model_len": str(self._arguments.max_model_len()), "adapters": adapters}
        return complete(config, _INPUTS, outputs, parameters)

    def load(self, config: ModelSpec) -> None:
        """Start the engine, which loads the model.

        Raises:
            InvalidArgument: The configuration or model.json is wrong. Errors of vLLM are passed on.
        """
        refuse_batches(config, "vLLM forms the batches")
        if not config.decoupled:
            raise InvalidArgument("model_transaction_policy: backend 'vllm' needs decoupled: true")
        if devices := devices_of(self.context, config, self._arguments.engine):
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        self._engine = self._loop.wait(VllmEngine.start(self._arguments))
        self.checks_ready = True
        self._loop.run(self._watch(), self._end_process)

    def execute(self, requests: list[Request]) -> list[Response]:
        """Raise Unsupported: requests are executed as streams."""
        raise Unsupported("backend 'vllm' serves decoupled models only")

    def execute_decoupled(self, streams: list[OutputStream]) -> None:
        """Pass requests to the engine."""
        for stream in streams:
            future = self._loop.run(self._respond(stream), partial(self._fail, stream))
            future.add_done_callback(partial(_end_cancelled, stream))
            stream.on_cancel(future.cancel)

    def metrics(self) -> list[list[Any]] | None:
        """Return vLLM's metrics if they have changed, or None."""
        metrics, self._changed_metrics = self._changed_metrics, None
        return metrics

    def is_ready(self) -> bool:
        """Return whether the engine is running."""
        return not self._engine.client.errored

    def unload(self) -> None:
        """End the engine's processes."""
        if self.checks_ready:  # the engine has started
            self._engine.client.shutdown()
        self._loop.close()

    @cached_property
    def _arguments(self) -> Arguments:
        return Arguments.read(self.context.version_dir, self.context.model_name)

    # --- in the event loop

    async def _respond(self, stream: OutputStream) -> None:
        """Generate and send the responses to a request."""
        request = stream.request
        for name in request.inputs.keys() & {"image", "embedding_request"}:
            raise Unsupported(
                f"{name}: not supported; backend 'vllm' serves requests for text only"
            )
        inputs = read_inputs(request, sys.maxsize, sys.maxsize)
        parameters, echoes = merged_parameters(request, inputs)
        requested_names = {output.name for output in request.schema.outputs}
        if (task := parameters.pop("task", None)) is not None:
            values = await self._engine.convert(task, inputs, parameters)
            stream.send(Response(Output.select(values, requested_names or values)), final=True)
            return
        call = await self._engine.make_call(inputs, parameters, echoes, "usage" in requested_names)
        call.options["priority"] = call.request.priority or request.work.priority
        requested_flags = {name for name in FLAGS if inputs.get(f"return_{name}")}
        answer = VllmAnswer(call, requested_names, requested_flags)
        credit = asyncio.Event()
        stream.on_credit(partial(asyncio.get_running_loop().call_soon_threadsafe, credit.set))
        request_id = f"shmserve-{next(self._request_numbers)}"
        generate = self._engine.client.generate
        # Closing this iterator aborts the request.
        async for result in generate(call.prompt, call.parameters, request_id, **call.options):
            for outputs, is_last in answer.responses(result):
                if not stream.may_send:
                    # Meanwhile vLLM merges further outputs of the request.
                    await _wait_for_credit(stream, credit)
                stream.send(Response(outputs), is_last)
        stream.send(final=True)  # this has no effect after a final response

    async def _watch(self) -> None:
        """Report changed metrics until the engine ends, then raise Internal."""
        last_metrics: list[list[Any]] = []
        while not self._engine.client.errored:
            current_metrics = convert_metrics(REGISTRY.collect(), self.context.version)
            if current_metrics != last_metrics:
                self._changed_metrics = last_metrics = current_metrics
                self.context.control.wake()  # wakes the main loop, which reports the metrics
            await asyncio.sleep(_CHECK_PERIOD_S)
        raise Internal("vLLM's engine has failed; see the server's log")

    def _fail(self, stream: OutputStream, error: BaseException) -> None:
        # After a failure of the engine the process ends, which fails all requests but warm-ups.
        if not self._engine.client.errored or isinstance(stream, WarmupStream):
            stream.fail_raised(self._engine.client_error(error, stream.request.inputs) or error)

    def _end_process(self, error: BaseException) -> None:
        """End the process by raising an error in the main loop."""
        logger.error("model '%s': vLLM failed: %s", self.context.model_name, error, exc_info=error)
        self.context.control.inbox.append(Internal(str(error)))
        self.context.control.wake(includes_loop_thread=True)


async def _wait_for_credit(stream: OutputStream, credit_event: asyncio.Event) -> None:
    """Wait until a stream may send; `credit_event` is set when the client has granted credit."""
    try:
        async with asyncio.timeout(MAX_CREDIT_WAIT_S):
            while not stream.may_send:
                await credit_event.wait()
                credit_event.clear()
    except TimeoutError:
        raise unread_responses() from None


def _end_cancelled(stream: OutputStream, future: Future[None]) -> None:
    if future.cancelled():
        stream.fail(Cancelled("request cancelled"))  # ignored if the stream has ended


def devices_of(context: ModelContext, config: ModelSpec, arguments: Mapping[str, Any]) -> str:
    """Return the names of this instance's GPUs for CUDA_VISIBLE_DEVICES; "": vLLM selects them.

    A GPU's number is its index in the server's CUDA_VISIBLE_DEVICES, if that is set.

    Raises:
        InvalidArgument: The instance has one GPU, but its engine requires several.
    """
    gpu_numbers = config.parameters.get("GPU_DEVICE_IDS", "").replace(" ", "").split(",")
    if context.kind == "GPU":
        gpu_numbers = [str(context.device_id)]
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if arguments.get(name, 1) != 1:
                raise InvalidArgument(f"instance_group: with {name}, the kind must be KIND_MODEL")
    visible_names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names_by_number = {str(number): name for number, name in enumerate(visible_names) if name}
    return ",".join(names_by_number.get(number, number) for number in gpu_numbers)


def convert_metrics(metrics: Iterable[Any], version: str) -> list[list[Any]]:
    """Convert vLLM's metrics from a Prometheus registry to the form of `Backend.metrics`.

    A label with the version distinguishes the versions of a model. Gauges of several instances are
    added up.
    """
    suffixes = {"counter": "_total", "gauge": "", "histogram": ""}
    return [
        [
            *(metric.name + suffixes[metric.type], metric.documentation, metric.type.upper()),
            _convert_samples(metric, version),
        ]
        for metric in metrics
        if metric.name.startswith("vllm:") and metric.type in suffixes
    ]


def _convert_samples(metric: Any, version: str) -> list[Any]:
    is_histogram = metric.type == "histogram"
    rows_by_labels: dict[Any, list[Any]] = {}
    for name, labels, value, *_ in metric.samples:
        label_values = {**labels, "version": version}
        bucket_bound = label_values.pop("le", None)
        key = tuple(sorted(label_values.items()))
        _, values, bounds = rows_by_labels.setdefault(key, [key, [0.0] * is_histogram, []])
        if bucket_bound is not None:
            values.append(value - sum(values[1:]))  # Prometheus's buckets are cumulative
            bounds += [] if bucket_bound == "+Inf" else [float(bucket_bound)]
        elif not (is_histogram or name.endswith("_created")):
            values += [0, 0, value] if metric.type == "gauge" else [value]
        elif name.endswith("_sum"):
            values[0] = value
    return list(rows_by_labels.values())
