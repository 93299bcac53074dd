"""The native client's memory, arrays and plans, without a server."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from shmserve.client.arrays import from_program
from shmserve.client.errors import Released
from shmserve.client.memory import AnySegment, Memories, Segment
from shmserve.client.models import Model, Models
from shmserve.client.plans import PLAIN, Form, Plan, Reader, cut
from shmserve.client.requests import prepare
from shmserve.client.views import Lease, View
from shmserve.errors import InvalidArgument, NotFound, Unavailable
from shmserve.ipc import messages as m
from shmserve.ipc.guests import FIRST, Seals
from shmserve.ipc.tensors import (
    Inferred,
    Memory,
    Place,
    TensorRef,
    pack_inferred,
    unpack_inference,
)

CONFIG = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [8192]}],
}


@pytest.fixture
def memories() -> Iterator[Memories]:
    """Memory that a server has been told of."""
    numbers = iter(range(1, 100))

    def share(segment: AnySegment) -> None:
        assert isinstance(segment, Segment)
        inode = os.fstat(segment.fd).st_ino
        segment.memory = Memory(next(numbers), 1, segment.fd, inode, segment.size, True)

    made = Memories(64 << 20, share, lambda segment: None)
    yield made
    made.close()


def published(name: str = "m", version: str = "1", latest: bool = True) -> m.ModelPublished:
    config = {**CONFIG, "name": name}
    return m.ModelPublished(name, version, config, {}, f"ipc:///{version}", True, latest, 0.0, 0)


def test_blocks_come_back_and_empty_segments_go(memories: Memories) -> None:
    blocks = [memories.allocate(1 << 20) for _ in range(3)]
    assert len({block.segment for block in blocks}) == 1
    alone = memories.allocate(100, alone=True)
    assert alone.segment not in {block.segment for block in blocks}
    with pytest.raises(Unavailable, match="may use 67108864 bytes"):
        memories.allocate(100 << 20)
    for block in [*blocks, alone]:
        memories.give_back(block)
    memories.settle()
    assert memories.find(blocks[0].segment.address, 1) is None


def test_a_view_raises_after_its_release_and_keeps_its_memory() -> None:
    segment, ended = Segment(4096), []
    lease = Lease(lambda: ended.append(True))
    view = View.over(segment.bytes, 64, (4,), np.dtype(np.int32), lease)
    view[:] = [1, 2, 3, 4]
    plain = view[1:]
    assert type(plain) is np.ndarray and type(view + 1) is np.ndarray
    assert np.stack([view, view]).shape == (2, 4)
    view += 1
    assert view.tolist() == [2, 3, 4, 5] and plain.tolist() == [3, 4, 5]
    assert type(copy.copy(view)) is type(pickle.loads(pickle.dumps(view))) is np.ndarray
    lease.released = True
    uses: tuple[Callable[[View], object], ...] = (
        lambda array: array[0],
        lambda array: array * 2,
        lambda array: array.copy(),
        lambda array: array.reshape(2, 2),
        lambda array: array.astype(np.int8),
        lambda array: array.item(0),
        lambda array: array.fill(1),
        lambda array: array.view(np.uint8),
        lambda array: array.flat[0],
        lambda array: array.ravel(),
        lambda array: array.sum(),
        list,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        str,
    )
    for use in uses:
        with pytest.raises(Released):
            use(view)
    segment.close()
    del view, lease, segment
    gc.collect()
    assert not ended and plain.tolist() == [3, 4, 5]
    del plain
    assert ended


def test_a_request_of_a_known_form_is_a_join(memories: Memories) -> None:
    model = Model(published())
    for number in (1.0, 2.0):
        x = np.full((1, 16), number, np.float32)
        prepared = prepare(memories, model, {"x": x}, ["y"], PLAIN)
        inference = unpack_inference(prepared.work)
        (tensor,) = inference.inputs
        assert tensor == TensorRef("x", "FP32", (1, 16), x.tobytes())
        (output,) = inference.outputs
        assert output.place is not None and output.place.byte_size == 4 * 8192
        prepared.end()
    assert len(model.plans) == 1 and prepared.shape_key and prepared.batch_size == 1


def test_large_inputs_lie_in_slots_that_are_used_again(memories: Memories) -> None:
    model = Model(published())
    x = np.arange(8192, dtype=np.float32)[None]
    first = prepare(memories, model, {"x": x}, None, PLAIN)
    second = prepare(memories, model, {"x": x + 1}, None, PLAIN)
    assert first.work != second.work
    first.end()
    third = prepare(memories, model, {"x": x}, None, PLAIN)
    assert third.work == first.work
    model.close()
    second.end()
    third.end()
    address = first.segments[0].address
    memories.settle()
    assert memories.find(address, 1) is None


def test_every_form_is_checked(memories: Memories) -> None:
    model = Model(published())
    for inputs, text in (
        ({"x": np.zeros((5, 2), np.float32)}, "batch-size must be <= 4"),
        ({"x": np.zeros((1, 2), np.int8)}, "data-type is 'INT8'"),
        ({"z": np.zeros((1, 2), np.float32)}, "unexpected inference input"),
        ({"x": np.zeros((1, 2), np.complex64)}, "which no datatype is"),
        ({"x": "word"}, "is no FP32 tensor"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            prepare(memories, model, inputs, None, PLAIN)
    assert not model.plans


def test_marks_that_are_too_short_are_not_looked_for() -> None:
    assert cut(b"head" + b"m" * 8 + b"tail", [b"m" * 8]) == [b"head", b"tail"]
    assert cut(b"headmtail", [b"m"]) == []


def test_a_reader_takes_only_answers_like_the_last() -> None:
    def answer(data: bytes, name: str = "y") -> bytes:
        return pack_inferred(Inferred((TensorRef(name, "INT32", (2,), data),)))

    reader = Reader()
    body = answer(bytes(8))
    assert reader.read(body) is None
    from shmserve.ipc.tensors import unpack_inferred

    reader.learn(body, unpack_inferred(body))
    found = reader.read(answer(b"\1\0\0\0\2\0\0\0"))
    assert found is not None and found["y"][0].tolist() == [1, 2]
    assert reader.read(answer(bytes(8), "z")) is None
    assert reader.read(answer(bytes(12))) is None


def test_what_programs_pass() -> None:
    array, datatype = from_program(torch.ones(3, dtype=torch.bfloat16), None, "x")
    assert datatype == "BF16" and array.dtype == np.uint16
    assert from_program(np.array(["a"]), None, "x")[1] == "BYTES"
    assert from_program(True, None, "x")[1] == "BOOL"
    with pytest.raises(InvalidArgument, match="takes host memory"):
        from_program(torch.empty(1, device="meta"), None, "x")


def test_models_follow_the_news() -> None:
    models = Models()
    models.publish(published(version="1"))
    models.publish(published(version="3", latest=True))
    assert models.resolve("m", "").version == "3"
    models.publish(published(version="1", latest=False))
    assert models.resolve("m", "").version == "3"
    assert models.names() == [("m", "1"), ("m", "3")]
    models.withdraw("m", "3")
    with pytest.raises(Unavailable, match="no available versions"):
        models.resolve("m", "")
    with pytest.raises(NotFound, match="version 3"):
        models.resolve("m", "3")
    with pytest.raises(NotFound, match="'other' is not found"):
        models.resolve("other", "")


def test_a_plan_for_inputs_without_bytes(memories: Memories) -> None:
    plan = Plan(Model(published()).signature, [Form("x", "FP32", (1, 0), 0)], (), memories)
    assert plan.slotted and plan.batch_size == 1


def test_guests_cannot_make_up_who_they_are_or_what_is_theirs() -> None:
    seals, others = Seals(bytes(32)), Seals(bytes(31) + b"1")
    token = seals.token(FIRST)
    assert seals.guest(f"{FIRST}.{token}.1".encode()) == FIRST
    for forged in (
        f"{FIRST + 1}.{token}.1",
        f"{FIRST}.{others.token(FIRST)}.1",
        f"{os.getpid()}.{token}.1",
        f"{FIRST}",
        "",
        f"0{FIRST}.{token}",
        f"{FIRST}.{token}x.1",
    ):
        assert seals.guest(forged.encode()) == 0, forged
    rest = (7, 8, 9, 4096, True)
    mine = Memory(seals.memory_id(FIRST, *rest), *rest)
    assert seals.owns(FIRST, mine) and not seals.owns(FIRST + 1, mine)
    assert not seals.owns(FIRST, Memory(mine.id, 7, 8, 9, 8192, True))
    assert Place(mine, 0, 1)
