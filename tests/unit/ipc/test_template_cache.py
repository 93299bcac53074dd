"""Requests and answers that are packed alike are read, and packed, once: with the same result."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.tensors.descriptors import Memory, Place, TensorRef
from shmserve.ipc.tensors.inference import (
    Inference,
    Inferred,
    PackedTemplate,
    RequestedOutput,
    pack_inference,
    pack_inferred,
    unpack_inference,
)
from shmserve.ipc.tensors.template_cache import BoundedCache, TemplateCache, UnpackCache
from shmserve.ipc.transport.records import MalformedMessage

MEMORY = Memory(7, 1, 2, 3, 1 << 20, False)
OUTPUTS = (RequestedOutput("OUT", Place(MEMORY, 4096, 64)),)

sizes = st.lists(st.integers(0, 300), min_size=1, max_size=4)


def inference(datas: list[bytes | Place], **more: Any) -> Inference:
    return Inference(
        tuple(
            TensorRef(f"IN{n}", "UINT8", (len(d) if isinstance(d, bytes) else d.byte_size,), d)
            for n, d in enumerate(datas)
        ),
        **more,
    )


def taught(*works: bytes) -> TemplateCache[int]:
    """What knows these; the meaning is their number of inputs."""
    templates: TemplateCache[int] = TemplateCache()
    for work in works:
        if templates.find(work) is None:
            request = unpack_inference(work)
            templates.learn(work, request, len(request.inputs))
    return templates


@given(sizes, st.data())
def test_inline_tensors_are_found_where_they_are(sizes: list[int], data: st.DataObject) -> None:
    def drawn() -> list[bytes | Place]:
        return [data.draw(st.binary(min_size=size, max_size=size)) for size in sizes]

    first, second, third = (pack_inference(inference(drawn())) for _ in range(3))
    templates = taught(first, second)
    datas = [tensor.data for tensor in unpack_inference(third).inputs]
    assert templates.find(third) == (len(datas), tuple(datas))


@given(st.binary(max_size=400), st.binary(min_size=40, max_size=40))
def test_what_is_not_alike_is_not_found(other: bytes, numbers: bytes) -> None:
    work = pack_inference(inference([numbers], outputs=OUTPUTS))
    templates = taught(work, work, work)
    if found := templates.find(other):
        assert [t.data for t in unpack_inference(other).inputs] == list(found[1])
    moved = (RequestedOutput("OUT", Place(MEMORY, 8192, 64)),)
    for changed in (
        inference([numbers], outputs=moved),
        inference([numbers], outputs=OUTPUTS, parameters={"a": 1}),
    ):
        assert templates.find(pack_inference(changed)) is None


def test_inline_and_in_memory_may_be_mixed() -> None:
    place = Place(MEMORY, 0, 16)
    works = [pack_inference(inference([place, b"%04d" % n, place])) for n in range(3)]
    assert taught(*works[:2]).find(works[2]) == (3, (b"0002",))


def test_a_form_is_learnt_when_it_comes_again() -> None:
    one, two = (pack_inference(inference([numbers])) for numbers in (b"1", b"2"))
    assert taught(one).find(two) is None
    assert taught(one, two).find(one) is not None


def test_what_was_packed_in_another_way_is_not_cut() -> None:
    # MessagePack has longer forms for the same: an empty map with its length in four bytes.
    work = pack_inference(inference([b"1234"]))
    odd = work[:-1] + b"\xdf" + bytes(4)
    assert unpack_inference(odd) == unpack_inference(work)
    assert taught(odd, odd, odd).find(odd) is None


def test_memory_is_bounded() -> None:
    templates: TemplateCache[None] = TemplateCache()
    for n in range(2000):
        request = inference([bytes(n)])
        for _ in range(2):
            templates.learn(pack_inference(request), request, None)
    assert 0 < len(templates._cuts) <= 256 and 0 < len(templates._cuts._noticed) <= 256
    few: TemplateCache[None] = TemplateCache(4)
    for n in range(20):
        answer = Inferred((TensorRef("O", "UINT8", (n,), bytes(n)),))
        for _ in range(2):
            few.learn(pack_inferred(answer), answer, None)
    assert 0 < len(few._cuts) <= 4 and 0 < len(few._cuts._noticed) <= 4
    for at in range(20):
        placed = TensorRef("P", "UINT8", (1,), Place(MEMORY, at, 1))
        answer = Inferred((placed, TensorRef("I", "UINT8", (1,), b"x")))
        few.learn(pack_inferred(answer), answer, None)
        assert sum(len(cut.meanings) for cut in few._cuts._known.values()) <= 4


@given(sizes, st.dictionaries(st.text(max_size=5), st.integers(-5, 300)), st.data())
def test_an_answer_is_filled_as_it_is_packed(
    sizes: list[int], parameters: dict[str, int], data: st.DataObject
) -> None:
    def drawn() -> Inferred:
        datas = [data.draw(st.binary(min_size=size, max_size=size)) for size in sizes]
        refs = (TensorRef(f"O{n}", "UINT8", (len(d),), d) for n, d in enumerate(datas))
        return Inferred(tuple(refs), parameters)

    first, second = drawn(), drawn()
    datas = [ref.data for ref in second.outputs if isinstance(ref.data, bytes)]
    assert PackedTemplate(first).fill(datas) == pack_inferred(second)


def test_an_answer_is_known_by_its_form() -> None:
    """Of answers in the client's region and beside it only the inline bytes differ."""

    def answer(inline: bytes, at: int = 0) -> tuple[Inferred, bytes]:
        placed = TensorRef("P", "INT8", (4,), Place(MEMORY, at, 4))
        made = Inferred((placed, TensorRef("I", "INT8", (len(inline),), inline)))
        return made, pack_inferred(made)

    templates: TemplateCache[str] = TemplateCache()
    for _ in range(2):
        assert templates.find(answer(b"ab")[1]) is None
        made, packed = answer(b"ab")
        templates.learn(packed, made, "both")
    assert templates.find(answer(b"xy")[1]) == ("both", (b"xy",))
    assert templates.find(answer(b"xyz")[1]) is None
    assert templates.find(answer(b"xy", at=5)[1]) is None, "another place"
    made, packed = answer(b"ab", at=5)
    templates.learn(packed, made, "there")
    for at, meaning in ((0, "both"), (5, "there"), (0, "both")):
        assert templates.find(answer(b"xy", at)[1]) == (meaning, (b"xy",)), "places by turns"


