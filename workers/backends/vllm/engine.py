"""vLLM's asynchronous engine: its arguments, and the calls that requests become.

Only this module imports vLLM. Chats and completions are rendered, validated and parsed by the
classes of vLLM's own server for OpenAI's API. Requests in the form of Triton's vllm_backend become
`SamplingParams` directly.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmserve.errors import InvalidArgument, NotFound, QueueFull, ShmserveError, clip, suggestion
from shmserve.ipc.engine_settings import PROMPT_TOO_LONG

logger = logging.getLogger(__name__)

FILE = "model.json"
_ADAPTERS = "multi_lora.json"
# Arguments of vLLM's server; the others are arguments of its engine.
_OF_SERVER = (
    *("tool_call_parser", "enable_auto_tool_choice", "chat_template"),
    *("chat_template_content_format", "default_chat_template_kwargs"),
)
# Arguments of earlier engines, which repositories for Triton still have.
_REMOVED = ("disable_log_requests", "engine_use_ray", "worker_use_ray", "use_v2_block_manager")
# Defaults of environment variables that vLLM reads.
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    "VLLM_NO_USAGE_STATS": "1",
}
_PROMPTS = ("text_input", "input_ids", "messages")
# Parameters of requests that are not the engine's.
_PLAIN = ("model", "user", "metadata", "request_id", "timeout", "stream_options", "lora_name")
_UNLIMITED = 1 << 24  # tokens, in chats without a limit
_STRUCTURED = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True)
class Arguments:
    """The contents of model.json and multi_lora.json.

    Attributes:
        engine: The arguments of the engine.
        server: The arguments of vLLM's server.
        adapters: The path of each LoRA adapter by its name.
    """

    engine: dict[str, Any]
    server: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, model_name: str) -> Arguments:
        """Read the files in the folder of a version.

        A relative path of a model that exists in the folder is meant; a folder with a checkpoint
        of its own needs no path.

        Raises:
            InvalidArgument: A file is missing, or is not a JSON object.
        """
        given = _object(folder / FILE)
        server = {name: given.pop(name) for name in _OF_SERVER if name in given}
        for name in _REMOVED:
            if given.pop(name, None) is not None:
                logger.warning("%s: %s has no effect on this version of vLLM", FILE, name)
        for name, value in given.items():
            if value in ("true", "false"):
                given[name] = value == "true"
        model = given.get("model", "" if (folder / "config.json").exists() else None)
        if not isinstance(model, str):
            raise InvalidArgument(f"{FILE}: model: it is missing; a path or a name is needed")
        for name in ("model", "tokenizer"):
            path = folder / str(given.get(name, "" if name == "model" else "?"))
            if path.exists():
                given[name] = str(path)
        given.setdefault("served_model_name", model_name)
        adapters = _object(folder / _ADAPTERS) if given.get("enable_lora") else {}
        return cls(given, server, adapters)

    @property
    def parsed(self) -> bool:
        """Return whether texts are parsed for reasoning or tool calls."""
        return bool(self.engine.get("reasoning_parser") or self.server.get("tool_call_parser"))

    @property
    def device_count(self) -> int:
        """Return the number of devices of one engine."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        tensor, pipeline = (int(self.engine.get(name, 1)) for name in sizes)
        return tensor * pipeline


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidArgument(f"unable to find '{path.parent.name}/{path.name}'") from None
    except ValueError as error:
        raise InvalidArgument(f"{path.name}: it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{path.name}: found {clip(repr(found))}, allowed is an object")
    return found


@dataclass
class Call:
    """A request in the form of the engine.

    Attributes:
        prompt: The prompt, rendered.
        parameters: The sampling parameters.
        options: Further arguments of `generate`.
        text: The text of the prompt if responses begin with it, or "".
        top: The number of likeliest tokens to report; -1: no log probabilities.
        prompt_top: The same for the prompt.
        only_prompt: Whether the response is the prompt, and nothing is generated.
        make_parser: Creates the parser of a sample's message; None: texts are not parsed.
    """

    prompt: Any
    parameters: Any
    options: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    top: int = -1
    prompt_top: int = -1
    only_prompt: bool = False
    make_parser: Callable[[], Parser] | None = None


