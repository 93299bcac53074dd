"""JSON requests that differ only in their numbers: read in a short way, with the same result."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmserve.errors import ShmserveError
from shmserve.gateway.http.json.fingerprint import (
    Cache,
    Fingerprint,
    cut_identity,
    fill_known_template,
    is_worth_caching,
    store_template,
)
from shmserve.gateway.http.json.infer_request import parse_request, tensor_bytes
from shmserve.gateway.http.json.parser import loads
from shmserve.gateway.inference.request import InferRequest, RequestIdentity
from shmserve.ipc.tensors.schemas import BoundedCache

LIMIT = 1 << 20


def header(memory_range: str) -> bytes:
    tensor = '{"name":"X","datatype":"INT8","shape":[1],"parameters":{"binary_data_size":1}}'
    return f'{{"inputs":[{tensor}],"parameters":{{{memory_range},"own":1}}}}'.encode()


@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("sequence", [1, 2**64 - 1, "a text"])
def test_the_position_in_a_sequence_is_cut_out(space: str, sequence: int | str) -> None:
    """Headers that differ in it alone have one key, and mean what they say."""
    keys = set()
    for start in (False, True):
        for end in (False, True):
            parameters = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
            text = header(json.dumps(parameters, separators=("," + space, ":" + space))[1:-1])
            key, found = cut_identity(text)
            assert found is not None and found.is_identity_of(
                parse_request(loads(text), 1, "m", LIMIT)
            )
            assert found == RequestIdentity("", sequence, start | end * 2)
            keys.add(key)
    (key,) = keys
    assert json.loads(key)["parameters"] == {"sequence_id": 0, "own": 1}


@given(st.text(max_size=8))
@example("")
@example('a"b')
@example("a\\b")
@example("ü")
def test_the_id_is_cut_out(request_id: str) -> None:
    """Where it is first, and of characters that stand for themselves."""
    rest = header('"other":2')[1:]
    for space in ("", " "):
        first = f'{{"id":{space}{json.dumps(request_id)},{space}'.encode() + rest
        key, found = cut_identity(first)
        if found is None:
            assert key == first and (not request_id.isascii() or "\\" in json.dumps(request_id))
        else:
            assert found == RequestIdentity(request_id, 0, 0) and json.loads(key)["id"] == 0
            assert found.is_identity_of(parse_request(loads(first), 1, "m", LIMIT))
    last = header(f'"other":2}},"id":{json.dumps(request_id)},"x":{{"y":1')
    assert cut_identity(last) == (last, None)


def test_id_and_position_are_cut_out_together() -> None:
    memory_range = '"sequence_id":5,"sequence_start":true,"sequence_end":false'
    text = b'{"id":"7",' + header(memory_range)[1:]
    key, found = cut_identity(text)
    assert found == RequestIdentity("7", 5, 1) and found.is_identity_of(
        parse_request(loads(text), 1, "m", LIMIT)
    )
    assert key == text.replace(b'"7"', b"0").replace(memory_range.encode(), b'"sequence_id":0')


def test_long_headers_are_not_searched() -> None:
    text = b'{"id":"7",' + b" " * 70_000 + header('"other":2')[1:]
    assert cut_identity(text) == (text, None)


@pytest.mark.parametrize(
    "memory_range",
    [
        '"sequence_id":5',
        '"sequence_id":0,"sequence_start":true,"sequence_end":true',
        '"sequence_id":-5,"sequence_start":true,"sequence_end":true',
        '"sequence_id":18446744073709551616,"sequence_start":true,"sequence_end":true',
        '"sequence_id":"\\u0041","sequence_start":true,"sequence_end":true',
        '"sequence_start":true,"sequence_id":5,"sequence_end":true',
        '"sequence_id":5,"sequence_start":true,"sequence_end":true,"sequence_id":6',
    ],
)
def test_other_notations_are_not_cut(memory_range: str) -> None:
    assert cut_identity(header(memory_range)) == (header(memory_range), None)


def test_sequence_members_of_other_objects_are_kept() -> None:
    memory_range = '"sequence_id":5,"sequence_start":true,"sequence_end":false'
    elsewhere = b'"binary_data_size":1,' + memory_range.encode()
    text = header('"other":2').replace(b'"binary_data_size":1', elsewhere)
    _, found = cut_identity(text)
    assert found is not None and not found.is_identity_of(parse_request(loads(text), 1, "m", LIMIT))


class Built(bytes):
    """The bytes of a request's tensors."""

    def identify(self, identity: RequestIdentity) -> None:
        """Ignore the identity."""


