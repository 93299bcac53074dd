"""The JSON array of an output of any size, encoded cooperatively: a long one in parts, with turns
of the loop between them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.infer_response import SentOutput
from shmserve.gateway.inference.malloc_trim import MallocTrim

# A tensor of more bytes than this is written in steps.
_LONG_TEXT = 64 * 1024


async def output_text(output: SentOutput, data: bytes | memoryview, trim: MallocTrim) -> bytes:
    """The array of an output's values; raises as `tensors.encode`. `trim` is told what a long one
    took."""
    arguments = (data, output.datatype, output.shape, output.name)
    if len(data) <= _LONG_TEXT:
        return tensors.encode(*arguments)
    return await joined(tensors.encode_parts(*arguments), trim)


async def joined(parts: Iterator[bytes], trim: MallocTrim) -> bytes:
    """The parts as one, each made in a turn of its own."""
    done: list[bytes] = []
    for part in parts:
        done.append(part)
        await asyncio.sleep(0)
    whole = b"".join(done)
    trim.soon(len(whole))
    return whole
