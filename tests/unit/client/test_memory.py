"""The native client's memory, arrays and prepared requests, without a server."""

import copy
import gc
import os
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

from shmserve.client.memory.region import Region
from shmserve.client.memory.segments import AnySegment, Memories, Segment
from shmserve.client.memory.views import MemoryLease, View
from shmserve.client.request.arrays import as_array
from shmserve.client.request.client_templates import ClientTemplate
from shmserve.client.request.prepare import PLAIN, options_of, prepare
from shmserve.client.request.results import Result, read
from shmserve.client.server_state import ClientModel, ClientModels
from shmserve.errors import InvalidArgument, NotFound, Released, Unavailable
from shmserve.ipc.endpoints import FIRST_LOCAL_CLIENT as FIRST
from shmserve.ipc.endpoints import Capabilities
from shmserve.ipc.messages import publications as m
from shmserve.ipc.messages.inference import Finished
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef
from shmserve.ipc.tensors.schemas import (
    Inference,
    Inferred,
    TensorSchema,
    pack_inference,
    pack_inferred,
    unpack_inference,
)
from shmserve.ipc.tensors.signature import Signature
from tests.support.leaks import open_descriptors

CONFIG = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [8192]}],
}


@pytest.fixture
def memories() -> Iterator[Memories]:
    numbers = iter(range(1, 100))

    def share(segment: AnySegment) -> None:
        assert isinstance(segment, Segment)
        inode = os.fstat(segment.fd).st_ino
        segment.memory = Memory(next(numbers), 1, segment.fd, inode, segment.size, True)

    new_memories = Memories(64 << 20, share, lambda segment: None)
    yield new_memories
    new_memories.close()


def published(name: str = "m", version: str = "1", latest: bool = True) -> m.ModelPublished:
    config = {**CONFIG, "name": name}
    return m.ModelPublished(
        name, version, ModelSpec.of(config), {}, f"ipc:///{version}", True, latest, 0.0, 0
    )


def test_released_blocks_are_reused_and_empty_segments_removed(memories: Memories) -> None:
    blocks = [memories.allocate(1 << 20) for _ in range(3)]
    assert len({block.segment for block in blocks}) == 1
    whole_segment = memories.allocate(100, whole_segment=True)
    assert whole_segment.segment not in {block.segment for block in blocks}
    with pytest.raises(Unavailable, match="may use 67108864 bytes"):
        memories.allocate(100 << 20)
    for block in [*blocks, whole_segment]:
        block.recycle()
    memories.free_recycled()
    assert memories.find(blocks[0].segment.address, 1) is None


def test_a_client_can_use_all_of_its_memory() -> None:
    """A segment has room for more than was asked for, but not at the cost of what still fits."""

    def share(segment: AnySegment) -> None:
        segment.set_memory(Memory(1, 0, 0, 0, segment.size, True).packed)

    memories = Memories(6 << 20, share, lambda segment: None)
    blocks = [memories.allocate(1 << 20) for _ in range(6)]
    assert sorted(segment.size >> 20 for segment in {block.segment for block in blocks}) == [2, 4]
    with pytest.raises(Unavailable, match="6291456 are in use, 64 more are needed"):
        memories.allocate(64)
    memories.close()


class Pair(NamedTuple):
    a: View
    b: View


def test_unused_slots_are_evicted_for_new_ones(memories: Memories) -> None:
    """Requests of ever other sizes, one at a time, need the memory of one."""
    model = ClientModel(published())
    for step in range(8):
        x = np.full((1, 5_000_000 + step), step, np.float32)
        request = prepare(memories, model, {"x": x}, None, PLAIN)
        assert request.slot is not None and (request.slot.inputs[0] == step).all()
        request.release_memory()
    in_use = prepare(memories, model, {"x": x}, None, PLAIN)
    with pytest.raises(Unavailable, match="may use 67108864 bytes"):
        memories.allocate(60 << 20, whole_segment=True)
    in_use.release_memory()
    assert memories.allocate(60 << 20, whole_segment=True)


def test_memory_returned_after_close_is_freed(memories: Memories) -> None:
    block = memories.allocate(100)
    segment = weakref.ref(block.segment)
    memories.close()
    block.recycle()
    del block
    gc.collect()
    assert segment() is None


