"""The parser of large bodies with prompts, which runs in a separate process.

Parsing a body of 64 MiB in the gateway would delay all other requests by a second. A body above
512 KiB, or with many objects, is therefore sent to a process. The process detects prompts that are
too long for the model, other fields that are too large, and JSON errors. It returns the small
fields of the body as JSON, the prompts as the bytes of their tensors, and other large fields as
bytes of JSON. The gateway only has to copy these bytes in pieces.

    8 bytes: size of the header | header: JSON | the bytes of all packed fields, one after the other
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from typing import Any

import numpy as np
import orjson

from shmserve.errors import Internal, InvalidArgument, ShmserveError, clip
from shmserve.gateway.http.json.parser import LARGE_BYTES, JsonFault, loads, loads_checked
from shmserve.gateway.http.json.tensors import decode
from shmserve.gateway.inference.infer_request import check_member_count
from shmserve.ipc.engine_settings import prompt_too_long_text
from shmserve.logs import warn_once

logger = logging.getLogger(__name__)

_PROMPT_FIELDS = ("prompt", "text_input", "input_ids", "messages", "input", "documents", "tokens")
_CHAT_FIELDS = ("messages", "input", "documents")
# Maximum bytes of all fields that are not prompts. They are limited because the worker parses them.
_MAX_OTHER_BYTES = 2 * LARGE_BYTES
_MAX_BYTES_PER_TOKEN = 128  # on average in a prompt
# The maximum number of prompts in a field of OpenAI's APIs, and the error about a longer list.
_PROMPT_COUNT_LIMITS = {
    "prompt": (1024, "prompt: {} prompts exceed the limit of {}"),
    "input": (2048, "input: {} strings exceed the limit of {}"),
}
_MAX_PACKED_PROMPTS = 2048  # a longer list of prompts stays JSON
_NESTED_OBJECTS = ("parameters", "input")  # objects whose fields are packed like those of the body
_MAX_WARNINGS = 256  # number of the process's warnings that the gateway logs
_MAX_TOKEN_ID = (1 << 31) - 1
_PIECE_BYTES = 1 << 16  # bytes that the pipes transfer at a time
_parser_slot = asyncio.Semaphore(1)  # permits one process at a time

# Called with the parsed body in the parser's process; returns the body to use instead.
Convert = Callable[[Any], Any]


@dataclass(slots=True, eq=False, repr=False)
class Packed:
    """A prompt or another large field of a large body, which the parser process has encoded.

    Attributes:
        kind: "text": a string. "tokens": a list of integers. "messages": a list of messages, whose
            bytes are JSON without the length that precedes an element of a tensor. "json": a field
            that is no prompt, as JSON.
        count: The number of elements of the tensor, or of the JSON value.
        byte_size: The number of bytes.
        fault_index: The index of the first message without a role, or None.
        pieces: The bytes.
    """

    kind: str  # "text", "tokens", "messages" or "json"
    count: int  # number of elements
    byte_size: int
    fault_index: int | None = None  # of the first message without a role
    pieces: list[bytes] = field(default_factory=list)

    @property
    def datatype(self) -> str:
        """Return the datatype of the prompt's tensor."""
        return "INT32" if self.kind == "tokens" else "BYTES"

    def __repr__(self) -> str:
        """Return the beginning of the field, as error messages show it."""
        first_bytes = b"".join(self.pieces[:1])
        if self.kind == "tokens":
            return repr(np.frombuffer(first_bytes, np.int32).tolist())
        prefix = {"text": 4, "json": int(first_bytes.startswith(b'"'))}.get(self.kind, 0)
        text = first_bytes[prefix:].decode(errors="replace")
        return repr(text) if prefix else text

    @property
    def is_json(self) -> bool:
        """Return whether this is another large field of the body, and not a prompt."""
        return self.kind == "json"

    def value(self) -> Any:
        """Return the field as a JSON parser returns it."""
        data = b"".join(self.pieces)
        if self.kind == "tokens":
            return np.frombuffer(data, np.int32).tolist()
        return data[4:].decode() if self.kind == "text" else orjson.loads(data)


