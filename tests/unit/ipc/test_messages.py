"""Every message can be packed and unpacked, and malformed bytes are rejected."""

import contextlib
import dataclasses
import os
import random
import typing
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.messages import generation as g
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.supervision import LoadFailed
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef, unpack_range
from shmserve.ipc.tensors.schemas import (
    Inference,
    Inferred,
    RequestedOutput,
    RequestSchema,
    ResponseSchema,
    pack_inference,
    pack_inferred,
    unpack_inference,
    unpack_inferred,
)
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.frames import MalformedMessage

_CHANGES = 200_000

ALL_CLASSES = list(frames._CLASSES_BY_TAG.values())
EXAMPLES: dict[Any, Any] = {
    int: 7,
    str: "x",
    bytes: b"x",
    bool: True,
    float: 0.5,
    list[int]: [1, 2],
    list[Any]: [1, b"x"],
    list[list[Any]]: [[1, 2, b"x"]],
    list[list[str]]: [["x", "y"]],
    list[m.Work]: [m.Work(1, 2, b"x", [b"y"])],
    list[m.SequenceRow]: [m.SequenceRow(1, 2, 3, 4, "x")],
    list[m.Reply]: [m.Reply(1, "", "", b"x", [b"y"])],
    list[g.Resumed]: [g.Resumed(1, b"x", 2, "x")],
    list[g.BeamSearch]: [g.BeamSearch(1, 0.5, "x", [1, 2])],
    list[g.NewSequence]: [g.NewSequence(1, 2, 3, 4, 5)],
    list[g.Row]: [g.Row(1, 2, 3, 4, [1, 2], 5, False)],
    list[g.RowResult]: [g.RowResult(1, [2], "x", 3, [4], [0.5])],
    list[g.Hypothesis]: [g.Hypothesis(b"x", "x", 0.5)],
    dict[str, Any]: {"a": 1},
    ModelSpec: ModelSpec.of({"name": "m",
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1], "reshape": None}],
        "dynamic_batching": {"priority_queue_policy": {"1": {"max_queue_size": 2}}},
        "parameters": {"a": {"string_value": "b"}}}),
}  # fmt: skip


def make_example(cls: type[Any]) -> Any:
    hints = typing.get_type_hints(cls)
    return cls(*(EXAMPLES[hints[field.name]] for field in dataclasses.fields(cls)))


@pytest.mark.parametrize("cls", ALL_CLASSES, ids=lambda cls: cls.__name__)
def test_every_message_survives_the_wire(cls: type[Any]) -> None:
    message = make_example(cls)
    assert frames.unpack(frames.pack([message, message])) == [message, message]


def test_a_lone_surrogate_is_escaped() -> None:
    (decoded,) = frames.unpack(frames.pack([m.Failed(1, "INTERNAL", "a \ud800 b ☃", 0, False)]))
    assert decoded.message == r"a \ud800 b ☃"


@pytest.mark.parametrize("cls", ALL_CLASSES, ids=lambda cls: cls.__name__)
def test_a_field_of_a_wrong_type_is_refused(cls: type[Any]) -> None:
    raw = msgpack.unpackb(frames.pack([make_example(cls)]))
    for index in range(1, len(raw[1])):
        wrong_record = [raw[0], [*raw[1][:index], None, *raw[1][index + 1 :]]]
        with pytest.raises(MalformedMessage):
            frames.unpack(msgpack.packb(wrong_record))
    with pytest.raises(MalformedMessage):
        frames.unpack(msgpack.packb([raw[0], [*raw[1], 1]]))


def test_invalid_unicode_is_escaped() -> None:
    """A text may contain the bytes of a file name that is not UTF-8."""
    sent_message = LoadFailed("INTERNAL", "no such file: " + os.fsdecode(b"n\xe4me"))
    load_failed = LoadFailed("INTERNAL", "no such file: n\\udce4me")
    assert frames.unpack(frames.pack([sent_message])) == [load_failed]


def test_another_version_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        frames.unpack(msgpack.packb([frames.VERSION + 1]))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_malformed(frame: bytes) -> None:
    for unpack in (frames.unpack, RequestSchema, ResponseSchema):
        with contextlib.suppress(MalformedMessage):
            unpack(frame)