def test_memory_is_freed_if_its_allocation_is_interrupted(
    memories: Memories, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    # Otherwise the collection may run during the measurement and free objects of earlier tests.
    gc.collect()
    fds_before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            memories.allocate(1 << 20)
    assert open_descriptors() <= fds_before


@pytest.mark.parametrize("writes_to_region", [False, True])
def test_a_request_that_is_interrupted_while_built_keeps_no_memory(
    memories: Memories, monkeypatch: pytest.MonkeyPatch, writes_to_region: bool
) -> None:
    """Most often while its inputs are copied, which takes longest."""

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = ClientModel(published())
    x = np.ones((1, 2_000_000), np.float32)
    region = Region(memories, {"y": ((1, 8192), "FP32")})
    outputs = region if writes_to_region else None
    for _ in range(20):  # eight blocks use all the memory
        with monkeypatch.context() as patch:
            patch.setattr(np, "copyto", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                prepare(memories, model, {"x": x}, outputs, PLAIN)
    prepare(memories, model, {"x": x}, outputs, PLAIN).release_memory()
    region.release()
    model.close()
    memories.free_recycled()
    assert not memories._segments


def test_a_region_accepts_numpy_types_and_a_single_size(memories: Memories) -> None:
    fields: Any = {
        "a": ((2, 3), np.float32),
        "b": (np.int64(4), "uint8"),
        "c": (np.zeros((1, 5)).shape, np.dtype("int64")),
        "d": ([2], bool),
        "e": (3, "BF16"),
        "f": (np.array([2, 1]), ml_dtypes.bfloat16),
    }
    with Region(memories, fields) as region:
        kinds = {"a": "FP32", "b": "UINT8", "c": "INT64", "d": "BOOL", "e": "BF16", "f": "BF16"}
        assert {name: spec[1] for name, spec in region.specs.items()} == kinds
        assert region["a"].dtype == np.float32 and region["b"].shape == (4,)
        assert region["f"].shape == (2, 1)
        region["a"] = [1, 2, 3]
        region["a"] += 1
        assert region["a"].tolist() == [[2, 3, 4]] * 2


@pytest.mark.parametrize("datatype", ["nonsense", None, np.complex64, object, "BYTES", 5])
def test_a_regions_unknown_datatype_names_the_allowed(memories: Memories, datatype: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"allowed: BOOL, .*numpy\.float32 or 'float32'"):
        Region(memories, {"x": ((1,), datatype)})


def test_a_view_raises_after_its_release_and_keeps_its_memory() -> None:
    segment, released = Segment(4096), []
    lease = MemoryLease(lambda: released.append(True))
    view = View.from_memory(segment.bytes, 64, (4,), np.dtype(np.int32), lease)
    view[:] = [1, 2, 3, 4]
    slice_ = view[1:]
    assert type(slice_) is np.ndarray and type(view + 1) is np.ndarray
    assert np.stack([view, view]).shape == (2, 4)
    assert np.block([[view, view], [view, view]]).shape == (2, 8)
    assert np.stack(Pair(view, view)).shape == (2, 4)
    booleans = View.from_memory(segment.bytes, 0, (4,), np.dtype(np.bool_), lease)
    booleans[:] = [True, False, False, True]
    assert np.add(view, 1, where=booleans, out=np.zeros(4, np.int32)).tolist() == [2, 0, 0, 5]
    view += 1
    assert view.tolist() == [2, 3, 4, 5] and slice_.tolist() == [3, 4, 5]
    assert type(copy.copy(view)) is type(pickle.loads(pickle.dumps(view))) is np.ndarray
    lease.released = True
    use_cases: tuple[Callable[[View], object], ...] = (
        lambda array: array[0], lambda array: array * 2, lambda array: array.copy(),
        lambda array: array.reshape(2, 2), lambda array: array.astype(np.int8),
        lambda array: array.item(0), lambda array: array.fill(1),
        lambda array: array.view(np.uint8), lambda array: array.flat[0],
        lambda array: array.ravel(), lambda array: array.sum(),
        lambda array: array.compress([True]), lambda array: array.searchsorted(1),
        lambda array: array.argpartition(1), lambda array: array.conj(),
        lambda array: array.setfield(1, np.int8), bool, list, copy.copy, copy.deepcopy,
        pickle.dumps, str,
    )  # fmt: skip
    for use in use_cases:
        with pytest.raises(Released):
            use(view)
    segment.close()
    del view, booleans, lease, segment
    gc.collect()
    assert not released and slice_.tolist() == [3, 4, 5]
    del slice_
    assert released


@pytest.mark.parametrize("is_large", [False, True])
def test_options_of_one_call_are_not_in_the_template(memories: Memories, is_large: bool) -> None:
    """Its id, its sequence and its timeout go beside it: by the same way as without them."""
    size = 8192 if is_large else 1
    config = {**CONFIG, "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [size]}]}
    model = ClientModel(replace(published(), config=ModelSpec.of(config)))
    x = np.zeros((1, 16), np.float32)
    requests = []
    for number in range(3):
        options = options_of(f"id-{number}", None, number, number + 0.5, number + 1, True, False)
        for value in (PLAIN, options):
            request = prepare(memories, model, {"x": x}, None, value)
            assert request.options is value
            requests.append((request.schema, request.data))
            request.release_memory()
    assert requests == requests[:1] * 6 and len(model.templates) == 1


def test_requests_of_one_template_have_the_same_schema(memories: Memories) -> None:
    model = ClientModel(published())
    schemas = set()
    for number in (1.0, 2.0):
        x = np.full((1, 16), number, np.float32)
        request = prepare(memories, model, {"x": x}, ["y"], PLAIN)
        schemas.add(request.schema)
        inference = unpack_inference(request.schema, request.data)
        (tensor,) = inference.inputs
        assert tensor == TensorRef("x", "FP32", (1, 16), x.tobytes())
        (output,) = inference.outputs
        assert output.memory_range is not None and output.memory_range.byte_size == 4 * 8192
        request.release_memory()
    assert len(model.templates) == 1 and len(schemas) == 1


def test_large_inputs_lie_in_slots_that_are_used_again(memories: Memories) -> None:
    model = ClientModel(published())
    x = np.arange(8192, dtype=np.float32)[None]
    first = prepare(memories, model, {"x": x}, None, PLAIN)
    second = prepare(memories, model, {"x": x + 1}, None, PLAIN)
    assert first.schema == second.schema and first.data != second.data
    first.release_memory()
    third_request = prepare(memories, model, {"x": x}, None, PLAIN)
    assert (third_request.schema, third_request.data) == (first.schema, first.data)
    model.close()
    second.release_memory()
    third_request.release_memory()
    address = first.segments[0].address
    memories.free_recycled()
    assert memories.find(address, 1) is None


def test_every_kind_of_input_is_checked(memories: Memories) -> None:
    model = ClientModel(published())
    wrong_cases: list[tuple[Any, str]] = [
        ([np.zeros((1, 2), np.float32)], "inputs must be a mapping of names to arrays, got "),
        ({"x": np.zeros((5, 2), np.float32)}, "batch-size must be <= 4"),
        ({"x": np.zeros((1, 2), np.int8)}, "data-type is 'INT8'"),
        ({"z": np.zeros((1, 2), np.float32)}, "unexpected inference input"),
        ({"z": np.array([["a", None]], object)}, "input 'z' has a missing value .None.: pass a"),
        ({"x": np.zeros((1, 2), np.complex64)}, "no corresponding datatype"),
        ({"x": np.zeros((1, 2), ">f4")}, "byte order: pass array.astype"),
        ({"x": "word"}, "cannot be converted to FP32"),
    ]
    for inputs, text in wrong_cases:
        with pytest.raises(InvalidArgument, match=text):
            prepare(memories, model, inputs, None, PLAIN)
    assert not model.templates


def test_completed_prepared_requests_keep_no_memory(memories: Memories) -> None:
    """A thread may be about to make one while another closes the model, or makes the same."""
    x = {"x": np.ones((1, 8192), np.float32)}
    model = ClientModel(published())
    first_request = prepare(memories, model, x, None, PLAIN)
    (key,) = model.templates._values
    made = ClientTemplate(
        model.signature, [TensorSchema("x", "FP32", (1, 8192), 32768)], (), memories
    )
    assert model.store_template(key, made) is first_request.template
    model.close()
    late_request = prepare(memories, model, x, None, PLAIN)
    assert not model.templates
    first_request.release_memory()
    late_request.release_memory()
    memories.free_recycled()
    assert memories._used_bytes() == 0


def test_a_deep_copy_of_a_region_has_its_own_memory(memories: Memories) -> None:
    region = Region(memories, {"x": (3, "FP32"), "y": ((2, 2), "BF16")})
    region["x"][:] = 1
    copied = copy.deepcopy(region)
    region["x"][:] = 2
    assert copied["x"].tolist() == [1, 1, 1] and copied.specs == region.specs


def test_a_region_of_another_process_can_be_copied(memories: Memories) -> None:
    region = Region(memories, {"x": (3, "FP32")})
    region["x"][:] = 1
    receive, arguments = region.__reduce__()
    copied = copy.deepcopy(receive(*arguments))
    region["x"][:] = 2
    assert copied["x"].tolist() == [1, 1, 1]


def test_a_region_keeps_no_templates_of_reloaded_models(memories: Memories) -> None:
    region = Region(memories, {"x": ((1, 8192), "FP32"), "y": ((1, 8192), "FP32")})
    models = ClientModels()
    models.publish(published("other"))
    for _ in range(3):
        models.publish(published("m"))
        for name in ("m", "other"):
            prepare(memories, models.resolve(name, ""), region, None, PLAIN).release_memory()
    assert list(region.requests) == [models.resolve(name, "") for name in ("other", "m")]
    region.release()


@pytest.mark.parametrize(
    ("wrong_options", "text"),
    [
        ({"request_id": 5}, "request_id must be a string, got 5"),
        ({"request_id": "\ud800"}, "request_id cannot be encoded as UTF-8"),
        ({"priority": "1"}, "priority must be an integer >= 0, got '1'"),
        ({"priority": 1.5}, "priority must"),
        ({"priority": -1}, "priority must"),
        ({"priority": 1 << 64}, "priority must"),
        ({"timeout_s": "1"}, "timeout must be a number of seconds, got '1'"),
        ({"timeout_s": float("nan")}, "timeout must"),
        ({"parameters": [1]}, "parameters must be a mapping"),
        ({"parameters": {1: 2}}, "the name of a parameter must be a string, got 1"),
        ({"parameters": {"a": None}}, "parameter 'a' must be a string, .* got None"),
        ({"parameters": {"a": np.int64(1)}}, "parameter 'a' must"),
        ({"parameters": {"a": 1 << 64}}, "parameter 'a' must"),
        ({"parameters": {"a": "\ud800"}}, "parameter 'a' cannot be encoded as UTF-8"),
        ({"parameters": {"deadline_us": "1"}}, "deadline_us must be an integer >= 0, got '1'"),
        ({"parameters": {"priority": -1}}, "priority must be an integer >= 0, got -1"),
    ],
)
def test_invalid_request_options_are_rejected(wrong_options: dict[str, Any], text: str) -> None:
    options: dict[str, Any] = {"request_id": "", "parameters": None, "priority": 0}
    with pytest.raises(InvalidArgument, match=text):
        options_of(**{**options, "timeout_s": None, **wrong_options})


def test_request_options_are_encoded() -> None:
    assert options_of("", {}, 0, None) is PLAIN
    assert options_of("a", {"b": True}, np.int64(2), None)[:4] == ("a", {"b": True}, 2, 0)  # type: ignore[arg-type]
    for expired_s in (0, -1, -1e300, float("-inf")):
        assert options_of("", None, 0, expired_s).timeout_us == 1
    assert options_of("", None, 0, float("inf")) == PLAIN
    assert options_of(None, None, 0, 1e9) == PLAIN  # type: ignore[arg-type]
    for timeout_s, limit_us, shortest_us in ((None, 9, 9), (5e-6, 9, 5), (1, 9, 9), (1e-6, 0, 1)):
        assert options_of("", {"deadline_us": limit_us}, 0, timeout_s).timeout_us == shortest_us
    assert [options_of("", {"priority": 2}, level, None).priority for level in (0, 1)] == [2, 1]
    # The longest that epoll can wait for, in milliseconds.
    assert options_of("", None, 0, 1.99e6).timeout_us // 1000 < 1 << 31


def test_a_response_is_decoded_by_its_schema(memories: Memories) -> None:
    """The schema of a repeated response is not parsed again, with any values and memory ranges."""
    model = ClientModel(published())
    packed_request = prepare(memories, model, {"x": np.ones((1, 2), np.float32)}, ["y"], PLAIN)
    reader: Any = SimpleNamespace(
        packed_request=packed_request,
        copy_range=lambda memory_range: b"\4\0\0\0",
        release=lambda release: None,
    )

    def read_response(*refs: TensorRef, **parameters: Any) -> dict[str, Any]:
        result = read(reader, Finished(1, *pack_inferred(Inferred(refs, parameters))))
        return {**result, **result.parameters}

    memory_range = Range(Memory(9, 4321, 5, 6, 1 << 20, True), 64, 4)
    for n in range(4):
        number = TensorRef("y", "INT32", (1,), n.to_bytes(4, "little"))
        copy = read_response(number, TensorRef("z", "BYTES", (1,), b"\1\0\0\0%d" % n), note=1)
        assert (copy["y"].tolist(), copy["z"].tolist()) == ([n], [b"%d" % n])
        assert copy["note"] == 1
        copy["y"][:] = 7  # the program's own
        for response in ((number, TensorRef("p", "INT32", (1,), memory_range)), (number,)):
            copy = read_response(*response)
            assert copy["y"].tolist() == [n]
            assert len(response) == 1 or copy["p"].tolist() == [4]
        assert read_response(TensorRef("p", "INT32", (1,), memory_range))["p"].tolist() == [4]


def test_accepted_input_types() -> None:
    array, datatype = as_array(torch.ones(3, dtype=torch.bfloat16), None, "x")
    assert datatype == "BF16" and array.dtype == np.uint16
    assert as_array(np.array(["a"]), None, "x")[1] == "BYTES"
    assert as_array(np.array(["a"], np.dtypes.StringDType()), None, "x")[1] == "BYTES"
    with pytest.raises(InvalidArgument, match="'x' is a masked array"):
        as_array(np.ma.masked_equal([1, 2], 2), None, "x")
    with pytest.raises(InvalidArgument, match="Python objects; model expects FP32: pass array"):
        as_array(np.array([1.0], object), TensorSpec("x", "FP32", (-1,)), "x")
    assert as_array(True, None, "x")[1] == "BOOL"
    with pytest.raises(InvalidArgument, match="pass a tensor in host memory"):
        as_array(torch.empty(1, device="meta"), None, "x")
    assert as_array(torch._neg_view(torch.ones(2)), None, "x")[0].tolist() == [-1, -1]
    scalar, datatype = as_array(torch.tensor(1.0, dtype=torch.bfloat16), None, "x")
    assert scalar.shape == () and datatype == "BF16"


def test_bfloat16_of_ml_dtypes_is_sent(memories: Memories) -> None:
    config: Any = copy.deepcopy(CONFIG)
    config["input"][0]["data_type"] = "TYPE_BF16"
    model = ClientModel(replace(published(), config=ModelSpec.of(config)))
    values = np.arange(16384).astype(ml_dtypes.bfloat16).reshape(1, -1)
    for _ in range(2):  # the first call makes a template
        request = prepare(memories, model, {"x": values}, None, PLAIN)
        segment: Any = request.segments[0]
        assert values.tobytes() in bytes(segment.bytes)
        request.release_memory()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2).to_sparse(), torch.ones(2).to(torch.float8_e4m3fn)],
    ids=["sparse", "of a type that numpy lacks"],
)
def test_unsupported_torch_tensors_are_rejected(tensor: torch.Tensor) -> None:
    with pytest.raises(InvalidArgument, match="input 'x' cannot be read from torch"):
        as_array(tensor, None, "x")


