"""Backend `llm`: text generation by Llama, Mistral, Qwen2 and Qwen3 from Hugging Face folders.

The version folder is the model's. `engine.yaml`, in the folder of config.pbtxt, has the settings of
the engine. The scheduler plans steps (`shmserve.ipc.messages.generation`), and the worker executes
them.

engine_file.py    `engine.yaml`
engine.py         steps
sequences.py      prompts and sequences
parameters.py sampler.py speculation.py     from logits to tokens
texts.py prompts.py chat_template.py        from requests to tokens
grammars.py                                 matchers of grammars
tools.py tool_formats.py                    grammars and formats of tool calls
answers.py message_parsers.py               from tokens to responses
model/            the checkpoint, the decoder, its attention and KV cache
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shmserve.errors import InvalidArgument, Unsupported
from shmserve.ipc.engine_settings import ENGINE_PARAMETER, EngineSettings
from shmserve.ipc.messages.generation import Choose, Prepare, Step, Stepped
from shmserve.ipc.model_spec import ModelSpec
from shmserve.workers.backends import Backend, Request, Response, ResponseStream
from shmserve.workers.backends.llm import engine_file
from shmserve.workers.backends.llm.engine import WorkerEngine
from shmserve.workers.backends.llm.engine_file import most_on_one_device, sized
from shmserve.workers.backends.llm.model.attention import KvCache
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.passes import Passes
from shmserve.workers.backends.llm.model.transformer import Transformer
from shmserve.workers.backends.llm.parameters import parse
from shmserve.workers.backends.llm.prompts import given_inputs
from shmserve.workers.backends.llm.speculation import DraftModel, NgramProposer, Proposer
from shmserve.workers.backends.llm.texts import Texts
from shmserve.workers.backends.llm.tool_formats import parsers_of
from shmserve.workers.batch.request import Unpacker
from shmserve.workers.batch.response_stream import ResponseWriter
from shmserve.workers.context import client_error
from shmserve.workers.links.scheduler import HandlerTable, WorkerRequest


def tensor(name: str, data_type: str, size: int, **options: Any) -> dict[str, Any]:
    """Return a tensor with one dimension in the form of a configuration."""
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": [size], **options}


INPUTS = [
    tensor("text_input", "STRING", 1, optional=True),
    tensor("input_ids", "INT32", -1, optional=True),
    tensor("messages", "STRING", 1, optional=True),
    tensor("sampling_parameters", "STRING", 1, optional=True),
    tensor("stream", "BOOL", 1, optional=True),
    tensor("exclude_input_in_output", "BOOL", 1, optional=True),
]
OUTPUTS = [
    tensor("text_output", "STRING", -1),
    tensor("index", "INT32", -1),
    tensor("token_ids", "INT32", -1),
    tensor("prompt_token_ids", "INT32", -1),
    tensor("finish_reason", "STRING", -1),
    tensor("stop_reason", "STRING", -1),
    tensor("logprobs", "STRING", -1),
    tensor("message", "STRING", -1),
    tensor("usage", "STRING", 1),
]


class LlmBackend(Backend):
    """A generative model, its KV cache, and the texts of its requests."""

    _texts: Texts | None = None
    _opened: Checkpoint | None = None

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add the inputs and outputs of a generative model and its engine's settings."""
        completed = {**config, "model_transaction_policy": {"decoupled": True}}
        completed["input"] = config.get("input") or INPUTS
        completed["output"] = config.get("output") or OUTPUTS
        text = self._settings(ModelSpec.of(config)).text
        parameters = {**config.get("parameters", {}), ENGINE_PARAMETER: {"string_value": text}}
        return {**completed, "parameters": parameters}

    def load(self, config: ModelSpec) -> None:
        """Read the weights, and create the engine.

        Raises:
            InvalidArgument: Parts of the folder do not fit; the message has all problems.
        """
        if config.max_batch_size:
            size = config.max_batch_size
            raise InvalidArgument(
                f"max_batch_size: {size} is not 0: the engine forms the "
                "batches, up to `max_batch_size` of engine.yaml"
            )
        if config.model_warmup:
            raise InvalidArgument("model_warmup: backend 'llm' does not support it")
        # One processor is left to texts, the scheduler and the gateway. If all processors computed,
        # each operation would wait for the slowest thread.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        checkpoint, settings = self._checkpoint(), self._settings(config)
        if settings.weights == "int8" and self.context.device != "cpu":
            raise InvalidArgument(
                "engine.yaml: weights: int8 is supported on CPUs only; use fp32 or bf16 on "
                f"{self.context.device}"
            )
        parse({}, checkpoint.defaults, checkpoint.architecture.vocabulary)
        self._passes = self._make_passes(checkpoint, settings, settings.swap_blocks)
        self._proposer = self._make_proposer(settings)
        self._engine = settings

    def execute(self, requests: list[Request]) -> list[Response]:
        """Raise Unsupported: the scheduler plans steps, not batches."""
        raise Unsupported("a generative model does not execute batches; use its step messages")

    def execute_decoupled(self, streams: list[ResponseStream]) -> None:
        """Raise Unsupported; see `execute`."""
        raise Unsupported("a generative model does not execute batches; use its step messages")

    def serve(self, writer: ResponseWriter, unpacker: Unpacker) -> HandlerTable:
        """Serve prompts, steps, and the ends of beam searches."""
        texts = self._texts = Texts(self._checkpoint(), writer.link, self._engine)
        engine = WorkerEngine(
            self._passes,
            self._proposer,
            texts.prompts,
            lambda news: texts.put(partial(texts.emitted, news)),
            texts.failed,
        )

        def prepare(message: Prepare, requests: list[WorkerRequest]) -> None:
            for open_request in requests:
                _prepare(texts, writer, unpacker, open_request, message)

        def step(message: Step, _: list[WorkerRequest]) -> Stepped:
            try:
                return replace(engine.step(message), text_ns=texts.spent_ns())
            except Exception as error:
                texts.failed(engine.keys(message), error)
                return Stepped(
                    message.step, [], 0, 0, 0, lost=[row.sequence for row in message.rows]
                )

        def choose(message: Choose, _: list[WorkerRequest]) -> None:
            texts.put(partial(texts.chosen, message))

        return {Prepare: prepare, Step: step, Choose: choose}

    def unload(self) -> None:
        """End the thread of texts."""
        if self._texts is not None:
            self._texts.close()

    # --- files

    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            self._opened = Checkpoint.open(self.context.version_dir)
        return self._opened

    def _settings(self, config: ModelSpec) -> EngineSettings:
        """Return the settings of the configuration or of engine.yaml, completed from the model."""
        parameter = config.parameters.get(ENGINE_PARAMETER)
        folder = self.context.model_dir
        settings = EngineSettings.read(parameter) if parameter else engine_file.read(folder)
        calls, reasoning = parsers_of(self._checkpoint().templates.values())
        settings = replace(
            settings,
            tool_parser=settings.tool_parser or calls,
            reasoning_parser=settings.reasoning_parser or reasoning,
        )
        sharing = most_on_one_device(config.instance_group)
        return sized(settings, self._checkpoint().architecture, self.context.device, sharing)

    def _make_proposer(self, settings: EngineSettings) -> Proposer | None:
        speculation = settings.speculative_decoding
        if not speculation.enabled:
            return None
        if speculation.method == "ngram":
            return NgramProposer()
        draft = Checkpoint.open(self._draft_folder(speculation.draft_model))
        target = self._checkpoint()
        same = draft.architecture.vocabulary == target.architecture.vocabulary
        if not same or draft.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise InvalidArgument(
                f"speculative_decoding.draft_model: '{speculation.draft_model}' has a different "
                "vocabulary than the model"
            )
        return DraftModel(self._make_passes(draft, settings, 0))

    def _make_passes(
        self, checkpoint: Checkpoint, settings: EngineSettings, host_blocks: int
    ) -> Passes:
        device = self.context.device
        model = Transformer(checkpoint, settings.weights, device)
        sizes = settings.block_size, settings.kv_cache_blocks, host_blocks
        passes = Passes(model, KvCache(checkpoint.architecture, *sizes, device))
        passes.capture(settings.max_batch_size, settings.max_model_len)
        return passes

    def _draft_folder(self, name: str) -> Path:
        """Return the folder of a model in the repository (its latest version), or at a path."""
        folder = self.context.repository / name
        versions = [each for each in folder.glob("*") if each.name.isdecimal()]
        if versions:
            return max(versions, key=_number)
        path = self.context.model_dir / name
        if (path / "config.json").exists():
            return path
        raise InvalidArgument(
            f"speculative_decoding.draft_model: '{name}' is neither a model in the repository nor "
            "the path of a folder with a config.json"
        )


def _number(folder: Path) -> int:
    return int(folder.name)


def _prepare(
    texts: Texts,
    writer: ResponseWriter,
    unpacker: Unpacker,
    open_request: WorkerRequest,
    message: Prepare,
) -> None:
    """Pass a request to the thread of texts, after reading its inputs from shared memory."""
    try:
        with writer.link.lock:
            request = unpacker.request(open_request.work, copies_text=False)
            inputs = given_inputs(request, texts.reader.most_bytes)
    except Exception as error:
        writer.refuse(open_request, client_error(writer.context, error))
        return
    stream = ResponseStream(writer, open_request, request)
    texts.put(partial(texts.prepare, stream, inputs, message.resumed))
