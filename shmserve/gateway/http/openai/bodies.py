"""The parts of a request's JSON body (model, prompts and parameters), and the bodies of errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import orjson

from shmserve.errors import InvalidArgument, NotFound, QueueFull, ShmserveError, clip
from shmserve.gateway.compression import BodyTooLarge, UnsupportedEncoding
from shmserve.gateway.context import Gateway, GatewayModel, resolve_model
from shmserve.gateway.http.body import read_json
from shmserve.gateway.http.json.large_bodies import (
    Convert,
    Packed,
    are_tokens,
    check_count,
    check_tokens,
    find_missing_role,
    parse_large,
)
from shmserve.gateway.http.json.parser import JsonFault
from shmserve.gateway.http.json.tensors import decode
from shmserve.gateway.http.messages import HttpRequest
from shmserve.gateway.http.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    CONVERSATION_FIELDS,
    select_supported_fields,
)
from shmserve.gateway.http.openai.model_names import (
    PARAMETERS_INPUT,
    TEXT_OUTPUT,
    find_adapter,
    generates_text,
    model_names,
    resolve_alias,
    response_name,
)
from shmserve.gateway.http.routing import NoRoute
from shmserve.gateway.inference.in_flight import output_bytes
from shmserve.gateway.inference.infer_request import InferInput, InferOutput, InferRequest
from shmserve.ipc.engine_settings import (
    ENGINE_PARAMETER,
    LLM_BACKEND,
    PROMPT_TOO_LONG,
    EngineSettings,
)
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES, decode_bytes
from shmserve.ipc.tensors.descriptors import TensorRef

# The output with the content, the reasoning and the tool calls of a text, as JSON.
MESSAGE_OUTPUT = "message"

_REQUIRED_OUTPUTS = (TEXT_OUTPUT, "finish_reason", "usage")
_STOP_REASON = "stop_reason"  # models of other backends may lack this output
_UNLIMITED_TOKENS = 1 << 24  # the worker reduces this number of tokens to the model's maximum
# The names of the field that limits the tokens; the first field in the body counts.
_TOKEN_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_new_tokens")


class TextRequest(NamedTuple):
    """A request for text: a tensor for each prompt, and the parameters of all prompts.

    Attributes:
        model: The model.
        name: The name of the model in the response.
        prompts: The input of each prompt.
        parameters: The sampling parameters.
        sample_count: The number of choices for each prompt.
        stream: Whether the response is streamed.
        shows_usage: Whether a stream ends with the numbers of tokens.
        detail_outputs: Outputs that only some requests need.
        shows_running_usage: Whether each chunk contains its sample's number of tokens so far.
    """

    model: GatewayModel
    name: str
    prompts: list[InferInput]
    parameters: dict[str, Any]
    sample_count: int
    stream: bool
    shows_usage: bool
    detail_outputs: tuple[str, ...] = ()
    shows_running_usage: bool = False

    def infer_requests(self) -> list[InferRequest]:
        """Return the inference request of each prompt."""
        names = [*_REQUIRED_OUTPUTS, *self.detail_outputs]
        if self.sample_count != 1:
            names.append("index")
        if _STOP_REASON in self.model.signature.outputs:
            names.append(_STOP_REASON)
        if wants_logprobs(self.parameters) and "logprobs" not in names:
            names.append("logprobs")
        encoded_parameters = orjson.dumps(self.parameters, *_WITH_PACKED).decode()
        return [
            InferRequest(
                "",
                [prompt, create_input(PARAMETERS_INPUT, "BYTES", [encoded_parameters])],
                [InferOutput(name, binary=True) for name in names],
                binary=True,
            )
            for prompt in self.prompts
        ]


def _select_details(parameters: dict[str, Any], shows_running_usage: bool) -> tuple[str, ...]:
    """Return the outputs that only some requests need: token ids and log probabilities.

    With `shows_running_usage`, each chunk reports its token usage, which is counted by token ids.
    """
    detail_outputs: tuple[str, ...] = ()
    if shows_running_usage or ("return_token_ids" in parameters and returns_tokens(parameters)):
        detail_outputs = ("token_ids", "prompt_token_ids")
    return (*detail_outputs, "logprobs") if "prompt_logprobs" in parameters else detail_outputs


def returns_tokens(parameters: dict[str, Any]) -> bool:
    """Return whether the response contains the ids of tokens."""
    return parameters.get("return_token_ids") is True


def wants_logprobs(parameters: dict[str, Any]) -> bool:
    """Return whether the response contains the probabilities of tokens."""
    count = parameters.get("logprobs")  # a `logprobs` of 0 also requests the log probabilities
    return count is not None and count is not False


def as_fragment(packed_text: Packed) -> orjson.Fragment:
    """Return a field of a large body as JSON for `orjson.dumps`."""
    return orjson.Fragment(b"".join(packed_text.pieces))


# Arguments of `orjson.dumps` that encode a `Packed` field, which is a dataclass.
_WITH_PACKED = as_fragment, orjson.OPT_PASSTHROUGH_DATACLASS


def create_input(
    name: str, datatype: str, values: Sequence[Any], shape: Sequence[int] = ()
) -> InferInput:
    """Return an input with these values, of one dimension unless a shape is given."""
    count = len(values)
    data = decode(list(values), datatype, count, name)
    return InferInput(name, datatype, tuple(shape) or (count,), count, data)


def packed_tensor(name: str, values: Sequence[Packed], shape: Sequence[int] = ()) -> InferInput:
    """Return an input with `values`, unparsed prompts of a large body, as its elements."""
    count = sum(prompt.count for prompt in values)
    pieces = [piece for prompt in values for piece in prompt.pieces]
    size = sum(prompt.byte_size for prompt in values)
    shape = tuple(shape) or (count,)
    return InferInput(name, values[0].datatype, shape, count, pieces, size)


def decode_output(gateway: Gateway, tensor: TensorRef, model: str) -> np.ndarray[Any, Any]:
    """Return a copy of the elements of an output, in one dimension."""
    data = bytes(output_bytes(gateway, tensor))
    if tensor.datatype == "BYTES":
        return decode_bytes(data, tensor.shape, tensor.name, model).ravel()
    return np.frombuffer(data, STORAGE_DTYPES[tensor.datatype])


async def read_body(
    gateway: Gateway,
    request: HttpRequest,
    prompt_fields: Sequence[str] = (),
    convert: Convert | None = None,
) -> dict[str, Any]:
    """Return the JSON object in a request's body, which may be compressed.

    In a large body, `prompt_fields` and other large fields are `Packed`. `convert`, if given,
    changes the parsed object of a large body.

    Raises:
        InvalidArgument: The body is too large, or not a JSON object.
        UnsupportedMediaType: The encoding of the body is not supported.
    """
    try:
        parse_body = partial(parse_prompts, gateway, prompt_fields, convert=convert)
        body = await read_json(gateway, request, is_required=True, parse_large=parse_body)
    except JsonFault as fault:
        raise InvalidArgument(fault.message) from None
    except BodyTooLarge as error:
        raise RequestTooLarge(error.message) from None
    except UnsupportedEncoding:
        encoding = clip(repr(request.headers.get("Content-Encoding")))
        raise UnsupportedMediaType(
            f"Content-Encoding: {encoding} is not supported; use gzip, deflate or identity"
        ) from None
    if type(body) is not dict:
        raise InvalidArgument(f"the body must be a JSON object, got {_describe_type(body)}")
    return body


async def read_fields(
    gateway: Gateway, request: HttpRequest, supported: frozenset[str], prompt_fields: Sequence[str]
) -> dict[str, Any]:
    """Return the supported fields of a request's body.

    Raises:
        ShmserveError: As in `read_body` and `select_supported_fields`.
    """
    body = await read_body(gateway, request, prompt_fields)
    return select_supported_fields(body, supported, gateway.settings.refuse_unknown_fields)


async def parse_prompts(
    gateway: Gateway,
    prompt_fields: Sequence[str],
    pieces: list[bytes],
    model: str = "",
    convert: Convert | None = None,
) -> Any:
    """Parse a large body with prompts, for `model` or the model that the body names.

    Raises:
        ShmserveError: As in `parse_large`.
    """
    token_limits = {
        name: model_version.max_model_len
        for model_version in gateway.models.all_versions()
        if model_version.max_model_len
        for name in (*model_names(gateway, model_version.name), *model_version.aliases)
    }
    return await parse_large(pieces, token_limits, prompt_fields, model, convert)


async def resolve_named_model(
    gateway: Gateway, body: dict[str, Any], *, default_model: str = ""
) -> GatewayModel:
    """Return the model that a body names, or the default.

    Raises:
        InvalidArgument: The body names no model.
        NotFound: There is no such model.
    """
    name = check_member(body, "model", str, default_model)
    if not name:
        raise InvalidArgument("model: the name of a model is required")
    model_name = await resolve_alias(gateway, name)
    try:
        return await resolve_model(gateway, model_name, "")
    except NotFound as error:
        raise NotFound(f"{error.message} (GET /v1/models lists the models)") from None


def check_member(body: dict[str, Any], name: str, member_type: type[Any], default: Any) -> Any:
    """Return a member of a body, or the default if the member is absent or null.

    Raises:
        InvalidArgument: The member has another type.
    """
    if name not in body or body[name] is None:
        return default
    value = body[name]
    if member_type is int and type(value) is float and value.is_integer():
        return int(value)
    is_prompt = type(value) is Packed and not value.is_json
    is_packed = is_prompt and member_type is (str if value.kind == "text" else list)
    if type(value) is not member_type and not is_packed:
        type_names = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}
        allowed_text = type_names.get(member_type, "an integer")
        raise InvalidArgument(f"{name}: {clip(repr(value))} is not {allowed_text}")
    return value


async def parse_completion(gateway: Gateway, body: dict[str, Any]) -> TextRequest:
    """Return the request in the body of a completion."""
    refuses_unknown = gateway.settings.refuse_unknown_fields
    fields = select_supported_fields(body, COMPLETION_FIELDS, refuses_unknown)
    model = await resolve_generative_model(gateway, fields)
    value: Any = fields.get("prompt")
    is_single = type(value) is not list or are_tokens(value)
    prompts = [prompt_input(value)] if is_single else await _prompt_inputs(model, value)
    echo = check_member(fields, "echo", bool, False)
    if "max_completion_tokens" in fields:  # the field of chats, which other backends do not know
        if model.backend == LLM_BACKEND:
            fields.pop("max_tokens", None)
        else:
            fields["max_tokens"] = fields.pop("max_completion_tokens")
    return _text_request(gateway, model, prompts, {**fields, "echo": echo})


async def parse_chat(gateway: Gateway, body: dict[str, Any]) -> TextRequest:
    """Return the request in the body of a chat."""
    fields = select_supported_fields(body, CHAT_FIELDS, gateway.settings.refuse_unknown_fields)
    model = await resolve_generative_model(gateway, fields)
    variables = {name: fields.pop(name) for name in CONVERSATION_FIELDS & fields.keys()}
    prompt = conversation_input(fields, variables)
    limit_names = [name for name in _TOKEN_LIMIT_FIELDS if name in fields] or ["max_tokens"]
    if not check_member(fields, "logprobs", bool, False):
        if check_member(fields, "top_logprobs", int, 0):
            raise InvalidArgument("top_logprobs: requires logprobs: true")
        fields.pop("top_logprobs", None)
    parameters = {
        "add_special_tokens": False,
        "echo": False,
        limit_names[0]: _UNLIMITED_TOKENS,
        **fields,
    }
    for name in limit_names[1:]:
        check_member(parameters, name, int, 0)
        del parameters[name]
    may_reason = MESSAGE_OUTPUT in model.signature.outputs and model.may_reason
    if may_reason and variables.get("include_reasoning") is False:
        # As in vLLM, the response has no tokens, because they would show the reasoning.
        for name in ("logprobs", "top_logprobs", "return_token_ids"):
            parameters.pop(name, None)
    text_request = _text_request(gateway, model, [prompt], parameters)
    if may_reason or (MESSAGE_OUTPUT in model.signature.outputs and "tools" in variables):
        return text_request._replace(detail_outputs=(*text_request.detail_outputs, MESSAGE_OUTPUT))
    return text_request


def conversation_input(body: dict[str, Any], variables: dict[str, Any]) -> InferInput:
    """Return the input with the messages of a body, and with variables of the chat template.

    Raises:
        InvalidArgument: There are no messages, or they are not objects with roles.
    """
    messages = check_member(body, "messages", list, [])
    if not messages:
        raise InvalidArgument("messages: at least one message is required")
    is_packed = type(messages) is Packed
    fault_index = messages.fault_index if is_packed else find_missing_role(messages)
    if fault_index is not None:
        raise InvalidArgument(f"messages[{fault_index}]: expected an object with a 'role'")
    if is_packed:
        prefix = b'{"messages":' if variables else b""
        suffix = b"," + orjson.dumps(variables, *_WITH_PACKED)[1:] if variables else b""
        size = len(prefix) + messages.byte_size + len(suffix)
        pieces = [size.to_bytes(4, "little") + prefix, *messages.pieces, suffix]
        return InferInput("messages", "BYTES", (1,), 1, pieces, size + 4)
    chat = {"messages": messages, **variables} if variables else messages
    return create_input("messages", "BYTES", [orjson.dumps(chat, *_WITH_PACKED).decode()])


async def resolve_generative_model(
    gateway: Gateway, body: dict[str, Any], *, default_model: str = ""
) -> GatewayModel:
    """Return the text-generating model that a body names, or the default.

    Raises:
        ShmserveError: As in `resolve_named_model`.
    """
    model = await resolve_named_model(gateway, body, default_model=default_model)
    if not generates_text(model):
        raise NotFound(f"model '{model.name}' does not generate text")
    return model


def _text_request(
    gateway: Gateway, model: GatewayModel, prompts: list[InferInput], parameters: dict[str, Any]
) -> TextRequest:
    stream = check_member(parameters, "stream", bool, False)
    sample_count = check_member(parameters, "n", int, 1)
    excluded_fields = ("model", "prompt", "messages", "stream_options")
    fields = {name: value for name, value in parameters.items() if name not in excluded_fields}
    adapter = find_adapter(gateway, model, parameters["model"]) if model.adapters else ""
    if adapter and fields.setdefault("lora_name", adapter) != adapter:
        found_text = clip(repr(fields["lora_name"]))
        raise InvalidArgument(f"lora_name: {found_text} contradicts the model '{adapter}'; omit it")
    name = adapter or response_name(gateway, model.name)
    shows_usage = shows_running_usage = False
    if options := check_member(parameters, "stream_options", dict, {}):
        if not stream:
            raise InvalidArgument("stream_options: only allowed if stream is true")
        options = {f"stream_options.{name}": value for name, value in options.items()}
        shows_usage = check_member(options, "stream_options.include_usage", bool, False)
        option = "stream_options.continuous_usage_stats"
        shows_running_usage = shows_usage and check_member(options, option, bool, False)
    usage_options = (shows_usage, _select_details(fields, shows_running_usage), shows_running_usage)
    return TextRequest(model, name, prompts, fields, sample_count, stream, *usage_options)


async def _prompt_inputs(model: GatewayModel, value: list[Any]) -> list[InferInput]:
    """Return the inputs of a list of texts, or of a list of lists of tokens.

    Other requests are handled between the conversions of many prompts.
    """
    if not value:
        raise InvalidArgument("prompt: the list is empty; at least one prompt is required")
    check_count("prompt", value)
    prompts: list[InferInput] = []
    for index, item in enumerate(value):
        prompts.append(prompt_input(item, f"prompt[{index}]"))
        await asyncio.sleep(0)
    if len(prompts) > 1:
        _check_capacity(model, len(prompts))
    return prompts


def _check_capacity(model: GatewayModel, count: int) -> None:
    """Raise InvalidArgument if a model can never process so many prompts at a time."""
    engine = model.config.get("parameters", {}).get(ENGINE_PARAMETER)
    if engine is None or model.backend != LLM_BACKEND:
        return
    settings = EngineSettings.read(engine["string_value"])
    instance_count = sum(group["count"] for group in model.config["instance_group"])
    max_count = settings.max_batch_size * instance_count + settings.max_waiting_requests
    if count > max_count:
        raise InvalidArgument(
            f"prompt: {count} prompts are more than the {max_count} that the model takes at a time "
            f"(max_batch_size {settings.max_batch_size}, "
            f"max_waiting_requests {settings.max_waiting_requests})"
        )


def prompt_input(value: Any, name: str = "prompt") -> InferInput:
    """Return the input for the field `name` of a body: a text, or a list of tokens."""
    if type(value) is str:
        return create_input("text_input", "BYTES", [value])
    if type(value) is Packed and value.kind in ("text", "tokens"):
        return packed_tensor("text_input" if value.kind == "text" else "input_ids", [value])
    if are_tokens(value):
        check_tokens(name, value)
        return create_input("input_ids", "INT32", value)
    text = f"{name}: {clip(repr(value))} is not a string, a list of tokens, or a list of these"
    raise InvalidArgument(text)


def _describe_type(value: Any) -> str:
    type_names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return type_names.get(type(value), "a number")


_REQUEST_ID = re.compile(r"\[request id: .*?\] ")
# Messages about fields have the name of each field before its problem.
_FIELD_PREFIX = re.compile(r"(^|; )([a-z][a-z_.\[\]0-9]*): ")
# The body's field that has the value of a model's input, by the name of the input.
_FIELDS_BY_INPUT = {"text_input": "prompt", "input_ids": "prompt"}


class TooManyRequests(QueueFull):
    """The error for a full queue, with the status that OpenAI's API defines for it."""

    status = 429