def test_lists_keep_their_numbers() -> None:
    def convert(value: object, datatype: str) -> list[object]:
        array, called_type = as_array(value, TensorSpec("x", datatype, (-1,)), "x")
        assert called_type == datatype
        return list(array.tolist())

    assert convert([1, 2.0, True], "INT32") == [1, 2, 1]
    assert convert([], "INT8") == []
    assert convert([1, 0], "BOOL") == [True, False]
    assert convert([2**63], "UINT64") == [2**63]
    assert convert([0.1], "FP32") == [np.float32(0.1)]
    # BF16 as bit patterns: 1.0 is 0x3f80.
    assert convert([1.0, -2, 1e-3], "BF16") == [0x3F80, 0xC000, 0x3A83]
    ones = np.ones(1, ml_dtypes.bfloat16)
    assert convert([ones], "BF16") == [[0x3F80]]
    assert convert([ones], "FP32") == [[1.0]]
    assert convert(NoArguments(), "FP32") == [1.0]
    assert convert(UnreadableByDlpack(), "BF16") == [0x3F80]


class NoArguments:
    """An array-like object with the method of older libraries."""

    def __array__(self, copy: bool | None = None) -> object:
        return np.ones(1)


class UnreadableByDlpack:
    """An array of JAX with a type that numpy's DLPack lacks."""

    def __dlpack__(self, **_: object) -> object:
        raise BufferError

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __array__(self, dtype: object = None, copy: bool | None = None) -> object:
        return np.ones(1, ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("value", "datatype", "found"),
    [
        ([0, 1.7], "INT32", "1.7"), ([300], "UINT8", "300"), ([-1], "UINT64", "-1"),
        ([2], "BOOL", "2"), (["1"], "INT32", "'1'"), ([0.5, None], "FP32", "None (NoneType)"),
        ([["a"]], "BF16", "'a'"), ([1, 10**30], "FP64", "0 (int)"), (range, "FP32", "range"),
    ],
)  # fmt: skip
def test_lists_with_values_outside_the_datatype_are_rejected(
    value: object, datatype: str, found: str
) -> None:
    text = f"input 'x' cannot be converted to {datatype}: .*{re.escape(found)}"
    with pytest.raises(InvalidArgument, match=text):
        as_array(value, TensorSpec("x", datatype, (-1,)), "x")


