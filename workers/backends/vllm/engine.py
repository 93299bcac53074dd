"""vLLM's asynchronous engine: its arguments, and the conversion of requests to its calls.

Only this module imports vLLM. The classes of vLLM's own server for OpenAI's API render prompts,
validate parameters and parse messages.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson

from shmserve.errors import InvalidArgument, NotFound, QueueFull, ShmserveError, clip, suggestion
from shmserve.ipc.engine_settings import PROMPT_TOO_LONG
from shmserve.workers.backends import Output
from shmserve.workers.backends.llm.prompts import UNLIMITED, prompt_input

logger = logging.getLogger(__name__)

FILE = "model.json"
# The arguments of vLLM's server are these and `tool_call_parser`; others are those of its engine.
_SERVER_SETTINGS = ("chat_template", "chat_template_content_format", "default_chat_template_kwargs")
_TOOL_PARSER = "tool_call_parser"
# Arguments in repositories for Triton that have no effect.
_IGNORED_ARGUMENTS = ("disable_log_requests", "engine_use_ray", "enable_auto_tool_choice")
# Defaults of environment variables. Processes are not forked, because this one has threads.
_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}
# Parameters that are read elsewhere, or have no effect.
_UNUSED = ("model", "metadata", "timeout", "stream_options", "lora_name", "exclude_input_in_output")
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "whitespace_pattern")


@dataclass(frozen=True)
class Arguments:
    """The arguments of the engine and of vLLM's server in model.json.

    Attributes:
        engine: The arguments of the engine.
        server: The arguments of vLLM's server.
        adapters: The path of each LoRA adapter by its name, from multi_lora.json.
    """

    engine: dict[str, Any]
    server: dict[str, Any]
    adapters: dict[str, str]

    @classmethod
    def read(cls, folder: Path, model_name: str) -> Arguments:
        """Read the files in the folder of a version; a relative path of the model begins there.

        Raises:
            InvalidArgument: A file is missing, or is not a JSON object.
        """
        settings = {
            name: {"true": True, "false": False}.get(str(value), value)
            for name, value in _read_object(folder / FILE).items()
            if name not in _IGNORED_ARGUMENTS
        }
        names = (*_SERVER_SETTINGS, _TOOL_PARSER)
        server = {name: settings.pop(name) for name in names if name in settings}
        if not isinstance(settings.get("model"), str):
            raise InvalidArgument(f"{FILE}: 'model' is missing; set it to a path or a name")
        if (folder / settings["model"]).exists():
            settings["model"] = str(folder / settings["model"])
        settings.setdefault("served_model_name", model_name)
        adapters = _read_object(folder / "multi_lora.json") if settings.get("enable_lora") else {}
        return cls(settings, server, adapters)

    def for_vllm(self) -> Any:
        """Return the arguments of the engine in vLLM's class.

        Raises:
            InvalidArgument: vLLM is missing, or an argument is unknown.
        """
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
        except ImportError as error:
            raise InvalidArgument(f"backend 'vllm' needs vLLM: {error}") from None
        fields = AsyncEngineArgs.__dataclass_fields__
        for name in self.engine:
            if name not in fields:
                hint = suggestion(name, fields)
                raise InvalidArgument(f"{FILE}: {name} is not an argument of vLLM's engine{hint}")
        return AsyncEngineArgs(**self.engine)

    def max_model_len(self) -> int:
        """Return the maximum length of a sequence; errors of vLLM are passed on."""
        return int(self.for_vllm().create_model_config().max_model_len)

    @property
    def parses_messages(self) -> bool:
        """Return whether texts are parsed for reasoning or tool calls."""
        return bool(self.engine.get("reasoning_parser") or self.server.get(_TOOL_PARSER))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidArgument(f"unable to find '{path.parent.name}/{path.name}'") from None
    except ValueError as error:
        raise InvalidArgument(f"{path.name}: it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path.name}: expected an object, found {clip(repr(value))}")
    return value


@dataclass
class VllmCall:
    """The arguments of the engine's `generate` for a request, and options of its responses.

    Attributes:
        prompt: The rendered prompt.
        parameters: vLLM's sampling parameters.
        options: Further arguments of `generate`.
        text: The text of the prompt if responses begin with it, or "".
        first_token: The text of the prompt's first token if the log probabilities of the text
            begin with those of the prompt, or None.
        only_prompt: Whether the response is the prompt, and nothing is generated.
        top_logprobs: The number of likeliest tokens to report for each token of the text.
        prompt_logprobs: The number of likeliest tokens to report for each token of the prompt; -1:
            no log probabilities.
        make_parser: Creates the parser of a sample's message; None: texts are not parsed.
    """

    prompt: Any
    parameters: Any
    options: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    first_token: str | None = None
    only_prompt: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int = -1
    make_parser: Callable[[], Parser] | None = None


class Parser:
    """A parser of vLLM for the message of one sample."""

    def __init__(self, parser: Any, request: Any) -> None:
        self._parser = parser
        self._request = request

    def parse(self, sample: Any, prompt: list[int], stream: bool) -> dict[str, Any]:
        """Return the content, the reasoning and the tool calls in the text of a sample.

        Args:
            sample: vLLM's output.
            prompt: The tokens of the prompt.
            stream: Whether the text of the sample is a new part; otherwise it is the whole text.
        """
        from vllm.renderers.chat_utils import make_tool_call_id

        request, text, tokens = self._request, sample.text, list(sample.token_ids)
        if stream:
            is_finished = sample.finish_reason is not None
            delta = self._parser.parse_delta(text, tokens, request, prompt, finished=is_finished)
            content, reasoning = (delta.content, delta.reasoning) if delta else (None, None)
            tool_calls = delta.tool_calls if delta else ()
            calls = [(call.index, call.id, call.function) for call in tool_calls]
        else:
            self._parser.set_prompt_token_ids(prompt)
            options = {"enable_auto_tools": True, "model_output_token_ids": tokens}
            reasoning, content, tool_calls = self._parser.parse(text, request, **options)
            calls = [(index, call.id, call) for index, call in enumerate(tool_calls or ())]
        encoded_calls = []
        for index, call_id, function in calls:
            call = {"index": index, "arguments": (function and function.arguments) or ""}
            if function is not None and function.name:
                call |= {"id": call_id or make_tool_call_id(), "name": function.name}
            if not index or request.parallel_tool_calls is not False:
                encoded_calls.append(call)
        shown_reasoning = reasoning if request.include_reasoning else None
        parts = {"content": content, "reasoning": shown_reasoning, "tool_calls": encoded_calls}
        return {name: part for name, part in parts.items() if part}


class VllmEngine:
    """vLLM's engine, its renderer of prompts, and its parsers of messages.

    All methods are called in the engine's event loop, except for `shutdown`.
    """

    def __init__(self, engine: Any, arguments: Arguments) -> None:
        from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
        from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
        from vllm.lora.request import LoRARequest
        from vllm.renderers.chat_utils import load_chat_template
        from vllm.renderers.online_renderer import OnlineRenderer

        self._engine = engine
        self._config = engine.model_config
        self._tokenizer = engine.renderer.tokenizer
        self._defaults = self._config.get_diff_sampling_param()
        numbered = enumerate(arguments.adapters.items(), 1)
        self._adapters = {
            name: LoRARequest(name, number, path) for number, (name, path) in numbered
        }
        options = {"chat_template_content_format": "auto", **arguments.server}
        options["request_logger"] = None
        tool_parser = options.pop(_TOOL_PARSER, None)
        options["chat_template"] = load_chat_template(options.get("chat_template"))
        self._renderer = OnlineRenderer(
            self._config,
            engine.renderer,
            enable_auto_tools=bool(tool_parser),
            tool_parser=tool_parser,
            reasoning_parser=arguments.engine.get("reasoning_parser") or None,
            **options,
        )
        registry = OpenAIModelRegistry(self._config, [])
        self._tokenization = ServingTokenization(registry, self._renderer, **options)

    @classmethod
    async def start(cls, arguments: Arguments) -> VllmEngine:
        """Start the engine's processes, and load the model.

        Raises:
            InvalidArgument: As by `Arguments.for_vllm`. Errors of vLLM are passed on.
        """
        engine_args = arguments.for_vllm()
        from vllm.v1.engine.async_llm import AsyncLLM

        return cls(AsyncLLM.from_engine_args(engine_args), arguments)

    @property
    def errored(self) -> bool:
        """Return whether the engine has ended or failed for good."""
        return bool(self._engine.errored)

    def generate(self, call: VllmCall, request_id: str, priority: int) -> AsyncIterator[Any]:
        """Return an iterator over the outputs of a call; closing it aborts the request."""
        options = {"priority": priority, **call.options}
        results = self._engine.generate(call.prompt, call.parameters, request_id, **options)
        return cast("AsyncIterator[Any]", results)

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()

    @staticmethod
    def client_error(error: BaseException) -> ShmserveError | None:
        """Return the client's error if vLLM has rejected its request, or None for other errors."""
        from pydantic import ValidationError
        from vllm.exceptions import GracefulHTTPError, VLLMClientError

        if isinstance(error, GracefulHTTPError):
            return QueueFull(str(error))
        text, name = str(error.args[0] if error.args else error), getattr(error, "parameter", None)
        if isinstance(error, ValidationError):
            problem = error.errors()[0]
            text, name = problem["msg"], ".".join(map(str, problem["loc"][:1]))
        elif not isinstance(error, VLLMClientError | ValueError | TypeError | NotImplementedError):
            return None
        if "maximum context length" in text:
            return InvalidArgument(f"text_input: {PROMPT_TOO_LONG}: {text}")
        return InvalidArgument(f"{name}: {text}" if name else text)

    # --- calls

    async def make_call(
        self, inputs: Mapping[str, Any], parameters: dict[str, Any], echoes: bool, openai: bool
    ) -> VllmCall:
        """Return the call for the inputs and the parameters of a request.

        Args:
            inputs: The inputs by name.
            parameters: The parameters.
            echoes: Whether log probabilities begin with those of the prompt.
            openai: Whether parameters have the defaults of vLLM's server; those of chats always do.

        Raises:
            InvalidArgument: An input or a parameter is wrong. vLLM raises other errors, see
                `client_error`.
        """
        name = prompt_input(inputs)
        adapter = parameters.get("lora_name")
        if adapter is not None and adapter not in self._adapters:
            raise NotFound(f"lora_name: there is no adapter {clip(repr(adapter))}")
        body = {key: value for key, value in parameters.items() if value is not None}
        echo = bool(body.pop("echo", False))
        constraints = body.pop("guided_decoding", {})
        guided_keys = [key for key in _CONSTRAINTS if f"guided_{key}" in body]
        constraints |= {key: body.pop(f"guided_{key}") for key in guided_keys}
        constraints.pop("backend", None)
        constraints = {key: value for key, value in constraints.items() if value is not None}
        if constraints:
            body["structured_outputs"] = constraints
        if name == "messages":
            call = await self._chat_call(_chat_body(inputs), body)
        else:
            is_text = name == "text_input"
            prompt = inputs[name] if is_text else inputs[name].tolist()
            defaults = self._defaults if openai else {}
            call = await self._completion_call({**body, "prompt": prompt, "echo": echoes}, defaults)
            if echo:
                call.text = prompt if is_text else self._tokenizer.decode(prompt)
        if adapter is not None:
            call.options["lora_request"] = self._adapters[adapter]
        return call

    async def convert(
        self, task: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> list[Output]:
        """Return the tokens of a prompt and their strings as JSON, or the text of tokens.

        Raises:
            InvalidArgument: The task or an input is wrong. vLLM raises other errors, see
                `client_error`.
        """
        from vllm.entrypoints.serve.tokenize import protocol

        tokenization = self._tokenization
        if task == "detokenize" and "input_ids" in inputs:
            tokens = inputs["input_ids"].tolist()
            self._engine.renderer.validate_token_ids(tokens, parameter="tokens")
            request = protocol.DetokenizeRequest(tokens=tokens)
            result = _check_accepted(await tokenization.create_detokenize(request, None))
            return [Output.of_values("text_output", "BYTES", [result.prompt])]
        name = "add_special_tokens"
        body = {name: parameters[name]} if name in parameters else {}
        if task == "tokenize" and "messages" in inputs:
            request_class = protocol.TokenizeChatRequest
            body = {**_chat_body(inputs), **body}
        elif task == "tokenize" and "text_input" in inputs:
            request_class, body["prompt"] = protocol.TokenizeCompletionRequest, inputs["text_input"]
        else:
            raise InvalidArgument(f"task: {clip(repr(task))} is unknown, or its input is missing")
        request = request_class.model_validate({**body, "return_token_strs": True})
        result = _check_accepted(await tokenization.create_tokenize(request, None))
        strings = orjson.dumps(result.token_strs)
        return [
            Output.of_values("token_ids", "INT32", result.tokens),
            Output.of_values("text_output", "BYTES", [strings]),
        ]

    async def _completion_call(self, body: dict[str, Any], defaults: dict[str, Any]) -> VllmCall:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        request = _parse_request(CompletionRequest, body)
        (prompt,) = _check_accepted(await self._renderer.render_completion(request))
        call = self._new_call(prompt, request, request.max_tokens, defaults)
        call.top_logprobs = request.logprobs or 0
        if request.echo:
            call.first_token = self._tokenizer.decode(prompt["prompt_token_ids"][:1])
        call.only_prompt = request.echo and request.max_tokens == 0
        return call

    async def _chat_call(self, conversation: dict[str, Any], body: dict[str, Any]) -> VllmCall:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        if body.get("max_tokens") == UNLIMITED:
            del body["max_tokens"]
        request = _parse_request(ChatCompletionRequest, {**body, **conversation})
        parser_class = self._renderer.parser
        if request.tools and request.tool_choice != "none" and parser_class is None:
            raise InvalidArgument(f"tools: the model's {FILE} has no {_TOOL_PARSER}")
        _, (prompt,) = _check_accepted(await self._renderer.render_chat(request))
        limit = request.max_completion_tokens
        limit = request.max_tokens if limit is None else limit
        call = self._new_call(prompt, request, limit, self._defaults)
        call.top_logprobs = (request.logprobs and request.top_logprobs) or 0
        if parser_class is not None:
            options = self._renderer.effective_chat_template_kwargs(request)
            parser_options = {"chat_template_kwargs": options, "model_config": self._config}
            new_parser = partial(parser_class, self._tokenizer, request.tools, **parser_options)
            parser = new_parser()
            reasoning_ended = request.resolve_reasoning_ended(parser, prompt["prompt_token_ids"])
            call.options["reasoning_ended"] = reasoning_ended
            if parser.reasoning_parser is not None:
                call.options["reasoning_parser_kwargs"] = {"chat_template_kwargs": options}
            call.make_parser = lambda: Parser(new_parser(), request)
        return call

    def _new_call(
        self, prompt: Any, request: Any, limit: int | None, defaults: dict[str, Any]
    ) -> VllmCall:
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

        prompt_length = len(prompt["prompt_token_ids"])
        max_tokens = get_max_tokens(self._config.max_model_len, limit, prompt_length, defaults)
        call = VllmCall(prompt, request.to_sampling_params(max_tokens, defaults))
        if request.priority:
            call.options["priority"] = request.priority
        if request.prompt_logprobs is not None:
            call.prompt_logprobs = request.prompt_logprobs
        return call


def _chat_body(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat, whose JSON is an object or a list of messages."""
    chat = json.loads(inputs["messages"])
    return chat if isinstance(chat, dict) else {"messages": chat}


def _parse_request(request_class: Any, body: dict[str, Any]) -> Any:
    """Return a request of vLLM's API; raise InvalidArgument for a field that vLLM lacks."""
    body = {name: value for name, value in body.items() if name not in _UNUSED}
    for name in body:
        if name not in request_class.model_fields:
            hint = suggestion(name, request_class.model_fields)
            raise InvalidArgument(f"{name}: vLLM has no such parameter{hint}")
    if body.get("use_beam_search"):
        raise InvalidArgument("use_beam_search: it is not supported")
    return request_class.model_validate(body)


def _check_accepted(response: Any) -> Any:
    """Return a response of vLLM's server; raise InvalidArgument if it is an error."""
    error = getattr(response, "error", None)
    if error is not None:
        raise InvalidArgument(f"{error.param}: {error.message}" if error.param else error.message)
    return response
