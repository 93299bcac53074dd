"""Backend `vllm`: vLLM's asynchronous engine, in repositories of Triton's vllm_backend.

`model.json` in the version folder has the arguments of the engine. The engine batches requests
itself, so all requests are executed at once.

engine.py     the engine, and the calls that requests become
answers.py    from the engine's outputs to responses
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from prometheus_client import REGISTRY

from shmserve.errors import Cancelled, InvalidArgument, Unavailable, Unsupported, clip
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers.backends import (
    Backend,
    ModelContext,
    Request,
    Response,
    ResponseStream,
)
from shmserve.workers.backends.vllm.answers import FLAGS, Answer
from shmserve.workers.backends.vllm.engine import Arguments, VllmEngine
from shmserve.workers.batch.response_stream import MOST_WAIT_S
from shmserve.workers.user_code import EventLoopThread

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5  # between checks of the engine and reports of its metrics
_CANCELLED = Cancelled("request cancelled")
# vLLM's own names, which begin in this way.
_METRICS = "vllm:"


def _tensor(name: str, data_type: str, size: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": [size], **more}


_INPUTS = [
    _tensor("text_input", "STRING", optional=True),
    _tensor("input_ids", "INT32", -1, optional=True),
    _tensor("messages", "STRING", optional=True),
    _tensor("image", "STRING", -1, optional=True),
    _tensor("stream", "BOOL", optional=True),
    _tensor("sampling_parameters", "STRING", optional=True),
    _tensor("exclude_input_in_output", "BOOL", optional=True),
    *(_tensor(f"return_{name}", "BOOL", optional=True) for name in FLAGS),
    _tensor("embedding_request", "STRING", optional=True),
]
_OUTPUTS = [
    _tensor("text_output", "STRING", -1),
    _tensor("index", "INT32", -1),
    _tensor("token_ids", "INT32", -1),
    _tensor("prompt_token_ids", "INT32", -1),
    _tensor("finish_reason", "STRING", -1),
    _tensor("cumulative_logprob", "FP32", -1),
    _tensor("logprobs", "STRING", -1),
    _tensor("num_input_tokens", "UINT32"),
    _tensor("num_output_tokens", "UINT32", -1),
    _tensor("usage", "STRING"),
]
_MESSAGE = _tensor("message", "STRING", -1)


class EngineDied(Exception):
    """An error of an engine that has ended. Its worker ends, too, and is restarted."""


class VllmBackend(Backend):
    """An engine of vLLM, and the requests that it executes."""

    _engine: VllmEngine | None = None

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._loop = EventLoopThread()
        self._families: list[list[Any]] | None = None
        self._samples: list[Any] = []
        self._arguments: Arguments | None = None
        self._dead = False
        self._number = 0

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add the inputs and outputs of Triton's vllm_backend and those of the OpenAI doors."""
        arguments = self._read()
        completed = {**config, "model_transaction_policy": {"decoupled": True}}
        outputs = [*_OUTPUTS, _MESSAGE] if arguments.parsed else _OUTPUTS
        for field, known in (("input", _INPUTS), ("output", outputs)):
            given = config.get(field) or []
            names = {each["name"] for each in given}
            completed[field] = given + [each for each in known if each["name"] not in names]
        return completed

    def load(self, config: ModelSpec) -> None:
        """Start the engine, which loads the model.

        Raises:
            InvalidArgument: The configuration or model.json is wrong. Errors of vLLM are passed on.
        """
        if config.max_batch_size:
            found = config.max_batch_size
            raise InvalidArgument(f"max_batch_size: {found} is not 0: vLLM forms the batches")
        if not config.decoupled:
            raise InvalidArgument("model_transaction_policy: backend 'vllm' is decoupled")
        arguments = self._read()
        devices = devices_of(self.context, config, arguments.device_count)
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        self._engine = self._loop.wait(VllmEngine.start(arguments))
        self.checks_ready = True
        self._loop.run(self._watch(), self._died)

    def execute(self, requests: list[Request]) -> list[Response]:
        """Raise Unsupported: requests are executed as streams."""
        raise Unsupported("a model of vLLM is decoupled")

    def execute_decoupled(self, streams: list[ResponseStream]) -> None:
        """Pass requests to the engine."""
        for stream in streams:
            try:
                given = _given(stream.request)
            except Exception as error:
                stream.fail_raised(error)
                continue
            future = self._loop.run(self._serve(stream, given), partial(self._failed, stream))
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

    def _read(self) -> Arguments:
        if self._arguments is None:
            context = self.context
            self._arguments = Arguments.read(context.version_dir, context.model_name)
        return self._arguments

    # --- in the event loop

    async def _serve(self, stream: ResponseStream, given: dict[str, Any]) -> None:
        assert self._engine is not None
        wanted = {output.name for output in stream.request.schema.outputs}
        call = await self._engine.call(given, "usage" in wanted, "message" in wanted)
        work = stream.request.work
        flags = [name for name in FLAGS if given.get(f"return_{name}")]
        answer = Answer(call, wanted, flags, bool(given["parameters"].get("stream")))
        self._number += 1
        credit = asyncio.Event()
        loop = asyncio.get_running_loop()
        stream.on_credit(partial(loop.call_soon_threadsafe, credit.set))
        async for found in self._engine.generate(call, f"shmserve-{self._number}", work.priority):
            while not stream.may_send:
                # Further outputs of the request are merged by vLLM until they are read.
                credit.clear()
                if not stream.may_send:
                    await _wait(credit)
            stream.send(Response(answer.outputs(found)), found.finished)
        stream.send(final=True)  # has no effect after a final response

    async def _watch(self) -> None:
        """Report metrics, and detect the end of the engine."""
        assert self._engine is not None
        while not self._engine.errored:
            samples = _samples()
            if samples != self._samples:
                self._samples = samples
                self._families = families(samples, self.context.version)
                self.metrics_changed(True)
            await asyncio.sleep(_PERIOD_S)
        raise EngineDied("vLLM's engine has ended")

    def _failed(self, stream: ResponseStream, error: BaseException) -> None:
        assert self._engine is not None
        if self._engine.errored:
            self._died(error)
        else:
            stream.fail_raised(self._engine.refusal(error) or error)

    def _died(self, error: BaseException) -> None:
        """End the process by an exception of its main loop, once."""
        if not self._dead:
            self._dead = True
            logger.error("model '%s': vLLM's engine has ended", self.context.model_name)
            self.context.control.inbox.append(EngineDied(str(error)))
            self.context.control.wake(always=True)


