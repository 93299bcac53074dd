"""The response cache of a scheduler: its keys, its entries, and the responses of requests."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.lent import LentMemory
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.messages.supervision import CacheStart, ResizeCache, StatisticsSnapshot
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef
from shmserve.ipc.tensors.schemas import (
    Inference,
    Inferred,
    Packed,
    RequestedOutput,
    pack_inference,
    pack_inferred,
    unpack_inferred,
)
from shmserve.scheduler.response_cache import LruCache, ResponseCache, cache_key, derive_schema_key
from tests.rigs.scheduler_rig import Rig, ok_reply, ready_rig
from tests.support.messages import inferred_of

SUPERVISOR = 4321
LARGE_SIZE = 100_000


@pytest.fixture
def arena() -> Iterator[Arena]:
    new_arena = Arena(8 << 20)
    yield new_arena
    new_arena.close()


def cached_rig(
    byte_size: int = 1 << 20,
    arena_byte_size: int = 1 << 20,
    dynamic_batching: dict[str, Any] | None = None,
    **server: Any,
) -> Rig:
    clock = itertools.count(0, 7)
    cache = ResponseCache(
        "m",
        "1",
        CacheStart(byte_size, SUPERVISOR),
        LentMemory(arena_byte_size),
        lambda: next(clock),
    )
    return Rig(dynamic_batching, cache=cache, **server)


def release_message(memory_range: Range) -> m.Release:
    """Return the message that releases a memory range."""
    return m.Release(memory_range.memory.pid, [memory_range.offset], memory_range.memory.id)


def pack_request(data: bytes | Range = b"x", output: Range | None = None, **fields: Any) -> Packed:
    shape = (len(data) if isinstance(data, bytes) else data.byte_size,)
    outputs = () if output is None else (RequestedOutput("O", output),)
    return pack_inference(Inference((TensorRef("I", "INT8", shape, data),), outputs, **fields))


def pack_response(data: bytes | Range) -> Packed:
    shape = (len(data) if isinstance(data, bytes) else data.byte_size,)
    return pack_inferred(Inferred((TensorRef("O", "INT8", shape, data),), {"p": 1}))


def place_data(arena: Arena, data: bytes) -> Range:
    memory_range = arena.allocate(len(data))
    arena.view(memory_range)[:] = data
    return memory_range


def run(rig: Rig, peer: bytes, request: Packed, result: Packed) -> int:
    number, batch = rig.submit_and_take_batch(work=request)
    rig.finish(peer, batch, ok_reply(batch.requests[0].key, result))
    (answer,) = rig.answers()
    assert (answer.id, inferred_of(answer)) == (number, unpack_inferred(*result))
    return number


def rig_with_large_response(arena: Arena, **options: Any) -> Rig:
    """Return a rig whose cache has a response that is too large for a message."""
    rig = cached_rig(**options)
    run(rig, rig.start(), pack_request(), pack_response(place_data(arena, b"l" * LARGE_SIZE)))
    return rig


def lent_bytes(rig: Rig) -> int:
    """Return the number of bytes of copies that readers have not released."""
    byte_size: int = rig.report()["shmserve"]["cache"]["lent_bytes"]
    return byte_size


def unpack_answer(message: m.Finished) -> Packed:
    return message.schema, message.data


def submit_hit(rig: Rig, request: Packed, **fields: Any) -> m.Finished:
    (number,) = rig.submit(work=request, **fields)
    assert rig.take_batches() == []
    (response,) = rig.answers()
    assert isinstance(response, m.Finished) and response.id == number
    return response


def test_a_hit_runs_nothing_and_counts_as_a_success() -> None:
    """A hit counts as success, queue and hit, but not as execution or inference."""
    rig = cached_rig()
    run(rig, rig.start(), pack_request(), pack_response(b"y"))
    assert unpack_answer(submit_hit(rig, pack_request())) == pack_response(b"y")
    report = rig.report()
    stats = report["inference_stats"]
    assert (report["inference_count"], report["execution_count"]) == (1, 1)
    assert (stats["success"]["count"], stats["queue"]["count"]) == (2, 2)
    assert {stats[f"compute_{name}"]["count"] for name in ("input", "infer", "output")} == {1}
    assert stats["cache_hit"] == {"count": 1, "ns": 7}
    # The times of the lookup and of the insertion.
    assert stats["cache_miss"] == {"count": 1, "ns": 14}
    assert report["shmserve"]["cache"]["entries"] == 1


def test_hits_do_not_wait_for_a_queue_that_is_full() -> None:
    rig = cached_rig(max_queue_size=1)
    run(rig, rig.start(), pack_request(), pack_response(b"y"))
    rig.submit(3, work=pack_request(b"z"))
    (refusal,) = rig.answers()
    assert refusal.message.endswith("Exceeds maximum queue size")
    rig.take_batches()
    submit_hit(rig, pack_request())


def test_hits_keep_the_order_of_requests() -> None:
    """With preserve_ordering, cached responses are sent in order, too."""
    rig = cached_rig(dynamic_batching={"preserve_ordering": True})
    peer = rig.start()
    run(rig, peer, pack_request(), pack_response(b"y"))
    (one,) = rig.submit(work=pack_request(b"z"))
    (two,) = rig.submit(work=pack_request())
    assert rig.answers() == []
    _, batch = rig.execute()
    rig.finish(peer, batch, ok_reply(batch.requests[0].key, pack_response(b"w")))
    assert rig.answers() == [
        m.Finished(n, *pack_response(w)) for n, w in ((one, b"w"), (two, b"y"))
    ]


def test_errors_are_not_cached() -> None:
    rig = cached_rig()
    peer = rig.start()
    _, batch = rig.submit_batch(work=pack_request())
    rig.finish(peer, batch, m.Reply(batch.requests[0].key, "INTERNAL", "no"))
    rig.answers()
    run(rig, peer, pack_request(), pack_response(b"y"))
    assert rig.report()["inference_stats"]["cache_miss"]["count"] == 1


def test_request_bodies_in_shared_memory_are_hashed(arena: Arena) -> None:
    rig = cached_rig()
    peer = rig.start()
    run(rig, peer, pack_request(place_data(arena, b"a" * LARGE_SIZE)), pack_response(b"y"))
    submit_hit(rig, pack_request(place_data(arena, b"a" * LARGE_SIZE)))
    run(rig, peer, pack_request(place_data(arena, b"a" * LARGE_SIZE + b"b")), pack_response(b"z"))


def test_large_responses_are_copied_for_each_reader(arena: Arena) -> None:
    """No reader can change the cached bytes, and the copies are released."""
    rig = cached_rig()
    peer = rig.start()
    placed_body = place_data(arena, b"l" * LARGE_SIZE)
    run(rig, peer, pack_request(), pack_response(placed_body))
    arena.view(placed_body)[:] = b"!" * LARGE_SIZE  # the worker may reuse its response's memory
    for _ in range(30):  # 3 MB in total, through an arena of 1 MB
        (output,) = inferred_of(submit_hit(rig, pack_request())).outputs
        assert isinstance(output.data, Range)
        view = Mappings().view(output.data)
        assert bytes(view) == b"l" * LARGE_SIZE
        view[:] = b"?" * LARGE_SIZE
        rig.client(release_message(output.data))
    assert lent_bytes(rig) == 0


def test_an_exited_reader_releases_all_blocks(arena: Arena) -> None:
    rig = rig_with_large_response(arena)
    submit_hit(rig, pack_request(), peer=b"7001.cd")
    assert lent_bytes(rig) >= LARGE_SIZE
    rig.supervisor(ProcessExited(7001, ""))
    assert lent_bytes(rig) == 0


def test_a_reader_cannot_release_blocks_it_was_not_lent(arena: Arena) -> None:
    rig = rig_with_large_response(arena)
    (output,) = inferred_of(submit_hit(rig, pack_request())).outputs
    assert isinstance(output.data, Range)
    rig.client(release_message(output.data), peer=b"7001.cd")
    assert lent_bytes(rig) >= LARGE_SIZE


def test_a_cancelled_held_hit_releases_its_copy(arena: Arena) -> None:
    rig = rig_with_large_response(arena, dynamic_batching={"preserve_ordering": True})
    rig.submit(work=pack_request(b"z"))
    (executed_id,) = rig.submit(work=pack_request())
    rig.client(m.Cancel(executed_id))
    assert [answer.code for answer in rig.answers()] == ["CANCELLED"]
    assert lent_bytes(rig) == 0


def test_a_refused_hit_releases_its_copy(arena: Arena) -> None:
    rig = rig_with_large_response(arena)
    rig.submit(work=pack_request(), deadline_ns=1)
    assert [type(answer) for answer in rig.answers()] == [m.Failed]
    assert lent_bytes(rig) == 0


def test_when_no_copy_can_be_lent_the_model_runs(arena: Arena) -> None:
    rig = cached_rig(arena_byte_size=128 * 1024)
    peer = rig.start()
    placed_body = pack_response(place_data(arena, b"l" * LARGE_SIZE))
    run(rig, peer, pack_request(), placed_body)
    submit_hit(rig, pack_request())
    run(rig, peer, pack_request(), placed_body)


def region_requests(arena: Arena) -> dict[str, Packed]:
    """Return requests whose inputs or outputs are in memory that schedulers do not read."""
    memory_range = place_data(arena, b"r" * 64)
    memory = memory_range.memory
    cached_memory = Memory(9, SUPERVISOR, memory.fd, memory.inode, memory.byte_size, True)
    copied = Memory(9, memory.pid, memory.fd, memory.inode, memory.byte_size, True, True)
    unsealed_memory = Memory(9, memory.pid, memory.fd, memory.inode, memory.byte_size, False)
    return {
        "region": pack_request(Range(cached_memory, memory_range.offset, 64)),
        "untrusted": pack_request(Range(copied, memory_range.offset, 64)),
        "may shrink": pack_request(Range(unsealed_memory, memory_range.offset, 64)),
        "output": pack_request(b"x", Range(cached_memory, memory_range.offset, 64)),
    }


@pytest.mark.parametrize("region_kind", ["region", "untrusted", "may shrink", "output"])
def test_requests_with_client_regions_are_not_cached(arena: Arena, region_kind: str) -> None:
    """A client could change its region between the hash and the execution, and poison the cache."""
    rig = cached_rig()
    peer = rig.start()
    for _ in range(2):
        run(rig, peer, region_requests(arena)[region_kind], pack_response(b"y"))
    stats = rig.report()["inference_stats"]
    assert (stats["cache_hit"]["count"], stats["cache_miss"]["count"]) == (0, 0)


def test_a_response_larger_than_the_cache_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    """The response is not inserted, which is logged."""
    rig = cached_rig(byte_size=1000)
    peer = rig.start()
    run(rig, peer, pack_request(), pack_response(b"small"))
    for _ in range(5):
        run(rig, peer, pack_request(b"z"), pack_response(b"y" * 1000))
    stats = rig.report()["inference_stats"]
    assert (stats["cache_hit"]["count"], stats["cache_miss"]["count"]) == (0, 6)
    assert caplog.text.count("Failed to insert key") == 3  # the 1st, 2nd and 4th refusal are logged
    submit_hit(rig, pack_request())


def test_a_smaller_share_applies_at_once() -> None:
    rig = cached_rig()
    peer = rig.start()
    run(rig, peer, pack_request(), pack_response(b"y" * 1000))
    rig.supervisor(ResizeCache(500))
    assert rig.report()["shmserve"]["cache"]["bytes"] == 0
    run(rig, peer, pack_request(), pack_response(b"y" * 1000))


def test_a_successor_continues_the_counts() -> None:
    rig = cached_rig()
    run(rig, rig.start(), pack_request(), pack_response(b"y"))
    submit_hit(rig, pack_request())
    snapshots = rig.take_supervisor_messages(StatisticsSnapshot)
    report_before = rig.report()
    assert snapshots == []
    successor = cached_rig()
    successor.scheduler.restore([rig.snapshot(), []], [])
    assert successor.report()["inference_stats"] == report_before["inference_stats"]


def test_without_a_cache_nothing_is_counted() -> None:
    rig, peer = ready_rig()
    for _ in range(2):
        run(rig, peer, pack_request(), pack_response(b"y"))
    assert rig.report()["shmserve"]["cache"] == {}


TENSOR_A = TensorRef("A", "INT32", (1, 2), b"12345678")
TENSOR_B = TensorRef("B", "INT8", (3,), b"abc")
REQUEST = Inference((TENSOR_A, TENSOR_B), (RequestedOutput("Y"),), {"p": 1})


NO_SEQUENCE = (0, "", 0)


def request_key(
    request: Inference,
    model: str = "m",
    version: str = "1",
    sequence: tuple[int, str, int] = NO_SEQUENCE,
) -> bytes:
    schema, _ = pack_inference(request)
    head = derive_schema_key(model, version, schema)
    datas = [request.inputs[index].data for index in head.input_order]
    inline_data = [b"12345678" if isinstance(data, Range) else data for data in datas]
    return cache_key(head.prefix, sequence, inline_data)


@pytest.mark.parametrize(
    "other_request",
    [
        replace(REQUEST, inputs=(replace(TENSOR_A, name="C"), TENSOR_B)),
        replace(REQUEST, inputs=(replace(TENSOR_A, shape=(2, 1)), TENSOR_B)),
        replace(REQUEST, inputs=(replace(TENSOR_A, datatype="UINT32"), TENSOR_B)),
        replace(REQUEST, inputs=(replace(TENSOR_A, data=b"12345679"), TENSOR_B)),
        replace(
            REQUEST, inputs=(replace(TENSOR_A, data=b"12345678a"), replace(TENSOR_B, data=b"bc"))
        ),
        replace(REQUEST, inputs=(TENSOR_A,)),
        replace(REQUEST, outputs=()),
        replace(REQUEST, outputs=(RequestedOutput("Y"), RequestedOutput("Z"))),
        replace(REQUEST, parameters={}),
        replace(REQUEST, parameters={"p": 2}),
        replace(REQUEST, parameters={"p": 1.0}),
        replace(REQUEST, parameters={"p": True}),
        replace(REQUEST, parameters={"p": "1"}),
    ],
)
def test_requests_that_differ_have_different_keys(other_request: Inference) -> None:
    assert request_key(other_request) != request_key(REQUEST)


def test_another_sequence_or_position_has_another_key() -> None:
    places = [NO_SEQUENCE, (1, "", 0), (0, "1", 0), (0, "", 1)]
    assert len({request_key(REQUEST, sequence=position) for position in places}) == len(places)


def test_another_model_or_version_has_another_key() -> None:
    keys = {request_key(REQUEST), request_key(REQUEST, "n"), request_key(REQUEST, "m", "2")}
    assert len(keys) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": (TENSOR_B, TENSOR_A)},
        {"inputs": (replace(TENSOR_A, data=Range(Memory(1, 2, 3, 4, 8, True), 0, 8)), TENSOR_B)},
    ],
)
def test_requests_that_ask_the_same_have_the_same_key(fields: dict[str, Any]) -> None:
    assert request_key(replace(REQUEST, **fields)) == request_key(REQUEST)


def test_the_order_of_parameters_does_not_matter() -> None:
    ordered = replace(REQUEST, parameters={"p": 1, "q": 2})
    assert request_key(ordered) == request_key(replace(REQUEST, parameters={"q": 2, "p": 1}))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(0, 6), st.integers(0, 60)),
        st.tuples(st.just("find"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("resize"), st.integers(0, 100), st.just(0)),
    )
)


@given(STEPS)
def test_the_cache_keeps_entries_within_its_bound(steps: list[tuple[str, int, int]]) -> None:
    """The least recently used entry is evicted; no entry is larger than the cache."""
    cache: LruCache[int] = LruCache(50)
    bound = 50
    entry_sizes: dict[bytes, int] = {}  # least recently used first
    for action, number, size in steps:
        key = b"%d" % number
        if action == "insert":
            assert cache.insert(key, size, size) == (size <= bound)
            if size <= bound:
                entry_sizes.pop(key, None)
                entry_sizes[key] = size
        elif action == "find":
            assert cache.find(key) == entry_sizes.get(key)
            if key in entry_sizes:
                entry_sizes[key] = entry_sizes.pop(key)
        else:
            bound = number
            cache.resize(bound)
        while sum(entry_sizes.values()) > bound:
            del entry_sizes[next(iter(entry_sizes))]
        assert (cache.used_bytes, len(cache)) == (sum(entry_sizes.values()), len(entry_sizes))
        assert cache.used_bytes <= bound
