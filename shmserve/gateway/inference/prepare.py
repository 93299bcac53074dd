"""The preparation of requests: places their tensors, and checks them against their models.

| size of all tensors in the body | location of the tensors                                        |
|---------------------------------|----------------------------------------------------------------|
| at most `INLINE_LIMIT`          | in the message to the scheduler                                |
| more                            | in one block of the arena, each at a multiple of 64 bytes      |
| in a region                     | unchanged; the message has the range                           |

A request holds its block and its references to regions until no worker can access them. Clients
often send the same header with different tensors. A `RequestTemplate` is a parsed and checked
header, which later requests with the same header fill with their tensors.

The tensors of a large request are received into its block while they arrive:

    head parsed ──> `reserve_tensors`: block, checks ──> start_tensor, feed*
        └──> an error: the block is released                 └──> is_complete
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from struct import Struct
from typing import Any, final

from shmserve.errors import Internal, InvalidArgument, Unavailable
from shmserve.gateway.context import Gateway, GatewayModel
from shmserve.gateway.inference.infer_request import InferInput, InferRequest, RequestIdentity
from shmserve.gateway.region_table import GatewayRegion, RegionReferences
from shmserve.gateway.request_trace import RequestTrace
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import Range, TensorRef, pack_range
from shmserve.ipc.tensors.schemas import (
    INLINE_LIMIT,
    BoundedCache,
    Inference,
    RequestedOutput,
    pack_inference,
)
from shmserve.ipc.tensors.signature import Signature

# The limit of the id, the parameters and the names of a request. It exists because all requests of
# a batch are sent in one frame, whose size is limited.
_MAX_HEAD_BYTES = 16 << 20
_MAX_RESPONSE_TEMPLATES = 8  # maximum number of response templates of requests with one header
_ALIGNMENT_BYTES = 64


@dataclass(slots=True, eq=False)
class BuiltRequest:
    """A request whose tensors are placed, and that was checked against its model.

    Attributes:
        model: The model.
        infer_request: The request as the parser of its protocol returned it.
        schema: The schema for `Submit`.
        data: The data for `Submit`.
        on_release: Releases the resources of the request; None if it has none.
        regions: The regions that the request uses.
        response_templates: The templates of responses by their schemas, shared by all requests with
            this header. None: the response is encoded without a template.
        trace: The trace of a submitted request, if it is recorded.
    """

    model: GatewayModel
    infer_request: InferRequest
    schema: bytes  # names, datatypes and shapes of the tensors, and parameters
    data: list[Any]  # the bytes or the shared memory range of each tensor
    on_release: Callable[[], None] | None
    regions: Sequence[GatewayRegion] = ()
    response_templates: BoundedCache[bytes, Any] | None = None
    trace: RequestTrace | None = None

    def release(self) -> None:
        """Release the resources of a request that is not submitted."""
        if self.on_release is not None:
            self.on_release()

    def identify(self, identity: RequestIdentity) -> None:
        """Set the id and the position in a sequence, which are not part of a template."""
        if not identity.is_identity_of(self.infer_request):
            self.infer_request = self.infer_request.with_identity(identity)


class Resources:
    """The arena block and the region references of one request, which are released together.

    If the arena is full, `BodyBudget.evict` frees the blocks of bodies that arrive too slowly.
    """

    __slots__ = ("_arena", "_block_offset", "_gateway", "_references")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._arena = gateway.arena
        self._block_offset = -1  # -1: no block
        self._references: RegionReferences | None = None

    @property
    def references(self) -> RegionReferences:
        """Return the references of the request to regions."""
        if self._references is None:
            self._references = RegionReferences(self._gateway.regions)
        return self._references

    @property
    def regions(self) -> Sequence[GatewayRegion]:
        """Return the regions that the request uses."""
        return () if self._references is None else self._references.regions

    def allocate(self, sizes: list[int]) -> list[Range]:
        """Reserve ranges of these sizes, in bytes, in one arena block.

        Raises:
            Unavailable: The arena is full.
            InvalidArgument: The sizes exceed the capacity of the arena.
        """
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        block = self._allocate_block(offsets.pop())
        self._block_offset = block.offset
        pairs = zip(offsets, sizes, strict=True)
        return [Range(block.memory, block.offset + offset, size) for offset, size in pairs]

    def _allocate_block(self, byte_size: int) -> Range:
        try:
            return self._arena.allocate(byte_size)
        except Unavailable:
            for _ in self._gateway.body_budget.evict():
                with contextlib.suppress(Unavailable):
                    return self._arena.allocate(byte_size)
            raise

    def view(self, memory_range: Range) -> memoryview:
        """Return the bytes of a range that `allocate` has returned."""
        return self._arena.view(memory_range)

    def __bool__(self) -> bool:
        return self._block_offset >= 0 or self._references is not None

    @property
    def has_block(self) -> bool:
        """Return whether the request has a block of the arena."""
        return self._block_offset >= 0

    def release(self) -> None:
        """Release the arena block and the references to regions. The method is idempotent."""
        if self._block_offset >= 0:
            self._arena.free(self._block_offset)
            self._block_offset = -1
        if self._references is not None:
            self._references.release()


class RequestTemplate:
    """A parsed and checked header, which requests with the same header fill with their tensors.

    Tensors of the body are copied to the message, or to one arena block if they are large. Tensors
    in regions keep their ranges.
    """

    __slots__ = (
        *("_unpack_tensors", "_data", "_model", "_request", "_create_resources"),
        *("_schema", "_sizes", "_body_indices", "_references", "_response_templates"),
    )

    def __init__(
        self,
        built_request: BuiltRequest,
        sizes: Sequence[int | None],
        references: RegionReferences | None,
        create_resources: Callable[[], Resources] | None,
    ) -> None:
        """Derive the template from the first request with a header.

        Args:
            built_request: The request.
            sizes: The byte size of each input in the body; None for an input in a region.
            references: The references of the request to regions.
            create_resources: Creates the resources of a request with large tensors; None if the
                tensors are small.
        """
        self._model = built_request.model
        self._request = built_request.infer_request
        self._schema = built_request.schema
        self._body_indices = [index for index, size in enumerate(sizes) if size is not None]
        # The data of the first request is kept only for inputs in regions.
        data = built_request.data
        self._data = data if len(self._body_indices) < len(data) else None
        self._sizes = [size for size in sizes if size is not None]
        tensor_layout = Struct("<" + "".join([f"{size}s" for size in self._sizes]))
        self._unpack_tensors: Callable[[bytes, int], tuple[bytes, ...]] = tensor_layout.unpack_from
        self._references = references.as_template() if references is not None else None
        self._create_resources = create_resources
        self._response_templates: BoundedCache[bytes, Any] = BoundedCache(_MAX_RESPONSE_TEMPLATES)

    def fill_from(self, body: bytes, offset: int) -> BuiltRequest | None:
        """Return the request whose tensors are in `body` from `offset`, as `fill` does."""
        if not self._sizes:
            return self.fill(())
        if self._create_resources is None:
            return self.fill(self._unpack_tensors(body, offset))
        body_view = memoryview(body)
        bounds = accumulate(self._sizes, initial=offset)
        return self.fill([body_view[start:end] for start, end in pairwise(bounds)])

    def fill(self, tensors: Sequence[bytes | memoryview]) -> BuiltRequest | None:
        """Return the request with these tensors, or None if its regions have changed.

        Raises:
            AlreadyExists: The range of an output is in use, and `shm_overlap` is "error".
            Unavailable: The arena is full.
        """
        on_release: Callable[[], None] | None = None
        regions: Sequence[GatewayRegion] = ()
        data: list[Any] = [*tensors]
        if self._references is not None:
            references = RegionReferences.from_template(self._references)
            if references is None:
                return None
            on_release, regions = references.release, references.regions
        elif self._create_resources is not None:
            resources = self._create_resources()
            ranges = resources.allocate(self._sizes)
            for memory_range, tensor in zip(ranges, tensors, strict=True):
                resources.view(memory_range)[:] = tensor
            data = list(map(pack_range, ranges))
            on_release = resources.release
        if self._data is not None:
            body_data, data = data, self._data.copy()
            for index, tensor_data in zip(self._body_indices, body_data, strict=True):
                data[index] = tensor_data
        return BuiltRequest(
            *(self._model, self._request, self._schema, data),
            *(on_release, regions, self._response_templates),
        )


def build_request(
    gateway: Gateway, model: GatewayModel, request: InferRequest, body: bytes = b"", offset: int = 0
) -> BuiltRequest:
    """Place the tensors of a request, and check the request.

    Args:
        gateway: The gateway.
        model: The model of the request.
        request: The parsed request.
        body: The bytes that contain the binary tensors.
        offset: The position of the first binary tensor in the body.

    Raises:
        ShmserveError: The request is invalid, or the arena is full.
    """
    return _place_and_check(gateway, model, request, body, offset)[0]


async def build_in_pieces(
    gateway: Gateway, model: GatewayModel, request: InferRequest
) -> BuiltRequest:
    """Build the request as `build_request` does, but copy tensors in pieces.

    Other requests are handled between two pieces. The `data` of a tensor with a `binary_size` is
    the list of its pieces.
    """
    pieces: list[bytes] = []
    for tensor in request.inputs:
        if tensor.binary_size >= 0:
            pieces += tensor.data
            tensor.data = None
    if not pieces:
        return build_request(gateway, model, request)
    arriving_request = reserve_tensors(gateway, model, request, sum(map(len, pieces)))
    try:
        for piece in pieces:
            arriving_request.feed_across_tensors(memoryview(piece))
            await asyncio.sleep(0)
    except BaseException:
        arriving_request.release()
        raise
    return arriving_request.built_request


def build_with_template(
    gateway: Gateway, model: GatewayModel, request: InferRequest, body: bytes, offset: int
) -> tuple[BuiltRequest, RequestTemplate | None]:
    """Place the tensors like `build_request`, and return a template for requests of this layout.

    A request with large tensors in the body and others in regions has no template.
    """
    built_request, resources, input_bytes = _place_and_check(gateway, model, request, body, offset)
    if resources.has_block and resources.regions:
        return built_request, None
    sizes = [None if data is None else len(data) for data in input_bytes]
    references = resources.references if resources.regions else None
    create_resources = partial(Resources, gateway) if resources.has_block else None
    return built_request, RequestTemplate(built_request, sizes, references, create_resources)


def _place_and_check(
    gateway: Gateway, model: GatewayModel, request: InferRequest, body: bytes, offset: int
) -> tuple[BuiltRequest, Resources, Sequence[bytes | None]]:
    input_bytes: list[bytes | None] = []
    total_bytes = 0
    for tensor in request.inputs:
        data: bytes | None = tensor.data
        if tensor.binary_size >= 0:
            data = body[offset : offset + tensor.binary_size]
            offset += tensor.binary_size
        total_bytes += len(data or b"")
        input_bytes.append(data)
    resources = Resources(gateway)
    try:
        input_data: Sequence[bytes | Range | None] = input_bytes
        if total_bytes > INLINE_LIMIT:
            input_data = _to_arena(resources, input_bytes)
        return check_and_pack(model, request, input_data, resources), resources, input_bytes
    except BaseException:
        resources.release()
        raise


def _to_arena(resources: Resources, input_bytes: Sequence[bytes | None]) -> Sequence[Range | None]:
    """Copy the inputs to one block of the arena, and return their ranges."""
    ranges = resources.allocate([len(data or b"") for data in input_bytes])
    for data, memory_range in zip(input_bytes, ranges, strict=True):
        if data:
            resources.view(memory_range)[:] = data
    return [None if data is None else r for data, r in zip(input_bytes, ranges, strict=True)]


def check_and_pack(
    model: GatewayModel,
    request: InferRequest,
    input_data: Sequence[bytes | Range | None],
    resources: Resources,
) -> BuiltRequest:
    """Check a request against its model and regions; return it packed for `Submit`.

    Args:
        model: The model.
        request: The parsed request.
        input_data: The bytes or the arena range of each input; None for an input in a region.
        resources: The resources of the request.

    Raises:
        InvalidArgument: The request does not match the model, or its head is too large.
        NotFound: A region is not registered.
        Internal: The range of an output is too small.
    """
    signature = model.signature
    tensors: list[TensorRef] = []
    for tensor, bytes_or_range in zip(request.inputs, input_data, strict=True):
        if bytes_or_range is None:
            assert tensor.memory_range is not None
            bytes_or_range = resources.references.reference_range(tensor.memory_range)
        tensors.append(TensorRef(tensor.name, tensor.datatype, tensor.shape, bytes_or_range))
    outputs = [
        RequestedOutput(
            output.name,
            None
            if output.memory_range is None
            else resources.references.reference_range(output.memory_range, is_output=True),
        )
        for output in request.outputs
    ]
    batch_size = signature.check(request.id, tensors, outputs).batch_size
    for output in outputs:
        if output.memory_range is not None:
            check_capacity(signature, output.name, output.memory_range.byte_size, batch_size)
    schema, data = pack_inference(Inference(tuple(tensors), tuple(outputs), request.parameters))
    # Only the id and the parameters can make the head too large: `signature.check` has accepted the
    # names and the shapes.
    if request.parameters or request.id:
        size = len(schema) + len(request.id)
        if size > _MAX_HEAD_BYTES:
            text = f"its id, parameters and names have {size} bytes (maximum: {_MAX_HEAD_BYTES})"
            raise InvalidArgument(f"the request is too large: {text}")
    on_release = resources.release if resources else None
    return BuiltRequest(model, request, schema, data, on_release, resources.regions)


def check_capacity(signature: Signature, name: str, capacity: int, batch_size: int) -> None:
    """Check that an output of known size fits its range of `capacity` bytes.

    Raises:
        Internal: The range is too small. Outputs of unknown size are checked after the
            computation.
    """
    required_bytes = signature.output_size(name, batch_size)
    if required_bytes is not None and capacity < required_bytes:
        raise Internal(
            f"shared memory size specified with the request for output '{name}' ({capacity} bytes) "
            f"should be at least {required_bytes} bytes to hold the results"
        )


def raw_request(signature: Signature, body: bytes) -> tuple[InferRequest, bytes]:
    """Return the request whose body is its only input, and the bytes of this input.

    The outputs are sent as binary data.

    Raises:
        InvalidArgument: The model has several inputs, or the size of the body does not determine
            the shape of the input.
    """
    error_prefix = "[request id: <id_unknown>] "
    if len(signature.inputs) != 1:
        raise InvalidArgument(
            f"{error_prefix}Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(signature.inputs)} inputs in '{signature.name}' model configuration"
        )
    spec = next(iter(signature.inputs.values()))
    dims = list(spec.dims)
    fixed_elements = element_count([dim for dim in dims if dim != -1])
    if dims.count(-1) > 1:
        raise InvalidArgument(
            f"{error_prefix}The shape of the raw input '{spec.name}' can not be deduced because "
            "there are more than one variable-sized dimension (send JSON with its shape before "
            "the bytes, and the length of the JSON in Inference-Header-Content-Length)"
        )
    if spec.datatype == "BYTES":
        if -1 in dims or fixed_elements != 1:
            raise InvalidArgument(
                f"{error_prefix}For BYTE datatype raw input '{spec.name}', "
                "the model must have input shape [1]"
            )
        body = len(body).to_bytes(4, "little") + body
    elif -1 in dims:
        row_bytes = fixed_elements * ITEM_SIZE[spec.datatype]
        dims[dims.index(-1)] = len(body) // row_bytes if row_bytes else 0
    shape = (1, *dims) if signature.max_batch_size else tuple(dims)
    tensor = InferInput(spec.name, spec.datatype, shape, element_count(shape))
    tensor.binary_size = len(body)
    return InferRequest("", [tensor], [], binary=True), body


_EMPTY_VIEW = memoryview(b"")


@final
class ArrivingRequest:
    """A checked request whose binary tensors are arriving in order, each into its own memory.

    `len` returns the size of the request's message.

    Attributes:
        built_request: The request, which is complete once its tensors are.
        views: The memory of each tensor.
        started_count: The number of tensors that have begun to arrive.
    """

    def __init__(self, built_request: BuiltRequest, views: Sequence[memoryview], size: int) -> None:
        self.built_request = built_request
        self.views = views
        self.started_count = 0  # the number of tensors that have begun to arrive
        self._byte_size = size
        self._remaining_view = _EMPTY_VIEW  # the remaining memory of the tensor that is arriving

    def __len__(self) -> int:
        return self._byte_size

    def release(self) -> None:
        """Release the memory of the request and its tensors; further bytes are ignored."""
        self.views, self._remaining_view = (), _EMPTY_VIEW
        self.built_request.release()

    def start_tensor(self, size: int) -> bool:
        """Begin the next tensor if it has this size; return whether it has."""
        if self.started_count == len(self.views) or len(self.views[self.started_count]) != size:
            return False
        self._remaining_view = self.views[self.started_count]
        self.started_count += 1
        return True

    def feed(self, piece: memoryview) -> int:
        """Receive bytes of the current tensor; return how many bytes belong to it."""
        size = min(len(self._remaining_view), len(piece))
        # If the socket has received the bytes directly into the tensor's memory, no copy is needed.
        if size and piece.obj is not self._remaining_view.obj:
            self._remaining_view[:size] = piece[:size]
        self._remaining_view = self._remaining_view[size:]
        return size

    def feed_across_tensors(self, piece: memoryview) -> None:
        """Receive bytes of tensors that follow each other without a gap; ignore surplus bytes."""
        while True:
            piece = piece[self.feed(piece) :]
            if self._remaining_view or self.started_count >= len(self.views):
                return
            self.start_tensor(len(self.views[self.started_count]))

    def next_buffer(self, byte_limit: int) -> memoryview | None:
        """Return the memory of the next bytes, at most `byte_limit`; None between tensors."""
        return self._remaining_view[:byte_limit] if self._remaining_view else None

    @property
    def missing_bytes(self) -> int:
        """Return the number of bytes that the current tensor lacks."""
        return len(self._remaining_view)

    @property
    def is_complete(self) -> bool:
        """Return whether all tensors were received."""
        return not self._remaining_view and self.started_count == len(self.views)

    def received_pieces(self) -> list[bytes]:
        """Return the received bytes of each tensor that has begun."""
        pieces = [bytes(view) for view in islice(self.views, self.started_count)]
        if self._remaining_view:
            pieces[-1] = pieces[-1][: -len(self._remaining_view)]
        return pieces


def reserve_tensors(
    gateway: Gateway, model: GatewayModel, request: InferRequest, byte_size: int
) -> ArrivingRequest:
    """Reserve the memory for the tensors of a request whose head was received.

    The request is checked first, so that an invalid request costs no upload.

    Args:
        gateway: The gateway.
        model: The model of the request.
        request: The parsed request. Inputs with a `binary_size` are to be received.
        byte_size: The size of the message.

    Raises:
        ShmserveError: The request is invalid, or the arena is full.
    """
    resources = Resources(gateway)
    try:
        inputs = request.inputs
        sizes = [max(tensor.binary_size, 0) or len(tensor.data or b"") for tensor in inputs]
        ranges = resources.allocate(sizes)
        pairs = zip(inputs, ranges, strict=True)
        input_data = [None if t.memory_range is not None else r for t, r in pairs]
        built_request = check_and_pack(model, request, input_data, resources)
        views: list[memoryview] = []
        for tensor, memory_range in zip(inputs, ranges, strict=True):
            if tensor.data is not None:
                resources.view(memory_range)[:] = tensor.data
            elif tensor.binary_size >= 0:
                views.append(resources.view(memory_range))
    except BaseException:
        resources.release()
        raise
    return ArrivingRequest(built_request, views, byte_size)
