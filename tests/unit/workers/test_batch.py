"""A worker's data path: views or one copy; errors fail only their request."""

import mmap
import os
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import Internal, InvalidArgument, Unavailable
from shmserve.ipc.endpoints import FIRST_LOCAL_CLIENT
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.tensors.schemas import Inference, RequestedOutput, pack_inference
from shmserve.ipc.tensors.signature import Signature, reshape
from shmserve.workers.backends import Output, Request, Response
from shmserve.workers.batch import execute as batches
from shmserve.workers.batch.backend_request import Input, Unpacker
from shmserve.workers.batch.runner import Gatherer, buffer_capacity
from shmserve.workers.memory.outputs import OutputMemory
from tests.rigs.worker_rig import (
    CLIENT_PID,
    MIB,
    FunctionBackend,
    Region,
    Rig,
    inference,
    model_config,
    tensor,
    tensor_config,
)

F32 = np.float32


def echo(requests: list[Request]) -> list[Response]:
    return [
        Response([Output("Y", r.inputs["X"].datatype, r.inputs["X"].numpy())]) for r in requests
    ]


def one_tensor(
    data_type: str = "FP32", dims: tuple[int, ...] = (-1,), max_batch_size: int = 0, **fields: Any
) -> dict[str, Any]:
    """Return a configuration with an input X and an output Y of the same datatype and shape."""
    return model_config(
        [tensor_config("X", data_type, dims, **fields)],
        [tensor_config("Y", data_type, dims, **fields)],
        max_batch_size,
    )


# --- views and copies


def make_gatherer(
    config: dict[str, Any], mappings: Mappings
) -> tuple[Unpacker, Gatherer, list[memoryview]]:
    signature = Signature(ModelSpec.of(config), "1")
    buffers: list[memoryview] = []

    def allocate(byte_size: int) -> memoryview:
        buffers.append(memoryview(bytearray(byte_size)))
        return buffers[-1]

    return Unpacker(signature, mappings), Gatherer(signature, mappings, allocate), buffers


def unpack(unpacker: Unpacker, *requests: Inference) -> list[Request]:
    return [unpacker.request(Work(key, 1, *pack_inference(r))) for key, r in enumerate(requests)]


def address_of(raw: memoryview) -> int:
    pointer: int = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
    return pointer


def test_a_batch_of_one_in_a_region_is_a_view(region: Region) -> None:
    mappings = Mappings()
    unpacker, gather, buffers = make_gatherer(one_tensor(max_batch_size=8), mappings)
    memory_range = region.write(256, np.arange(8, dtype=F32))
    (request,) = unpack(unpacker, inference(tensor("X", np.zeros((2, 4), F32), memory_range)))
    raw, shape, view = gather.gather("X", [request])
    assert (shape, view, buffers) == ((2, 4), True, [])
    assert address_of(raw) == address_of(mappings.view(memory_range))
    assert np.array_equal(np.frombuffer(raw, F32), np.arange(8, dtype=F32))


def test_adjacent_rows_are_one_view_and_separate_rows_are_copied(region: Region) -> None:
    mappings = Mappings()
    unpacker, gather, buffers = make_gatherer(one_tensor(max_batch_size=8), mappings)
    rows = [np.full((n, 2), n, F32) for n in (1, 3, 2)]
    ranges = [region.write(offset, row) for offset, row in zip((64, 72, 96), rows, strict=True)]
    items = [inference(tensor("X", row, place)) for row, place in zip(rows, ranges, strict=True)]
    requests = unpack(unpacker, *items)
    raw, shape, view = gather.gather("X", requests)
    assert (shape, view, buffers) == ((6, 2), True, [])
    assert address_of(raw) == address_of(mappings.view(ranges[0]))
    assert np.array_equal(np.frombuffer(raw, F32).reshape(6, 2), np.concatenate(rows))
    # Rows in another order, or with a gap between them, are not contiguous.
    for shuffled_requests in (requests[::-1], [requests[0], requests[2]]):
        raw, shape, view = gather.gather("X", shuffled_requests)
        assert not view
        expected = np.concatenate([rows[request.work.key] for request in shuffled_requests])
        assert np.array_equal(np.frombuffer(raw, F32).reshape(shape), expected)
    assert len(buffers) == 1, "one buffer, kept"


def test_the_first_buffer_fits_the_largest_batch() -> None:
    unpacker, gather, buffers = make_gatherer(one_tensor(dims=(2,), max_batch_size=8), Mappings())
    for sizes in ((1, 1), (3, 2), (4, 4)):
        rows = [np.random.rand(n, 2).astype(F32) for n in sizes]
        requests = unpack(unpacker, *(inference(tensor("X", row)) for row in rows))
        raw, shape, view = gather.gather("X", requests)
        assert not view
        assert np.array_equal(np.frombuffer(raw, F32).reshape(shape), np.concatenate(rows))
    assert [len(buffer) for buffer in buffers] == [8 * 2 * 4]


