"""Backend `vllm`: vLLM's asynchronous engine, in repositories of Triton's vllm_backend.

`model.json` in the version folder has the arguments of the engine. The engine batches requests
itself, so all requests are executed at once.

engine.py     the engine, and the calls that requests become
answers.py    from the engine's outputs to responses
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

from prometheus_client import REGISTRY

from shmserve.errors import Cancelled, Internal, InvalidArgument, Unavailable, Unsupported
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers.backends import Backend, ModelContext, Request, Response, ResponseStream
from shmserve.workers.backends.llm.prompts import given_inputs, merged_parameters
from shmserve.workers.backends.vllm.answers import FLAGS, OUTPUTS, VllmAnswer, output
from shmserve.workers.backends.vllm.engine import Arguments, VllmEngine
from shmserve.workers.batch.response_stream import MAX_CREDIT_WAIT_S
from shmserve.workers.user_code import EventLoopThread

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5  # seconds between checks of the engine and reports of its metrics
_CANCELLED = Cancelled("request cancelled")
_NOT_READ = (
    f"the client has read no response for {MAX_CREDIT_WAIT_S:g} s; no more responses are sent"
)
# The prefix of vLLM's own metrics.
_METRICS = "vllm:"
_SINGLE = ("num_input_tokens", "usage")  # outputs that belong to the whole request, not to a sample


_INPUTS = (
    *("text_input STRING 1", "input_ids INT32 -1", "messages STRING 1", "image STRING -1"),
    *("stream BOOL 1", "sampling_parameters STRING 1", "exclude_input_in_output BOOL 1"),
    *("embedding_request STRING 1", *(f"return_{name} BOOL 1" for name in FLAGS)),
)


def _tensor(name: str, kind: str, size: str) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{kind}", "dims": [int(size)]}


class VllmBackend(Backend):
    """An engine of vLLM, and the requests that it executes."""

    _engine: VllmEngine | None = None

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._loop = EventLoopThread()
        self._families: list[list[Any]] | None = None
        self._last: list[list[Any]] = []
        self._dead = False
        self._number = 0

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add the inputs and outputs of Triton's vllm_backend and those of the OpenAI API."""
        inputs = [{**_tensor(*each.split()), "optional": True} for each in _INPUTS]
        outputs = [
            _tensor(name, kind.replace("BYTES", "STRING"), "1" if name in _SINGLE else "-1")
            for name, kind in OUTPUTS.items()
            if name != "message" or self._arguments.parsed
        ]
        # The gateway refuses longer prompts.
        longest = {"max_model_len": {"string_value": str(self._arguments.max_model_len())}}
        parameters = {**config.get("parameters", {}), **longest}
        completed = {
            **config,
            "model_transaction_policy": {"decoupled": True},
            "parameters": parameters,
        }
        for field, defaults in (("input", inputs), ("output", outputs)):
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

    def execute_decoupled(self, streams: list[ResponseStream]) -> None:
        """Pass requests to the engine."""
        for stream in streams:
            try:
                inputs = given_inputs(stream.request, sys.maxsize)
                parameters, echoes = merged_parameters(stream.request, inputs)
            except Exception as error:
                stream.fail_raised(error)
                continue
            task = parameters.pop("task", None)
            serving = (
                self._serve(stream, inputs, parameters, echoes)
                if task is None
                else self._convert(stream, task, inputs, parameters)
            )
            future = self._loop.run(serving, partial(self._failed, stream))
            future.add_done_callback(partial(_end_cancelled, stream))
            stream.on_cancel(future.cancel)

    def metrics(self) -> list[list[Any]] | None:
        """Return vLLM's metrics if they have changed."""
        families, self._families = self._families, None
        return families

    def is_ready(self) -> bool:
        """Return whether the engine is running."""
        return self._engine is not None and not self._engine.errored

    def unload(self) -> None:
        """End the engine's processes."""
        if self._engine is not None:
            self._engine.shutdown()
        self._loop.close()

    @cached_property
    def _arguments(self) -> Arguments:
        return Arguments.read(self.context.version_dir, self.context.model_name)

    # --- in the event loop

    async def _serve(
        self,
        stream: ResponseStream,
        inputs: dict[str, Any],
        parameters: dict[str, Any],
        echoes: bool,
    ) -> None:
        assert self._engine is not None
        for name in ("image", "embedding_request"):
            if name in inputs:
                raise Unsupported(
                    f"{name}: it is not supported; backend 'vllm' serves requests for text only"
                )
        requested = {output.name for output in stream.request.schema.outputs}
        streams = bool(parameters.get("stream"))
        call = await self._engine.call(inputs, parameters, echoes, openai="usage" in requested)
        flags = [name for name in FLAGS if inputs.get(f"return_{name}")]
        answer = VllmAnswer(call, requested, flags, streams)
        self._number += 1
        work, credit = stream.request.work, asyncio.Event()
        stream.on_credit(partial(asyncio.get_running_loop().call_soon_threadsafe, credit.set))
        async for result in self._engine.generate(call, f"shmserve-{self._number}", work.priority):
            responses = answer.responses(result)
            for count, outputs in enumerate(responses, 1):
                while not stream.may_send:
                    # vLLM merges further outputs of the request until they are read.
                    credit.clear()
                    if not stream.may_send and not await _arrives(credit):
                        raise Unavailable(_NOT_READ)
                stream.send(Response(outputs), result.finished and count == len(responses))
        stream.send(final=True)  # this has no effect after a final response

    async def _convert(
        self,
        stream: ResponseStream,
        task: str,
        inputs: dict[str, Any],
        parameters: dict[str, Any],
    ) -> None:
        """Send the tokens of a prompt, or the text of tokens."""
        assert self._engine is not None
        data = await self._engine.convert(task, inputs, parameters)
        names = {output.name for output in stream.request.schema.outputs} or data
        stream.send(Response([output(name, data[name]) for name in data if name in names]), True)

    async def _watch(self) -> None:
        """Report metrics, and detect the end of the engine."""
        assert self._engine is not None
        while not self._engine.errored:
            current = families(REGISTRY.collect(), self.context.version)
            if current != self._last:
                self._families = self._last = current
                self.context.control.wake()  # wakes the main loop, which reports the metrics
            await asyncio.sleep(_PERIOD_S)
        raise Internal("vLLM's engine has ended")

    def _failed(self, stream: ResponseStream, error: BaseException) -> None:
        assert self._engine is not None
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


