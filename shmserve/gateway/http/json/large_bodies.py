"""The parser of large bodies with prompts, which runs in a separate process.

Parsing a body of 64 MiB takes a second, in which the gateway would serve no other request. A body
above 512 KiB, or with many objects, is therefore sent to a process. It finds prompts that are too
long for every model, other large fields, and JSON errors. It returns the body without its prompts
as JSON, and the prompts as the bytes of their tensors, which the gateway only has to copy in
pieces.

    8 bytes: size of the header | header: JSON | the bytes of all prompts, one after the other
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from shmserve.errors import Internal, InvalidArgument, ShmserveError, clip
from shmserve.gateway.http.json.parser import LARGE, JsonFault, loads, loads_checked
from shmserve.gateway.http.json.tensors import decode
from shmserve.ipc.engine_settings import PROMPT_TOO_LONG

_PROMPTS = ("prompt", "text_input", "input_ids", "messages", "input", "documents", "tokens")
_CHATS = ("messages", "input", "documents")
# Maximum bytes of all other fields, which the gateway parses in 20 ms.
_MAX_OTHER_BYTES = 2 * LARGE
_BYTES_A_TOKEN = 128  # maximum average bytes of a token
# The maximum number of prompts of OpenAI's APIs, and the error about a longer list.
_COUNTS = {
    "prompt": (1024, "prompt: {} prompts are more than {}"),
    "input": (2048, "input: {} strings exceed the limit of {}"),
}
_MAX_PACKED_PROMPTS = 2048
OTHER_FIELDS = "*"  # stands for the fields of a body that only the model reads
_MAX_TOKEN_ID = (1 << 31) - 1
_PIECE = 1 << 16
_one_at_a_time = asyncio.Semaphore(1)

# Called with the parsed body in the process; returns another body, and the fields to pack.
Convert = Callable[[Any], tuple[Any, Sequence[str]]]


@dataclass(slots=True, eq=False, repr=False)
class Packed:
    """A prompt of a large body, converted to the bytes of a tensor by the process.

    Attributes:
        kind: "text": a string. "tokens": a list of integers. "messages": a list of messages, whose
            bytes are JSON without the length that precedes an element of a tensor. "json": a field
            that is no prompt, as JSON.
        count: The number of elements of the tensor.
        byte_size: The number of bytes.
        fault: The index of the first message without a role, or None.
        pieces: The bytes.
    """

    kind: str
    count: int
    byte_size: int
    fault: int | None = None
    pieces: list[bytes] = field(default_factory=list)

    @property
    def datatype(self) -> str:
        """Return the datatype of the tensor."""
        return "INT32" if self.kind == "tokens" else "BYTES"

    def __repr__(self) -> str:
        """Return the text by which errors show the prompt."""
        return (
            self.pieces[0][:_PIECE].decode(errors="replace") if self.is_json else repr(self.value())
        )

    @property
    def is_json(self) -> bool:
        """Return whether this is a field that is no prompt."""
        return self.kind == "json"

    def value(self) -> Any:
        """Return the prompt as in the parsed body."""
        data = b"".join(self.pieces)
        if self.kind == "tokens":
            return np.frombuffer(data, np.int32).tolist()
        return data[4:].decode() if self.kind == "text" else orjson.loads(data)


async def parse_large(
    pieces: Sequence[bytes],
    longest: Mapping[str, int],
    packed: Sequence[str],
    model: str = "",
    convert: Convert | None = None,
) -> Any:
    """Parse a large body, whose prompts become `Packed`.

    Args:
        pieces: The body.
        longest: The maximum number of tokens of each model.
        packed: The fields with prompts. `OTHER_FIELDS` stands for other large fields, which become
            JSON that this process does not parse.
        model: The model, unless the body has its name.
        convert: The function that converts the parsed body, if any; a public one of a module.

    Raises:
        JsonFault: The body is not JSON.
        InvalidArgument: A prompt or another field is too large.
    """
    code = f"from {__name__} import main; main()"
    if convert is not None:
        code = f"import {convert.__module__} as m; {code[:-1]}m.{convert.__name__})"
    arguments = (sys.executable, "-c", code, json.dumps([longest, packed, model]))
    pipe = asyncio.subprocess.PIPE
    async with _one_at_a_time:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=pipe, stdout=pipe, limit=_PIECE
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    for begin in range(0, len(piece), _PIECE):
                        process.stdin.write(piece[begin : begin + _PIECE])
                        await process.stdin.drain()
            process.stdin.close()
            return await _receive_result(process.stdout)
        except asyncio.IncompleteReadError:
            raise Internal("the process that parses large bodies has exited") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _receive_result(output: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await output.readexactly(8), "little")
    header = loads_checked(await output.readexactly(size))
    if "error" in header:
        raise (JsonFault if header["malformed"] else InvalidArgument)(header["error"])
    prompts = {name: Packed(*columns) for name, columns in header["prompts"].items()}
    for prompt in prompts.values():
        missing_bytes = prompt.byte_size
        while missing_bytes:
            prompt.pieces.append(await output.readexactly(min(missing_bytes, _PIECE)))
            missing_bytes -= len(prompt.pieces[-1])
    body = header["body"]
    for holder in _holders(body):
        for name in header["packed"]:
            value = holder.get(name)
            if isinstance(value, str):
                holder[name] = prompts.get(value, value)
            elif isinstance(value, list) and len(value) <= _MAX_PACKED_PROMPTS:
                texts = [item if isinstance(item, str) else "" for item in value]
                holder[name] = [
                    prompts.get(text, item) for text, item in zip(texts, value, strict=True)
                ]
    return body


def _holders(body: Any) -> list[dict[str, Any]]:
    """Return the objects of a body that may contain prompts: itself, and its `parameters`."""
    nested = body.get("parameters") if isinstance(body, dict) else None
    return [holder for holder in (body, nested) if isinstance(holder, dict)]


def long_prompt(body: Any, longest: Mapping[str, int], model: str) -> str:
    """Return the error about a prompt or other fields that are too large, or ""."""
    requested_model = (body.get("model") or model) if isinstance(body, dict) else None
    token_limit = longest.get(requested_model) if isinstance(requested_model, str) else None
    if token_limit is None:
        return ""
    nested = body.get("parameters")
    fields = {**nested, **body, "parameters": None} if isinstance(nested, dict) else body
    other_sizes = {name: len(orjson.dumps(fields[name])) for name in fields if name not in _PROMPTS}
    if sum(other_sizes.values()) > _MAX_OTHER_BYTES:
        name = max(other_sizes, key=lambda name: other_sizes[name])
        return f"{clip(name)}: {other_sizes[name]} bytes exceed the limit of {_MAX_OTHER_BYTES}"
    if fields.get("truncate_prompt_tokens") is not None:
        return ""
    for name in _PROMPTS:
        value = fields.get(name)
        is_conversation = name in _CHATS
        prompts = value if isinstance(value, list) and not is_conversation else [value]
        if prompts and type(prompts[0]) is int:
            prompts = [prompts]
        for prompt in prompts:
            text = isinstance(prompt, str) or (is_conversation and prompt is not None)
            limit = max(token_limit * _BYTES_A_TOKEN, LARGE) if text else token_limit
            measured = orjson.dumps(prompt) if text else prompt
            size = len(measured) if isinstance(measured, bytes | list | dict) else 0
            if size > limit:
                unit = "bytes" if text else "tokens"
                return f"{name}: {PROMPT_TOO_LONG}: {size} {unit} exceed the limit of {limit}"
    return ""


def without_role(messages: Sequence[Any]) -> int | None:
    """Return the index of the first message that is not an object with a role, or None."""
    for index, message in enumerate(messages):
        if type(message) is not dict or type(message.get("role")) is not str:
            return index
    return None


def are_tokens(value: Any) -> bool:
    """Return whether a prompt is a list of tokens, since its first element is a number."""
    return type(value) is list and bool(value) and type(value[0]) in (int, float)


def check_tokens(name: str, tokens: Sequence[Any]) -> None:
    """Raise InvalidArgument if an element is not an integer, or if INT32 would wrap it."""
    if {*map(type, tokens)} == {int} and max(-min(tokens), max(tokens)) <= _MAX_TOKEN_ID:
        return
    for index, token in enumerate(tokens):
        if type(token) is not int or abs(token) > _MAX_TOKEN_ID:
            raise InvalidArgument(f"{name}[{index}]: {clip(repr(token))} is not a token")


def check_count(name: str, values: Sequence[Any]) -> None:
    """Raise InvalidArgument if a field of OpenAI's API has too many prompts."""
    max_count, text = _COUNTS[name]
    if len(values) > max_count:
        raise InvalidArgument(text.format(len(values), max_count))