class Parser:
    """A parser of vLLM for the message of one sample."""

    def __init__(self, parser: Any, request: Any) -> None:
        self._parser = parser
        self._request = request

    def parse(
        self, text: str, tokens: list[int], prompt: list[int] | None, stream: bool, ended: bool
    ) -> dict[str, Any]:
        """Return the content, the reasoning and the tool calls of a part of a text, or of all."""
        if stream:
            found = self._parser.parse_delta(text, tokens, self._request, prompt, finished=ended)
            if found is None:
                return {}
            parts = found.content, found.reasoning
            calls = [(each.index, each.id, each.function) for each in found.tool_calls]
        else:
            if prompt is not None:
                self._parser.set_prompt_token_ids(prompt)
            options = {"enable_auto_tools": True, "model_output_token_ids": tokens}
            reasoning, content, made = self._parser.parse(text, self._request, **options)
            parts = content, reasoning
            calls = [(index, each.id or "", each) for index, each in enumerate(made or ())]
        return self._message(*parts, calls)

    def _message(
        self, content: str | None, reasoning: str | None, calls: list[tuple[int, Any, Any]]
    ) -> dict[str, Any]:
        from vllm.renderers.chat_utils import make_tool_call_id

        message: dict[str, Any] = {"content": content} if content else {}
        if reasoning and self._request.include_reasoning:
            message["reasoning"] = reasoning
        told = []
        for index, number, function in calls:
            if index and self._request.parallel_tool_calls is False:
                continue
            call = {"index": index, "arguments": (function and function.arguments) or ""}
            if function is not None and function.name:
                call |= {"id": number or make_tool_call_id(), "name": function.name}
            told.append(call)
        return {**message, "tool_calls": told} if told else message