async def _wait(credit: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(credit.wait(), MOST_WAIT_S)
    except TimeoutError:
        why = f"the client has taken no response for {MOST_WAIT_S:g} s: no more are sent"
        raise Unavailable(why) from None


def _end_cancelled(stream: ResponseStream, future: Future[None]) -> None:
    if future.cancelled():
        stream.fail(_CANCELLED)  # ignored if the stream has ended


def _given(request: Request) -> dict[str, Any]:
    """Return the inputs of a request, which do not refer to its memory, and its "parameters".

    Raises:
        InvalidArgument: An input is invalid.
        Unsupported: The request is not one for text.
    """
    found: dict[str, Any] = {}
    for name, tensor in request.inputs.items():
        values = tensor.numpy().ravel().tolist()
        if name in ("image", "embedding_request"):
            raise Unsupported(f"{name}: it is not supported, only requests for text are")
        if name == "input_ids":
            found[name] = values
        elif tensor.datatype == "BYTES":
            try:
                found[name] = values[0].decode()
            except UnicodeDecodeError:
                raise InvalidArgument(f"{name}: {clip(repr(values[0]))} is not UTF-8") from None
        else:
            found[name] = values[0]
    parameters = {**request.schema.parameters}
    text = found.get("sampling_parameters") or parameters.pop("sampling_parameters", None)
    try:
        parameters |= json.loads(text or "{}")
    except (TypeError, ValueError):
        problem = f"sampling_parameters: {clip(repr(text))} is not a JSON object"
        raise InvalidArgument(problem) from None
    if "stream" in found:
        parameters["stream"] = found["stream"]
    excluded = parameters.pop("exclude_input_in_output", None)
    if excluded is not None:
        found.setdefault("exclude_input_in_output", excluded)
    return {**found, "parameters": parameters}


def devices_of(context: ModelContext, config: ModelSpec, count: int) -> str:
    """Return the numbers of the GPUs of this instance, or "" for those that vLLM selects.

    Raises:
        InvalidArgument: An instance on one GPU has an engine on several.
    """
    if context.kind == "GPU":
        if count > 1:
            raise InvalidArgument(
                "instance_group: KIND_GPU is for engines on one GPU; use KIND_MODEL for "
                f"{count} of them"
            )
        return str(context.device_id)
    return config.parameters.get("GPU_DEVICE_IDS", "").replace(" ", "")


# --- metrics


def _samples() -> list[Any]:
    """Return the samples of vLLM's metrics in this process."""
    return [
        (found.name, found.documentation, found.type.upper(), each.name, each.labels, each.value)
        for found in REGISTRY.collect()
        if found.name.startswith(_METRICS)
        for each in found.samples
        if not each.name.endswith("_created")
    ]


def families(samples: Iterable[Any], version: str) -> list[list[Any]]:
    """Return samples of Prometheus in the form of `Backend.metrics`.

    A label with the version distinguishes the versions of a model.
    """
    now_ns = time.monotonic_ns()
    made: dict[str, list[Any]] = {}
    rows: dict[tuple[str, Any], list[Any]] = {}
    for name, text, kind, sample, labels, value in samples:
        if kind not in ("COUNTER", "GAUGE", "HISTOGRAM"):
            continue
        name = sample if kind == "COUNTER" else name
        given = {key: each for key, each in labels.items() if key != "le"}
        key = tuple(sorted({**given, "version": version}.items()))
        row = rows.get((name, key))
        if row is None:
            row = rows[name, key] = [key, [0.0] if kind == "HISTOGRAM" else [], []]
            made.setdefault(name, [name, text, kind, []])[3].append(row)
        _, numbers, bounds = row
        if kind == "HISTOGRAM":
            if sample.endswith("_sum"):
                numbers[0] = value
            elif sample.endswith("_bucket"):
                numbers.append(value - sum(numbers[1:]))  # Prometheus's are cumulative
                if labels["le"] != "+Inf":
                    bounds.append(float(labels["le"]))
        else:
            numbers += [value] if kind == "COUNTER" else [value, now_ns, 0]
    return list(made.values())
