"""The JSON array of an output of any size, with turns of the loop between the parts of a long
one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.infer_response import Output
from shmserve.gateway.inference import malloc_trim

# A tensor of more bytes than this is written in steps.
_LONG_TEXT = 64 * 1024


async def output_text(output: Output, data: bytes | memoryview) -> bytes:
    """The array of an output's values; raises as `tensors.encode`."""
    arguments = (data, output.datatype, output.shape, output.name)
    if len(data) <= _LONG_TEXT:
        return tensors.encode(*arguments)
    return await joined(tensors.encode_parts(*arguments))


async def joined(parts: Iterator[bytes]) -> bytes:
    """The parts as one, each made in a turn of its own."""
    done: list[bytes] = []
    for part in parts:
        done.append(part)
        await asyncio.sleep(0)
    whole = b"".join(done)
    malloc_trim.soon(len(whole))
    return whole