async def parse_large(
    pieces: Sequence[bytes],
    token_limits: Mapping[str, int],
    prompt_fields: Sequence[str],
    model: str = "",
    convert: Convert | None = None,  # applied to the parsed body
) -> Any:
    """Parse a large body, whose prompts and other large fields become `Packed`.

    Args:
        pieces: The body.
        token_limits: The maximum number of tokens of a prompt, by model.
        prompt_fields: The names of the fields with prompts.
        model: The name of the model, unless the body contains the name.
        convert: The function that converts the parsed body, or None; the process imports it.

    Raises:
        JsonFault: The body is not JSON.
        InvalidArgument: A prompt or another field is too large.
    """
    main_call = "main()"
    if convert is not None:
        main_call = f"import {convert.__module__} as m; main(m.{convert.__name__})"
    # The process has a low priority, since its imports need more CPU time than most bodies.
    code = f"import os; os.nice(10); from {__name__} import main; {main_call}"
    command = (sys.executable, "-P", "-c", code, json.dumps([token_limits, prompt_fields, model]))
    pipe = asyncio.subprocess.PIPE
    async with _parser_slot:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=_PIECE_BYTES
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    for offset in range(0, len(piece), _PIECE_BYTES):
                        process.stdin.write(piece[offset : offset + _PIECE_BYTES])
                        await process.stdin.drain()
            process.stdin.close()
            return await _receive_result(process.stdout)
        except asyncio.IncompleteReadError:
            text = "the process that parses large bodies has exited; send the request again"
            raise Internal(text) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _receive_result(output: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await output.readexactly(8), "little")
    header = loads_checked(await output.readexactly(size))
    if "error" in header:
        raise (JsonFault if header["malformed"] else InvalidArgument)(header["error"])
    for text in header["warnings"]:
        warn_once(logger, "%s", text)
    packed_values = {name: Packed(*fields) for name, fields in header["packed"].items()}
    for value in packed_values.values():
        missing_bytes = value.byte_size
        while missing_bytes:
            value.pieces.append(await output.readexactly(min(missing_bytes, _PIECE_BYTES)))
            missing_bytes -= len(value.pieces[-1])
    body = header["body"]
    if isinstance(body, dict):
        _insert_packed(body, packed_values)
    return body


def _insert_packed(fields: dict[str, Any], packed_values: Mapping[str, Packed]) -> None:
    """Replace the placeholders of prompts and other large fields by their values."""
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = packed_values.get(value, value)
        elif isinstance(value, list):
            fields[name] = [packed_values.get(i, i) if isinstance(i, str) else i for i in value]
        elif isinstance(value, dict) and name in _NESTED_OBJECTS:
            _insert_packed(value, packed_values)


def prompt_size_error(body: Any, token_limits: Mapping[str, int], model: str) -> str:
    """Return the error about a prompt or other fields that are too large, or ""."""
    requested_model = (body.get("model") or model) if isinstance(body, dict) else None
    token_limit = token_limits.get(requested_model) if isinstance(requested_model, str) else None
    if requested_model == "":  # a request without a name is for the server's only model
        token_limit = max(token_limits.values(), default=None)
    if token_limit is None:
        return ""
    parameters = body.get("parameters")
    fields = {**parameters, **body, "parameters": None} if isinstance(parameters, dict) else body
    other_fields = [name for name in fields if name not in _PROMPT_FIELDS]
    other_sizes = {name: len(orjson.dumps(fields[name])) for name in other_fields}
    if sum(other_sizes.values()) > _MAX_OTHER_BYTES:
        name = max(other_sizes, key=other_sizes.__getitem__)
        return f"{clip(name)}: {other_sizes[name]} bytes exceed the limit of {_MAX_OTHER_BYTES}"
    if fields.get("truncate_prompt_tokens") is not None:
        return ""
    for name in _PROMPT_FIELDS:
        value = fields.get(name)
        is_conversation = name in _CHAT_FIELDS
        prompts = value if isinstance(value, list) and not is_conversation else [value]
        if prompts and type(prompts[0]) is int:
            prompts = [prompts]
        for prompt in prompts:
            is_text = isinstance(prompt, str) or (is_conversation and prompt is not None)
            byte_limit = max(token_limit * _MAX_BYTES_PER_TOKEN, LARGE_BYTES)
            limit = byte_limit if is_text else token_limit
            measured_value = orjson.dumps(prompt) if is_text else prompt
            size = len(measured_value) if isinstance(measured_value, bytes | list | dict) else 0
            if size > limit:
                unit = "bytes" if is_text else "tokens"
                problem = prompt_too_long_text(
                    token_limit, f"{size} {unit} exceed the limit of {limit}"
                )
                return f"{name}: {problem}"
    return ""


def find_missing_role(messages: Sequence[Any]) -> int | None:
    """Return the index of the first message that is not an object with a role, or None."""
    for index, message in enumerate(messages):
        if type(message) is not dict or type(message.get("role")) is not str:
            return index
    return None


def are_tokens(value: Any) -> bool:
    """Return whether a prompt is a list of tokens: a list that begins with a number."""
    return type(value) is list and bool(value) and type(value[0]) in (int, float)


