"""The response to an inference: JSON text, followed by the binary outputs in order (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import call
from typing import Any, NamedTuple

import orjson

from shmserve.gateway.http.json import tensors
from shmserve.gateway.inference.request import InferRequest
from shmserve.ipc.tensors.inference import Inferred, tensor_schema

_CUT_MARK = b"\0"  # a byte that no JSON text contains
_NULL = b"null"  # orjson's text for numbers that are not finite


class SentOutput(NamedTuple):
    """An output that is sent to the client.

    Attributes:
        byte_size: The size, or -1 for BYTES, whose size varies.
        binary: Whether the output follows the JSON text; otherwise it is an array in the text.
        position: The position of the output in the response.
        unpack: Returns the values of the array; None if `tensors.encode` is needed.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    byte_size: int
    binary: bool
    position: int
    unpack: Callable[[bytes], tuple[Any, ...]] | None


class JsonResponseTemplate:
    """A template for responses of one schema, without the id and the tensors' values.

    Attributes:
        outputs: The outputs that are sent. Outputs in regions of the client are not sent.
    """

    __slots__ = ("_format", "_is_all_binary", "_output_count", "_sizes", "_unpackers", "outputs")

    def __init__(self, request: InferRequest, name: str, version: str, response: Inferred) -> None:
        requested_outputs = {output.name: output for output in request.outputs}
        self.outputs: list[SentOutput] = []
        self._output_count = len(response.outputs)
        entries: list[dict[str, Any]] = []
        for index, tensor in enumerate(response.outputs):
            entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype}
            entry["shape"] = tensor.shape
            entries.append(entry)
            output = requested_outputs.get(tensor.name)
            if output is not None and output.memory_range is not None:
                continue
            is_binary = output.binary if output is not None else request.binary
            schema = tensor_schema(tensor.name, tensor.datatype, tensor.shape)
            size = schema.byte_size
            if is_binary:
                binary_size = size if size >= 0 else orjson.Fragment(_CUT_MARK)
                entry["parameters"] = {"binary_data_size": binary_size}
            else:
                entry["data"] = orjson.Fragment(_CUT_MARK)
            unpack = tensors.create_unpacker(tensor.datatype, tensor.shape)
            self.outputs.append(SentOutput(*schema, is_binary, index, unpack))
        text = _encode_members(name, version, response, entries)
        self._format = text.replace(b"%", b"%%").replace(_CUT_MARK, b"%b")
        self._sizes = [output.byte_size for output in self.outputs]
        # `fill` is fast for most responses: their outputs are all JSON numbers, or all binary.
        is_uniform = len(self.outputs) == self._output_count and min(self._sizes, default=-1) >= 0
        self._is_all_binary = is_uniform and all(output.binary for output in self.outputs)
        unpackers = [item.unpack for item in self.outputs if not item.binary and item.unpack]
        self._unpackers = unpackers if is_uniform and len(unpackers) == self._output_count else None

    def encode_json(self, request_id: str, text_values: Sequence[bytes]) -> bytes:
        """Return the JSON text.

        Args:
            request_id: The id of the request; it may be empty.
            text_values: The arrays of the outputs that are not binary, and the sizes of the binary
                BYTES outputs, in the order of the outputs.
        """
        text = self._format % tuple(text_values)
        return b'{"id":%b,%b' % (orjson.dumps(request_id), text) if request_id else b"{" + text

    def fill(self, request_id: str, data: Sequence[Any]) -> tuple[bytes, Sequence[bytes]] | None:
        """Return the JSON text of a response, and its binary data.

        Args:
            request_id: The id of the request; it may be empty.
            data: The data of the response's message.

        Returns:
            None if the data of an output is not in the message, or has another size than its
            shape, or if the number of outputs differs.

        Raises:
            Internal: As `tensors.encode` does.
        """
        if self._is_all_binary or self._unpackers:
            if {*map(type, data)} != {bytes} or list(map(len, data)) != self._sizes:
                return None
            if self._is_all_binary:
                return self.encode_json(request_id, ()), data
            arrays = list(map(orjson.dumps, map(call, self._unpackers, data)))  # type: ignore[arg-type]
            if _NULL not in b"".join(arrays):
                return self.encode_json(request_id, arrays), ()
        elif not self.outputs and len(data) == self._output_count:
            return self.encode_json(request_id, ()), ()
        return self._fill_mixed(request_id, data)

    def _fill_mixed(
        self, request_id: str, data: Sequence[Any]
    ) -> tuple[bytes, Sequence[bytes]] | None:
        if len(data) != self._output_count:
            return None
        text_values: list[bytes] = []
        binary: list[bytes] = []
        for name, datatype, shape, byte_size, is_binary, position, unpack in self.outputs:
            content = data[position]
            if type(content) is not bytes or len(content) != byte_size >= 0:
                return None
            if is_binary:
                binary.append(content)
                if byte_size < 0:
                    text_values.append(b"%d" % len(content))
                continue
            text = _NULL if unpack is None else orjson.dumps(unpack(content))
            if _NULL in text:
                text = tensors.encode(content, datatype, shape, name)
            text_values.append(text)
        return self.encode_json(request_id, text_values), binary


def _encode_members(
    name: str, version: str, response: Inferred, entries: list[dict[str, Any]]
) -> bytes:
    """Return the JSON members that follow the id, with keys in Triton's order."""
    body: dict[str, Any] = {"model_name": name, "model_version": version}
    if response.parameters:
        body["parameters"] = response.parameters
    body["outputs"] = entries
    return orjson.dumps(body)[1:]
