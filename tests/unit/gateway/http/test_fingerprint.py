"""JSON requests that differ only in their numbers: read in a short way, with the same result."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmserve.errors import ShmserveError
from shmserve.gateway.http.json.codec import parse_request, tensor_bytes
from shmserve.gateway.http.json.fingerprint import (
    Cache,
    Fingerprint,
    cut_identity,
    fill_known_template,
    is_worth_caching,
    store_template,
)
from shmserve.gateway.http.json.parser import loads
from shmserve.gateway.inference.infer_request import InferRequest, RequestIdentity
from shmserve.ipc.tensors.schemas import BoundedCache

LIMIT = 1 << 20


def header(position_members: str) -> bytes:
    tensor = '{"name":"X","datatype":"INT8","shape":[1],"parameters":{"binary_data_size":1}}'
    return f'{{"inputs":[{tensor}],"parameters":{{{position_members},"own":1}}}}'.encode()


@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("sequence", [1, 2**64 - 1, "a text"])
def test_the_position_in_a_sequence_is_cut_out(space: str, sequence: int | str) -> None:
    """Headers that differ only in the position have one key and their own positions."""
    keys = set()
    for start in (False, True):
        for end in (False, True):
            parameters = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
            text = header(json.dumps(parameters, separators=("," + space, ":" + space))[1:-1])
            key, cut = cut_identity(text)
            assert cut is not None and cut.is_identity_of(parse_request(loads(text), 1, "m", LIMIT))
            assert cut == RequestIdentity("", sequence, start | end * 2)
            keys.add(key)
    (key,) = keys
    assert json.loads(key)["parameters"] == {"sequence_id": 0, "own": 1}


@given(st.text(max_size=8))
@example("")
@example('a"b')
@example("a\\b")
@example("ü")
def test_the_id_is_cut_out(request_id: str) -> None:
    """Only an id that is the first member and has no escapes or non-ASCII characters is cut out."""
    tail = header('"other":2')[1:]
    for space in ("", " "):
        body = f'{{"id":{space}{json.dumps(request_id)},{space}'.encode() + tail
        key, identity = cut_identity(body)
        if identity is None:
            assert key == body and (not request_id.isascii() or "\\" in json.dumps(request_id))
        else:
            assert identity == RequestIdentity(request_id, 0, 0) and json.loads(key)["id"] == 0
            assert identity.is_identity_of(parse_request(loads(body), 1, "m", LIMIT))
    id_last = header(f'"other":2}},"id":{json.dumps(request_id)},"x":{{"y":1')
    assert cut_identity(id_last) == (id_last, None)


def test_id_and_position_are_cut_out_together() -> None:
    position_members = '"sequence_id":5,"sequence_start":true,"sequence_end":false'
    text = b'{"id":"7",' + header(position_members)[1:]
    key, found = cut_identity(text)
    assert found == RequestIdentity("7", 5, 1) and found.is_identity_of(
        parse_request(loads(text), 1, "m", LIMIT)
    )
    assert key == text.replace(b'"7"', b"0").replace(position_members.encode(), b'"sequence_id":0')


def test_long_headers_are_not_searched() -> None:
    text = b'{"id":"7",' + b" " * 70_000 + header('"other":2')[1:]
    assert cut_identity(text) == (text, None)


@pytest.mark.parametrize(
    "position_members",
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
def test_other_notations_are_not_cut(position_members: str) -> None:
    assert cut_identity(header(position_members)) == (header(position_members), None)


def test_sequence_members_of_other_objects_are_kept() -> None:
    position_members = '"sequence_id":5,"sequence_start":true,"sequence_end":false'
    other_members = b'"binary_data_size":1,' + position_members.encode()
    text = header('"other":2').replace(b'"binary_data_size":1', other_members)
    _, found = cut_identity(text)
    assert found is not None and not found.is_identity_of(parse_request(loads(text), 1, "m", LIMIT))


class FilledRequest(bytes):
    """The bytes of a request's tensors."""

    def identify(self, identity: RequestIdentity) -> None:
        """Ignore the identity."""


