"""A duplicate name in a JSON object is rejected in every JSON body."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmserve.common.names import DuplicateKeyError, reject_duplicate_keys
from shmserve.errors import InvalidArgument
from shmserve.gateway.http.json import parser
from shmserve.gateway.http.json.parser import loads, loads_large
from shmserve.model_config.message_builder import from_json
from tests.rigs.gateway_rig import SIMPLE_CONFIG, Rig, add_sub, rig
from tests.support.wire.raw_http import Http

Pairs = list[tuple[str, Any]]


class Members:
    """A JSON object in text form, in which names may occur twice."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def __repr__(self) -> str:
        return f"Members({self.pairs})"


# Names in requests, names that differ only in their escapes, and texts that resemble JSON's
# structure.
names = st.sampled_from(["inputs", "outputs", "parameters", "data", "id", ":", '":', '\\":{"a"'])
json_texts = st.text(st.sampled_from('":\\{}[], aä\u20ac\U0001f600'), max_size=6)
scalars = st.none() | st.booleans() | st.integers(-5, 5) | json_texts
trees = st.recursive(
    scalars,
    lambda values: (
        st.lists(values, max_size=3)
        | st.lists(st.tuples(names | json_texts, values), max_size=4).map(Members)
    ),
    max_leaves=12,
)


def write_json(value: Any, data: st.DataObject) -> str:
    """Return the JSON text of a tree, with random blanks and escapes."""
    gap = data.draw(st.sampled_from(["", " ", "\n\t"]))
    if isinstance(value, Members):
        parts = [f"{write_string(n, data)}{gap}:{gap}{write_json(m, data)}" for n, m in value.pairs]
        return f"{{{gap}{f',{gap}'.join(parts)}{gap}}}"
    if isinstance(value, list):
        return f"[{f'{gap},'.join(write_json(m, data) for m in value)}]"
    return write_string(value, data) if isinstance(value, str) else json.dumps(value)


def write_string(text: str, data: st.DataObject) -> str:
    return json.dumps(text, ensure_ascii=data.draw(st.booleans()))


def is_doubled(value: Any) -> bool:
    if isinstance(value, Members):
        names = [name for name, _ in value.pairs]
        return len(set(names)) < len(names) or any(is_doubled(member) for _, member in value.pairs)
    return isinstance(value, list) and any(map(is_doubled, value))


@settings(max_examples=300)
@given(trees, st.data())
def test_exactly_the_duplicate_names_are_refused(tree: Any, data: st.DataObject) -> None:
    raw = write_json(tree, data).encode()
    if is_doubled(tree):
        with pytest.raises(InvalidArgument, match=r"duplicate key '.*' in an object"):
            loads(raw)
    else:
        assert loads(raw) == json.loads(raw)


tensor: Pairs = [("name", "A"), ("datatype", "BYTES"), ("shape", [2]), ("data", ["a:b", ":"])]
sized_tensor: Pairs = [*tensor[:3], ("parameters", Members([("binary_data_size", 8)]))]
request: Pairs = [
    ("id", "i"),
    ("parameters", Members([("timeout", 5), ("mine", "a")])),
    ("inputs", [Members(tensor), Members(sized_tensor)]),
    ("outputs", [Members([("name", "B"), ("parameters", Members([("binary_data", True)]))])]),
]


def find_members(value: Any) -> Iterator[Members]:
    if isinstance(value, Members):
        yield value
        for _, member in value.pairs:
            yield from find_members(member)
    elif isinstance(value, list):
        for member in value:
            yield from find_members(member)


MEMBER_PLACES = [
    (index, name)
    for index, holder in enumerate(find_members(Members(request)))
    for name, _ in holder.pairs
]


@pytest.mark.parametrize(("index", "name"), MEMBER_PLACES)
@settings(max_examples=10)
@given(value=st.sampled_from([1, "a:b", [], Members([]), Members([("x", 1)])]), data=st.data())
def test_duplicate_names_are_refused_everywhere_in_a_request(
    index: int, name: str, value: Any, data: st.DataObject
) -> None:
    """A duplicate name is rejected at any position and with any value."""
    assert loads(write_json(Members(request), data).encode())["id"] == "i"
    members = list(find_members(Members(request)))[index]
    kept_pairs = members.pairs
    position = data.draw(st.integers(0, len(kept_pairs)))
    members.pairs = [*kept_pairs[:position], (name, value), *kept_pairs[position:]]
    # The root object is new each time, but it contains the same members.
    root = members if index == 0 else Members(request)
    try:
        raw = write_json(root, data).encode()
    finally:
        members.pairs = kept_pairs
    for parse in (loads, loads_large):
        with pytest.raises(InvalidArgument, match=f"duplicate key '{name}' in an object"):
            parse(raw)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"\\u0061":2}',
        '\ufeff{"a":1,"a":1}',
        '{"a":NaN,"a":1}',
        '{"a":Inf,"b":{"c":1,"c":-Inf}}',
    ],
)
def test_duplicate_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"JSON buffer: duplicate key '.*' in an") as caught:
        loads(text.encode())
    assert (caught.value.status, caught.value.code) == (400, "INVALID_ARG")


