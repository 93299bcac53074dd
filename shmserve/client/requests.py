"""A program's tensors -> a request that can be sent; its answer -> tensors for the program.

inputs of a known form     by a plan (plans.py)
inputs in a region         where they are: nothing is copied
strings, and mixtures      packed as they come
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shmserve.client.arrays import Array, dtype_of, from_program, is_torch, to_torch
from shmserve.client.errors import Released
from shmserve.client.memory import Block, Lease, Memories, Segment, View, aligned
from shmserve.client.models import Model
from shmserve.client.plans import PLAIN, Form, Options, Plan, Slot, pack
from shmserve.errors import InvalidArgument, Unavailable, Unsupported
from shmserve.ipc.ranges import LARGEST
from shmserve.ipc.tensors import (
    INLINE_LIMIT,
    ITEM_SIZE,
    Inferred,
    Memory,
    Place,
    RequestedOutput,
    TensorRef,
    decode_bytes,
    element_count,
    encode_bytes,
    unpack_inferred,
)

_MOST_PLANS = 64
Shape = tuple[int, ...]


def nothing() -> None:
    """The end of a request that holds no memory."""


class Region(Mapping[str, Any]):
    """Memory for tensors, by name, that the server reads and writes in place.

    `region["image"]` is an array to fill or to read; `infer(model, region)` takes those of its
    tensors that the model takes, and has the others written where they lie.
    """

    def __init__(
        self, memories: Memories, tensors: Mapping[str, tuple[Sequence[int], str]]
    ) -> None:
        """Allocate. Raises InvalidArgument for a shape or a datatype, Unavailable without memory.

        >>> Region(memories, {"image": ((8, 1, 8, 8), "FP32")})  # doctest: +SKIP
        """
        self._forms = {name: _form(name, *spec) for name, spec in tensors.items()}
        total = sum(aligned(max(1, form.byte_size)) for form in self._forms.values())
        self._block = block = memories.allocate(max(1, total), alone=True)
        self._lease = Lease(lambda: memories.give_back(block))
        self._memories = memories
        self._offsets: dict[str, int] = {}
        at = block.offset
        for form in self._forms.values():
            self._offsets[form.name] = at
            at += aligned(max(1, form.byte_size))
        # What a request of a model with these tensors comes to.
        self.requests: dict[Model, tuple[bytes, int, bytes]] = {}

    def __getitem__(self, name: str) -> View:
        return self.view(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)

    def view(self, name: str, shape: Shape | None = None) -> View:
        """The array of a tensor; with a smaller `shape` (fewer rows, say) of its first bytes.

        Raises KeyError, Released, or InvalidArgument when the shape has more than there is.
        """
        form = self._forms[name]
        if self._lease.released:
            raise Released("this region was released")
        if shape is not None and element_count(shape) > element_count(form.shape):
            raise InvalidArgument(f"'{name}' has room for {form.shape}, not for {tuple(shape)}")
        shape = form.shape if shape is None else tuple(shape)
        segment, offset = self._block.segment, self._offsets[name]
        return View.over(segment, offset, shape, dtype_of(form.datatype), self._lease)

    def ref(self, name: str) -> TensorRef:
        """The tensor as it travels. Raises Released."""
        form = self._forms[name]
        return form.ref(self.place(name))

    def place(self, name: str) -> Place:
        """Where a tensor is, for the server. Raises Released."""
        if self._lease.released:
            raise Released("this region was released")
        return self._block.segment.place(self._offsets[name], self._forms[name].byte_size)

    def release(self) -> None:
        """Give the memory back; arrays over it raise from now on. A second time is fine."""
        self._lease.released = True
        self.requests.clear()
        self._block_given()

    def _block_given(self) -> None:
        # The memory itself goes when the last array over it does.
        lease, self._lease = self._lease, Lease(nothing)
        self._lease.released = True
        del lease
        self._memories.settle()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _form(name: str, shape: Sequence[int], datatype: str) -> Form:
    item = ITEM_SIZE.get(datatype)
    if not item:
        allowed = ", ".join(name for name, size in ITEM_SIZE.items() if size)
        raise InvalidArgument(f"'{name}': datatype '{datatype}' is none of {allowed}")
    dims = tuple(shape)
    if any(type(dim) is not int or dim < 0 for dim in dims):
        raise InvalidArgument(f"'{name}': shape {dims} has a size that is no whole number")
    size = element_count(dims) * item
    if size > LARGEST:
        raise InvalidArgument(f"'{name}': shape {dims} is too large")
    return Form(name, datatype, dims, size)


class Result(Mapping[str, Any]):
    """An answer: its outputs by name, numpy arrays or torch tensors as the inputs were.

    Large outputs lie in shared memory, and stay as long as an array over them does; `release` (or
    the end of a `with`) gives them back at once, and what is used then raises Released.
    """

    __slots__ = ("_lease", "_outputs", "parameters")

    def __init__(
        self, outputs: dict[str, Any], parameters: dict[str, Any], lease: Lease | None
    ) -> None:
        self._outputs = outputs
        self.parameters = parameters
        self._lease = lease

    def __getitem__(self, name: str) -> Any:
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"Result({self._outputs!r})"

    def release(self) -> None:
        """Give the outputs' memory back."""
        if self._lease is not None:
            self._lease.released = True
            self._lease = None
        self._outputs = _Released()

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class _Released(dict[str, Any]):
    """The outputs of a result that was released."""

    def __missing__(self, name: str) -> Any:
        raise Released("this result was released")