class VllmEngine:
    """vLLM's engine, its renderer of prompts, and its parsers of messages.

    All methods are called in the engine's event loop, except for `shutdown`.
    """

    def __init__(self, engine: Any, renderer: Any, adapters: Mapping[str, Any]) -> None:
        self._engine = engine
        self._renderer = renderer
        self._adapters = adapters
        config = engine.model_config
        self._defaults = config.get_diff_sampling_param()
        self._override = (
            self._defaults.get("max_tokens")
            if config.generation_config not in ("auto", "vllm")
            else config.override_generation_config.get("max_new_tokens")
        )

    @classmethod
    async def start(cls, arguments: Arguments) -> VllmEngine:
        """Start the engine's processes, and load the model.

        Raises:
            InvalidArgument: An argument is unknown. Errors of vLLM are passed on.
        """
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
        except ImportError as error:
            raise InvalidArgument(f"backend 'vllm' needs vLLM: {error}") from None
        from vllm.lora.request import LoRARequest
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.v1.engine.async_llm import AsyncLLM

        known = AsyncEngineArgs.__dataclass_fields__
        strange = [name for name in arguments.engine if name not in known]
        if strange:
            near = suggestion(strange[0], known)
            raise InvalidArgument(f"{FILE}: {strange[0]} is no argument of vLLM's engine{near}")
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments.engine))
        server = arguments.server
        renderer = OnlineRenderer(
            engine.model_config,
            engine.renderer,
            request_logger=None,
            chat_template=_template(server.get("chat_template")),
            chat_template_content_format=server.get("chat_template_content_format", "auto"),
            enable_auto_tools=bool(server.get("tool_call_parser")),
            tool_parser=server.get("tool_call_parser"),
            reasoning_parser=arguments.engine.get("reasoning_parser") or None,
            default_chat_template_kwargs=server.get("default_chat_template_kwargs"),
        )
        adapters = {
            name: LoRARequest(str(number), number, path)
            for number, (name, path) in enumerate(arguments.adapters.items(), 1)
        }
        return cls(engine, renderer, adapters)

    @property
    def errored(self) -> bool:
        """Return whether the engine has ended or failed for good."""
        return bool(self._engine.errored)

    def generate(self, call: Call, request_id: str, priority: int) -> AsyncIterator[Any]:
        """Return the iterator of the outputs of a call; closing it aborts the request."""
        options = {"priority": priority, **call.options}
        found: AsyncIterator[Any] = self._engine.generate(
            call.prompt, call.parameters, request_id, **options
        )
        return found

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()

    @staticmethod
    def refusal(error: BaseException) -> ShmserveError | None:
        """Return the error for a client whose request vLLM has refused; None: another error."""
        from pydantic import ValidationError
        from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMNotFoundError

        if isinstance(error, GracefulHTTPError):
            return QueueFull(str(error))
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            return InvalidArgument(f"{'.'.join(map(str, first['loc'][:1]))}: {first['msg']}")
        if isinstance(error, VLLMNotFoundError):
            return NotFound(str(error))
        if isinstance(error, VLLMClientError | ValueError | TypeError | NotImplementedError):
            text = str(error.args[0] if error.args else error)  # without the name
            name = getattr(error, "parameter", None)
            if "maximum context length" in text:
                return InvalidArgument(f"text_input: {PROMPT_TOO_LONG}: {text}")
            return InvalidArgument(f"{name}: {text}" if name else text)
        return None

    # --- calls

    async def call(self, given: Mapping[str, Any], openai: bool, message: bool) -> Call:
        """Return the call for the inputs and the parameters of a request.

        Args:
            given: The inputs by name, and the parameters in "parameters".
            openai: Whether the parameters are those of OpenAI's API, else those of Triton's
                vllm_backend.
            message: Whether messages are parsed.

        Raises:
            InvalidArgument: An input or a parameter is wrong.
        """
        named = [name for name in _PROMPTS if name in given]
        if len(named) != 1:
            found = " and ".join(named) or "none"
            raise InvalidArgument(f"the prompt is one of {', '.join(_PROMPTS)}: {found} is given")
        parameters = {key: each for key, each in given["parameters"].items() if each is not None}
        if named[0] == "messages":
            call = await self._chat(given["messages"], parameters, message)
        else:
            call = await self._completion(given[named[0]], parameters, given, openai)
        adapter = parameters.get("lora_name")
        if adapter is not None:
            if adapter not in self._adapters:
                names = ", ".join(self._adapters) or "none"
                raise InvalidArgument(f"lora_name: {clip(repr(adapter))} is not known, of: {names}")
            call.options["lora_request"] = self._adapters[adapter]
        return call

    async def _chat(self, text: str, parameters: dict[str, Any], message: bool) -> Call:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        conversation = json.loads(text)
        if isinstance(conversation, list):
            conversation = {"messages": conversation}
        parameters.setdefault("add_special_tokens", False)
        if parameters.get("max_tokens") == _UNLIMITED:
            del parameters["max_tokens"]
        request = _parsed(ChatCompletionRequest, {**_structured(parameters), **conversation})
        kind = self._renderer.parser
        if request.tools and request.tool_choice != "none" and kind is None:
            raise InvalidArgument(f"tools: the model's {FILE} has no tool_call_parser")
        _, (prompt,) = _accepted(await self._renderer.render_chat(request))
        tokens = prompt["prompt_token_ids"]
        limit = request.max_completion_tokens or request.max_tokens
        values = request.to_sampling_params(self._limit(limit, tokens), self._defaults)
        call = Call(prompt, values, {"priority": request.priority} if request.priority else {})
        call.top = (request.top_logprobs or 0) if request.logprobs else -1
        call.prompt_top = _count(request.prompt_logprobs)
        if kind is not None:
            options = self._renderer.effective_chat_template_kwargs(request)
            config = self._engine.model_config
            tokenizer = self._engine.renderer.tokenizer

            def made() -> Any:
                return kind(
                    tokenizer, request.tools, chat_template_kwargs=options, model_config=config
                )

            parser = made()
            call.options["reasoning_ended"] = request.resolve_reasoning_ended(parser, tokens)
            if parser.reasoning_parser is not None:
                call.options["reasoning_parser_kwargs"] = {"chat_template_kwargs": options}
            if message:
                call.make_parser = lambda: Parser(made(), request)
        return call

    async def _completion(
        self, source: Any, parameters: dict[str, Any], given: Mapping[str, Any], openai: bool
    ) -> Call:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        names = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")
        echo = bool(parameters.pop("echo", False)) if openai else _prepends(given, parameters)
        if openai:
            body = {**_structured(parameters), "prompt": source, "echo": echo}
            request = _parsed(CompletionRequest, body)
        else:
            body = {name: parameters.pop(name) for name in names if name in parameters}
            request = _parsed(CompletionRequest, {**body, "prompt": source})
        (prompt,) = _accepted(await self._renderer.render_completion(request))
        tokens = prompt["prompt_token_ids"]
        if openai:
            limit = self._limit(request.max_tokens, tokens)
            values = request.to_sampling_params(limit, self._defaults)
        else:
            values = _triton_parameters(parameters)
        call = Call(prompt, values, {"priority": request.priority} if request.priority else {})
        call.top, call.prompt_top = _count(values.logprobs), _count(request.prompt_logprobs)
        call.only_prompt = openai and echo and request.max_tokens == 0
        if echo:
            decode = self._engine.renderer.tokenizer.decode
            call.text = source if isinstance(source, str) else decode(tokens)
        return call

    def _limit(self, wanted: int | None, tokens: list[int]) -> int:
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

        longest = self._engine.model_config.max_model_len
        if len(tokens) >= longest:
            raise InvalidArgument(
                f"text_input: {PROMPT_TOO_LONG}: {len(tokens)} tokens and one more are above "
                f"{longest}"
            )
        limits = longest, wanted, len(tokens), self._defaults, self._override
        return int(get_max_tokens(*limits))


