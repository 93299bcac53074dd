"""The request builder: places the tensors of a request in resources of its own, which are held
until no worker can touch them, and checks it against its model.

all tensor bytes <= INLINE_LIMIT   inline, in the message to the scheduler
more                               one arena block, each tensor on its own 64-byte boundary
in a region                        where they are: a place is passed on, nothing is copied

Programs send the same header again and again with other numbers behind it. A header that came
before needs no parsing and no checks: a `Prepared` request is filled with the tensors' bytes, as
prepared statements are for a database.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from struct import Struct
from typing import Any

from shmserve.errors import Internal, InvalidArgument, Unavailable
from shmserve.gateway.context import Gateway
from shmserve.gateway.inference.body_arrival import BodyBudget
from shmserve.gateway.inference.request import InferInput, InferRequest, RequestIdentity
from shmserve.gateway.model_table import GatewayModel
from shmserve.gateway.region_table import GatewayRegion, RegionTable, Uses
from shmserve.gateway.request_trace import RequestTrace
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import Place, TensorRef, pack_place
from shmserve.ipc.tensors.inference import (
    INLINE_LIMIT,
    Inference,
    RequestedOutput,
    pack_inference,
)
from shmserve.ipc.tensors.schemas import BoundedCache
from shmserve.ipc.tensors.signature import Signature

_MOST_RESPONSES = 8  # heads of responses to requests with one header
_ALIGNMENT = 64


def nothing() -> None:
    """The release of a request without resources."""


@dataclass(slots=True, eq=False)
class BuiltRequest:
    """A request with its tensors in place, admitted to its model.

    Attributes:
        infer_request: The request as its protocol's parser has read it.
        schema: Its schema, for `Submit`.
        data: Its data, for `Submit`.
        release: Frees its resources, which may be references to `regions`.
        regions: The regions that it uses.
        responses: The heads of responses by their schemas, shared by all requests with the same
            header; None where there are no others.
        trace: Its trace once it is submitted, if its times are wanted.
    """

    infer_request: InferRequest
    schema: bytes
    data: list[Any]
    release: Callable[[], None]
    regions: Sequence[GatewayRegion] = ()
    responses: BoundedCache[bytes, Any] | None = None
    trace: RequestTrace | None = None

    def identify(self, identity: RequestIdentity) -> None:
        """Set the id and the place in a sequence, which an equal header does not have."""
        if not identity.is_of(self.infer_request):
            self.infer_request = self.infer_request.identified(identity)


class Resources:
    """The resources of one request, released together.

    Where the arena is full, `budget` evicts slow bodies.
    """

    __slots__ = ("_arena", "_budget", "_offset", "_table", "_uses")

    def __init__(self, arena: Arena, budget: BodyBudget, regions: RegionTable) -> None:
        self._arena = arena
        self._budget = budget
        self._table = regions
        self._offset = -1
        self._uses: Uses | None = None

    @property
    def uses(self) -> Uses:
        """The request's references to regions."""
        if self._uses is None:
            self._uses = Uses(self._table)
        return self._uses

    @property
    def regions(self) -> Sequence[GatewayRegion]:
        """The regions that the request uses."""
        return () if self._uses is None else self._uses.regions

    def allocate(self, sizes: list[int]) -> list[Place]:
        """Places of these sizes, in bytes, in one arena block.

        Raises Unavailable when memory for tensors is full, InvalidArgument for what never fits.
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
            for _ in self._budget.evict():
                with contextlib.suppress(Unavailable):
                    return self._arena.allocate(byte_size)
            raise

    def view(self, place: Place) -> memoryview:
        """The bytes of a place that `allocate` gave."""
        return self._arena.view(place)

    def __bool__(self) -> bool:
        return self._offset >= 0 or self._uses is not None

    @property
    def placed(self) -> bool:
        """Whether it has a block of the arena."""
        return self._offset >= 0

    def release(self) -> None:
        """Release everything; a second time does nothing."""
        if self._offset >= 0:
            self._arena.free(self._offset)
            self._offset = -1
        if self._uses is not None:
            self._uses.release()


def resources_of(gateway: Gateway) -> Resources:
    """The resources of a new request: none yet."""
    return Resources(gateway.arena, gateway.body_budget, gateway.regions)


class Prepared:
    """The common part of requests with one header, which is not parsed or checked again.

    The tensors in the body go into the message, or into one arena block where they are large.
    Tensors in regions stay where they are.
    """

    __slots__ = (
        *("_cut", "_data", "_request", "_resources", "_responses"),
        *("_schema", "_sizes", "_slots", "_uses"),
    )

    def __init__(
        self,
        built: BuiltRequest,
        sizes: Sequence[int | None],
        uses: Uses | None,
        resources: Callable[[], Resources] | None,
    ) -> None:
        """Prepare requests like `built`.

        Args:
            built: The first of them.
            sizes: The byte size of each input in the body; None: it is in a region.
            uses: The references to regions.
            resources: Makes the resources of a request with large tensors; None: they are small.
        """
        self._request = built.infer_request
        self._schema = built.schema
        self._slots = [index for index, size in enumerate(sizes) if size is not None]
        # Where all data are in the body, there is nothing to be kept of the first request's.
        self._data = built.data if len(self._slots) < len(built.data) else None
        self._sizes = [size for size in sizes if size is not None]
        layout = Struct("<" + "".join([f"{size}s" for size in self._sizes]))
        self._cut: Callable[[bytes, int], tuple[bytes, ...]] = layout.unpack_from
        self._uses = uses.pattern() if uses is not None else None
        self._resources = resources
        self._responses: BoundedCache[bytes, Any] = BoundedCache(_MOST_RESPONSES)

    def fill(self, body: bytes, at: int) -> BuiltRequest | None:
        """Return the request whose tensors are in `body` from `at`, see `of`."""
        if self._resources is None:
            return self.of(self._cut(body, at))
        with memoryview(body) as whole:
            ends = list(accumulate(self._sizes, initial=at))
            return self.of([whole[start:end] for start, end in pairwise(ends)])

    def of(self, datas: Sequence[bytes | memoryview]) -> BuiltRequest | None:
        """Return the request with these tensors, or None if its regions have changed.

        Raises:
            AlreadyExists: An output overlaps another one in flight and may not.
            Unavailable: Memory for tensors is full.
        """
        release: Callable[[], None] = nothing
        regions: Sequence[GatewayRegion] = ()
        data: list[Any] = list(datas)
        if self._resources is not None:
            resources = self._resources()
            places = resources.allocate(self._sizes)
            for place, given in zip(places, datas, strict=True):
                resources.view(place)[:] = given
            data = list(map(pack_place, places))
            release = resources.release
        elif self._uses is not None:
            uses = self._uses.again()
            if uses is None:
                return None
            release, regions = uses.release, uses.regions
        if self._data is not None:
            inputs, data = data, self._data.copy()
            for slot, each in zip(self._slots, inputs, strict=True):
                data[slot] = each
        return BuiltRequest(self._request, self._schema, data, release, regions, self._responses)


def build(
    gateway: Gateway,
    model: GatewayModel,
    request: InferRequest,
    body: bytes,
    at: int,
    *,
    prepare: bool = False,
) -> tuple[BuiltRequest, Prepared | None]:
    """Make the tensors of a request whose binary data is in `body` from `at`, and admit it.

    What is prepared, if that is wanted and can be, is good for every request that differs only in
    its tensors' bytes.

    Raises what is wrong with it, or Unavailable when memory for tensors is full.
    """
    datas: list[bytes | None] = []
    total = 0
    for tensor in request.inputs:
        data: bytes | None = tensor.data
        if tensor.binary_size >= 0:
            data = body[at : at + tensor.binary_size]
            at += tensor.binary_size
        total += len(data or b"")
        datas.append(data)
    resources = resources_of(gateway)
    try:
        stored: Sequence[bytes | Place | None] = datas
        if total > INLINE_LIMIT:
            stored = _store(resources, datas)
        tensors = [
            tensor_ref(resources, tensor, data)
            for tensor, data in zip(request.inputs, stored, strict=True)
        ]
        built = check_request(model, request, tensors, resources)
    except BaseException:
        resources.release()
        raise
    if not prepare or (resources.placed and resources.regions):
        return built, None
    sizes = [
        None if tensor.data is None and tensor.place is not None else len(data or b"")
        for tensor, data in zip(request.inputs, datas, strict=True)
    ]
    uses = resources.uses if resources.regions else None
    large = partial(resources_of, gateway) if resources.placed else None
    return built, Prepared(built, sizes, uses, large)


def _store(resources: Resources, datas: Sequence[bytes | None]) -> Sequence[Place | None]:
    places = resources.allocate([len(data or b"") for data in datas])
    for data, place in zip(datas, places, strict=True):
        if data:
            resources.view(place)[:] = data
    return [None if d is None else place for d, place in zip(datas, places, strict=True)]


def tensor_ref(resources: Resources, tensor: InferInput, data: bytes | Place | None) -> TensorRef:
    """The descriptor of an input; without `data` it is in a region."""
    if data is None:
        assert tensor.place is not None
        data = resources.uses.take(tensor.place)
    return TensorRef(tensor.name, tensor.datatype, tensor.shape, data)


def check_request(
    model: GatewayModel, request: InferRequest, tensors: Sequence[TensorRef], resources: Resources
) -> BuiltRequest:
    """Check a request against its model and the regions that its outputs go to.

    Raises InvalidArgument, NotFound or Internal.
    """
    signature = model.signature
    outputs = [
        RequestedOutput(
            output.name,
            None if output.place is None else resources.uses.take(output.place, write=True),
        )
        for output in request.outputs
    ]
    batch_size = signature.check(request.id, tensors, outputs).batch_size
    for wanted in outputs:
        if wanted.place is not None:
            check_room(signature, wanted.name, wanted.place.byte_size, batch_size)
    inference = Inference(tuple(tensors), tuple(outputs), request.parameters)
    release = resources.release if resources else nothing
    return BuiltRequest(request, *pack_inference(inference), release, resources.regions)


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


def raw_request(signature: Signature, body: bytes) -> tuple[InferRequest, bytes]:
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
    tensor = InferInput(spec.name, spec.datatype, shape, element_count(shape))
    tensor.binary_size = len(body)
    return InferRequest("", [tensor], [], binary=True), body
