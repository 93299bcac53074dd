"""Backend `vllm`: vLLM's asynchronous engine, in repositories of Triton's vllm_backend.

`model.json` in the version folder has the arguments of the engine. The engine batches requests
itself, so all requests are executed at once.

engine.py     the engine, and the calls that requests become
answers.py    from the engine's outputs to responses
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
from shmserve.workers.backends import Backend, ModelContext, OutputStream, Request, Response
from shmserve.workers.backends.llm import INPUTS, OUTPUTS, tensor
from shmserve.workers.backends.llm.prompts import given_inputs, merged_parameters
from shmserve.workers.backends.vllm.answers import FLAGS, VllmAnswer
from shmserve.workers.backends.vllm.engine import Arguments, VllmEngine
from shmserve.workers.batch.response_stream import MAX_CREDIT_WAIT_S, unread_responses
from shmserve.workers.user_code import EventLoopThread

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5  # seconds between checks of the engine and reports of its metrics
_CANCELLED = Cancelled("request cancelled")
# The prefix of vLLM's own metrics.
_METRICS = "vllm:"
_UNSUPPORTED = ("image", "embedding_request")  # inputs of Triton's vllm_backend

# The inputs and outputs of Triton's vllm_backend and those of the OpenAI API.
_INPUTS = [
    *INPUTS,
    tensor("image", "STRING", -1, optional=True),
    tensor("embedding_request", "STRING", 1, optional=True),
    *(tensor(f"return_{name}", "BOOL", 1, optional=True) for name in FLAGS),
]
_OUTPUTS = [
    *OUTPUTS,
    tensor("cumulative_logprob", "FP32", -1),
    tensor("num_input_tokens", "UINT32", 1),
    tensor("num_output_tokens", "UINT32", -1),
]


class VllmBackend(Backend):
    """An engine of vLLM, and the requests that it executes."""

    _engine: VllmEngine  # set by `load`

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._loop = EventLoopThread()
        self._families: list[list[Any]] | None = None
        self._dead = False
        self._numbers = itertools.count(1)

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add the missing inputs and outputs, and the maximum length of a sequence."""
        # The gateway refuses longer prompts.
        longest = {"max_model_len": {"string_value": str(self._arguments.max_model_len())}}
        completed = {
            **config,
            "model_transaction_policy": {"decoupled": True},
            "parameters": {**config.get("parameters", {}), **longest},
        }
        parsed = self._arguments.parsed
        outputs = [each for each in _OUTPUTS if parsed or each["name"] != "message"]
        for field, defaults in (("input", _INPUTS), ("output", outputs)):
            tensors = config.get(field) or []
            names = {each["name"] for each in tensors}
            completed[field] = tensors + [each for each in defaults if each["name"] not in names]
        return completed

    def load(self, config: ModelSpec) -> None:
        """Start the engine, which loads the model.

        Raises:
            InvalidArgument: The configuration or model.json is wrong. Errors of vLLM are passed on.
        """
        if config.max_batch_size:
            size = config.max_batch_size
            raise InvalidArgument(f"max_batch_size: {size} is not 0: vLLM forms the batches")
        if not config.decoupled:
            raise InvalidArgument("model_transaction_policy: backend 'vllm' is decoupled")
        devices = devices_of(self.context, config, self._arguments.engine)
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        self._engine = self._loop.wait(VllmEngine.start(self._arguments))
        self.checks_ready = True
        self._loop.run(self._watch(), self._died)

    def execute(self, requests: list[Request]) -> list[Response]:
        """Raise Unsupported: requests are executed as streams."""
        raise Unsupported("a vLLM model is decoupled")

    def execute_decoupled(self, streams: list[OutputStream]) -> None:
        """Pass requests to the engine."""
        for stream in streams:
            future = self._loop.run(self._serve(stream), partial(self._failed, stream))
            future.add_done_callback(partial(_end_cancelled, stream))
            stream.on_cancel(future.cancel)

    def metrics(self) -> list[list[Any]] | None:
        """Return vLLM's metrics if they have changed."""
        families, self._families = self._families, None
        return families

    def is_ready(self) -> bool:
        """Return whether the engine is running."""
        return not self._engine.errored

    def unload(self) -> None:
        """End the engine's processes."""
        if self.checks_ready:  # the engine has started
            self._engine.shutdown()
        self._loop.close()

    @cached_property
    def _arguments(self) -> Arguments:
        return Arguments.read(self.context.version_dir, self.context.model_name)

    # --- in the event loop

    async def _serve(self, stream: OutputStream) -> None:
        """Send the responses to a request."""
        request = stream.request
        inputs = given_inputs(request, sys.maxsize)
        parameters, echoes = merged_parameters(request, inputs)
        requested = {output.name for output in request.schema.outputs}
        task = parameters.pop("task", None)
        if task is not None:
            outputs = await self._engine.convert(task, inputs, parameters)
            shown = [each for each in outputs if not requested or each.name in requested]
            stream.send(Response(shown), final=True)
            return
        for name in _UNSUPPORTED:
            if name in inputs:
                raise Unsupported(
                    f"{name}: it is not supported; backend 'vllm' serves requests for text only"
                )
        streams = bool(parameters.get("stream"))
        call = await self._engine.call(inputs, parameters, echoes, openai="usage" in requested)
        flags = [name for name in FLAGS if inputs.get(f"return_{name}")]
        answer = VllmAnswer(call, requested, flags, streams)
        credit = asyncio.Event()
        stream.on_credit(partial(asyncio.get_running_loop().call_soon_threadsafe, credit.set))
        number = f"shmserve-{next(self._numbers)}"
        async for result in self._engine.generate(call, number, request.work.priority):
            responses = answer.responses(result)
            for count, outputs in enumerate(responses, 1):
                if not stream.may_send:
                    # vLLM merges further outputs of the request until they are read.
                    await _wait_for_credit(stream, credit)
                stream.send(Response(outputs), result.finished and count == len(responses))
        stream.send(final=True)  # this has no effect after a final response

    async def _watch(self) -> None:
        """Report metrics, and detect the end of the engine."""
        reported: list[list[Any]] = []
        while not self._engine.errored:
            current = families(REGISTRY.collect(), self.context.version)
            if current != reported:
                self._families = reported = current
                self.context.control.wake()  # wakes the main loop, which reports the metrics
            await asyncio.sleep(_PERIOD_S)
        raise Internal("vLLM's engine has ended")

    def _failed(self, stream: OutputStream, error: BaseException) -> None:
        if self._engine.errored:
            self._died(error)
        else:
            stream.fail_raised(self._engine.refusal(error) or error)

    def _died(self, error: BaseException) -> None:
        """End the process, once, by raising the engine's error in the main loop."""
        if not self._dead:
            self._dead = True
            name = self.context.model_name
            logger.error("model '%s': vLLM's engine has ended", name, exc_info=error)
            self.context.control.inbox.append(Internal(str(error)))
            self.context.control.wake(always=True)