def _count(wanted: int | None) -> int:
    return -1 if wanted is None else wanted


def _template(given: str | None) -> str | None:
    from vllm.renderers.chat_utils import load_chat_template

    found: str | None = load_chat_template(given)
    return found


def _prepends(given: Mapping[str, Any], parameters: Mapping[str, Any]) -> bool:
    """Return whether the text begins with the prompt, by the rules of Triton's vllm_backend."""
    excluded = given.get("exclude_input_in_output")
    stream = bool(parameters.get("stream"))
    if excluded is False and stream:
        raise InvalidArgument("When streaming, `exclude_input_in_output` = False is not allowed.")
    return not stream if excluded is None else not excluded


def _structured(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return parameters with vLLM's earlier fields for structured outputs in their present form."""
    found = {name: each for name, each in parameters.items() if name not in _PLAIN}
    given = {key: found.pop(f"guided_{key}", None) for key in (*_STRUCTURED, "whitespace_pattern")}
    made = {key: each for key, each in given.items() if each is not None}
    return {**found, "structured_outputs": made} if made else found


def _parsed(kind: Any, body: dict[str, Any]) -> Any:
    """Return a request of vLLM's API; a field that it does not know is refused."""
    for name in body:
        if name not in kind.model_fields and not name.startswith("triton_"):
            near = suggestion(name, kind.model_fields)
            raise InvalidArgument(f"{name}: it is refused: vLLM does not know it{near}")
    if body.get("use_beam_search"):
        raise InvalidArgument("use_beam_search: True is refused: it is not supported")
    return kind.model_validate(body)


def _accepted(rendered: Any) -> Any:
    error = getattr(rendered, "error", None)
    if error is not None:
        raise InvalidArgument(f"{error.param}: {error.message}" if error.param else error.message)
    return rendered


def _triton_parameters(given: dict[str, Any]) -> Any:
    """Return the sampling parameters for those of Triton's vllm_backend, which may be strings."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    stream = given.pop("stream", False)
    values = {
        name: each
        for name, each in given.items()
        if name not in _PLAIN and not name.startswith("triton_")
    }
    for name in ("guided_decoding", "structured_outputs"):
        rules = values.pop(name, None)
        if rules is not None:
            rules = json.loads(rules) if isinstance(rules, str) else dict(rules)
            rules.pop("backend", None)
            values["structured_outputs"] = StructuredOutputsParams(**rules)
    for name, value in values.items():
        kind = SamplingParams.__annotations__.get(name)
        if kind is None:
            near = suggestion(name, SamplingParams.__annotations__)
            raise InvalidArgument(f"{name}: it is no sampling parameter of vLLM{near}")
        for each in (int, float, bool):
            if isinstance(value, str) and kind in (each, each | None):
                values[name] = value.lower() == "true" if each is bool else each(value)
    values["output_kind"] = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values)