class Prepared(NamedTuple):
    """A request that can be sent; `end` gives back the memory that it uses until its answer."""

    model: Model
    work: bytes
    batch_size: int
    shape_key: bytes
    options: Options
    plan: Plan | None
    slot: Slot | None
    segments: tuple[Segment, ...]  # where its outputs may lie
    leases: tuple[Lease, ...]  # regions it uses
    as_torch: bool
    end: Callable[[], None]


def prepare(
    memories: Memories,
    model: Model,
    inputs: Mapping[str, Any],
    outputs: Sequence[str] | Mapping[str, Any] | None,
    options: Options,
) -> Prepared:
    """A request of `model`. `outputs`: the names that are wanted, or a region or arrays of one
    where they are to be written.

    Raises InvalidArgument when it does not fit the model, Unavailable when memory is short.
    """
    if type(inputs) is Region and outputs is None:
        return _in_place(model, inputs, options)
    arrays: list[Array] = []
    key: list[Any] = []
    as_torch = False
    large = 0
    specs = model.signature.inputs
    for name, value in inputs.items():
        if type(value) is np.ndarray and value.flags.c_contiguous:
            array, datatype = value, ""
        else:
            as_torch = as_torch or is_torch(value)
            array, datatype = from_program(value, specs.get(name), name)
        arrays.append(array)
        large += array.nbytes
        key += (name, array.dtype, array.shape, datatype)
    plannable = not isinstance(outputs, Mapping)
    # What is large may lie in a region, which only its address tells.
    if plannable and (large <= INLINE_LIMIT or not memories.any_within(arrays)):
        key += outputs or ()
        plan = model.plans.get(tuple(key))
        if plan is not None:
            return _planned(model, plan, arrays, options, as_torch)
    else:
        plannable = False
    loose = _Loose(memories, model, inputs, arrays, options, as_torch)
    if not plannable or not loose.plain:
        return loose.prepare(outputs)
    plan = loose.plan(tuple(key), tuple(outputs or ()))
    return _planned(model, plan, arrays, options, as_torch)


def _planned(
    model: Model, plan: Plan, arrays: Sequence[Array], options: Options, as_torch: bool
) -> Prepared:
    if not plan.slotted:
        work = plan.joined(arrays) if options is PLAIN else plan.packed(arrays, None, options)
        return Prepared(
            *(model, work, plan.batch_size, plan.shape_key, options, plan, None),
            *((), (), as_torch, nothing),
        )
    slot = plan.slot()
    for target, array in zip(slot.inputs, arrays, strict=False):
        np.copyto(target, array)
    plain = options is PLAIN and slot.work
    work = slot.work if plain else plan.packed(arrays, slot, options)
    return Prepared(
        *(model, work, plan.batch_size, plan.shape_key, options, plan, slot),
        *((slot.block.segment,), (), as_torch, slot.end),
    )