async def _wait_for_credit(stream: OutputStream, credit: asyncio.Event) -> None:
    """Wait until a stream may send; `credit` is set when the client has granted credit."""
    try:
        async with asyncio.timeout(MAX_CREDIT_WAIT_S):
            while not stream.may_send:
                await credit.wait()
                credit.clear()
    except TimeoutError:
        raise unread_responses() from None


def _end_cancelled(stream: OutputStream, future: Future[None]) -> None:
    if future.cancelled():
        stream.fail(_CANCELLED)  # ignored if the stream has ended


def devices_of(context: ModelContext, config: ModelSpec, arguments: Mapping[str, Any]) -> str:
    """Return the numbers of the GPUs of this instance, or "" for those that vLLM selects.

    Raises:
        InvalidArgument: An instance on one GPU has an engine on several.
    """
    if context.kind != "GPU":
        return config.parameters.get("GPU_DEVICE_IDS", "").replace(" ", "")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if arguments.get(name, 1) != 1:
            raise InvalidArgument(f"instance_group: with {name}, the kind must be KIND_MODEL")
    return str(context.device_id)


def families(collected: Iterable[Any], version: str) -> list[list[Any]]:
    """Return vLLM's metrics among those of Prometheus in the form of `Backend.metrics`.

    A label with the version distinguishes the versions of a model. Gauges of several instances are
    added up.
    """
    return [
        _family(metric, metric.type.upper(), version)
        for metric in collected
        if metric.name.startswith(_METRICS) and metric.type in ("counter", "gauge", "histogram")
    ]


def _family(metric: Any, kind: str, version: str) -> list[Any]:
    rows: dict[Any, list[Any]] = {}
    for name, labels, value, *_ in metric.samples:
        if name.endswith("_created"):
            continue
        bound = labels.get("le")
        named = {**labels, "version": version}
        named.pop("le", None)
        key = tuple(sorted(named.items()))
        _, numbers, bounds = rows.setdefault(key, [key, [0.0] * (kind == "HISTOGRAM"), []])
        if kind != "HISTOGRAM":
            numbers += [value] if kind == "COUNTER" else [0, 0, value]
        elif name.endswith("_sum"):
            numbers[0] = value
        elif bound is not None:
            numbers.append(value - sum(numbers[1:]))  # Prometheus's buckets are cumulative
            bounds += [] if bound == "+Inf" else [float(bound)]
    suffix = "_total" if kind == "COUNTER" else ""
    return [metric.name + suffix, metric.documentation, kind, list(rows.values())]
