"""The response to an inference: JSON, then the binary outputs in order. Long arrays are encoded
cooperatively, in parts, with turns of the loop between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from shmserve.gateway.http.json import tensors
from shmserve.gateway.inference.body_arrival import MallocTrim
from shmserve.gateway.inference.request import InferRequest
from shmserve.gateway.inference.response import check_size
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import Inferred

_CUT = b"\0"  # no JSON text has it
_UNKNOWN = b"null"  # orjson's word for a number that is not finite


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

    __slots__ = ("_form", "_places", "_unpackers", "outputs", "whole")

    def __init__(self, request: InferRequest, name: str, version: str, response: Inferred) -> None:
        asked = {output.name: output for output in request.outputs}
        self.outputs: list[SentOutput] = []
        self._unpackers: list[Callable[[bytes], tuple[Any, ...]] | None] = []  # of their values
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
            self._unpackers.append(tensors.unpacker(tensor.datatype, tensor.shape))
            self._places.append(place)
        inline = sum(type(tensor.data) is bytes for tensor in response.outputs)
        self.whole = inline == len(self.outputs)
        text = _response_json(name, version, response, entries)
        self._form = text.replace(b"%", b"%%").replace(_CUT, b"%b")

    def datas(self, response: Inferred) -> list[bytes | Place]:
        """The data of a response of this form, one for each of `outputs`."""
        return [response.outputs[place].data for place in self._places]

    def json(self, request_id: str, arrays: Sequence[bytes]) -> bytes:
        """The JSON, with the arrays of the outputs that are not binary."""
        text = self._form % tuple(arrays)
        return b'{"id":%b,%b' % (orjson.dumps(request_id), text) if request_id else b"{" + text

    def fill(self, request_id: str, datas: Sequence[bytes]) -> tuple[bytes, list[bytes]]:
        """The JSON with these tensors, those that are sent, and what is binary of them; raises as
        `tensors.encode`."""
        arrays: list[bytes] = []
        binary: list[bytes] = []
        for output, unpack, data in zip(self.outputs, self._unpackers, datas, strict=True):
            if output.binary:
                binary.append(data)
                continue
            text = _UNKNOWN if unpack is None else orjson.dumps(unpack(data))
            if _UNKNOWN in text:
                text = tensors.encode(data, output.datatype, output.shape, output.name)
            arrays.append(text)
        return self.json(request_id, arrays), binary


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