def _in_place(model: Model, region: Region, options: Options) -> Prepared:
    known = region.requests.get(model)
    if known is None or options is not PLAIN:
        signature = model.signature
        for name in region:
            if name not in signature.inputs and name not in signature.outputs:
                raise InvalidArgument(
                    f"the region's tensor '{name}' is neither an input nor an output of "
                    f"model '{model.name}'"
                )
        refs = [region.ref(name) for name in region if name in signature.inputs]
        asked = [
            RequestedOutput(name, region.place(name))
            for name in region
            if name not in signature.inputs
        ]
        admission = signature.admit(options.request_id, refs, asked)
        known = pack(refs, asked, options), admission.batch_size, admission.shape_key
        if options is PLAIN:
            region.requests[model] = known
    lease, segment = region._lease, region._block.segment
    return Prepared(model, *known, options, None, None, (segment,), (lease,), False, nothing)


class _Loose:
    """A request that follows no plan."""

    def __init__(
        self,
        memories: Memories,
        model: Model,
        inputs: Mapping[str, Any],
        arrays: list[Array],
        options: Options,
        as_torch: bool,
    ) -> None:
        self._memories = memories
        self._model = model
        self._options = options
        self._as_torch = as_torch
        self._arrays = arrays
        self._segments: list[Segment] = []
        self._leases: list[Lease] = []
        self._forms: list[Form] = []
        self._places: list[Place | None] = []
        specs = model.signature.inputs
        for index, (name, value) in enumerate(inputs.items()):
            array, datatype = from_program(value, specs.get(name), name)
            shape = array.shape
            if datatype == "BYTES":
                array = arrays[index] = np.frombuffer(encode_bytes(array), np.uint8)
            self._forms.append(Form(name, datatype, shape, array.nbytes))
            self._places.append(self._found(value, array))

    def _found(self, value: Any, array: Array) -> Place | None:
        """Where an array is if it lies in our memory already."""
        if type(value) is not View and array.nbytes <= INLINE_LIMIT:
            return None
        found = self._memories.find(array.ctypes.data, array.nbytes)
        if found is None:
            return None
        segment, offset = found
        self._segments.append(segment)
        if isinstance(value, View) and value._lease is not None:
            self._leases.append(value._lease)
        return segment.place(offset, array.nbytes)

    @property
    def plain(self) -> bool:
        """Whether a plan can serve it."""
        strings = any(form.datatype == "BYTES" for form in self._forms)
        return not strings and not any(self._places)

    def plan(self, key: tuple[Any, ...], outputs: Sequence[str]) -> Plan:
        """Make the plan for all that are like it."""
        plans = self._model.plans
        if len(plans) >= _MOST_PLANS:
            plans.pop(next(iter(plans))).close()
        plan = Plan(self._model.signature, tuple(self._forms), outputs, self._memories)
        plans[key] = plan
        return plan

    def prepare(self, outputs: Sequence[str] | Mapping[str, Any] | None) -> Prepared:
        """The request, packed as it is."""
        signature = self._model.signature
        asked = [self._output(name, outputs) for name in outputs or ()]
        pairs = list(zip(self._forms, self._arrays, self._places, strict=True))
        loose = [array.nbytes for _, array, place in pairs if place is None]
        block: Block | None = None
        if sum(loose) > INLINE_LIMIT:
            block = self._memories.allocate(sum(map(aligned, loose)))
        at = block.offset if block else 0
        refs: list[TensorRef] = []
        for form, array, place in pairs:
            data: bytes | Place
            if place is not None:
                data = place
            elif block is None:
                data = array.tobytes()
            else:
                segment = block.segment
                np.copyto(np.ndarray(array.shape, array.dtype, segment.bytes, at), array)
                data = segment.place(at, array.nbytes)
                at += aligned(array.nbytes)
            refs.append(form.ref(data))
        end = nothing if block is None else lambda: self._memories.give_back(block)
        try:
            admission = signature.admit(self._options.request_id, refs, asked)
        except InvalidArgument:
            end()
            raise
        work = pack(refs, asked, self._options)
        return Prepared(
            *(self._model, work, admission.batch_size, admission.shape_key, self._options),
            *(None, None, tuple(self._segments), tuple(self._leases), self._as_torch, end),
        )

    def _output(
        self, name: str, outputs: Sequence[str] | Mapping[str, Any] | None
    ) -> RequestedOutput:
        if type(outputs) is Region:
            self._segments.append(outputs._block.segment)
            self._leases.append(outputs._lease)
            return RequestedOutput(name, outputs.place(name))
        target = outputs[name] if isinstance(outputs, Mapping) else None
        if target is None:
            return RequestedOutput(name)
        place = None
        if isinstance(target, np.ndarray) and target.flags.c_contiguous:
            plain = target.plain() if isinstance(target, View) else target
            found = self._memories.find(plain.ctypes.data, plain.nbytes)
            if found is not None:
                self._segments.append(found[0])
                if isinstance(target, View) and target._lease is not None:
                    self._leases.append(target._lease)
                place = found[0].place(found[1], plain.nbytes)
        if place is None:
            raise InvalidArgument(
                f"output '{name}' can only be written to memory from `allocate`, in one piece"
            )
        return RequestedOutput(name, place)


