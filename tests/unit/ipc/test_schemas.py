"""Schemas are derived once. Requests and responses survive packing into a schema and data."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.tensors import descriptors
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, Range, TensorRef, unpack_range
from shmserve.ipc.tensors.schemas import (
    BoundedCache,
    Inference,
    Inferred,
    RequestedOutput,
    RequestSchema,
    ResponseSchema,
    Schemas,
    byte_size_of,
    inline_size_of,
    pack_inference,
    pack_inferred,
    unpack_inference,
    unpack_inferred,
    unpack_ranges,
)
from shmserve.ipc.transport.frames import MalformedMessage

MEMORY = Memory(7, 1, 2, 3, 1 << 20, False)
SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=4)


def tensors(datas: list[bytes | Range]) -> tuple[TensorRef, ...]:
    return tuple(
        TensorRef(
            f"T{n}",
            "UINT8",
            (len(tensor_data) if isinstance(tensor_data, bytes) else tensor_data.byte_size,),
            tensor_data,
        )
        for n, tensor_data in enumerate(datas)
    )


@given(SIZES, st.dictionaries(st.text(max_size=5), st.integers(-5, 300)), st.data())
def test_requests_of_one_kind_have_one_schema(
    sizes: list[int], parameters: dict[str, int], data: st.DataObject
) -> None:
    def draw_request() -> Inference:
        offsets = st.integers(0, 1000)
        datas: list[bytes | Range] = [
            data.draw(st.binary(min_size=size, max_size=size))
            if data.draw(st.booleans())
            else Range(MEMORY, data.draw(offsets), size)
            for size in sizes
        ]
        memory_range = Range(MEMORY, data.draw(offsets), 64)
        outputs = (RequestedOutput("A"), RequestedOutput("B", memory_range, may_reuse_input=True))
        return Inference(tensors(datas), outputs, parameters)

    first, second = draw_request(), draw_request()
    (schema, first_data), (other, second_data) = (pack_inference(first), pack_inference(second))
    assert schema == other, "neither bytes nor places are in the schema"
    request_schema = RequestSchema(schema)
    assert request_schema.inference(first_data) == first
    assert request_schema.inference(second_data) == second
    assert request_schema.data_count == len(first_data) == len(sizes) + 1


@given(SIZES, st.data())
def test_responses_of_one_kind_have_one_schema(sizes: list[int], data: st.DataObject) -> None:
    def draw_response() -> Inferred:
        datas = [data.draw(st.binary(min_size=size, max_size=size)) for size in sizes]
        return Inferred(tensors(list(datas)), {"p": 1})

    first, second = draw_response(), draw_response()
    (schema, first_data), (other, second_data) = (pack_inferred(first), pack_inferred(second))
    assert schema == other
    response_schema = ResponseSchema(schema)
    assert response_schema.inferred(first_data) == first
    assert response_schema.inferred(second_data) == second


@pytest.mark.parametrize(
    "other_request",
    [
        Inference(tensors([b"123"])),
        Inference(tensors([b"1234"]), parameters={"a": 1}),
        Inference(tensors([b"1234"]), (RequestedOutput("OUT"),)),
        Inference(tensors([b"1234"]), (RequestedOutput("OUT", Range(MEMORY, 0, 64)),)),
        Inference((TensorRef("T0", "INT8", (4,), b"1234"),)),
        Inference((TensorRef("T1", "UINT8", (4,), b"1234"),)),
        Inference(tensors([b"1234", b""])),
    ],
)
def test_requests_of_different_kinds_have_different_schemas(other_request: Inference) -> None:
    assert pack_inference(Inference(tensors([b"1234"])))[0] != pack_inference(other_request)[0]


@pytest.mark.parametrize("data", [[], [b"1", b"2"], [None], [b"1", b"2", b"3"]])
def test_data_that_do_not_match_their_schema_are_malformed(data: list[Any]) -> None:
    schema, _ = pack_inference(Inference(tensors([b"1"])))
    with pytest.raises(MalformedMessage):
        unpack_inference(schema, data)
    schema, _ = pack_inferred(Inferred(tensors([b"1"])))
    with pytest.raises(MalformedMessage):
        unpack_inferred(schema, data)


def test_a_placed_output_requires_a_memory_range() -> None:
    placed_output = RequestedOutput("OUT", Range(MEMORY, 0, 64))
    schema, data = pack_inference(Inference(tensors([b"1"]), (placed_output,)))
    assert unpack_inference(schema, data).outputs == (placed_output,)
    with pytest.raises(MalformedMessage):
        unpack_inference(schema, [b"1", b"no place"])


@pytest.mark.parametrize(
    "packed_schema", [b"", b"\xc1", msgpack.packb([]), msgpack.packb([1, 2, 3])]
)
def test_bytes_that_are_no_schema_are_malformed(packed_schema: bytes) -> None:
    for schema_type in (RequestSchema, ResponseSchema):
        with pytest.raises(MalformedMessage):
            schema_type(packed_schema)


def test_schema_sizes_count_inline_bytes_and_ranges() -> None:
    memory_range = Range(MEMORY, 4096, 100)
    _, data = pack_inferred(Inferred(tensors([b"abc", memory_range])))
    assert byte_size_of(data) == 103
    assert inline_size_of(data) == 3
    assert unpack_ranges(data) == [memory_range]


def test_a_schema_is_derived_once() -> None:
    derived_schemas: list[bytes] = []

    def derive(schema: bytes) -> int:
        derived_schemas.append(schema)
        return len(derived_schemas)

    schemas = Schemas(derive)
    assert (schemas[b"a"], schemas[b"a"], schemas.get(b"b")) == (1, 1, None)
    assert schemas[b"b"] == 2 and derived_schemas == [b"a", b"b"]


def test_a_schema_that_cannot_be_derived_is_not_kept() -> None:
    schemas = Schemas(RequestSchema)
    for _ in range(2):
        with pytest.raises(MalformedMessage):
            schemas[b"\xc1"]
    assert len(schemas) == 0


def test_the_number_of_schemas_is_bounded() -> None:
    schemas = Schemas(len, capacity=4)
    for n in range(20):
        assert schemas[bytes(n)] == n and 0 < len(schemas) <= 4


def test_a_long_schema_is_not_kept() -> None:
    schemas = Schemas(len)
    assert schemas[bytes(1 << 20)] == 1 << 20 and len(schemas) == 0


def test_a_full_cache_is_cleared() -> None:
    cache: BoundedCache[int, str] = BoundedCache(2)
    cache.store(1, "one")
    cache.store(1, "other")
    cache.store(2, "two")
    assert (cache.find(1), cache.find(2)) == ("other", "two")
    cache.store(3, "three")
    assert (cache.find(1), cache.find(3), len(cache)) == (None, "three", 1)
    cache.remove(3)
    cache.remove(3)
    assert len(cache) == 0


def test_a_key_is_repeated_from_its_second_occurrence() -> None:
    cache: BoundedCache[int, str] = BoundedCache(2)
    assert [cache.mark_seen(key) for key in (1, 1, 2, 2, 3, 3)] == [False, True] * 3
    cache.store(1, "one")
    for key in range(10, 20):
        assert not cache.mark_seen(key)
    assert cache.find(1) == "one" and cache.mark_seen(1)


def test_the_oldest_value_is_evicted_and_passed_to_the_callback() -> None:
    evicted_values: list[str] = []
    cache: BoundedCache[int, str] = BoundedCache(2, evicted_values.append)
    for key, value in enumerate("abc"):
        assert cache.store_if_absent(key, value) == value
    assert cache.store_if_absent(2, "later") == "c"
    assert evicted_values == ["a"] and len(cache) == 2
    cache.clear()
    assert evicted_values == ["a", "b", "c"] and len(cache) == 0


@pytest.mark.parametrize("wrong_range", [1.0, True, "1", None])
def test_a_malformed_memory_range_is_refused_also_beside_a_known_one(wrong_range: Any) -> None:
    packed_memory = Memory(1, 2, 3, 4, 100, sealed=True).packed
    assert unpack_range([packed_memory, 1, 1]).offset == 1
    for raw in (
        [packed_memory, wrong_range, 1],
        [packed_memory, 1, wrong_range],
        [wrong_range, 1, 1],
        [packed_memory, 1],
        [packed_memory, 100, 1],
    ):
        with pytest.raises(MalformedMessage):
            unpack_range(raw)


def test_a_memory_of_many_bytes_is_malformed_and_not_kept() -> None:
    longest_memory = Memory.on_device(1, 100, CudaHandle(b"h" * 64, 2**31, b"u" * 16), 2**31)
    assert unpack_range([longest_memory.packed, 0, 1]).memory == longest_memory

    def cache_sizes() -> tuple[int, int]:
        memory_count = descriptors._unpack_memory_cached.cache_info().currsize
        return descriptors._unpack_range_cached.cache_info().currsize, memory_count

    sizes_before = cache_sizes()
    for handle in (b"h" * 256, b"h" * 1_000_000):
        packed_memory = Memory.on_device(1, 100, CudaHandle(handle, 0)).packed
        with pytest.raises(MalformedMessage):
            unpack_range([packed_memory, 0, 1])
    assert cache_sizes() == sizes_before