def test_what_lies_in_memory_is_known_as_a_whole() -> None:
    """The very same bytes, at once."""
    work = pack_inference(inference([Place(MEMORY, 0, 16)]))
    moved = pack_inference(inference([Place(MEMORY, 64, 16)]))
    templates = taught(work)
    assert templates.find(work) == (1, ()) and templates.find(moved) is None


def test_what_is_long_is_not_learnt() -> None:
    work = pack_inference(inference([bytes(100)]))
    templates: TemplateCache[None] = TemplateCache(longest=99)
    for _ in range(3):
        templates.learn(work, unpack_inference(work), None)
    assert templates.find(work) is None


def test_a_full_cache_forgets_all() -> None:
    cache: BoundedCache[int, str] = BoundedCache(2)
    cache.remember(1, "one")
    cache.remember(1, "other")
    cache.remember(2, "two")
    assert (cache.find(1), cache.find(2)) == ("other", "two")
    cache.remember(3, "three")
    assert (cache.find(1), cache.find(3), len(cache)) == (None, "three", 1)
    cache.forget(3)
    cache.forget(3)
    assert len(cache) == 0


def test_what_comes_for_the_first_time_is_noticed() -> None:
    cache: BoundedCache[int, str] = BoundedCache(2)
    assert [cache.notice(key) for key in (1, 1, 2, 2, 3, 3)] == [False, True] * 3
    cache.remember(1, "one")
    for key in range(10, 20):
        assert not cache.notice(key)
    assert cache.find(1) == "one" and cache.notice(1)


def test_the_oldest_goes_and_its_owner_hears() -> None:
    gone: list[str] = []
    cache: BoundedCache[int, str] = BoundedCache(2, gone.append)
    for key, value in enumerate("abc"):
        assert cache.share(key, value) == value
    assert cache.share(2, "later") == "c"
    assert gone == ["a"] and len(cache) == 2
    cache.clear()
    assert gone == ["a", "b", "c"] and len(cache) == 0


def test_what_is_like_one_before_but_for_the_bytes_of_its_tensors_is_not_unpacked() -> None:
    place, other = Place(MEMORY, 0, 64), Place(MEMORY, 64, 64)
    unpacked: list[bytes] = []

    def unpack(work: bytes) -> Inference:
        unpacked.append(work)
        return unpack_inference(work)

    cache = UnpackCache(unpack)
    asked = [inference([data, place, b"abc"]) for data in (b"1", b"2", b"3", b"4")]
    asked += [inference([place, place])] * 3 + [inference([place, other])]
    for each in asked:
        assert cache.unpack(pack_inference(each)) == each
    packed = [pack_inference(asked[at]) for at in (0, 1, 4, 7)]
    assert unpacked == packed, "a template is learnt when it comes again"
    long = pack_inference(inference([place], parameters={"text": "x" * 5000}))
    assert cache.unpack(long) == cache.unpack(long) and unpacked[4:] == [long, long]
    with pytest.raises(MalformedMessage):
        cache.unpack(b"no")
