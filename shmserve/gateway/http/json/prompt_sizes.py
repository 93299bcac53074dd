"""The check of large bodies for prompts that are too long, in a process of its own.

To parse a body of 64 MiB takes a second, in which no other request of the gateway would be served.
A body above `LARGE` is therefore first sent to a process that finds prompts that no model takes.
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

from shmserve.ipc.engine_settings import PROMPT_TOO_LONG

LARGE = 1 << 20
_BYTES_A_TOKEN = 128  # at most, on average
_CODE = f"from {__name__} import main; main()"
_PIECE = 1 << 16
_one_at_a_time = asyncio.Semaphore(1)


async def find_long_prompt(
    pieces: Sequence[bytes], longest: Mapping[str, int], model: str = ""
) -> str:
    """Return the error of a prompt in a body that is too long for its model, or "".

    Args:
        pieces: The body.
        longest: The maximum number of tokens of each model.
        model: The model, unless the body has its name.
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
            return (await process.stdout.read()).decode()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def long_prompt(body: Any, longest: Mapping[str, int], model: str) -> str:
    """Return the error of a prompt in a parsed body, or ""."""
    most = longest.get(body.get("model") or model) if isinstance(body, dict) else None
    nested = body.get("parameters") if isinstance(body, dict) else None
    given = {**nested, **body} if isinstance(nested, dict) else body
    if most is None or given.get("truncate_prompt_tokens") is not None:
        return ""
    for name in ("prompt", "text_input", "input_ids", "messages", "input"):
        value = given.get(name)
        is_conversation = name in ("messages", "input")
        prompts = value if isinstance(value, list) and not is_conversation else [value]
        if prompts and type(prompts[0]) is int:
            prompts = [prompts]
        for prompt in prompts:
            text = isinstance(prompt, str) or (is_conversation and prompt is not None)
            limit = max(most * _BYTES_A_TOKEN, LARGE) if text else most
            size = len(orjson.dumps(prompt)) if text else len(prompt or ())
            if size > limit:
                unit = "bytes" if text else "tokens"
                return f"{name}: {PROMPT_TOO_LONG}: {size} {unit} are above {limit}"
    return ""


def main() -> None:
    """Check the body on the standard input; a body that is no JSON has no prompt."""
    os.nice(10)
    with contextlib.suppress(ValueError):
        body = orjson.loads(sys.stdin.buffer.read())
        sys.stdout.write(long_prompt(body, json.loads(sys.argv[1]), sys.argv[2]))