def check_tokens(name: str, tokens: Sequence[Any]) -> None:
    """Raise InvalidArgument if an element is not an integer, or exceeds the range of INT32."""
    if {*map(type, tokens)} == {int} and max(-min(tokens), max(tokens)) <= _MAX_TOKEN_ID:
        return
    for index, token in enumerate(tokens):
        if type(token) is not int or abs(token) > _MAX_TOKEN_ID:
            raise InvalidArgument(
                f"{name}[{index}]: {clip(repr(token))} is not a token (32-bit integer)"
            )


def check_count(name: str, values: Sequence[Any]) -> None:
    """Raise InvalidArgument if a field of OpenAI's API has too many prompts."""
    max_count, error_format = _PROMPT_COUNT_LIMITS[name]
    if len(values) > max_count:
        raise InvalidArgument(error_format.format(len(values), max_count))


class _Packer:
    """A packer of the large fields of one body.

    `packed` contains the arguments of each `Packed`, by the string that replaces its field.
    """

    def __init__(self, prompt_fields: Sequence[str]) -> None:
        self._prompt_fields = prompt_fields
        self._token = secrets.token_hex(16)  # random, so that no client can send a placeholder
        # By placeholder: the fields of `Packed`.
        self.packed: dict[str, tuple[str, int, int, int | None]] = {}
        self.pieces: list[bytes] = []

    def pack_fields(self, fields: dict[str, Any]) -> None:
        """Replace prompts and large fields by placeholder strings."""
        check_member_count(fields, "fields")
        for name, value in fields.items():
            if isinstance(value, dict) and name in _NESTED_OBJECTS:
                self.pack_fields(value)
                continue
            placeholder = self._pack_prompt(name, value) if name in self._prompt_fields else None
            fields[name] = self._pack_large(value) if placeholder is None else placeholder

    def _pack_prompt(self, name: str, value: Any) -> str | list[Any] | None:
        """Return the placeholder of a prompt or a list of prompts; None for other values."""
        if isinstance(value, str):
            return self._pack("text", 1, decode([value], "BYTES", 1, name))
        if not isinstance(value, list) or not value:
            return None
        is_chat = name == "messages" and type(value[0]) is not str
        if is_chat or (name == "input" and type(value[0]) is dict):
            return self._pack("messages", 1, orjson.dumps(value), find_missing_role(value))
        if are_tokens(value):
            check_tokens(name, value)
            return self._pack("tokens", len(value), decode(value, "INT32", len(value), name))
        if name == "prompt" or (name == "input" and {*map(type, value)} == {str}):
            check_count(name, value)
        if len(value) > _MAX_PACKED_PROMPTS:
            return None
        return [
            self._pack_prompt(f"{name}[{index}]", item)
            if isinstance(item, str) or are_tokens(item)
            else self._pack_large(item)
            for index, item in enumerate(value)
        ]

    def _pack_large(self, value: Any) -> Any:
        if not isinstance(value, str | list | dict):
            return value
        text = _encode_json(value)
        count = len(value) if isinstance(value, list) else 1
        return self._pack("json", count, text) if len(text) > _PIECE_BYTES else value

    def _pack(self, kind: str, count: int, data: bytes, fault_index: int | None = None) -> str:
        name = f"{self._token}.{len(self.packed)}"
        self.packed[name] = kind, count, len(data), fault_index
        self.pieces.append(data)
        return name


def main(convert: Convert | None = None) -> None:
    """Parse the body on the standard input, and write its header and its large fields."""
    token_limits, prompt_fields, model = json.loads(sys.argv[1])
    packer = _Packer(prompt_fields)
    warning_buffer = BufferingHandler(_MAX_WARNINGS)
    logging.basicConfig(handlers=[warning_buffer])
    try:
        body = loads(sys.stdin.buffer.read())
        if error := prompt_size_error(body, token_limits, model):
            raise InvalidArgument(error)
        if convert is not None:
            body = convert(body)
        if isinstance(body, dict):
            packer.pack_fields(body)
        else:
            body = type(body)()  # errors about the body name only its type
        warnings = [record.getMessage() for record in warning_buffer.buffer]
        text = _encode_json({"body": body, "packed": packer.packed, "warnings": warnings})
        if len(text) > _MAX_OTHER_BYTES:
            sizes_text = f"{len(text)} bytes (maximum: {_MAX_OTHER_BYTES})"
            raise InvalidArgument(f"the fields besides prompts and messages have {sizes_text}")
    except ShmserveError as fault:
        text = _encode_json({"error": fault.message, "malformed": isinstance(fault, JsonFault)})
        packer.pieces.clear()
    sys.stdout.buffer.writelines((len(text).to_bytes(8, "little"), text, *packer.pieces))


def _encode_json(value: Any) -> bytes:
    # The json module, since orjson would write NaN as null.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
