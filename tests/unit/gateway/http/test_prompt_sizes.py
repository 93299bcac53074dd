"""Large bodies: prompts that are too long are found in another process."""

import asyncio
import json
import time
from typing import Any

import pytest

from shmserve.gateway.http.json.parser import LARGE, JsonFault
from shmserve.gateway.http.json.prompt_sizes import find_long_prompt, long_prompt

LONGEST = {"m": 100, "vast": 1 << 24}
LONG = "a" * (LARGE + 1)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"model": "m", "prompt": LONG}, "prompt: the prompt is longer"),
        ({"model": "m", "prompt": ["a", LONG]}, "prompt: the prompt is longer"),
        ({"model": "m", "prompt": [5] * 101}, "101 tokens exceed the limit of 100"),
        ({"model": "m", "prompt": [[5], [5] * 101]}, "101 tokens exceed the limit of 100"),
        ({"model": "m", "messages": [{"role": "user", "content": LONG}]}, "messages: the prompt"),
        ({"model": "m", "input": LONG}, "input: the prompt is longer"),
        ({"model": "m", "input": [{"role": "user", "content": LONG}]}, "input: the prompt is"),
        ({"text_input": LONG}, "text_input: the prompt is longer"),
        ({"input_ids": [5] * 101}, "input_ids: the prompt is longer"),
        ({"model": "m", "tokens": [5] * 101}, "tokens: the prompt is longer"),
        ({"model": "m", "prompt": [5] * 100}, ""),
        ({"model": "m", "prompt": LONG, "truncate_prompt_tokens": 5}, ""),
        ({"text_input": LONG, "parameters": {"truncate_prompt_tokens": 5}}, ""),
        (
            {"model": "m", "prompt": "a", "stop": LONG * 2},
            "stop: 2097156 bytes exceed the limit of 2097152",
        ),
        (
            {"prompt": "a", "truncate_prompt_tokens": 5, "x": [LONG, LONG]},
            "x: 2097161 bytes exceed",
        ),
        (
            {"text_input": "a", "parameters": {"x": LONG, "y": LONG + "b"}},
            "y: 1048580 bytes exceed",
        ),
        ({"model": "m", "messages": [], "documents": [LONG]}, "documents: the prompt is longer"),
        ({"model": "nobody", "x": LONG * 2}, ""),
        ({"model": "vast", "prompt": LONG}, ""),
        ({"model": "nobody", "prompt": LONG}, ""),
        ({"model": "m", "prompt": None}, ""),
        ([LONG], ""),
    ],
)
def test_a_prompt_that_is_too_long_is_found(body: Any, found: str) -> None:
    error = long_prompt(body, LONGEST, "m")
    assert found in error if found else not error


def test_another_process_parses_large_bodies() -> None:
    body = json.dumps({"prompt": [123] * 1_000_000}).encode()
    gaps = []

    async def served() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(time.thread_time() - last)
            last = time.thread_time()

    async def bodies_at_once() -> str:
        other = asyncio.create_task(served())
        problem = await find_long_prompt([body[:9], body[9:]], LONGEST, "m")
        other.cancel()
        return problem

    assert "1000000 tokens exceed the limit of 100" in asyncio.run(bodies_at_once())
    assert max(gaps) < 0.02  # seconds of processor time, because other processes may run meanwhile


def test_malformed_json_is_reported() -> None:
    with pytest.raises(JsonFault, match="failed to parse the request JSON buffer"):
        asyncio.run(find_long_prompt([b"{" * 9], LONGEST))
    doubled = asyncio.run(find_long_prompt([b'{"a": 1, "a": 2}'], LONGEST))
    assert "'a'" in doubled
    deep = asyncio.run(find_long_prompt([b"[" * 200 + b"]" * 200], LONGEST))
    assert "nesting depth" in deep
