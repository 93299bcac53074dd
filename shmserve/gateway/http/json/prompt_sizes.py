"""The check of large bodies for prompts that are too long, in a separate process.

Parsing a body of 64 MiB takes a second, in which the gateway would serve no other request. A body
above `LARGE` is therefore first sent to a process. It finds prompts that are too long for every
model, other large fields, and JSON errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from shmserve.errors import ShmserveError, clip
from shmserve.gateway.http.json.parser import LARGE, JsonFault, loads
from shmserve.ipc.engine_settings import PROMPT_TOO_LONG

_PROMPTS = ("prompt", "text_input", "input_ids", "messages", "input", "documents", "tokens")
_CHATS = ("messages", "input", "documents")
# Maximum bytes of all other fields, which the gateway parses in 20 ms.
_MOST_OTHER_BYTES = 2 * LARGE
_BYTES_A_TOKEN = 128  # maximum average bytes of a token
_CODE = f"from {__name__} import main; main()"
_PIECE = 1 << 16
_FAULT = 65  # the exit status for a body that is not JSON
_one_at_a_time = asyncio.Semaphore(1)


async def find_long_prompt(
    pieces: Sequence[bytes], longest: Mapping[str, int], model: str = ""
) -> str:
    """Return the error of a prompt in a body that is too long for its model, or "".

    Args:
        pieces: The body.
        longest: The maximum number of tokens of each model.
        model: The model, unless the body has its name.

    Raises:
        JsonFault: The body is not JSON.
    """
    arguments = (sys.executable, "-c", _CODE, json.dumps(longest), model)
    pipe = asyncio.subprocess.PIPE
    async with _one_at_a_time:
        process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe)
        try:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    for begin in range(0, len(piece), _PIECE):
                        process.stdin.write(piece[begin : begin + _PIECE])
                        await process.stdin.drain()
            process.stdin.close()
            error = (await process.stdout.read()).decode()
            if await process.wait() == _FAULT:
                raise JsonFault(error)
            return error
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def long_prompt(body: Any, longest: Mapping[str, int], model: str) -> str:
    """Return the error about a prompt or other fields that are too large, or ""."""
    token_limit = longest.get(body.get("model") or model) if isinstance(body, dict) else None
    if token_limit is None:
        return ""
    nested = body.get("parameters")
    fields = {**nested, **body, "parameters": None} if isinstance(nested, dict) else body
    other_sizes = {name: len(orjson.dumps(fields[name])) for name in fields if name not in _PROMPTS}
    if sum(other_sizes.values()) > _MOST_OTHER_BYTES:
        name = max(other_sizes, key=lambda name: other_sizes[name])
        return f"{clip(name)}: {other_sizes[name]} bytes exceed the limit of {_MOST_OTHER_BYTES}"
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
            size = len(orjson.dumps(prompt)) if text else len(prompt or ())
            if size > limit:
                unit = "bytes" if text else "tokens"
                return f"{name}: {PROMPT_TOO_LONG}: {size} {unit} exceed the limit of {limit}"
    return ""


def main() -> None:
    """Check the body on the standard input, and print the error."""
    os.nice(10)
    try:
        body = loads(sys.stdin.buffer.read())
        sys.stdout.write(long_prompt(body, json.loads(sys.argv[1]), sys.argv[2]))
    except ShmserveError as fault:
        sys.stdout.write(fault.message)
        sys.exit(_FAULT if isinstance(fault, JsonFault) else 0)