async def _arrives(credit: asyncio.Event) -> bool:
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(credit.wait(), MAX_CREDIT_WAIT_S)
    return False


def _end_cancelled(stream: ResponseStream, future: Future[None]) -> None:
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
    by_name: dict[str, list[Any]] = {}
    rows: dict[tuple[str, Any], list[Any]] = {}
    for metric in collected:
        kind = metric.type.upper()
        if not metric.name.startswith(_METRICS) or kind not in ("COUNTER", "GAUGE", "HISTOGRAM"):
            continue
        for name, labels, value, *_ in metric.samples:
            family = name if kind == "COUNTER" else metric.name
            if name.endswith("_created"):
                continue
            bound = labels.get("le", "")
            named = {key: each for key, each in labels.items() if key != "le"}
            key = tuple(sorted({**named, "version": version}.items()))
            if (family, key) not in rows:
                row = rows[family, key] = [key, [0.0] if kind == "HISTOGRAM" else [], []]
                about = [family, metric.documentation, kind, []]
                by_name.setdefault(family, about)[3].append(row)
            _, numbers, bounds = rows[family, key]
            if kind != "HISTOGRAM":
                numbers += [value] if kind == "COUNTER" else [0, 0, value]
            elif name.endswith("_sum"):
                numbers[0] = value
            elif bound:
                numbers.append(value - sum(numbers[1:]))  # Prometheus's buckets are cumulative
                bounds += [] if bound == "+Inf" else [float(bound)]
    return list(by_name.values())