def test_corrupted_frames_are_refused() -> None:
    """Changed or missing bytes make another message or schema, or a malformed one."""
    rng = random.Random(3)
    place = Range(Memory(1, 2, 3, 4, 100, sealed=True), 10, 20)
    tensors = (TensorRef("a", "FP32", (1, 5), place), TensorRef("b", "BYTES", (1,), b"\0\0\0\0"))
    request, data = pack_inference(Inference(tensors, (RequestedOutput("c"),)))
    response, _ = pack_inferred(Inferred(tensors, {"x": "y"}))
    kinds: list[tuple[Callable[[bytes], Any], bytes]] = [
        (frames.unpack, frames.pack([make_example(cls)])) for cls in ALL_CLASSES
    ]
    kinds += [
        (lambda schema: unpack_inference(schema, data), request),
        (lambda schema: unpack_inferred(schema, data), response),
        (lambda memory: unpack_range([memory, 10, 20]), place.memory.packed),
    ] * 20
    malformed_count = 0
    for number in range(_CHANGES):
        unpack, valid_frame = kinds[number % len(kinds)]
        frame = bytearray(valid_frame)
        for _ in range(rng.randint(1, 3)):
            position = rng.randrange(len(frame) + 1)
            frame[position : position + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        try:
            unpack(bytes(frame))
        except MalformedMessage:
            malformed_count += 1
    assert _CHANGES // 2 < malformed_count < _CHANGES


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda children: st.lists(children, max_size=6),
    max_leaves=20,
)


@given(VALUES)
def test_any_value_is_a_frame_or_malformed(value: Any) -> None:
    frame = msgpack.packb(value)
    for unpack in (frames.unpack, RequestSchema, ResponseSchema):
        with contextlib.suppress(MalformedMessage):
            unpack(frame)
    schema, _ = pack_inferred(Inferred((TensorRef("a", "FP32", (1,), b"1234"),)))
    with contextlib.suppress(MalformedMessage):
        unpack_inferred(schema, [value])


def test_a_request_and_its_answer_survive_the_wire() -> None:
    place = Range(Memory(1, 2, 3, 4, 100, sealed=True), 10, 20)
    tensors = (TensorRef("a", "FP32", (1, 5), place), TensorRef("b", "BYTES", (), b"\0\0\0\0"))
    request = Inference(tensors, (RequestedOutput("c", place), RequestedOutput("d")), {"k": 1})
    assert unpack_inference(*pack_inference(request)) == request
    answer = Inferred(tensors, {"x": "y"})
    assert unpack_inferred(*pack_inferred(answer)) == answer


def test_a_memory_range_outside_its_memory_is_malformed() -> None:
    bad_range = Range(Memory(1, 2, 3, 4, 100, sealed=True), 90, 20)
    with pytest.raises(MalformedMessage):
        unpack_inference(*pack_inference(Inference((TensorRef("a", "FP32", (5,), bad_range),))))


@pytest.mark.parametrize(
    "reply",
    [[], [1], [1, ""], [1, None, ""], [1, "", "", "text"], [1, "", "", b"", 7], 7, ["a", 2]],
)
def test_records_within_a_message_are_typed_too(reply: Any) -> None:
    times = (0, 0, 0, 0)
    batch = m.BatchFinished(1, *times, [m.Reply(1, "", "", b"made", [b"x"]), m.Reply(2, "X", "no")])
    assert frames.unpack(frames.pack([batch])) == [batch]
    frame = msgpack.packb([frames.VERSION, ["BatchFinished", 1, *times, [reply], 0, 0, True]])
    with pytest.raises(MalformedMessage):
        frames.unpack(frame)


def test_fields_with_a_default_may_be_left_out_at_the_end() -> None:
    submit = ["Submit", 1, b"schema", [b"data"], 0, 0, 0, 0]
    assert frames.unpack(msgpack.packb([frames.VERSION, submit])) == [
        m.Submit(1, b"schema", [b"data"], 0, 0, 0, 0)
    ]
    with pytest.raises(MalformedMessage):
        frames.unpack(msgpack.packb([frames.VERSION, submit[:-1]]))
