"""An inference request and its response as they travel between processes, and their templates.

What differs from one request to the next by its nature, its id, its place in a sequence and its
limits on time, is not packed with the tensors: `Submit` and `Work` say it beside them. So requests
that are alike are packed alike, and who has a template of one has it of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from struct import Struct
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

_PACKER = msgpack.Packer()  # to make one takes as long as to pack a request


@record
class RequestedOutput:
    """An output the client asked for; with a `place`, its bytes go there (`byte_size` is the
    room). `or_input`: where the model returns an input as it is, they may stay where that lies."""

    name: str
    place: Place | None = None
    or_input: bool = False


@record
class Inference:
    """The content of an inference request to a model. No `outputs` means all of them."""

    inputs: tuple[TensorRef, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def aliased(self) -> bool:
        """Whether an output goes where an input is.

        Once a worker has begun to write, the inputs are gone: such a request can run only once, and
        where nobody knows whether it has begun, it fails. What it would give on its own output is
        no response.
        """
        inputs = [tensor.data for tensor in self.inputs if isinstance(tensor.data, Place)]
        places = [output.place for output in self.outputs if output.place is not None]
        return any(place.overlaps(other) for place in places for other in inputs)

    def filled(self, datas: Sequence[bytes]) -> Inference:
        """The same with these bytes of its inline tensors, in order."""
        return Inference(_filled(self.inputs, datas), self.outputs, self.parameters)


@record
class Inferred:
    """The response to an `Inference`; an output that went to the client's place carries that
    place."""

    outputs: tuple[TensorRef, ...]
    parameters: dict[str, Any] = field(default_factory=dict)

    def filled(self, datas: Sequence[bytes]) -> Inferred:
        """The same with these bytes of its inline tensors, in order."""
        return Inferred(_filled(self.outputs, datas), self.parameters)


def _filled(tensors: tuple[TensorRef, ...], datas: Sequence[bytes]) -> tuple[TensorRef, ...]:
    filled: list[TensorRef] = []
    at = 0
    for tensor in tensors:
        if type(tensor.data) is bytes:
            tensor = TensorRef(tensor.name, tensor.datatype, tensor.shape, datas[at])
            at += 1
        filled.append(tensor)
    return tuple(filled)


def pack_inference(request: Inference) -> bytes:
    """An `Inference` as bytes, for `Submit.work`."""
    packed: bytes = _PACKER.pack(
        (
            [pack_tensor(tensor) for tensor in request.inputs],
            list(map(_pack_output, request.outputs)),
            request.parameters,
        )
    )
    return packed


class PackedTemplate:
    """A packed `Inference` or `Inferred` but for the bytes of its inline tensors, whose sizes stay.
    `pieces` are what comes before each of these, and after the last; `form` is all of them, to be
    formatted with these bytes."""

    __slots__ = ("cut", "form", "pieces")

    def __init__(self, unpacked: Inference | Inferred) -> None:
        layout = "<"
        self.pieces: list[bytes] = []
        tensors, rest = _parts(unpacked)
        packer = msgpack.Packer(autoreset=False)
        packer.pack_array_header(1 + len(rest))
        packer.pack_array_header(len(tensors))
        for tensor in tensors:
            packer.pack_array_header(4)
            packed = pack_tensor(tensor)
            for value in packed:
                packer.pack(value)
            if type(data := packed[3]) is bytes:
                layout += f"{len(data)}s"
                self.pieces.append(packer.bytes().removesuffix(data))
                packer.reset()
        for value in rest:
            packer.pack(value)
        self.pieces.append(packer.bytes())
        # The bytes of its tensors, which lie one after the other in some bytes from some place on.
        self.cut: Callable[[bytes, int], tuple[bytes, ...]] = Struct(layout).unpack_from
        self.form = b"%b".join([piece.replace(b"%", b"%%") for piece in self.pieces])

    def fill(self, datas: Iterable[bytes]) -> bytes:
        """The packed message with these bytes of its inline tensors, in order."""
        return self.form % tuple(datas)


def _parts(unpacked: Inference | Inferred) -> tuple[tuple[TensorRef, ...], list[Any]]:
    if isinstance(unpacked, Inferred):
        return unpacked.outputs, [unpacked.parameters]
    return unpacked.inputs, [list(map(_pack_output, unpacked.outputs)), unpacked.parameters]


def _pack_output(output: RequestedOutput) -> tuple[Any, ...]:
    packed = (output.name, output.place and pack_place(output.place))
    return (*packed, True) if output.or_input else packed


def unpack_inference(work: bytes) -> Inference:
    """The `Inference` in `work`; raises MalformedMessage."""
    try:
        inputs, outputs, parameters = msgpack.unpackb(work)
        return Inference(
            tuple(map(unpack_tensor, inputs)),
            tuple(
                RequestedOutput(name, None if place is None else unpack_place(place), *or_input)
                for name, place, *or_input in outputs
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


def unpack_inferred(body: bytes) -> Inferred:
    """The `Inferred` in `body`; raises MalformedMessage."""
    try:
        outputs, parameters = msgpack.unpackb(body)
        return Inferred(tuple(map(unpack_tensor, outputs)), parameters)
    except MalformedMessage:
        raise
    except Exception as error:
        raise MalformedMessage(f"not an answer: {error}") from error


def runs_once(work: bytes) -> bool:
    """Whether this packed request is `aliased`; what cannot be read fails wherever it runs."""
    try:
        return unpack_inference(work).aliased
    except MalformedMessage:
        return False