def read(
    prepared: Prepared,
    body: bytes,
    copied: Callable[[Place], bytes],
    release: Callable[[int, list[int]], None],
) -> Result:
    """The result in an answer. `copied(place)` gives what is in a worker's memory, and
    `release(pid, offsets)` tells the worker that it was read.

    Raises Unsupported for outputs that only the server's own user may read.
    """
    plan = prepared.plan
    if plan is not None:
        small = plan.reader.read(body)
        if small is not None:
            prepared.end()
            return _result(small, {}, None, prepared.as_torch)
    answer = unpack_inferred(body)
    if plan is not None:
        plan.reader.learn(body, answer)
    lease: Lease | None = None
    if prepared.slot is not None:
        lease = Lease(prepared.end)  # from here on it ends with the last array
    else:
        prepared.end()
    found = _Outputs(prepared, lease, copied)
    try:
        outputs = {tensor.name: found.array(tensor) for tensor in answer.outputs}
    finally:
        for pid, offsets in _of_workers(answer, prepared.segments).items():
            release(pid, offsets)
    return _result(outputs, answer.parameters, lease, prepared.as_torch)


def _result(
    arrays: dict[str, tuple[Array, str]],
    parameters: dict[str, Any],
    lease: Lease | None,
    as_torch: bool,
) -> Result:
    if as_torch:
        return Result({n: to_torch(*pair) for n, pair in arrays.items()}, parameters, lease)
    return Result({name: pair[0] for name, pair in arrays.items()}, parameters, lease)


def _of_workers(answer: Inferred, own: Sequence[Segment]) -> dict[int, list[int]]:
    ours = {segment.memory.id for segment in own if segment.memory is not None}
    found: dict[int, list[int]] = {}
    for tensor in answer.outputs:
        place = tensor.data
        if isinstance(place, Place) and place.memory.id not in ours:
            found.setdefault(place.memory.pid, []).append(place.offset)
    return found


class _Outputs:
    """Where the outputs of one answer are."""

    def __init__(
        self, prepared: Prepared, lease: Lease | None, copied: Callable[[Place], bytes]
    ) -> None:
        self._prepared = prepared
        self._lease = lease
        self._from_worker = copied

    def array(self, tensor: TensorRef) -> tuple[Array, str]:
        """An output and its datatype."""
        raw = tensor.data
        if isinstance(raw, Place):
            segment = self._segment(raw.memory)
            if segment is not None and tensor.datatype != "BYTES":
                lease = self._lease or self._region_lease()
                dtype = dtype_of(tensor.datatype)
                return View.over(segment, raw.offset, tensor.shape, dtype, lease), tensor.datatype
            raw = self._copied(raw, segment)
        if tensor.datatype == "BYTES":
            model = self._prepared.model.name
            return decode_bytes(raw, tensor.shape, tensor.name, model), "BYTES"
        dtype = dtype_of(tensor.datatype)
        return np.ndarray(tensor.shape, dtype, bytearray(raw)), tensor.datatype

    def _segment(self, memory: Memory) -> Segment | None:
        for segment in self._prepared.segments:
            if segment.memory is not None and segment.memory.id == memory.id:
                return segment
        return None

    def _region_lease(self) -> Lease:
        leases = self._prepared.leases
        return leases[-1] if leases else Lease(nothing)

    def _copied(self, place: Place, segment: Segment | None) -> bytes:
        if segment is not None:
            return bytes(segment.bytes[place.offset : place.offset + place.byte_size])
        try:
            return self._from_worker(place)
        except Unavailable as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
            raise Unsupported(
                "an output is too large for a message: name a place for it, from `allocate`"
            ) from None