class Bytes:
    """A template that returns the tensors' bytes, or None if its regions are not `unchanged`."""

    def __init__(self) -> None:
        self.unchanged = True

    def fill(self, datas: list[bytes]) -> Any:
        return Built(b"".join(datas)) if self.unchanged else None


def new_cache() -> Cache:
    return BoundedCache(256)


def wire_of(text: bytes) -> InferRequest:
    return parse_request(loads(text), 0, "m", LIMIT)


def long_way(text: bytes) -> bytes:
    inputs = [tensor for tensor in wire_of(text).inputs if tensor.data is not None]
    return b"".join(map(tensor_bytes, inputs))


def short_way(cache: Cache, text: bytes, plan: Bytes | None = None) -> Any:
    """Return the cache's result for a request; store the request if wanted."""
    fingerprint = Fingerprint(text, 0)
    known: Any = fill_known_template(cache, fingerprint, text, len(text))
    if known is None:
        try:
            long_way(text)
        except ShmserveError:
            return None
        if is_worth_caching(cache, fingerprint):
            template: Any = plan or Bytes()
            store_template(cache, fingerprint, wire_of(text), template)
    return known


def one_tensor_body(data: str, before: str = "", behind: str = "") -> bytes:
    text = '{%s"inputs": [{"name": "A", "datatype": "INT32", "shape": [2], "data": %s}]%s}'
    return (text % (before, data, behind)).encode()


# --- the same as the long way ----------------------------------------------------------------

numbers = st.lists(st.integers(-9, 9), min_size=2, max_size=2)
# Text elsewhere in the request that looks like a tensor's data.
odd = st.sampled_from(
    (
        *('"id": "\\"data\\": [1, 2]", ', '"id": "\\\\", ', '"more": {"data": [7, 7]}, ', ""),
        *('"outputs": [], "data": [1], ', '"data\\"data": [3], ', '"\\"data": [4, 5], '),
        *('"outputs": [{"name": "Y", "parameters": {"data": [1]}}], ', '"id": "\\u0000", '),
    )
)
array = st.sampled_from(
    ("[%d, %d]", "[%d,%d]", "[ %d ,\n%d]", "[[%d], [%d]]", "[%d, %d, 1]", "[%d.0, %d]", "[%de0,%d]")
)
colon = st.sampled_from(('"data": ', '"data":', '"data" : ', '"data":  '))


@given(odd, array, colon, st.lists(numbers, min_size=1, max_size=2), st.data())
def test_a_repeated_request_equals_a_parsed_one(
    before: str, form: str, key: str, first: list[list[int]], data: st.DataObject
) -> None:
    """For any text around the numbers, the result equals that of the parser, or the parser is
    used.
    """

    def written(values: list[list[int]], elsewhere: str) -> bytes:
        inputs = [
            f'{{"name": "X{number}", "datatype": "INT32", "shape": [2], {key}{form % tuple(pair)}}}'
            for number, pair in enumerate(values)
        ]
        return f'{{{elsewhere}"inputs": [{",".join(inputs)}]}}'.encode()

    cache = new_cache()
    for _ in range(4):
        values = data.draw(st.lists(numbers, min_size=len(first), max_size=len(first)))
        # The numbers elsewhere change as well.
        elsewhere = "".join(
            str(data.draw(st.integers(0, 9))) if sign.isdigit() and "u" not in before else sign
            for sign in before
        )
        text = written(values, elsewhere)
        found = short_way(cache, text)
        assert found is None or found == long_way(text)


@given(st.binary(max_size=30), st.binary(max_size=30))
@example(b"1, 2]", b"")
@example(b'"\0"', b"\0")
def test_different_requests_have_different_fingerprints(data: bytes, behind: bytes) -> None:
    """The request equals a known one except for some bytes."""
    cache = new_cache()
    for known in ("[1, 2]", "[3, 4]"):
        short_way(cache, one_tensor_body(known))
    assert short_way(cache, one_tensor_body("[5, 6]")) == long_way(one_tensor_body("[5, 6]"))
    text = one_tensor_body("[1, 2]").replace(b"[1, 2]", data).replace(b"}]", behind + b"}]")
    found = short_way(cache, text)
    assert found is None or found == long_way(text)