def test_long_names_and_long_texts() -> None:
    """A long name is truncated in the error; in megabytes of text, no name is searched for."""
    long_text = "n" * 1000
    with pytest.raises(InvalidArgument) as caught:
        loads(json.dumps([long_text]).encode()[1:-1].join([b"{", b":1,", b":1}"]))
    assert len(caught.value.message) < 200
    text = json.dumps({"inputs": [{"data": ["x" * 64] * 40_000}]}).encode()
    assert loads(text) == loads_large(text) == json.loads(text)
    for parse in (loads, loads_large):
        with pytest.raises(InvalidArgument, match="duplicate keys in an object"):
            parse(text[:-1] + b', "inputs": []}')


def test_duplicate_names_beside_large_arrays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "_MIN_CUT_BYTES", 1)
    for doubled in ('"data": [1, 2], "data": [3, 4]', '"data": [1, 2], "name": "", "name": ""'):
        with pytest.raises(InvalidArgument, match=r"duplicate key '(data|name)' in an object"):
            loads_large(f'{{"inputs": [{{{doubled}}}]}}'.encode())


@given(st.lists(st.tuples(json_texts, scalars), max_size=6))
@example([("a", 1), ("a", 2)])
def test_members_refuse_duplicate_names(pairs: Pairs) -> None:
    if len(dict(pairs)) < len(pairs):
        with pytest.raises(DuplicateKeyError):
            reject_duplicate_keys(pairs)
    else:
        assert reject_duplicate_keys(pairs) == dict(pairs)


def test_duplicate_names_in_a_configuration_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="not valid JSON: duplicate key 'backend' in an"):
        from_json('{"name": "m", "backend": "python", "backend": "pytorch"}')
    with pytest.raises(InvalidArgument, match="duplicate key 'key'"):
        from_json('{"parameters": {"key": {}, "key": {"string_value": "x"}}}')


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("run")) as model_rig:
        model_rig.open()
        model_rig.serve(SIMPLE_CONFIG, add_sub)
        yield model_rig


HTTP_BODIES = {
    "/v2/models/simple/infer": b'{"id": "a", "inputs": [], "id": "b"}',
    "/v2/repository/index": b'{"ready": false, "ready": true}',
    "/v2/repository/models/m/load": b'{"parameters": {"config": "{}", "config": "{}"}}',
    "/v2/repository/models/m/unload": b'{"parameters": {}, "parameters": {}}',
    "/v2/systemsharedmemory/region/r/register": b'{"key": "/k", "byte_size": 1, "key": "/j"}',
    "/v2/logging": b'{"log_info": true, "log_info": false}',
}


@pytest.mark.parametrize("path", HTTP_BODIES)
def test_duplicate_names_over_http_are_refused(gateway: Rig, path: str) -> None:
    http = Http(gateway.port)
    received_count = len(gateway.received)
    reply = http.post(path, HTTP_BODIES[path])
    http.close()
    assert reply.status == 400 and "duplicate key '" in reply.error
    assert len(gateway.received) == received_count


def test_duplicate_names_in_a_binary_head_are_refused(gateway: Rig) -> None:
    """Holds also if the body arrives after its head was checked."""
    for size in (64, 1 << 20):
        sent_inputs = [
            {
                "name": name,
                "datatype": "INT32",
                "shape": [1, size // 4],
                "parameters": {"binary_data_size": size},
            }
            for name in ("INPUT0", "INPUT1")
        ]
        head = json.dumps({"inputs": sent_inputs}).encode()
        head = head.replace(b'"binary_data_size"', b'"binary_data_size": 1, "binary_data_size"', 1)
        http = Http(gateway.port)
        length = {"Inference-Header-Content-Length": str(len(head))}
        reply = http.infer("simple", head + bytes(2 * size), length)
        http.close()
        assert reply.status == 400
        assert "duplicate key 'binary_data_size' in an object" in reply.error