@given(rows=st.integers(0, 64), row=st.integers(0, 1 << 32), min_capacity=st.integers(1, 64))
def test_the_capacity_of_a_buffer(rows: int, row: int, min_capacity: int) -> None:
    byte_size = rows * row
    capacity = buffer_capacity(byte_size, rows, min_capacity)
    assert byte_size <= capacity <= max(2 * byte_size, 64 * MIB), "not room for what may never come"
    if row * max(rows, min_capacity) <= 64 * MIB:
        assert capacity == (row * max(rows, min_capacity) if rows else 0), "never grown"


def test_a_ragged_input_is_flat() -> None:
    config = one_tensor(max_batch_size=8, allow_ragged_batch=True)
    unpacker, gather, _ = make_gatherer(config, Mappings())
    rows = [np.arange(n, dtype=F32).reshape(1, n) for n in (2, 4, 1)]
    requests = unpack(unpacker, *(inference(tensor("X", row)) for row in rows))
    raw, shape, _ = gather.gather("X", requests)
    assert shape == (7,)
    assert np.frombuffer(raw, F32).tolist() == [0, 1, 0, 1, 2, 3, 0]


def test_16_mib_through_regions_are_copied_once(worker: Rig, region: Region) -> None:
    """The input is a view; no buffer of the tensor's size is allocated."""
    data = np.random.rand(4 * MIB).astype(F32)
    source = region.write(0, data)
    raw_inputs: list[Any] = []

    def record_inputs(requests: list[Request]) -> list[Response]:
        raw_inputs.append(requests[0].inputs["X"].raw)
        return echo(requests)

    worker.serve_function(record_inputs, one_tensor())
    requested_output = RequestedOutput("Y", region.memory_range(20 * MIB, 16 * MIB))
    request = inference(TensorRef("X", "FP32", data.shape, source), outputs=[requested_output])
    tracemalloc.start()
    (reply,) = worker.batch(request)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reply.code == "", reply.message
    assert peak < 1 * MIB
    assert address_of(raw_inputs[0]) == address_of(worker.context.mappings.view(source))
    assert region.read(20 * MIB, 16 * MIB) == data.tobytes()
    assert reply.outputs[0].data == requested_output.memory_range
    assert worker.context.arena.used_bytes == 0


def test_only_inputs_in_regions_are_read_only(worker: Rig, region: Region) -> None:
    flags: list[bool] = []

    def record_flags(requests: list[Request]) -> list[Response]:
        flags.append(requests[0].inputs["X"].numpy().flags.writeable)
        return echo(requests)

    worker.serve_function(record_flags, one_tensor())
    data = np.arange(4, dtype=F32)
    worker.batch(inference(tensor("X", data)))
    worker.batch(inference(tensor("X", data, region.write(0, data))))
    assert flags == [True, False]


def test_a_model_that_writes_into_its_inputs_gets_copies(worker: Rig, region: Region) -> None:
    def add_one(requests: list[Request]) -> list[Response]:
        for request in requests:
            array = request.inputs["X"].numpy()
            array += 1
        return echo(requests)

    worker.serve_function(add_one, one_tensor())
    data = np.arange(4, dtype=F32)
    for _ in range(2):
        reply = worker.infer(tensor("X", data, region.write(8, data)))
        assert reply.array("Y").tolist() == [1, 2, 3, 4]
        assert region.read(8, 16) == data.tobytes(), "the client's memory is as it was"


def test_unaligned_inputs_are_read_correctly(worker: Rig, region: Region) -> None:
    worker.serve_function(echo, one_tensor())
    data = np.arange(5, dtype=F32)
    reply = worker.infer(tensor("X", data, region.write(3, data)))
    assert reply.array("Y").tolist() == data.tolist()


# --- outputs


def test_outputs_are_written_to_their_destinations(worker: Rig, region: Region) -> None:
    """Small outputs inline, large ones in the arena, requested ranges of a client."""
    worker.serve_function(echo, one_tensor())
    small_array, large_array = np.arange(8, dtype=F32), np.random.rand(MIB).astype(F32)
    reply = worker.infer(tensor("X", small_array))
    assert reply.array("Y").tolist() == small_array.tolist()
    assert worker.context.arena.used_bytes == 0
    reply = worker.infer(tensor("X", large_array, region.write(0, large_array)))
    assert np.array_equal(reply.array("Y", worker), large_array)
    assert worker.context.arena.used_bytes == 4 * MIB
    memory_range = reply.outputs[0].data
    assert not isinstance(memory_range, bytes)
    worker.release([memory_range.offset], pid=1)
    worker.batch(inference(tensor("X", small_array)))
    assert worker.context.arena.used_bytes == 4 * MIB, "only its reader may release it"
    worker.release([memory_range.offset])
    worker.batch(inference(tensor("X", small_array)))
    assert worker.context.arena.used_bytes == 0