class BytesTemplate:
    """A template that returns the tensors' bytes, or None if its regions are not `unchanged`."""

    def __init__(self) -> None:
        self.unchanged = True

    def fill(self, datas: list[bytes]) -> Any:
        return FilledRequest(b"".join(datas)) if self.unchanged else None


def new_cache() -> Cache:
    return BoundedCache(256)


def parse_text(text: bytes) -> InferRequest:
    return parse_request(loads(text), 0, "m", LIMIT)


def parse_fully(text: bytes) -> bytes:
    inputs = [tensor for tensor in parse_text(text).inputs if tensor.data is not None]
    return b"".join(map(tensor_bytes, inputs))


def fill_from_cache(cache: Cache, text: bytes, plan: BytesTemplate | None = None) -> Any:
    """Return the cache's result for a request; store the request if wanted."""
    fingerprint = Fingerprint(text, 0)
    known_template: Any = fill_known_template(cache, fingerprint, text, len(text))
    if known_template is None:
        try:
            parse_fully(text)
        except ShmserveError:
            return None
        if is_worth_caching(cache, fingerprint):
            template: Any = plan or BytesTemplate()
            store_template(cache, fingerprint, parse_text(text), template)
    return known_template


def one_tensor(data: str, prefix: str = "", suffix: str = "") -> bytes:
    text = '{%s"inputs": [{"name": "A", "datatype": "INT32", "shape": [2], "data": %s}]%s}'
    return (text % (prefix, data, suffix)).encode()