def test_an_unknown_model_is_awaited_until_the_server_has_started() -> None:
    models = ClientModels()
    models.started = False
    with pytest.raises(Unavailable, match="unknown model: 'm' is not found, and the server is not"):
        models.resolve("m", "")
    models.started = True
    with pytest.raises(NotFound, match=r"unknown model: 'm' is not found$"):
        models.resolve("m", "")


def test_models_are_updated_by_publications() -> None:
    models = ClientModels()
    models.publish(published(version="1"))
    models.publish(published(version="3", latest=True))
    assert models.resolve("m", "").version == "3"
    models.publish(published(version="1", latest=False))
    assert models.resolve("m", "").version == "3"
    assert models.resolve("m", "01").version == "1"
    assert models.names() == [("m", "1"), ("m", "3")]
    models.withdraw("m", "3")
    with pytest.raises(Unavailable, match="no available versions"):
        models.resolve("m", "")
    with pytest.raises(NotFound, match="version 3"):
        models.resolve("m", "3")
    with pytest.raises(NotFound, match="'other' is not found"):
        models.resolve("other", "")


def test_a_template_is_prepared_for_inputs_without_bytes(memories: Memories) -> None:
    template = ClientTemplate(
        ClientModel(published()).signature, [TensorSchema("x", "FP32", (1, 0), 0)], (), memories
    )
    assert template.uses_slots


