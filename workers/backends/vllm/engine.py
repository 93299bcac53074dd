"""vLLM's asynchronous engine: its arguments, and the conversion of requests to its calls.

Only this module imports vLLM. The classes of vLLM's own server for OpenAI's API render prompts,
validate parameters and parse messages.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from shmserve.errors import (
    InvalidArgument,
    NotFound,
    QueueFull,
    ShmserveError,
    Unavailable,
    clip,
    missing_package,
    suggestion,
)
from shmserve.ipc.engine_settings import PROMPT_TOO_LONG
from shmserve.workers.backends.llm.chat_template import parse_conversation
from shmserve.workers.backends.llm.model.checkpoint import read_json
from shmserve.workers.backends.llm.prompts import UNLIMITED, find_prompt_input, task_input

FILE = "model.json"
# These arguments and `tool_call_parser` are for vLLM's server, all others for its engine.
_SERVER_SETTINGS = ("chat_template", "chat_template_content_format", "default_chat_template_kwargs")
_TOOL_PARSER = "tool_call_parser"
# Arguments in repositories for Triton that have no effect.
_IGNORED_ARGUMENTS = ("disable_log_requests", "engine_use_ray", "enable_auto_tool_choice")
# Defaults of environment variables. Processes are not forked, because this process has threads.
_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}
# Parameters that are read elsewhere, or have no effect.
_UNUSED = ("model", "metadata", "timeout", "stream_options", "lora_name", "exclude_input_in_output")
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "whitespace_pattern")


@dataclass(frozen=True)
class Arguments:
    """The arguments of the engine and of vLLM's server in model.json.

    Attributes:
        engine: The arguments of the engine.
        server_arguments: The arguments of vLLM's server.
        adapters: The path of each LoRA adapter by its name, from multi_lora.json.
    """

    engine: dict[str, Any]
    server_arguments: dict[str, Any]
    adapters: dict[str, str]

    @classmethod
    def read(cls, folder: Path, model_name: str) -> Arguments:
        """Read the files in the folder of a version; resolve a relative path of the model there.

        Raises:
            InvalidArgument: A file is missing, or is not a JSON object.
        """
        problems: list[str] = []
        settings = {
            name: {"true": True, "false": False}.get(str(value), value)
            for name, value in read_json(folder / FILE, problems).items()
            if name not in _IGNORED_ARGUMENTS
        }
        has_adapters = settings.get("enable_lora")
        adapters = read_json(folder / "multi_lora.json", problems) if has_adapters else {}
        if not problems and not isinstance(settings.get("model"), str):
            problems.append(f"{FILE}: 'model' is missing; set it to a path or a name")
        if problems:
            raise InvalidArgument(f"{folder.name}/{problems[0]}")
        names = (*_SERVER_SETTINGS, _TOOL_PARSER)
        server_arguments = {name: settings.pop(name) for name in names if name in settings}
        if (folder / settings["model"]).exists():
            settings["model"] = str(folder / settings["model"])
        settings.setdefault("served_model_name", model_name)
        return cls(settings, server_arguments, adapters)

    def for_vllm(self) -> Any:
        """Return the arguments of the engine in vLLM's class.

        Raises:
            InvalidArgument: An argument is unknown.
            Unavailable: vLLM is missing.
        """
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
        except ImportError as error:
            raise Unavailable(missing_package("backend 'vllm'", error, "vllm")) from None
        fields = AsyncEngineArgs.__dataclass_fields__
        _check_known(self.engine, fields, f"{FILE}: {{}} is not an argument of vLLM's engine")
        return AsyncEngineArgs(**self.engine)

    def max_model_len(self) -> int:
        """Return the maximum length of a sequence; errors of vLLM are passed on."""
        with _explained_errors():
            return int(self.for_vllm().create_model_config().max_model_len)

    @property
    def parses_messages(self) -> bool:
        """Return whether texts are parsed for reasoning or tool calls."""
        return bool(self.engine.get("reasoning_parser") or self.server_arguments.get(_TOOL_PARSER))


@contextlib.contextmanager
def _explained_errors() -> Iterator[None]:
    """Raise InvalidArgument if vLLM rejects an argument; other errors of vLLM are passed on."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{FILE}: {VllmEngine.client_error(error)}") from error