class _Packer:
    """A packer of the prompts of one body. `prompts` has the arguments of each `Packed`."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)  # A client cannot guess the string of a prompt.
        self.prompts: dict[str, tuple[str, int, int, int | None]] = {}
        self.pieces: list[bytes] = []

    def packed(self, name: str, value: Any) -> Any:
        """Return the value of a field, with strings that stand for its prompts."""
        if isinstance(value, str):
            return self._pack("text", 1, decode([value], "BYTES", 1, name))
        if not isinstance(value, list) or not value:
            return value
        is_chat = name == "messages" and type(value[0]) is not str
        if is_chat or (name == "input" and type(value[0]) is dict):
            return self._pack("messages", 1, orjson.dumps(value), without_role(value))
        if are_tokens(value):
            check_tokens(name, value)
            return self._pack("tokens", len(value), decode(value, "INT32", len(value), name))
        if name == "prompt" or (name == "input" and {*map(type, value)} == {str}):
            check_count(name, value)
        if len(value) > _MAX_PACKED_PROMPTS:
            return value
        return [
            self.packed(f"{name}[{index}]", item)
            if isinstance(item, str) or are_tokens(item)
            else item
            for index, item in enumerate(value)
        ]

    def pack_others(self, body: dict[str, Any], prompts: Sequence[str]) -> list[str]:
        """Pack large fields that are no prompts, and return their names."""
        names = []
        for name, value in body.items():
            if name not in prompts and isinstance(value, dict | list):
                text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
                if len(text) > _PIECE:
                    body[name] = self._pack("json", 1, text)
                    names.append(name)
        return names

    def _pack(self, kind: str, count: int, data: bytes, fault: int | None = None) -> str:
        name = f"{self._token}.{len(self.prompts)}"
        self.prompts[name] = kind, count, len(data), fault
        self.pieces.append(data)
        return name


def main(convert: Convert | None = None) -> None:
    """Parse the body on the standard input, and write its header and its prompts."""
    os.nice(10)
    longest, packed, model = json.loads(sys.argv[1])
    packer = _Packer()
    try:
        body = loads(sys.stdin.buffer.read())
        if error := long_prompt(body, longest, model):
            raise InvalidArgument(error)
        if convert is not None:
            body, packed = convert(body)
        for holder in _holders(body):
            for name in holder.keys() & {*packed}:
                holder[name] = packer.packed(name, holder[name])
        if OTHER_FIELDS in packed and isinstance(body, dict):
            packed += packer.pack_others(body, packed)
        header = {"body": body, "prompts": packer.prompts, "packed": packed}
    except ShmserveError as fault:
        header = {"error": fault.message, "malformed": isinstance(fault, JsonFault)}
    # orjson would write NaN as null.
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    sys.stdout.buffer.writelines((len(text).to_bytes(8, "little"), text, *packer.pieces))