@pytest.mark.parametrize("size", [1, 2, 200])
def test_small_inputs_travel_in_the_message(memories: Memories, size: int) -> None:
    config = {**CONFIG, "output": [{"name": "y", "data_type": "TYPE_INT8", "dims": [-1]}]}
    template = TensorSchema("x", "FP32", (1, size), 4 * size)
    client_template = ClientTemplate(Signature(ModelSpec.of(config), "1"), [template], (), memories)
    array = np.arange(size, dtype=np.float32).reshape(1, size)
    assert not client_template.uses_slots
    tensor = TensorRef("x", "FP32", (1, size), array.tobytes())
    for parameters in (None, {"n": 1}):
        expected = pack_inference(Inference((tensor,), (), parameters or {}))
        assert client_template.pack_request([array], None, parameters) == expected


def test_local_clients_cannot_forge_identities_or_memory() -> None:
    capabilities, other_capabilities = Capabilities(bytes(32)), Capabilities(bytes(31) + b"1")
    token = capabilities.token(FIRST)
    assert capabilities.local_client(f"{FIRST}.{token}.1".encode()) == FIRST
    for forged_identity in (
        f"{FIRST + 1}.{token}.1",
        f"{FIRST}.{other_capabilities.token(FIRST)}.1",
        f"{os.getpid()}.{token}.1",
        f"{FIRST}",
        "",
        f"0{FIRST}.{token}",
        f"{FIRST}.{token}x.1",
    ):
        assert capabilities.local_client(forged_identity.encode()) == 0, forged_identity
    fields = (7, 8, 9, 4096, True)
    own_memory = Memory(capabilities.memory_id(FIRST, *fields, False, False), *fields)
    assert capabilities.owns(FIRST, own_memory) and not capabilities.owns(FIRST + 1, own_memory)
    assert not capabilities.owns(FIRST, Memory(own_memory.id, 7, 8, 9, 8192, True))
    assert not capabilities.owns(FIRST, replace(own_memory, sealed=False))
    assert not capabilities.owns(FIRST, replace(own_memory, copied=True))
    assert Range(own_memory, 0, 1)


def test_regions_and_results_are_compared_by_identity(memories: Memories) -> None:
    pool: list[Any] = [Region(memories, {"x": (3, "FP32")}) for _ in range(2)]
    pool += [Result({"x": np.zeros(3)}, {}, None) for _ in range(2)]
    for kept in list(pool):
        assert pool.index(kept) == 0 and kept in set(pool)
        pool.remove(kept)