class RequestTooLarge(InvalidArgument):
    """The error for a body that is too large, with the status that OpenAI's API defines for it."""

    status = 413


class RefusedFields(InvalidArgument):
    """The error for refused fields of a body, whose names in the message need no conversion."""


class UnsupportedMediaType(UnsupportedEncoding):
    """The error for an unknown encoding of a body; OpenAI's clients would retry after a 501."""

    status = 415


# The types and codes of errors by status. Errors with another status have no code, and the type
# "invalid_request_error" below 500, else "server_error".
_ERROR_TYPES: Mapping[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("invalid_request_error", "model_not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    421: ("invalid_request_error", "misdirected_request"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    501: ("invalid_request_error", "unsupported"),
}


def encode_openai_error(error: ShmserveError, names: Mapping[str, str] = _FIELDS_BY_INPUT) -> bytes:
    """Return the body of an error response: {"error": {"message", "type", "param", "code"}}.

    Args:
        error: The error.
        names: Maps a field name in error messages to the name that the client knows.
    """
    is_invalid = isinstance(error, InvalidArgument)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    # OpenAI's API has the status 429 for a full queue. A stream has sent its status before,
    # but its error event has the type that belongs to 429, too.
    status = TooManyRequests.status if isinstance(error, QueueFull) else error.status
    kind, code = _ERROR_TYPES.get(status, (kind, None))
    if isinstance(error, NoRoute):
        code = "unknown_url"
    elif is_invalid and PROMPT_TOO_LONG in error.message:
        code = "context_length_exceeded"
    message = _REQUEST_ID.sub("", error.message, count=1).encode(errors="replace").decode()
    if is_invalid and not isinstance(error, RefusedFields):

        def rename_field(prefix: re.Match[str]) -> str:
            name = names.get(prefix[2], prefix[2])
            for tool_infix in (".function.", ".custom."):  # "tools[0].function.name"
                name = name.replace(tool_infix, names.get(tool_infix, tool_infix))
            return f"{prefix[1]}{name}: "

        message = _FIELD_PREFIX.sub(rename_field, message)
    match = _FIELD_PREFIX.match(message) if is_invalid else None
    param = None if match is None else match[2]
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
