"""An inference request and its response as they travel between processes, and their templates.

What differs from one request to the next by its nature, its id, its place in a sequence and its
limits on time, is not packed with the tensors: `Submit` and `Work` say it beside them. So requests
that are alike are packed alike, and who has a template of one has it of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import msgpack

from shmserve.ipc.tensors.descriptors import (
    Place,
    TensorRef,
    pack_place,
    pack_tensor,
    unpack_place,
    unpack_tensor,
)
from shmserve.ipc.transport.records import MalformedMessage, record

# All tensor bytes of one request, or of one response, up to this many travel inside the messages:
# below it the copies through two sockets cost less than an arena's allocation and release message.
INLINE_LIMIT = 16 * 1024

# Of `Inference.flags` and `Submit.flags`: the request is the first, or the last, of its sequence.
SEQUENCE_START, SEQUENCE_END = 1, 2
LONGEST_CORRELATION_ID = 128  # characters of one that is a text


@record
class RequestedOutput:
    """An output the client asked for; with a `place`, its bytes go there (`byte_size` is the
    room)."""

    name: str
    place: Place | None = None


@record
class Inference:
    """The content of an inference request to a model. No `outputs` means all of them."""

    inputs: tuple[TensorRef, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)


@record
class Inferred:
    """The response to an `Inference`; an output that went to the client's place carries that
    place."""

    outputs: tuple[TensorRef, ...]
    parameters: dict[str, Any] = field(default_factory=dict)


_PACKER = msgpack.Packer()  # to make one takes as long as to pack a request


def pack_inference(request: Inference) -> bytes:
    """An `Inference` as bytes, for `Submit.work`."""
    packed: bytes = _PACKER.pack(
        (
            [pack_tensor(tensor) for tensor in request.inputs],
            [(out.name, out.place and pack_place(out.place)) for out in request.outputs],
            request.parameters,
        )
    )
    return packed


class _Template:
    """What is packed but for the bytes of inline tensors, whose sizes stay."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # what comes before each inline tensor's bytes, and after

    def fill(self, datas: Sequence[bytes]) -> bytes:
        """What is packed for inline tensors of the same sizes with these bytes."""
        pieces: list[bytes] = []
        for piece, data in zip(self._pieces, datas, strict=False):
            pieces += (piece, data)
        pieces.append(self._pieces[-1])
        return b"".join(pieces)

    def pieces(self) -> list[bytes]:
        """The bytes around the inline tensors' bytes, in order."""
        return list(self._pieces)


class InferenceTemplate(_Template):
    """A packed `Inference` but for the bytes of its inline tensors, whose sizes stay."""

    __slots__ = ("_sizes",)

    def __init__(self, request: Inference) -> None:
        super().__init__()
        self._sizes: list[int] = []
        packer = msgpack.Packer(autoreset=False)
        packer.pack_array_header(3)
        packer.pack_array_header(len(request.inputs))
        for tensor in request.inputs:
            packer.pack_array_header(4)
            *described, data = pack_tensor(tensor)
            for value in described:
                packer.pack(value)
            packer.pack(data)
            if type(data) is bytes:
                self._sizes.append(len(data))
                self._pieces.append(packer.bytes().removesuffix(data))
                packer.reset()
        packer.pack([(out.name, out.place and pack_place(out.place)) for out in request.outputs])
        packer.pack(request.parameters)
        self._pieces.append(packer.bytes())

    def fill_from(self, body: bytes, at: int) -> bytes:
        """`fill`, with the tensors' bytes that are in `body`, one after the other, from `at`."""
        datas: list[bytes] = []
        for size in self._sizes:
            datas.append(body[at : at + size])
            at += size
        return self.fill(datas)


def unpack_inference(work: bytes) -> Inference:
    """The `Inference` in `work`; raises MalformedMessage."""
    try:
        inputs, outputs, parameters = msgpack.unpackb(work)
        return Inference(
            tuple(map(unpack_tensor, inputs)),
            tuple(
                RequestedOutput(name, None if place is None else unpack_place(place))
                for name, place in outputs
            ),
            parameters,
        )
    except MalformedMessage:
        raise
    except Exception as error:  # msgpack and unpacking raise many kinds; all mean the same
        raise MalformedMessage(f"not an inference: {error}") from error


def pack_inferred(response: Inferred) -> bytes:
    """An `Inferred` as bytes, for `Finished.body`."""
    packed: bytes = _PACKER.pack(
        ([pack_tensor(tensor) for tensor in response.outputs], response.parameters)
    )
    return packed


class InferredTemplate(_Template):
    """A packed `Inferred` but for the bytes of its inline tensors, whose sizes stay."""

    __slots__ = ()

    def __init__(self, response: Inferred) -> None:
        super().__init__()
        packer = msgpack.Packer(autoreset=False)
        packer.pack_array_header(2)
        packer.pack_array_header(len(response.outputs))
        for tensor in response.outputs:
            packer.pack_array_header(4)
            packed = pack_tensor(tensor)
            for value in packed:
                packer.pack(value)
            if type(data := packed[3]) is bytes:
                self._pieces.append(packer.bytes().removesuffix(data))
                packer.reset()
        packer.pack(response.parameters)
        self._pieces.append(packer.bytes())


def unpack_inferred(body: bytes) -> Inferred:
    """The `Inferred` in `body`; raises MalformedMessage."""
    try:
        outputs, parameters = msgpack.unpackb(body)
        return Inferred(tuple(map(unpack_tensor, outputs)), parameters)
    except MalformedMessage:
        raise
    except Exception as error:
        raise MalformedMessage(f"not an answer: {error}") from error