@pytest.mark.parametrize("may_return", [False, True])
def test_a_returned_input_is_not_copied(worker: Rig, region: Region, may_return: bool) -> None:
    """If the request allows it; a part of an input, or a computed output, is written."""
    data = np.arange(MIB, dtype=F32)
    kinds_of_output = ["whole", "part", "whole", "computed"]

    def compute(requests: list[Request]) -> list[Response]:
        x = requests[0].inputs["X"].numpy()
        y = {"whole": x, "part": x[: MIB // 2], "computed": x + 1}[kinds_of_output.pop(0)]
        return [Response([Output("Y", "FP32", y)])]

    worker.serve_function(compute, one_tensor())
    memory_range = region.write(0, data)
    requested = RequestedOutput("Y", region.memory_range(8 * MIB, 4 * MIB), may_return)
    for expected in (data, data[: MIB // 2], data, data + 1):
        is_returned = may_return and expected is data
        reply = worker.infer(tensor("X", data, memory_range), outputs=[requested])
        (output,) = reply.outputs
        assert isinstance(output.data, Range)
        assert output.data.offset == (0 if is_returned else 8 * MIB)
        assert region.read(output.data.offset, output.data.byte_size) == expected.tobytes()


@pytest.mark.parametrize("size", [4, 8192])
@pytest.mark.parametrize("names", ["one", "two"])
def test_a_write_over_an_input_changes_no_other_output(
    worker: Rig, region: Region, size: int, names: str
) -> None:
    """The client's outputs are in its inputs' memory, and one output is a view of an input."""

    def compute(requests: list[Request]) -> list[Response]:
        (request,) = requests
        x, y = (request.inputs[name].numpy() for name in "XY")
        outputs = {"Z": x * 2, "A": y, "B": x}
        return [Response([Output(name, "FP32", data) for name, data in outputs.items()])]

    config = model_config(
        [tensor_config(name, "FP32", (-1,)) for name in "XY"],
        [tensor_config(name, "FP32", (-1,)) for name in "ABZ"],
    )
    worker.serve_function(compute, config)
    x, y = np.arange(size, dtype=F32), np.arange(size, dtype=F32) + 1000
    # A client may have registered the object a second time, under another name, for outputs.
    memory = region.memory if names == "one" else replace(region.memory, id=region.memory.id + 1)

    def answers(**range_indices: int | None) -> dict[str, list[float]]:
        inputs = tensor("X", x, region.write(0, x)), tensor("Y", y, region.write(4 * size, y))
        expected = [
            RequestedOutput(
                name, None if index is None else Range(memory, 4 * index * size, 4 * size)
            )
            for name, index in range_indices.items()
        ]
        reply = worker.infer(*inputs, outputs=expected)
        return {
            name: reply.array(name, worker).tolist()
            if index is None
            else np.frombuffer(region.read(4 * index * size, 4 * size), F32).tolist()
            for name, index in range_indices.items()
        }

    assert answers(A=0, B=1) == {"A": y.tolist(), "B": x.tolist()}
    for _ in range(2):
        for second_index in (None, 1, 4):
            assert answers(Z=0, B=second_index) == {"Z": (x * 2).tolist(), "B": x.tolist()}


def test_an_output_too_large_for_its_range_fails_that_request(worker: Rig, region: Region) -> None:
    worker.serve_function(echo, one_tensor(max_batch_size=4))
    bytes_before = region.read(0, 64)
    requested_output = RequestedOutput("Y", region.memory_range(0, 15))
    data = np.ones((1, 4), F32)
    short_reply, valid_reply = worker.batch(
        inference(tensor("X", data), outputs=[requested_output]), inference(tensor("X", data))
    )
    assert (short_reply.code, short_reply.message) == (
        "INTERNAL",
        "shared memory size specified with the request for output 'Y' (15 bytes) should be at "
        "least 16 bytes to hold the results",
    )
    assert valid_reply.code == ""
    assert region.read(0, 64) == bytes_before


def test_only_requested_outputs_are_sent(worker: Rig) -> None:
    def respond_with_three(requests: list[Request]) -> list[Response]:
        names = ("A", "B", "UNKNOWN")
        return [Response([Output(name, "INT32", np.ones(1, np.int32)) for name in names])]

    config = model_config(
        [tensor_config("X", "FP32", [-1])],
        [tensor_config("A", "INT32", [1]), tensor_config("B", "INT32", [1])],
    )
    worker.serve_function(respond_with_three, config)
    x = tensor("X", np.zeros(1, F32))
    for outputs, names in (((), ["A", "B"]), ([RequestedOutput("B")], ["B"])):
        reply = worker.infer(x, outputs=outputs)
        assert [ref.name for ref in reply.outputs] == names


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros(4, np.float64), "for output 'Y', model provides TYPE_FP64"),
        (np.zeros((4, 1), F32), "unexpected shape for inference output 'Y' for model 'm'"),
        (torch.zeros(3).to_sparse(), "Failed to process the request(s) for model 'm_0_0'"),
    ],
)
def test_outputs_that_contradict_the_configuration(worker: Rig, data: Any, message: str) -> None:
    kind = "FP64" if getattr(data, "dtype", None) == np.float64 else "FP32"
    response = Response([Output("Y", kind, data)])
    worker.serve_function(lambda requests: [response], one_tensor(dims=(4,)))
    reply = worker.infer(tensor("X", np.zeros(4, F32)))
    assert reply.code == "INTERNAL"
    assert message in reply.message


def test_a_lenient_backend_passes_any_output(worker: Rig) -> None:
    backend = FunctionBackend(
        worker.context, lambda requests: [Response([Output("Y", "FP64", np.zeros((2, 3)))])]
    )
    backend.strict_outputs = False
    worker.serve(backend, one_tensor(dims=(4,)))
    reply = worker.infer(tensor("X", np.zeros(4, F32)))
    assert reply.array("Y").shape == (2, 3)


@pytest.mark.parametrize(
    "rows",
    [
        np.asfortranarray(np.arange(12, dtype=F32).reshape(3, 4)),
        np.arange(24, dtype=F32).reshape(3, 8)[:, ::2],
        np.arange(12, dtype=">f4").reshape(3, 4),
        torch.arange(12, dtype=torch.float32).reshape(4, 3).t(),
        torch.zeros(12, requires_grad=True).reshape(3, 4),
    ],
)
@pytest.mark.parametrize("has_range", [False, True])
def test_layouts_are_row_major(worker: Rig, region: Region, rows: Any, has_range: bool) -> None:
    response = Response([Output("Y", "FP32", rows)])
    worker.serve_function(lambda requests: [response], one_tensor(dims=(3, 4)))
    requested = [RequestedOutput("Y", region.memory_range(64, 100))] if has_range else []
    reply = worker.infer(tensor("X", np.zeros((3, 4), F32)), outputs=requested)
    assert reply.code == "", reply.message
    plain = np.ascontiguousarray(
        rows.detach().numpy() if isinstance(rows, torch.Tensor) else rows, F32
    )
    written_bytes = region.read(64, 48) if has_range else reply.array("Y").tobytes()
    assert written_bytes == plain.tobytes()


def test_zero_size_tensors_and_empty_batches(worker: Rig, region: Region) -> None:
    worker.serve_function(echo, one_tensor(max_batch_size=4))
    for shape in ((1, 0), (0, 3)):
        data = np.zeros(shape, F32)
        for outputs in ((), [RequestedOutput("Y", region.memory_range(0, 0))]):
            reply = worker.infer(tensor("X", data), outputs=outputs)
            assert reply.outputs[0].shape == shape


def test_an_empty_output_beside_a_large_one_needs_no_memory(worker: Rig) -> None:
    def respond(requests: list[Request]) -> list[Response]:
        arrays = {"A": np.zeros(MIB, F32), "B": np.zeros(0, F32)}
        return [Response([Output(name, "FP32", array) for name, array in arrays.items()])]

    outputs = [tensor_config(name, "FP32", [-1]) for name in "AB"]
    config = model_config([tensor_config("X", "FP32", [-1])], outputs)
    worker.serve_function(respond, config)
    reply = worker.infer(tensor("X", np.zeros(1, F32)))
    ranges = [output.data for output in reply.outputs if isinstance(output.data, Range)]
    assert [memory_range.byte_size for memory_range in ranges] == [4 * MIB]
    worker.release([memory_range.offset for memory_range in ranges])
    worker.instance.link.receive()
    assert worker.context.arena.used_bytes == 0


@pytest.mark.parametrize("has_range", [False, True])
def test_string_outputs(worker: Rig, region: Region, has_range: bool) -> None:
    worker.serve_function(echo, one_tensor("STRING", (2,), max_batch_size=4))
    data = np.array([[b"", "ä".encode()], [b"\0\1", b"x" * 50]], dtype=object)
    requested_outputs = [RequestedOutput("Y", region.memory_range(0, 1000))] if has_range else []
    reply = worker.infer(tensor("X", data), outputs=requested_outputs)
    sent = tensor("X", data).data
    assert isinstance(sent, bytes)
    assert (region.read(0, len(sent)) if has_range else reply.outputs[0].data) == sent


def test_strings_of_any_numpy_kind_become_bytes(worker: Rig) -> None:
    arrays = [np.array(["é", "b"]), np.array([b"x", b"y"]), np.array([5, "z"], dtype=object)]
    outputs = iter([Output("Y", "BYTES", data) for data in arrays])
    worker.serve_function(lambda requests: [Response([next(outputs)])], one_tensor("STRING", (2,)))
    for _ in arrays:
        reply = worker.infer(tensor("X", np.array([b"a", b"b"], dtype=object)))
        assert reply.code == "", reply.message


def test_reshape_of_inputs_and_outputs(worker: Rig) -> None:
    shapes: list[tuple[int, ...]] = []

    def record_shapes(requests: list[Request]) -> list[Response]:
        shapes.extend(request.inputs["X"].shape for request in requests)
        return echo(requests)

    config = one_tensor(dims=(4, -1), max_batch_size=8, reshape={"shape": [2, 2, -1]})
    worker.serve_function(record_shapes, config)
    replies = worker.batch(*(inference(tensor("X", np.zeros((n, 4, 5), F32))) for n in (1, 3)))
    assert shapes == [(1, 2, 2, 5), (3, 2, 2, 5)]
    assert [reply.array("Y").shape for reply in replies] == [(1, 4, 5), (3, 4, 5)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_reshape_carries_variable_sizes_in_order(sizes: list[int], data: st.DataObject) -> None:
    is_variable = [data.draw(st.booleans()) for _ in sizes]
    dims = tuple(-1 if free else size for size, free in zip(sizes, is_variable, strict=True))
    target_dims = (1, *(dim for dim in dims if dim == -1), 1)
    reshaped = reshape(tuple(sizes), dims, target_dims)
    free_sizes = [size for size, is_free in zip(sizes, is_variable, strict=True) if is_free]
    assert reshaped == (1, *free_sizes, 1)
    assert reshape(reshaped, target_dims, dims) == tuple(
        size if dim == -1 else dim for size, dim in zip(sizes, dims, strict=True)
    )


# --- errors of single requests


def test_an_invalid_request_fails_alone(worker: Rig, region: Region) -> None:
    worker.serve_function(echo, one_tensor(max_batch_size=8))
    data = np.ones((1, 4), F32)
    outside_range = region.memory_range(40 * MIB - 8, 16)
    wrong_size = TensorRef("X", "FP32", (1, 4), b"123")
    replies = worker.raw_batch(
        [
            pack_inference(inference(tensor("X", data))),
            (b"garbage", []),
            pack_inference(inference(tensor("X", data, outside_range))),
            pack_inference(inference(wrong_size)),
            pack_inference(inference(tensor("NOPE", data))),
        ]
    )
    assert [reply.code for reply in replies] == [
        "", "INTERNAL", "INTERNAL", "INVALID_ARG", "INVALID_ARG",
    ]  # fmt: skip
    assert replies[1].message == Internal().message


def test_bytes_that_do_not_add_up_fail_their_request_alone(worker: Rig) -> None:
    worker.serve_function(echo, one_tensor("STRING", (1,), max_batch_size=8))
    valid_tensor = tensor("X", np.array([[b"a"]], dtype=object))
    bad_tensor = TensorRef("X", "BYTES", (1, 1), b"\xff\0\0\0ab")
    first_reply, second = worker.batch(inference(valid_tensor), inference(bad_tensor))
    assert first_reply.code == ""
    assert second.code == "INVALID_ARG"
    assert second.message.startswith("[request id: id-1] incomplete string data for inference")
    assert "inference input 'X' for model 'm'" in second.message
    assert "its length in 4 bytes" in second.message
    assert worker.finished.executed
    worker.batch(inference(bad_tensor))
    assert not worker.finished.executed


@pytest.mark.parametrize(
    ("data", "count", "is_copied"),
    [(b"\1\0\0\0a", 1, False), (b"\0\0\0\0", 1, False), (b"\1\0\0\0a" * 2, 2, True)],
)
def test_one_text_is_checked_uncopied_on_request(data: bytes, count: int, is_copied: bool) -> None:
    unpacker, *_ = make_gatherer(one_tensor("STRING", (-1,)), Mappings())
    unit_of_work = Work(1, 1, *pack_inference(inference(TensorRef("X", "BYTES", (count,), data))))
    assert unpacker.request(unit_of_work).inputs["X"].array is not None
    unpacked_input = unpacker.request(unit_of_work, copies_text=False).inputs["X"]
    assert (unpacked_input.array is not None) == is_copied
    assert unpacked_input.numpy().tolist() == [data[4:5]] * count


@pytest.mark.parametrize("data", [b"", b"\1\0\0", b"\2\0\0\0a", b"\0\0\0\0a"])
def test_a_text_of_the_wrong_length_is_refused_without_a_copy_too(data: bytes) -> None:
    unpacker, *_ = make_gatherer(one_tensor("STRING", (1,)), Mappings())
    unit_of_work = Work(1, 1, *pack_inference(inference(TensorRef("X", "BYTES", (1,), data))))
    with pytest.raises(InvalidArgument, match="for inference input 'X' for model 'm'"):
        unpacker.request(unit_of_work, copies_text=False)


def test_a_text_of_4_gib_has_no_valid_length() -> None:
    with mmap.mmap(-1, 4 + 2**32) as memory, memoryview(memory) as raw:
        assert not Input("X", "BYTES", (1,), raw).is_text()


def test_all_inputs_are_named_whose_strings_do_not_add_up(worker: Rig) -> None:
    names = ("A", "B", "C")
    inputs = [tensor_config(name, "STRING", [2]) for name in names]
    config = model_config(inputs, [tensor_config("Y", "STRING", [2])])
    worker.serve_function(echo, config)
    one_string, two_strings = b"\1\0\0\0a", b"\1\0\0\0a" * 2
    tensors = [
        TensorRef(name, "BYTES", (2,), data)
        for name, data in zip(names, (one_string, two_strings, b""), strict=True)
    ]
    reply = worker.infer(*tensors)
    assert reply.code == "INVALID_ARG"
    assert reply.message == (
        "[request id: id-1] expected 2 string elements for inference input 'A' for model 'm', "
        "got 1; expected 2 string elements for inference input 'C' for model 'm', got 0"
    )


def test_a_region_truncated_after_registration(worker: Rig, region: Region) -> None:
    worker.serve_function(echo, one_tensor())
    data = np.zeros(4, F32)
    memory_range = region.write(8192, data)
    assert worker.batch(inference(tensor("X", data, memory_range)))[0].code == ""
    os.ftruncate(region.fd, 4096)
    reply = worker.infer(tensor("X", data, memory_range))
    assert reply.code == "INVALID_ARG" and "truncated" in reply.message


def test_a_batch_of_many_bytes_runs_in_parts(worker: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of gathered bytes is bounded, even if many requests name the same memory."""
    monkeypatch.setattr(batches, "MAX_PART_BYTES", 100)
    batch_keys: list[list[int]] = []

    def execute(requests: list[Request]) -> list[Response]:
        batch_keys.append([request.work.key for request in requests])
        if 5 in batch_keys[-1]:
            worker.cancel(7)
        return echo(requests)

    worker.serve_function(execute, one_tensor(max_batch_size=16))
    rows = [np.full((1, n), n, F32) for n in (10, 10, 5, 1, 40, 10, 5, 5)]
    items = [inference(tensor("X", row)) for row in rows]
    items[3] = inference(tensor("Z", rows[3]))
    replies = worker.batch(*items)
    assert batch_keys == [[1, 2, 3], [5], [6, 8]]
    assert worker.finished.executed
    assert [reply.code for reply in replies] == ["", "", "", "INVALID_ARG", "", "", "CANCELLED", ""]
    for number in (0, 1, 2, 4, 5, 7):
        assert np.array_equal(replies[number].array("Y"), rows[number])


def test_the_requests_of_a_failed_batch_are_retried_alone(worker: Rig) -> None:
    sizes: list[int] = []

    def fail_several(requests: list[Request]) -> list[Response]:
        sizes.append(len(requests))
        for request in requests:
            array = request.inputs["X"].numpy()
            if array[0, 0] < 0:
                raise ValueError("negative")
            array *= 2  # the retry must not see this change
        return echo(requests)

    worker.serve_function(fail_several, one_tensor(max_batch_size=8))
    replies = worker.batch(*(inference(tensor("X", np.array([[n]], F32))) for n in (1, -1, 3)))
    assert sizes == [3, 1, 1, 1]
    assert [reply.code for reply in replies] == ["", "INTERNAL", ""]
    message = "Failed to process the request(s) for model 'm_0_0', message: ValueError: negative"
    assert replies[1].message == message and replies[0].array("Y").tolist() == [[2]]
    assert replies[2].array("Y").tolist() == [[6]]


@pytest.mark.parametrize(
    "memory_error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()]
)
@pytest.mark.parametrize(
    ("max_rows", "sizes"), [(2, [8, 4, 2, 2, 4, 2, 2]), (1, [8, *[4, 2, 1, 1, 2, 1, 1] * 2])]
)
def test_a_batch_that_is_too_large_for_the_memory_is_run_in_halves(
    worker: Rig,
    monkeypatch: pytest.MonkeyPatch,
    memory_error: BaseException,
    max_rows: int,
    sizes: list[int],
) -> None:
    """torch's cache is emptied before each retry; cancelled requests are skipped."""
    freed_after: list[int] = []
    batch_sizes: list[int] = []
    for module in ("batch.execute", "context"):
        monkeypatch.setattr(
            f"shmserve.workers.{module}.free_cached_memory",
            lambda: freed_after.append(len(batch_sizes)),
        )

    def execute(requests: list[Request]) -> list[Response]:
        batch_sizes.append(len(requests))
        if len(requests) > max_rows:
            requests[0].inputs["X"].numpy()[:] = 0  # the retry must not see this change
            raise memory_error
        return echo(requests)

    worker.serve_function(execute, one_tensor(max_batch_size=8))
    replies = worker.batch(*(inference(tensor("X", np.full((1, 1), n, F32))) for n in range(8)))
    assert batch_sizes == sizes
    assert freed_after == [attempt for attempt, size in enumerate(sizes, 1) if size > max_rows]
    assert [reply.code for reply in replies] == [""] * 8
    assert [reply.array("Y").tolist() for reply in replies] == [[[n]] for n in range(8)]


def test_a_request_too_large_for_the_memory_fails_alone(worker: Rig) -> None:
    def execute(requests: list[Request]) -> list[Response]:
        if any(request.inputs["X"].numpy()[0, 0] < 0 for request in requests):
            worker.cancel(3)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return echo(requests)

    worker.serve_function(execute, one_tensor(max_batch_size=8))
    replies = worker.batch(*(inference(tensor("X", np.array([[n]], F32))) for n in (1, -1, 3, 4)))
    assert [reply.code for reply in replies] == ["", "UNAVAILABLE", "CANCELLED", ""]
    assert "not enough memory on device 'cpu' for model 'm'" in replies[1].message


@pytest.mark.parametrize("result", [[], None])
def test_wrong_numbers_of_responses_fail_a_batch(worker: Rig, result: Any) -> None:
    worker.serve_function(lambda requests: result, one_tensor())
    reply = worker.infer(tensor("X", np.zeros(1, F32)))
    assert reply.code == "INTERNAL"
    assert reply.message.startswith("Failed to process the request(s) for model 'm_0_0', message:")
    assert "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0" in reply.message


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (SystemExit(3), "INTERNAL", "SystemExit: 3"),
        (InvalidArgument("as it is"), "INVALID_ARG", "as it is"),
        (MemoryError(), "UNAVAILABLE", "not enough memory on device 'cpu' for model 'm'"),
        (torch.OutOfMemoryError("CUDA..."), "UNAVAILABLE", "not enough memory on device 'cpu'"),
    ],
)
def test_exceptions_of_a_model_fail_the_request(
    worker: Rig, error: BaseException, code: str, text: str
) -> None:
    def fail(requests: list[Request]) -> list[Response]:
        raise error

    worker.serve_function(fail, one_tensor())
    for _ in range(2):
        reply = worker.infer(tensor("X", np.zeros(1, F32)))
        assert reply.code == code
        assert text in reply.message


def test_a_failed_copy_of_an_input_fails_its_request_only(
    worker: Rig, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs in another user's memory are copied."""
    worker.serve_function(echo, one_tensor(max_batch_size=8))
    data = np.ones((1, 4), F32)
    copied = Range(replace(region.memory, copied=True), 0, data.nbytes)

    def raise_memory_error(memory_range: Range) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(worker.context.mappings, "read", raise_memory_error)
    failed, own = worker.batch(inference(tensor("X", data, copied)), inference(tensor("X", data)))
    assert failed.code == "UNAVAILABLE"
    assert "not enough memory on device 'cpu' for model 'm'" in failed.message
    assert own.code == ""


def test_per_request_errors_and_parameters(worker: Rig) -> None:
    def answer_mixed(requests: list[Request]) -> list[Response]:
        good_response, bad_response = echo(requests)
        good_response.parameters = {"n": 1}
        bad_response.error = Internal("not this one")
        return [good_response, bad_response]

    worker.serve_function(answer_mixed, one_tensor(max_batch_size=8))
    data = tensor("X", np.zeros((1, 1), F32))
    good_reply, bad_reply = worker.batch(inference(data), inference(data))
    assert good_reply.answer is not None and good_reply.answer.parameters == {"n": 1}
    assert (bad_reply.code, bad_reply.message) == ("INTERNAL", "not this one")


def test_a_cancelled_request_is_not_written(worker: Rig, region: Region) -> None:
    cancelled_flags: list[bool] = []

    def answer_cancelled(requests: list[Request]) -> list[Response]:
        worker.cancel(2)
        cancelled_flags.extend(request.is_cancelled() for request in requests)
        return echo(requests)

    worker.serve_function(answer_cancelled, one_tensor(max_batch_size=8))
    data = np.ones((1, 4), F32)
    first_reply, second_reply = worker.batch(
        *(
            inference(
                tensor("X", data), outputs=[RequestedOutput("Y", region.memory_range(offset, 16))]
            )
            for offset in (0, 64)
        )
    )
    assert cancelled_flags == [False, True]
    assert first_reply.code == ""
    assert region.read(0, 16) == data.tobytes()
    assert second_reply.code == "CANCELLED"
    assert region.read(64, 16) == bytes(16)


def test_times_are_in_order(worker: Rig) -> None:
    worker.serve_function(echo, one_tensor())
    worker.batch(inference(tensor("X", np.zeros(1, F32))))
    finished_message = worker.finished
    assert (
        0
        < finished_message.compute_start_ns
        <= finished_message.input_end_ns
        <= finished_message.output_start_ns
        <= finished_message.compute_end_ns
    )


def test_outputs_for_a_dead_scheduler_are_not_written(worker: Rig, region: Region) -> None:
    """The retried request may have other data in that memory by then."""
    region.write(0, np.zeros(4, F32))

    def execute(requests: list[Request]) -> list[Response]:
        worker.scheduler.close()
        return echo(requests)

    worker.serve_function(execute, one_tensor())
    x = tensor("X", np.ones(4, F32))
    reply = worker.infer(x, outputs=[RequestedOutput("Y", region.memory_range(0, 16))])
    assert reply.code == "CANCELLED"
    assert region.read(0, 16) == bytes(16)


# --- output memory


def test_blocks_of_an_exited_reader_are_released() -> None:
    arena = Arena(MIB)
    memory = OutputMemory(arena)
    for pid in (1, 2, 1):
        memory.allocate(pid, 1000)
    memory.free_all(1)
    assert len(memory) == 1
    memory.free_all(2)
    assert arena.used_bytes == 0
    arena.close()


def test_blocks_of_a_dead_reader_are_kept_until_the_scheduler_confirms_its_exit() -> None:
    """The scheduler may be copying the blocks into its cache. Its own exit releases them, too."""
    arena = Arena(MIB)
    memory = OutputMemory(arena)
    for _ in range(2):
        memory.allocate(1, 1000)
        memory.mark_sent()
        memory.record_exit(1)
        assert arena.used_bytes
        memory.free_all(1)
        assert not arena.used_bytes
        memory.free_exited()
        memory.allocate(1, 1000)  # for a new process with the same pid
        memory.free_exited()
        assert arena.used_bytes
        memory.record_exit(1)
        memory.record_exit(2)
        memory.free_exited()
        assert not arena.used_bytes and len(memory) == 0
    arena.close()


def test_blocks_of_unsent_responses_are_freed() -> None:
    arena = Arena(MIB)
    memory = OutputMemory(arena)
    kept_range = memory.allocate(CLIENT_PID, 1000)[0]
    memory.mark_sent()
    memory.allocate(CLIENT_PID, 1000)
    memory.free_unsent()
    memory.free_unsent()
    assert len(memory) == 1
    memory.release(CLIENT_PID, [kept_range.offset])
    assert len(memory) == 0 == arena.used_bytes
    arena.close()


def test_a_local_client_without_releases_cannot_fill_the_arena() -> None:
    arena = Arena(MIB)
    memory = OutputMemory(arena)
    block = MIB // 64

    def fill(reader: int) -> list[int]:
        offsets: list[int] = []

        def allocate_all() -> None:
            while True:
                offsets.append(memory.allocate(reader, block)[0].offset)

        with pytest.raises(Unavailable, match="this client holds "):
            allocate_all()
        memory.mark_sent()
        return offsets

    first_ranges = fill(FIRST_LOCAL_CLIENT)
    assert len(first_ranges) == 32
    assert [len(fill(FIRST_LOCAL_CLIENT + client_offset)) for client_offset in (1, 2)] == [16, 8]
    memory.allocate(CLIENT_PID, 8 * block)  # a gateway may allocate all remaining memory
    assert arena.used_bytes == MIB
    memory.release(FIRST_LOCAL_CLIENT, first_ranges)
    assert len(fill(FIRST_LOCAL_CLIENT)) == 16
    for reader in (FIRST_LOCAL_CLIENT, FIRST_LOCAL_CLIENT + 1, FIRST_LOCAL_CLIENT + 2, CLIENT_PID):
        memory.free_all(reader)
    assert arena.used_bytes == 0
    assert len(fill(FIRST_LOCAL_CLIENT)) == 32, "who has ended holds nothing"
    memory.free_all(FIRST_LOCAL_CLIENT)
    memory.allocate(FIRST_LOCAL_CLIENT, MIB)  # one output may be larger than a client's share
    arena.close()


@pytest.mark.parametrize("is_lost", [False, True])
def test_outputs_of_a_batch_without_its_scheduler_are_released(worker: Rig, is_lost: bool) -> None:
    worker.serve_function(echo, one_tensor())
    worker.batch(inference(tensor("X", np.ones(MIB, F32))))
    assert worker.context.arena.used_bytes
    if is_lost:
        worker.scheduler.close()
    worker.instance.send_reply(worker.finished)
    assert (worker.context.arena.used_bytes == 0) == is_lost


def test_an_arena_that_is_full_fails_the_request_and_keeps_nothing(worker: Rig) -> None:
    def answer_huge(requests: list[Request]) -> list[Response]:
        big_array = np.zeros(10 * MIB, F32)
        return [Response([Output("A", "FP32", big_array), Output("B", "FP32", big_array)])]

    config = model_config(
        [tensor_config("X", "FP32", [-1])],
        [tensor_config("A", "FP32", [-1]), tensor_config("B", "FP32", [-1])],
    )
    worker.serve_function(answer_huge, config)
    reply = worker.infer(tensor("X", np.zeros(1, F32)))
    assert reply.code == "UNAVAILABLE"
    assert worker.context.arena.used_bytes == 0