numbers = st.lists(st.integers(-9, 9), min_size=2, max_size=2)
# Text elsewhere in the request that looks like a tensor's data.
number_texts = st.sampled_from(
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


@given(number_texts, array, colon, st.lists(numbers, min_size=1, max_size=2), st.data())
def test_a_repeated_request_equals_a_parsed_one(
    prefix: str, data_format: str, key: str, first_data: list[list[int]], data: st.DataObject
) -> None:
    """For any text around the numbers, the result is the parser's, or the parser runs."""

    def write_request(values: list[list[int]], other_member: str) -> bytes:
        inputs = [
            f'{{"name": "X{number}", "datatype": "INT32", "shape": [2], '
            f"{key}{data_format % tuple(pair)}}}"
            for number, pair in enumerate(values)
        ]
        return f'{{{other_member}"inputs": [{",".join(inputs)}]}}'.encode()

    cache = new_cache()
    for _ in range(4):
        values = data.draw(st.lists(numbers, min_size=len(first_data), max_size=len(first_data)))
        # The numbers elsewhere change as well.
        other_member = "".join(
            str(data.draw(st.integers(0, 9))) if sign.isdigit() and "u" not in prefix else sign
            for sign in prefix
        )
        text = write_request(values, other_member)
        template = fill_from_cache(cache, text)
        assert template is None or template == parse_fully(text)


@given(st.binary(max_size=30), st.binary(max_size=30))
@example(b"1, 2]", b"")
@example(b'"\0"', b"\0")
def test_different_requests_have_different_fingerprints(data: bytes, suffix: bytes) -> None:
    """The request equals a known one except for some bytes."""
    cache = new_cache()
    for known_data in ("[1, 2]", "[3, 4]"):
        fill_from_cache(cache, one_tensor(known_data))
    assert fill_from_cache(cache, one_tensor("[5, 6]")) == parse_fully(one_tensor("[5, 6]"))
    text = one_tensor("[1, 2]").replace(b"[1, 2]", data).replace(b"}]", suffix + b"}]")
    template = fill_from_cache(cache, text)
    assert template is None or template == parse_fully(text)


def test_a_request_is_repeated_from_its_third_occurrence() -> None:
    cache = new_cache()
    filled = [
        fill_from_cache(cache, one_tensor(t)) for t in ("[1, 2]", "[3, 4]", "[5, 6]", "[-7, 8]")
    ]
    assert [template is not None for template in filled] == [False, False, True, True]
    assert filled[3] == parse_fully(one_tensor("[-7, 8]"))


@pytest.mark.parametrize(
    "text",
    [
        *("[1, 2, 3]", "[1]", "[]", "[1.5, 2]", "[1, 2,]", "[,1 2]", "[+1, 2]", "[01, 2]"),
        *("[1e400, 2]", "[1, 99999999999999999999]", "[-, 2]", "[1\f, 2]"),
    ],
)
def test_invalid_requests_are_parsed_for_their_error(text: str) -> None:
    cache = new_cache()
    for known_data in ("[1, 2]", "[3, 4]"):
        fill_from_cache(cache, one_tensor(known_data))
    assert fill_from_cache(cache, one_tensor(text)) is None
    assert fill_from_cache(cache, one_tensor("[5, 6]")) is not None


def test_the_text_of_a_fingerprint_is_no_request() -> None:
    """The text of a fingerprint has no arrays, but the key of a request that has."""
    cache = new_cache()
    for known_data in ("[1, 2]", "[3, 4]"):
        fill_from_cache(cache, one_tensor(known_data))
    without_data = one_tensor("[1, 2]").replace(b'"data": [1, 2]', b"\0")
    assert Fingerprint(without_data, 0).key == Fingerprint(one_tensor("[1, 2]"), 0).key
    assert not Fingerprint(without_data, 0).arrays
    assert fill_from_cache(cache, without_data) is None


def test_other_arrays_of_numbers_are_not_tensors() -> None:
    """An array of numbers elsewhere, and the tensor's own written so that it is not seen."""
    cache = new_cache()
    nested_array = one_tensor("[1, 2]", '"more": {"data": [1, 2]}, ').replace(
        b'32", "shape": [2], "data":', b'32", "shape": [2], "data" :'
    )
    assert len(Fingerprint(nested_array, 0).arrays) == 1
    for _ in range(3):
        assert fill_from_cache(cache, nested_array) is None
    other_array = nested_array.replace(b"[1, 2]}, ", b"[8, 9]}, ")
    assert Fingerprint(other_array, 0).key == Fingerprint(nested_array, 0).key
    assert fill_from_cache(cache, other_array) is None


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL"])
def test_datatypes_without_numbers_are_parsed(datatype: str) -> None:
    cache = new_cache()
    data = json.dumps(["1", "2"] if datatype == "BYTES" else [True, False])
    text = one_tensor(data).replace(b"INT32", datatype.encode())
    assert [fill_from_cache(cache, text) for _ in range(3)] == [None] * 3


def test_leniently_parsed_headers_are_not_cached() -> None:
    cache = new_cache()
    for text in (
        b"\xef\xbb\xbf" + one_tensor("[1, 2]"),
        one_tensor("[1, 2]", '"parameters": {"p": NaN}, '),
    ):
        for _ in range(3):
            assert fill_from_cache(cache, text) is None


def test_changed_regions_invalidate_a_template() -> None:
    cache, stale_regions = new_cache(), BytesTemplate()
    for text in ("[1, 2]", "[3, 4]"):
        fill_from_cache(cache, one_tensor(text), stale_regions)
    stale_regions.unchanged = False
    assert fill_from_cache(cache, one_tensor("[5, 6]")) is None
    assert fill_from_cache(cache, one_tensor("[5, 6]")) == parse_fully(one_tensor("[5, 6]"))


def test_the_cache_of_templates_is_bounded() -> None:
    cache = new_cache()
    for number in range(2000):
        fill_from_cache(cache, one_tensor("[1, 2]", suffix=f', "id": "{number // 2}"'))
    assert 0 < len(cache) <= 256
    long_body = one_tensor("[1, 2]", suffix=', "id": "%s"' % ("x" * 3000))
    assert [fill_from_cache(cache, long_body) for _ in range(3)] == [None] * 3