def _check_known(names: Iterable[str], known_names: Collection[str], problem: str) -> None:
    for name in names:
        if name not in known_names:
            raise InvalidArgument(problem.format(name) + suggestion(name, known_names))


@dataclass
class VllmCall:
    """The arguments of the engine's `generate` for a request, and options of its responses.

    Attributes:
        request: The request in the form of vLLM's own server. If `echo` is set, log probabilities
            include the prompt's.
        prompt: The rendered prompt.
        parameters: vLLM's sampling parameters.
        decode: Returns the text of a token.
        options: Further arguments of `generate`.
        text: The text of the prompt if responses begin with it, or "".
        make_parser: Creates vLLM's parser of a sample's message; None: texts are not parsed.
    """

    request: Any
    prompt: Any
    parameters: Any
    decode: Callable[[Any], str]
    options: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    make_parser: Callable[[], Any] | None = None


def parse_message(parser: Any, request: Any, sample: Any, prompt: list[int]) -> dict[str, Any]:
    """Return the members of the message in a sample's text: content, reasoning and tool calls.

    Args:
        parser: vLLM's parser for the message of this sample.
        request: The request in the form of vLLM's server.
        sample: vLLM's output. If the request is a stream, its text is a new part.
        prompt: The tokens of the prompt.
    """
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.renderers.chat_utils import make_tool_call_id

    text, tokens = sample.text, list(sample.token_ids)
    if request.stream:
        ended = sample.finish_reason is not None
        delta = parser.parse_delta(text, tokens, request, prompt, finished=ended) or DeltaMessage()
        content, reasoning = delta.content, delta.reasoning
        calls = [(call.index, call.id, call.function) for call in delta.tool_calls]
    else:
        parser.set_prompt_token_ids(prompt)
        options = {"enable_auto_tools": True, "model_output_token_ids": tokens}
        reasoning, content, tool_calls = parser.parse(text, request, **options)
        calls = [(index, call.id, call) for index, call in enumerate(tool_calls or ())]
    shown_calls = []
    for index, call_id, function in calls:
        call = {"index": index, "arguments": (function and function.arguments) or ""}
        if function is not None and function.name:
            call |= {"id": call_id or make_tool_call_id(), "name": function.name}
        if not index or request.parallel_tool_calls is not False:
            shown_calls.append(call)
    shown_reasoning = reasoning if request.include_reasoning else None
    message_parts = {"content": content, "reasoning": shown_reasoning, "tool_calls": shown_calls}
    return {name: part for name, part in message_parts.items() if part}


