"""A request that is placed while it arrives equals one that is parsed as a whole."""

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.gateway.grpc.wire.request import RequestSink
from shmserve.gateway.inference.prepare import ArrivingRequest, BuiltRequest
from shmserve.proto.grpc_service_pb2 import ModelInferRequest


class RecordedTensors(ArrivingRequest):  # type: ignore[misc]
    """The memory of tensors of these sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.blocks = [bytearray(size) for size in sizes]
        self.releases = 0
        request = cast("BuiltRequest", SimpleNamespace(release=self._count))
        super().__init__(request, [memoryview(block) for block in self.blocks], sum(sizes))

    def _count(self) -> None:
        self.releases += 1


def request(contents: Sequence[bytes]) -> ModelInferRequest:
    message = ModelInferRequest(model_name="m", id="one")
    for number in range(len(contents)):
        message.inputs.add(name=f"IN{number}", datatype="UINT8", shape=[1])
    message.parameters["key"].string_param = "value"
    message.raw_input_contents.extend(contents)
    return message


def receive(
    raw: bytes, cuts: Sequence[int], sizes: Sequence[int] | None, in_place: Collection[int] = ()
) -> tuple[RequestSink, list[RecordedTensors], list[bytes]]:
    """Pass bytes in pieces, some read in place; return requested sizes and parsed heads."""
    recordings: list[RecordedTensors] = []
    heads: list[bytes] = []

    def find(head: bytes, _: int) -> RecordedTensors | None:
        heads.append(head)
        if sizes is None:
            return None
        recordings.append(RecordedTensors(sizes))
        return recordings[-1]

    arriving = RequestSink(find)
    view = memoryview(raw)
    start = 0
    for number, end in enumerate((*sorted(cut % (len(raw) + 1) for cut in cuts), len(raw))):
        memory_range = arriving.next_buffer(end - start) if number in in_place else None
        if memory_range is not None:
            memory_range[:] = view[start : start + len(memory_range)]
            arriving.feed(memory_range)
            start += len(memory_range)
        arriving.feed(view[start:end])
        start = end
    return arriving, recordings, heads


CONTENTS = st.lists(st.binary(max_size=300), min_size=1, max_size=4)
CUT_POINTS = st.lists(st.integers(0, 5000), max_size=12)


@given(contents=CONTENTS, cuts=CUT_POINTS, in_place=st.sets(st.integers(0, 12)))
def test_tensors_are_received_in_place_for_any_split(
    contents: list[bytes], cuts: list[int], in_place: set[int]
) -> None:
    message = request(contents)
    sizes = [len(content) for content in contents]
    arriving, (tensors,), (head,) = receive(message.SerializeToString(), cuts, sizes, in_place)
    assert arriving.finish() is tensors and not tensors.releases
    assert list(map(bytes, tensors.blocks)) == contents
    del message.raw_input_contents[:]
    assert ModelInferRequest.FromString(head) == message


@given(
    contents=CONTENTS,
    cuts=CUT_POINTS,
    sizes=st.lists(st.integers(0, 300), max_size=5) | st.none(),
    in_place=st.sets(st.integers(0, 12)),
)
def test_tensors_of_unexpected_sizes_are_collected(
    contents: list[bytes], cuts: list[int], sizes: list[int] | None, in_place: set[int]
) -> None:
    raw = request(contents).SerializeToString()
    arriving, recordings, _ = receive(raw, cuts, sizes, in_place)
    sizes_match = sizes == [len(content) for content in contents]
    assert arriving.finish() == (recordings[0] if sizes_match else raw)
    assert all(tensors.releases == (not sizes_match) for tensors in recordings)


@given(junk=st.binary(max_size=600), cuts=CUT_POINTS, after_request=st.booleans())
def test_bad_messages_are_collected(junk: bytes, cuts: list[int], after_request: bool) -> None:
    raw = request([b"a" * 40]).SerializeToString() + junk if after_request else junk
    arriving, recordings, _ = receive(raw, cuts, [40])
    message = arriving.finish()
    if isinstance(message, RecordedTensors):
        assert message is recordings[-1] and bytes(message.blocks[0]) and not message.releases
        assert raw.endswith(message.blocks[0])
    else:
        assert message == raw and all(tensors.releases for tensors in recordings)


@pytest.mark.parametrize("size", [70_000, 200_000])
def test_a_message_with_a_long_head_is_collected(size: int) -> None:
    message = request([b"a" * 40])
    message.parameters["key"].string_param = "v" * size
    raw = message.SerializeToString()
    arriving, recordings, _ = receive(raw, range(0, len(raw), 999), [40])
    assert arriving.finish() == raw and not recordings


def test_memory_is_released_once() -> None:
    raw = request([b"a" * 4000]).SerializeToString()
    arriving, (tensors,), _ = receive(raw[:-10], (), [4000])
    arriving.discard()
    arriving.discard()
    assert tensors.releases == 1 and arriving.next_buffer(1) is None
