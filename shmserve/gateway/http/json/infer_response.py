"""The response to an inference: JSON, then the binary outputs in order. Long arrays are encoded
cooperatively, in parts, with turns of the loop between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from shmserve.gateway.http.json import tensors
from shmserve.gateway.inference.malloc_trim import MallocTrim
from shmserve.gateway.inference.request import InferRequest
from shmserve.gateway.inference.response import check_size
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import Inferred

_CUT = b"\0"  # no JSON text has it


class SentOutput(NamedTuple):
    """An output that is sent, and whether it is binary; else it is an array in the JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    binary: bool


class JsonResponseTemplate:
    """A response but for its request's id and its tensors' values.

    `whole`: what is sent is all that the worker's response has inline, so that it follows from any
    one of its form.
    """

    __slots__ = ("_places", "_texts", "outputs", "whole")

    def __init__(self, request: InferRequest, name: str, version: str, response: Inferred) -> None:
        asked = {output.name: output for output in request.outputs}
        self.outputs: list[SentOutput] = []
        self._places: list[int] = []  # of those outputs in the response
        entries: list[dict[str, Any]] = []
        for place, tensor in enumerate(response.outputs):
            entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype}
            entry["shape"] = tensor.shape
            entries.append(entry)
            output = asked.get(tensor.name)
            if output is not None and output.place is not None:
                continue  # it is in the client's region
            data = tensor.data
            size = len(data) if isinstance(data, bytes) else data.byte_size
            check_size(tensor, size)
            binary = output.binary if output is not None else request.binary
            if binary:
                entry["parameters"] = {"binary_data_size": size}
            else:
                entry["data"] = orjson.Fragment(_CUT)
            self.outputs.append(SentOutput(tensor.name, tensor.datatype, tensor.shape, binary))
            self._places.append(place)
        inline = sum(type(tensor.data) is bytes for tensor in response.outputs)
        self.whole = inline == len(self.outputs)
        self._texts = _response_json(name, version, response, entries).split(_CUT)

    def datas(self, response: Inferred) -> list[bytes | Place]:
        """The data of a response of this form, one for each of `outputs`."""
        return [response.outputs[place].data for place in self._places]

    def json(self, request_id: str, arrays: Sequence[bytes]) -> bytes:
        """The JSON, with the arrays of the outputs that are not binary."""
        begin = b'{"id":%b,' % orjson.dumps(request_id) if request_id else b"{"
        if not arrays:
            return begin + self._texts[0]
        parts = [begin, self._texts[0]]
        for array, text in zip(arrays, self._texts[1:], strict=True):
            parts += (array, text)
        return b"".join(parts)


def _response_json(
    name: str, version: str, response: Inferred, entries: list[dict[str, Any]]
) -> bytes:
    """The response's JSON behind its id, keys in Triton's order."""
    body: dict[str, Any] = {"model_name": name, "model_version": version}
    if response.parameters:
        body["parameters"] = response.parameters
    body["outputs"] = entries
    return orjson.dumps(body)[1:]


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