class VllmEngine:
    """vLLM's engine, its renderer of prompts, and its parsers of messages.

    All methods are called in the engine's event loop.

    Attributes:
        client: vLLM's `AsyncLLM`.
    """

    def __init__(self, client: Any, arguments: Arguments) -> None:
        from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
        from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
        from vllm.lora.request import LoRARequest
        from vllm.renderers.chat_utils import load_chat_template
        from vllm.renderers.online_renderer import OnlineRenderer

        self.client = client
        self._config = client.model_config
        self._tokenizer = client.renderer.tokenizer
        self._defaults = self._config.get_diff_sampling_param()
        self._max_tokens = max_tokens_cap(self._config, self._defaults)
        adapters = enumerate(arguments.adapters.items(), 1)
        self._adapters = {name: LoRARequest(name, n, path) for n, (name, path) in adapters}
        options: dict[str, Any] = {"request_logger": None, "chat_template_content_format": "auto"}
        options |= arguments.server_arguments
        options["chat_template"] = load_chat_template(options.get("chat_template"))
        tool_parser = options.pop(_TOOL_PARSER, None)
        parsers = {"tool_parser": tool_parser, "enable_auto_tools": bool(tool_parser)}
        parsers["reasoning_parser"] = arguments.engine.get("reasoning_parser") or None
        self._renderer = OnlineRenderer(self._config, client.renderer, **parsers, **options)
        registry = OpenAIModelRegistry(self._config, [])
        self._tokenization = ServingTokenization(registry, self._renderer, **options)

    @classmethod
    async def start(cls, arguments: Arguments) -> VllmEngine:
        """Start the engine's processes, and load the model.

        Raises:
            InvalidArgument: An argument is unknown. Errors of vLLM are passed on.
        """
        engine_args = arguments.for_vllm()
        from vllm.v1.engine.async_llm import AsyncLLM

        with _explained_errors():
            return cls(AsyncLLM.from_engine_args(engine_args), arguments)

    @staticmethod
    def client_error(error: BaseException, inputs: Any = None) -> ShmserveError | None:
        """Return the client's error if vLLM has rejected its request, or None for other errors.

        Args:
            error: The error of vLLM.
            inputs: The inputs of the request by name; None if vLLM has rejected model.json.
        """
        from pydantic import ValidationError
        from vllm.exceptions import GracefulHTTPError, VLLMClientError
        from vllm.sampling_params import SamplingParams

        if isinstance(error, GracefulHTTPError):
            return QueueFull(str(error))
        text, name = str(error.args[0] if error.args else error), getattr(error, "parameter", None)
        if isinstance(error, ValidationError):
            problem = error.errors()[0]
            text = problem["msg"].removeprefix("Value error, ")
            name = ".".join(map(str, problem["loc"][:1]))
        elif not isinstance(error, VLLMClientError | ValueError | TypeError | NotImplementedError):
            return None
        if inputs and PROMPT_TOO_LONG in text.lower():
            return InvalidArgument(f"{find_prompt_input(inputs)}: {text[:1].lower()}{text[1:]}")
        first_word = text.split(" ", 1)[0]
        name = name or (first_word if first_word in SamplingParams.__annotations__ else "")
        return InvalidArgument(f"{name}: {text}" if name else text)

    async def make_call(
        self, inputs: Mapping[str, Any], parameters: dict[str, Any], echoes: bool, for_openai: bool
    ) -> VllmCall:
        """Return the call for the inputs and the parameters of a request.

        Args:
            inputs: The inputs by name.
            parameters: The parameters.
            echoes: Whether log probabilities include the prompt's.
            for_openai: Whether the defaults of vLLM's server apply, as they always do in chats.

        Raises:
            InvalidArgument: An input or a parameter is wrong. vLLM raises other errors, see
                `client_error`.
            NotFound: There is no LoRA adapter of this name.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

        name = find_prompt_input(inputs)
        adapter = parameters.get("lora_name")
        if adapter is not None and adapter not in list(self._adapters):  # it may be unhashable
            raise NotFound(f"lora_name: there is no adapter {clip(repr(adapter))}")
        echo = parameters.pop("echo", False) in (True, "true")
        body = _request_body(parameters)
        if name == "messages":
            source, defaults = "", self._defaults
            if body.get("max_tokens") == UNLIMITED:
                del body["max_tokens"]
            request = _parse_request(ChatCompletionRequest, body | parse_conversation(inputs[name]))
            if request.tool_choice not in (None, "none") and not self._renderer.enable_auto_tools:
                raise InvalidArgument(f"tools: {_TOOL_PARSER} is not set in the model's {FILE}")
            _, (prompt,) = _check_accepted(await self._renderer.render_chat(request))
        else:
            source, defaults = inputs[name], self._defaults if for_openai else {}
            body |= {"prompt": source if name == "text_input" else source.tolist(), "echo": echoes}
            request = _parse_request(CompletionRequest, body)
            (prompt,) = _check_accepted(await self._renderer.render_completion(request))
        limit = getattr(request, "max_completion_tokens", None)
        limit = request.max_tokens if limit is None else limit
        prompt_length = len(prompt["prompt_token_ids"])
        cap = self._max_tokens if defaults else None
        limit = get_max_tokens(self._config.max_model_len, limit, prompt_length, defaults, cap)
        sampling_params = request.to_sampling_params(limit, defaults)
        call = VllmCall(request, prompt, sampling_params, self._tokenizer.decode)
        if echo:
            call.text = source if isinstance(source, str) else self._tokenizer.decode(source)
        call.options["lora_request"] = self._adapters.get(adapter or "")
        if name == "messages" and self._renderer.parser is not None:
            self._add_parser(call)
        return call

    def _add_parser(self, call: VllmCall) -> None:
        """Add the parsers of a chat's messages to its call."""
        template_options = self._renderer.effective_chat_template_kwargs(call.request)
        options = {"chat_template_kwargs": template_options, "model_config": self._config}
        new_parser = partial(self._renderer.parser, self._tokenizer, call.request.tools, **options)
        parser, tokens = new_parser(), call.prompt["prompt_token_ids"]
        call.options["reasoning_ended"] = call.request.resolve_reasoning_ended(parser, tokens)
        if parser.reasoning_parser is not None:
            call.options["reasoning_parser_kwargs"] = {"chat_template_kwargs": template_options}
        call.make_parser = new_parser

    async def convert(
        self, task: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> dict[str, tuple[str, list[Any]]]:
        """Return the tokens of a prompt and their strings as JSON, or the text of tokens.

        Returns:
            The datatype and the values of each output.

        Raises:
            InvalidArgument: The task or an input is wrong. vLLM raises other errors, see
                `client_error`.
        """
        from vllm.entrypoints.serve.tokenize import protocol

        name = task_input(task, inputs)
        if name == "input_ids":
            tokens = inputs[name].tolist()
            self.client.renderer.validate_token_ids(tokens, parameter="tokens")
            detokenize = protocol.DetokenizeRequest(tokens=tokens)
            result = _check_accepted(await self._tokenization.create_detokenize(detokenize, None))
            return {"text_output": ("BYTES", [result.prompt])}
        request_class, body = protocol.TokenizeCompletionRequest, {"prompt": inputs[name]}
        if name == "messages":
            request_class, body = protocol.TokenizeChatRequest, parse_conversation(inputs[name])
        if "add_special_tokens" in parameters:
            body["add_special_tokens"] = parameters["add_special_tokens"]
        tokenize = request_class.model_validate({**body, "return_token_strs": True})
        result = _check_accepted(await self._tokenization.create_tokenize(tokenize, None))
        strings = orjson.dumps(result.token_strs)
        return {"token_ids": ("INT32", result.tokens), "text_output": ("BYTES", [strings])}


def max_tokens_cap(config: Any, defaults: Mapping[str, Any]) -> int | None:
    """Return the maximum of `max_tokens` that the arguments of vLLM's server set, or None."""
    if config.generation_config in ("auto", "vllm"):
        return (config.override_generation_config or {}).get("max_new_tokens")
    return defaults.get("max_tokens")


def _request_body(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as fields of vLLM's API, with the older names of constraints replaced.

    Clients of Triton's vllm_backend send the constraints as the text of a JSON object.

    Raises:
        InvalidArgument: The constraints contradict each other, or are not an object. vLLM would
            fail with an AttributeError in the latter case.
    """
    body = {name: value for name, value in parameters.items() if value is not None}
    for name in body.keys() & {"structured_outputs", "guided_decoding"}:
        with contextlib.suppress(ValueError):
            body[name] = orjson.loads(body[name]) if isinstance(body[name], str) else body[name]
        if not isinstance(body[name], dict):
            raise InvalidArgument(f"{name}: {clip(repr(body[name]))} is not an object")
    fields = {key: body.pop(f"guided_{key}") for key in _CONSTRAINTS if f"guided_{key}" in body}
    constraints = {**body.pop("guided_decoding", {}), **fields}
    constraints = {key: value for key, value in constraints.items() if value is not None}
    if constraints and body.get("structured_outputs", constraints) != constraints:
        found, guided_text = clip(repr(body["structured_outputs"])), clip(repr(constraints))
        raise InvalidArgument(f"structured_outputs: {found} contradicts guided_*: {guided_text}")
    return {**body, "structured_outputs": constraints} if constraints else body


def _parse_request(request_class: Any, body: dict[str, Any]) -> Any:
    """Return a request of vLLM's API; raise InvalidArgument for a field that is not supported."""
    # The `id` of a request of `generate` is a parameter, too, as in Triton.
    body = {name: value for name, value in body.items() if name not in ("id", *_UNUSED)}
    _check_known(body, request_class.model_fields, "{}: vLLM has no such parameter")
    if body.get("use_beam_search"):
        raise InvalidArgument("use_beam_search: not supported")
    return request_class.model_validate(body)


def _check_accepted(response: Any) -> Any:
    """Return a response of vLLM's server; raise InvalidArgument if it is an error."""
    if (error := getattr(response, "error", None)) is not None:
        raise InvalidArgument(f"{error.param}: {error.message}" if error.param else error.message)
    return response