# --- when it is taken ------------------------------------------------------------------------


def test_a_request_is_repeated_from_its_third_occurrence() -> None:
    cache = new_cache()
    found = [
        short_way(cache, one_tensor_body(text))
        for text in ("[1, 2]", "[3, 4]", "[5, 6]", "[-7, 8]")
    ]
    assert [template is not None for template in found] == [False, False, True, True]
    assert found[3] == long_way(one_tensor_body("[-7, 8]"))


@pytest.mark.parametrize(
    "text",
    [
        *("[1, 2, 3]", "[1]", "[]", "[1.5, 2]", "[1, 2,]", "[,1 2]", "[+1, 2]", "[01, 2]"),
        *("[1e400, 2]", "[1, 99999999999999999999]", "[-, 2]", "[1\f, 2]"),
    ],
)
def test_invalid_requests_are_parsed_for_their_error(text: str) -> None:
    cache = new_cache()
    for known in ("[1, 2]", "[3, 4]"):
        short_way(cache, one_tensor_body(known))
    assert short_way(cache, one_tensor_body(text)) is None
    assert short_way(cache, one_tensor_body("[5, 6]")) is not None


def test_the_text_of_a_fingerprint_is_no_request() -> None:
    """The text of a fingerprint has no arrays, but the key of a request that has."""
    cache = new_cache()
    for known in ("[1, 2]", "[3, 4]"):
        short_way(cache, one_tensor_body(known))
    cut = one_tensor_body("[1, 2]").replace(b'"data": [1, 2]', b"\0")
    assert Fingerprint(cut, 0).key == Fingerprint(one_tensor_body("[1, 2]"), 0).key
    assert not Fingerprint(cut, 0).arrays
    assert short_way(cache, cut) is None


def test_other_arrays_of_numbers_are_not_tensors() -> None:
    """An array of numbers elsewhere, and the tensor's own written so that it is not seen."""
    cache = new_cache()
    hidden = one_tensor_body("[1, 2]", '"more": {"data": [1, 2]}, ').replace(
        b'32", "shape": [2], "data":', b'32", "shape": [2], "data" :'
    )
    assert len(Fingerprint(hidden, 0).arrays) == 1
    for _ in range(3):
        assert short_way(cache, hidden) is None
    other = hidden.replace(b"[1, 2]}, ", b"[8, 9]}, ")
    assert Fingerprint(other, 0).key == Fingerprint(hidden, 0).key
    assert short_way(cache, other) is None


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL"])
def test_datatypes_without_numbers_are_parsed(datatype: str) -> None:
    cache = new_cache()
    data = json.dumps(["1", "2"] if datatype == "BYTES" else [True, False])
    text = one_tensor_body(data).replace(b"INT32", datatype.encode())
    assert [short_way(cache, text) for _ in range(3)] == [None] * 3


def test_leniently_parsed_headers_are_not_cached() -> None:
    cache = new_cache()
    for text in (
        b"\xef\xbb\xbf" + one_tensor_body("[1, 2]"),
        one_tensor_body("[1, 2]", '"parameters": {"p": NaN}, '),
    ):
        for _ in range(3):
            assert short_way(cache, text) is None


def test_changed_regions_invalidate_a_template() -> None:
    cache, stale = new_cache(), Bytes()
    for text in ("[1, 2]", "[3, 4]"):
        short_way(cache, one_tensor_body(text), stale)
    stale.unchanged = False
    assert short_way(cache, one_tensor_body("[5, 6]")) is None
    assert short_way(cache, one_tensor_body("[5, 6]")) == long_way(one_tensor_body("[5, 6]"))


def test_the_cache_of_templates_is_bounded() -> None:
    cache = new_cache()
    for number in range(2000):
        short_way(cache, one_tensor_body("[1, 2]", behind=f', "id": "{number // 2}"'))
    assert 0 < len(cache) <= 256
    long = one_tensor_body("[1, 2]", behind=', "id": "%s"' % ("x" * 3000))
    assert [short_way(cache, long) for _ in range(3)] == [None] * 3
