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
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.inference import Inferred, tensor_schema

_CUT = b"\0"  # no JSON text has it
_UNKNOWN = b"null"  # orjson's word for a number that is not finite


class SentOutput(NamedTuple):
    """An output that is sent; `byte_size` is -1 for BYTES, whose size varies.

    A `binary` one follows the JSON, any other is an array in it. `position` is its place in the
    response.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    byte_size: int
    binary: bool
    position: int
    unpack: Callable[[bytes], tuple[Any, ...]] | None


class JsonResponseTemplate:
    """The head of responses of one schema: all but the id and the tensors' values.

    `outputs` are those that are sent; the others are in regions that the client named.
    """

    __slots__ = ("_count", "_form", "outputs")

    def __init__(self, request: InferRequest, name: str, version: str, response: Inferred) -> None:
        asked = {output.name: output for output in request.outputs}
        self.outputs: list[SentOutput] = []
        self._count = len(response.outputs)
        entries: list[dict[str, Any]] = []
        for index, tensor in enumerate(response.outputs):
            entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype}
            entry["shape"] = tensor.shape
            entries.append(entry)
            output = asked.get(tensor.name)
            if output is not None and output.place is not None:
                continue
            binary = output.binary if output is not None else request.binary
            schema = tensor_schema(tensor.name, tensor.datatype, tensor.shape)
            size = schema.byte_size
            if binary:
                hole = size if size >= 0 else orjson.Fragment(_CUT)
                entry["parameters"] = {"binary_data_size": hole}
            else:
                entry["data"] = orjson.Fragment(_CUT)
            unpack = tensors.unpacker(tensor.datatype, tensor.shape)
            self.outputs.append(SentOutput(*schema, binary, index, unpack))
        text = _response_json(name, version, response, entries)
        self._form = text.replace(b"%", b"%%").replace(_CUT, b"%b")

    def json(self, request_id: str, cuts: Sequence[bytes]) -> bytes:
        """Return the JSON, with the arrays of the outputs that are not binary, and sizes of BYTES.

        Args:
            request_id: The request's id; it may be empty.
            cuts: One for each output that is not binary, or is of BYTES, in their order.
        """
        text = self._form % tuple(cuts)
        return b'{"id":%b,%b' % (orjson.dumps(request_id), text) if request_id else b"{" + text

    def fill(self, request_id: str, data: Sequence[Any]) -> tuple[bytes, list[bytes]] | None:
        """Return the JSON of a response, and what is binary of it.

        Args:
            request_id: The request's id; it may be empty.
            data: The data of the response's message.

        Returns:
            None where an output is not in the message, or has another size than its shape, or
            where the data are not one for each output.

        Raises:
            Internal: As `tensors.encode` does.
        """
        if len(data) != self._count:
            return None
        cuts: list[bytes] = []
        binary: list[bytes] = []
        for name, datatype, shape, byte_size, is_binary, position, unpack in self.outputs:
            raw = data[position]
            if type(raw) is not bytes or len(raw) != byte_size >= 0:
                return None
            if is_binary:
                binary.append(raw)
                if byte_size < 0:
                    cuts.append(b"%d" % len(raw))
                continue
            text = _UNKNOWN if unpack is None else orjson.dumps(unpack(raw))
            if _UNKNOWN in text:
                text = tensors.encode(raw, datatype, shape, name)
            cuts.append(text)
        return self.json(request_id, cuts), binary


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


async def output_text(
    output: SentOutput | TensorRef, data: bytes | memoryview, trim: MallocTrim
) -> bytes:
    """Return the JSON array of an output's values; raises as `tensors.encode`.

    The memory that a long array took is reported to `trim`.
    """
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
