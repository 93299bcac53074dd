"""Backend `llm`: text generation by Llama, Mistral, Qwen2 and Qwen3 from Hugging Face folders.

The version folder contains the model. `engine.yaml`, in the folder of config.pbtxt, contains the
settings of the engine. The scheduler plans steps (`shmserve.ipc.messages.generation`), and the
worker executes them.

engine_file.py                          `engine.yaml`
prompts.py chat_template.py             from requests to tokens
worker_engine.py                        execution of steps, with sequences and draft tokens
parameters.py sampler.py                from logits to tokens
texts.py                                the text thread: calls the files above and below
token_texts.py message_parsers.py       from tokens to responses
grammars.py                             matchers of grammars
tools.py tool_formats.py                grammars and formats of tool calls
model/                                  the checkpoint, the decoder, its attention and KV cache
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from shmserve.errors import InvalidArgument, Unsupported
from shmserve.ipc.engine_settings import ENGINE_PARAMETER, EngineSettings
from shmserve.ipc.messages.generation import Choose, Prepare, Step, Stepped
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers.backends import Backend, OutputStream, Request, Response
from shmserve.workers.backends.llm import engine_file
from shmserve.workers.backends.llm.engine_file import max_instances_per_device, with_default_sizes
from shmserve.workers.backends.llm.model.attention import KvCache
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.transformer import Passes, Transformer
from shmserve.workers.backends.llm.parameters import parse
from shmserve.workers.backends.llm.prompts import read_inputs
from shmserve.workers.backends.llm.texts import TextThread
from shmserve.workers.backends.llm.tool_formats import detect_parsers
from shmserve.workers.backends.llm.worker_engine import (
    DraftModel,
    Propose,
    WorkerEngine,
    propose_ngrams,
)
from shmserve.workers.batch.backend_request import Unpacker
from shmserve.workers.batch.response_stream import ResponseWriter
from shmserve.workers.context import client_error
from shmserve.workers.links import HandlerTable, WorkerRequest


def tensor_config(name: str, data_type: str, size: int, **options: Any) -> dict[str, Any]:
    """Return an entry of `input` or `output` of a configuration, with one dimension of `size`."""
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": [size], **options}


_Json = dict[str, Any]
INPUTS = [
    tensor_config("text_input", "STRING", 1, optional=True),
    tensor_config("input_ids", "INT32", -1, optional=True),
    tensor_config("messages", "STRING", 1, optional=True),
    tensor_config("sampling_parameters", "STRING", 1, optional=True),
    tensor_config("stream", "BOOL", 1, optional=True),
    tensor_config("exclude_input_in_output", "BOOL", 1, optional=True),
]
OUTPUTS = [
    tensor_config("text_output", "STRING", -1),
    tensor_config("index", "INT32", -1),
    tensor_config("token_ids", "INT32", -1),
    tensor_config("prompt_token_ids", "INT32", -1),
    tensor_config("finish_reason", "STRING", -1),
    tensor_config("stop_reason", "STRING", -1),
    tensor_config("logprobs", "STRING", -1),
    tensor_config("message", "STRING", -1),
    tensor_config("usage", "STRING", 1),
]


def complete(
    config: _Json, inputs: list[_Json], outputs: list[_Json], parameters: Mapping[str, str]
) -> _Json:
    """Return the configuration of a generative model with its missing inputs and outputs.

    Parameters whose text is empty are not added.
    """
    added_parameters = {name: {"string_value": text} for name, text in parameters.items() if text}
    completed_config = {
        **config,
        "model_transaction_policy": {"decoupled": True},
        "parameters": {**config.get("parameters", {}), **added_parameters},
    }
    for field, tensors in (("input", inputs), ("output", outputs)):
        written_tensors = {entry["name"]: entry for entry in config.get(field) or ()}
        default_tensors = {entry["name"]: entry for entry in tensors}
        completed_config[field] = list((default_tensors | written_tensors).values())
    return completed_config


def refuse_batches(config: ModelSpec, reason: str) -> None:
    """Raise InvalidArgument with `reason` if `max_batch_size` is not 0."""
    if config.max_batch_size:
        raise InvalidArgument(f"max_batch_size: {config.max_batch_size} is not 0: {reason}")


class LlmBackend(Backend):
    """The backend of a generative model."""

    _text_thread: TextThread | None = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add the inputs and outputs of a generative model and its engine's settings."""
        json_text = self._read_settings(ModelSpec.of(config)).json_text
        return complete(config, INPUTS, OUTPUTS, {ENGINE_PARAMETER: json_text})

    def load(self, config: ModelSpec) -> None:
        """Read the weights, and create the engine.

        Raises:
            InvalidArgument: The folder or the configuration is invalid; the message has all
                problems.
        """
        text = "the engine forms the batches, up to `max_batch_size` of engine.yaml"
        refuse_batches(config, text)
        if config.model_warmup:
            raise InvalidArgument("model_warmup: backend 'llm' does not support it")
        # One processor is left to the text thread, the scheduler and the gateway. Otherwise they
        # would delay one thread of torch, and each operation waits for its slowest thread.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        checkpoint, settings = self._checkpoint, self._read_settings(config)
        if settings.weights == "int8" and self.context.device != "cpu":
            raise InvalidArgument(
                "engine.yaml: weights: int8 is supported on CPUs only; use fp32 or bf16 on "
                f"{self.context.device}"
            )
        vocab_size = checkpoint.architecture.vocab_size
        parse({}, checkpoint.defaults, vocab_size, checkpoint.defaults_file)
        self._passes = self._make_passes(checkpoint, settings, settings.swap_blocks)
        self._propose = self._find_proposer(settings)
        self._engine_settings = settings

    def execute(self, requests: list[Request]) -> list[Response]:
        """Raise Unsupported: the scheduler plans steps, not batches."""
        raise Unsupported("a generative model does not execute batches; use its step messages")

    def execute_decoupled(self, streams: list[OutputStream]) -> None:
        """Raise Unsupported; see `execute`."""
        raise Unsupported("a generative model does not execute batches; use its step messages")

    def serve(self, writer: ResponseWriter, unpacker: Unpacker) -> HandlerTable:
        """Return the handlers of prompts, steps, and the ends of beam searches."""
        settings = self._engine_settings
        text_thread = self._text_thread = TextThread(self._checkpoint, writer.link, settings)
        engine = WorkerEngine(
            self._passes,
            self._propose,
            text_thread.prompts,
            lambda outputs: text_thread.put(partial(text_thread.append_outputs, outputs)),
            text_thread.fail_requests,
        )

        def prepare(message: Prepare, requests: list[WorkerRequest]) -> None:
            for open_request in requests:
                _prepare(text_thread, writer, unpacker, open_request, message)

        def step(message: Step, _: list[WorkerRequest]) -> Stepped:
            try:
                return replace(engine.step(message), text_ns=text_thread.spent_ns())
            except Exception as error:
                return engine.fail_step(message, error)

        def choose(message: Choose, _: list[WorkerRequest]) -> None:
            text_thread.put(partial(text_thread.end_beam_search, message))

        return {Prepare: prepare, Step: step, Choose: choose}

    def unload(self) -> None:
        """End the text thread."""
        if self._text_thread is not None:
            self._text_thread.close()

    # --- files

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint.open(self.context.version_dir)

    def _read_settings(self, config: ModelSpec) -> EngineSettings:
        """Return the settings in the configuration or in engine.yaml, with the model's defaults."""
        parameter = config.parameters.get(ENGINE_PARAMETER)
        folder = self.context.model_dir
        settings = EngineSettings.read(parameter) if parameter else engine_file.read(folder)
        checkpoint = self._checkpoint
        tool_parser, reasoning_parser = detect_parsers(checkpoint.templates.values())
        tool_parser = settings.tool_parser or tool_parser
        reasoning_parser = settings.reasoning_parser or reasoning_parser
        settings = replace(settings, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        instances = max_instances_per_device(config.instance_group)  # number
        return with_default_sizes(settings, checkpoint.architecture, self.context.device, instances)

    def _find_proposer(self, settings: EngineSettings) -> Propose | None:
        speculation = settings.speculative_decoding
        if not speculation.enabled:
            return None
        if speculation.method == "ngram":
            return propose_ngrams
        draft = Checkpoint.open(self._draft_folder(speculation.draft_model))
        target = self._checkpoint
        has_same_vocabulary = draft.architecture.vocab_size == target.architecture.vocab_size
        if not has_same_vocabulary or draft.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise InvalidArgument(
                f"speculative_decoding.draft_model: '{speculation.draft_model}' has a different "
                "vocabulary than the model"
            )
        return DraftModel(self._make_passes(draft, settings, 0)).propose

    def _make_passes(
        self, checkpoint: Checkpoint, settings: EngineSettings, host_block_count: int
    ) -> Passes:
        device = self.context.device
        model = Transformer(checkpoint, settings.weights, device)
        cache_sizes = settings.block_size, settings.kv_cache_blocks, host_block_count
        passes = Passes(model, KvCache(checkpoint.architecture, *cache_sizes, device))
        passes.capture(settings.max_batch_size, settings.max_model_len)
        return passes

    def _draft_folder(self, name: str) -> Path:
        """Return the folder of a draft model: its latest version in the repository, or a path."""
        folder = self.context.model_dir.parent / name
        versions = [version for version in folder.glob("*") if version.name.isdecimal()]
        if versions:
            return max(versions, key=_version_number)
        path = self.context.model_dir / name
        if (path / "config.json").exists():
            return path
        raise InvalidArgument(
            f"speculative_decoding.draft_model: '{name}' is neither a model in the repository nor "
            "the path of a folder with a config.json"
        )


def _version_number(folder: Path) -> int:
    return int(folder.name)


def _prepare(
    text_thread: TextThread,
    writer: ResponseWriter,
    unpacker: Unpacker,
    open_request: WorkerRequest,
    message: Prepare,
) -> None:
    """Read the inputs of a request from shared memory, and pass the request to the text thread."""
    reader = text_thread.reader
    try:
        with writer.link.lock:
            request = unpacker.request(open_request.work, copies_text=False)
            inputs = read_inputs(request, reader.max_bytes, max_tokens=reader.max_length)
    except Exception as error:
        writer.refuse(open_request, client_error(writer.context, error))
        return
    stream = OutputStream(writer, open_request, request)
    text_thread.put(partial(text_thread.prepare, stream, inputs, message.resumed))
