"""The tensors of a request: inline in the message, in our arena, or in clients' regions.

all tensor bytes <= INLINE_LIMIT   inline
more                               one arena block, each tensor on its own 64-byte boundary
in a region                        where they are: a place is passed on, nothing is touched
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from shmserve.errors import Internal, InvalidArgument, Unavailable
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body import give_way
from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.infer_request import WireInput, WireRequest
from shmserve.gateway.http.json.parser import JsonFault
from shmserve.gateway.inference.response import Form
from shmserve.gateway.model_table import Model
from shmserve.gateway.region_table import Region, Uses
from shmserve.ipc.inflight import LONGEST_TIMEOUT_US
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import Place, TensorRef
from shmserve.ipc.tensors.inference import (
    INLINE_LIMIT,
    Inference,
    InferenceTemplate,
    RequestedOutput,
    pack_inference,
)
from shmserve.ipc.tensors.signature import Admission, Signature
from shmserve.ipc.tensors.template_cache import TemplateCache

_ALIGNMENT = 64
_MOST_FORMS = 8  # of answers to requests with one header


class Resources:
    """What a request occupies until no worker can touch it: an arena block, uses of regions."""

    __slots__ = ("_arena", "_offset", "_uses")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._offset = -1
        self._uses: Uses | None = None

    def uses(self, gateway: Gateway) -> Uses:
        """The request's uses of regions."""
        if self._uses is None:
            self._uses = Uses(gateway.regions)
        return self._uses

    @property
    def regions(self) -> Sequence[Region]:
        """The regions that the request uses."""
        return () if self._uses is None else self._uses.regions

    def allocate(self, sizes: list[int]) -> list[Place]:
        """Places of these sizes, in bytes, in one arena block.

        Raises Unavailable when memory for tensors is full.
        """
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        block = self._block(starts.pop())
        self._offset = block.offset
        return [
            Place(block.memory, block.offset + start, size)
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _block(self, byte_size: int) -> Place:
        try:
            return self._arena.allocate(byte_size)
        except Unavailable:
            if byte_size <= self._arena.memory.byte_size:
                for _ in give_way():
                    with contextlib.suppress(Unavailable):
                        return self._arena.allocate(byte_size)
            raise

    def __bool__(self) -> bool:
        return self._offset >= 0 or self._uses is not None

    @property
    def plannable(self) -> bool:
        """Whether another request with the same header would come to the same."""
        return self._offset < 0

    def release(self) -> None:
        """Give everything back."""
        if self._offset >= 0:
            self._arena.free(self._offset)
            self._offset = -1
        if self._uses is not None:
            self._uses.release()


def nothing() -> None:
    """The release of a request that holds nothing."""


class BuiltRequest:
    """A request and what it was admitted as.

    `pack(deadline_ns)` gives its work for a worker; `release` ends what it holds, which may be
    uses of `regions`. `forms` are those of answers to it, and to others with its header.
    """

    __slots__ = ("admission", "pack", "regions", "release", "templates", "wire")

    def __init__(
        self,
        wire: WireRequest,
        admission: Admission,
        pack: Callable[[int], bytes],
        release: Callable[[], None],
        regions: Sequence[Region] = (),
        templates: TemplateCache[Form] | None = None,
    ) -> None:
        self.regions = regions
        self.templates = templates
        self.wire = wire
        self.admission = admission
        self.pack = pack
        self.release = release


class Plan:
    """What a header that describes small tensors and places in regions always comes to.

    Programs send the same header again and again; then only the tensors' bytes are new.
    """

    __slots__ = ("_admission", "_template", "_templates", "_uses", "_wire")

    def __init__(self, taken: BuiltRequest, work: Inference, uses: Uses | None) -> None:
        self._wire = taken.wire
        self._admission = taken.admission
        self._template = InferenceTemplate(work)
        self._uses = uses.pattern() if uses is not None else None
        self._templates: TemplateCache[Form] = TemplateCache(_MOST_FORMS)

    def follow(self, body: bytes, at: int) -> BuiltRequest | None:
        """The request whose inline tensors are in `body` from `at`, one behind the other; None: its
        regions have changed."""
        pack = partial(self._template.fill, body, at)
        if self._uses is None:
            return BuiltRequest(self._wire, self._admission, pack, nothing, (), self._templates)
        uses = self._uses.again()
        if uses is None:
            return None
        return BuiltRequest(
            self._wire, self._admission, pack, uses.release, uses.regions, self._templates
        )


def build(
    gateway: Gateway,
    model: Model,
    wire: WireRequest,
    body: bytes,
    at: int,
    *,
    planned: bool = False,
) -> tuple[BuiltRequest, Plan | None]:
    """Make the tensors of a request whose binary data is in `body` from `at`, and admit it.

    The plan, if one is wanted and there can be one, is good for every request that differs only in
    its tensors' bytes.

    Raises what is wrong with it, or Unavailable when memory for tensors is full.
    """
    datas: list[bytes | None] = []
    total = 0
    for tensor in wire.inputs:
        data: bytes | None = None
        if tensor.binary_size >= 0:
            data = body[at : at + tensor.binary_size]
            at += tensor.binary_size
        elif tensor.place is None:
            data = from_json(tensor)
        total += len(data or b"")
        datas.append(data)
    holds = Resources(gateway.arena)
    try:
        stored: Sequence[bytes | Place | None] = datas
        if total > INLINE_LIMIT:
            stored = _store(gateway, holds, datas)
        tensors = [
            tensor_ref(gateway, holds, tensor, data)
            for tensor, data in zip(wire.inputs, stored, strict=True)
        ]
        taken, work = admit(gateway, model, wire, tensors, holds)
    except BaseException:
        holds.release()
        raise
    if planned and holds.plannable:
        return taken, Plan(taken, work, holds.uses(gateway) if holds else None)
    return taken, None


def _store(
    gateway: Gateway, holds: Resources, datas: Sequence[bytes | None]
) -> Sequence[Place | None]:
    places = holds.allocate([len(data or b"") for data in datas])
    for data, place in zip(datas, places, strict=True):
        if data:
            gateway.arena.view(place)[:] = data
    return [None if d is None else place for d, place in zip(datas, places, strict=True)]


def tensor_ref(
    gateway: Gateway, holds: Resources, tensor: WireInput, data: bytes | Place | None
) -> TensorRef:
    """The descriptor of an input; without `data` it is in a region."""
    if data is None:
        assert tensor.place is not None
        data = holds.uses(gateway).take(tensor.place)
    return TensorRef(tensor.name, tensor.datatype, tensor.shape, data)


def from_json(tensor: WireInput) -> bytes:
    """The bytes of a tensor that was given as JSON; raises what is wrong with it."""
    data = tensor.data
    if type(data) is bytes:
        return data  # a large array, which was read before; or from gRPC
    if not tensor.count:
        return b""
    if type(data) is not list:
        raise JsonFault("Unable to parse 'data': attempt to access JSON non-array as array")
    return tensors.decode(data, tensor.datatype, tensor.count, tensor.name)


def admit(
    gateway: Gateway,
    model: Model,
    wire: WireRequest,
    tensors: Sequence[TensorRef],
    holds: Resources,
) -> tuple[BuiltRequest, Inference]:
    """Check a request against its model and the regions that its outputs go to.

    The work is without its deadline, which `Taken.pack` adds.

    Raises InvalidArgument, NotFound or Internal.
    """
    signature = model.signature
    outputs = [
        RequestedOutput(
            output.name,
            None if output.place is None else holds.uses(gateway).take(output.place, write=True),
        )
        for output in wire.outputs
    ]
    admission = signature.admit(wire.id, tensors, outputs)
    for wanted in outputs:
        if wanted.place is not None:
            check_room(signature, wanted.name, wanted.place.byte_size, admission.batch_size)
    work = Inference(
        wire.id,
        tuple(tensors),
        tuple(outputs),
        wire.parameters,
        wire.correlation_id,
        wire.flags,
        min(wire.timeout_us, LONGEST_TIMEOUT_US),
        wire.priority,
    )
    release = holds.release if holds else nothing
    return BuiltRequest(wire, admission, partial(_packed, work), release, holds.regions), work


def _packed(work: Inference, deadline_ns: int) -> bytes:
    return pack_inference(replace(work, deadline_ns=deadline_ns) if deadline_ns else work)


def check_room(signature: Signature, name: str, room: int, batch_size: int) -> None:
    """An output whose size is known beforehand must fit its place of `room` bytes.

    Raises Internal, as when the result is too large after the computation.
    """
    needed = signature.output_size(name, batch_size)
    if needed is not None and room < needed:
        raise Internal(
            f"shared memory size specified with the request for output '{name}' ({room} bytes) "
            f"should be at least {needed} bytes to hold the results"
        )


def raw_request(signature: Signature, body: bytes) -> tuple[WireRequest, bytes]:
    """A request whose body is the one input, and that input's bytes; outputs are sent binary.

    Raises InvalidArgument when the model has not one input, or its shape does not follow from the
    body's size.
    """
    prefix = "[request id: <id_unknown>] "
    if len(signature.inputs) != 1:
        raise InvalidArgument(
            f"{prefix}Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(signature.inputs)} inputs in '{signature.name}' model configuration"
        )
    spec = next(iter(signature.inputs.values()))
    dims = list(spec.dims)
    fixed = element_count([dim for dim in dims if dim != -1])
    if dims.count(-1) > 1:
        raise InvalidArgument(
            f"{prefix}The shape of the raw input '{spec.name}' can not be deduced because "
            "there are more than one variable-sized dimension"
        )
    if spec.datatype == "BYTES":
        if -1 in dims or fixed != 1:
            raise InvalidArgument(
                f"{prefix}For BYTE datatype raw input '{spec.name}', "
                "the model must have input shape [1]"
            )
        body = len(body).to_bytes(4, "little") + body
    elif -1 in dims:
        row = fixed * ITEM_SIZE[spec.datatype]
        dims[dims.index(-1)] = len(body) // row if row else 0
    shape = (1, *dims) if signature.max_batch_size else tuple(dims)
    tensor = WireInput(spec.name, spec.datatype, shape, element_count(shape))
    tensor.binary_size = len(body)
    return WireRequest("", [tensor], [], binary=True), body
