"""The fuzzer's targets on its corpus, and on what hypothesis makes of the protocols' words."""

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmserve.common.auth_tokens import Authorisation
from shmserve.gateway.listener import ClientIdentity, ListenerKind, ListenerRules
from shmserve.ipc.transport import frames
from tests.fuzz import targets
from tests.fuzz.__main__ import CORPUS
from tests.fuzz.by_chance import search
from tests.fuzz.http2.differences import find_known_difference

FILES = sorted(path for path in CORPUS.rglob("*") if path.is_file())

keys = st.sampled_from(
    [
        *("inputs", "outputs", "parameters", "id", "name", "datatype", "shape", "data"),
        *("binary_data_size", "shared_memory_region", "shared_memory_offset"),
        *("shared_memory_byte_size", "binary_data", "classification", "timeout", "priority"),
        *("sequence_id", "sequence_start", "key", "offset", "byte_size", "lifetime", "triton_x"),
    ]
)
string_values = st.sampled_from(
    ["INPUT0", "INPUT1", "FP32", "BYTES", "INT8", "BF16", "BOOL", "r", "/k", "connection", "/../x"]
)
numbers = st.sampled_from([0, 1, 2, 4, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64]) | (
    st.floats(width=32)
)
scalars = st.none() | st.booleans() | numbers | string_values | st.text(max_size=5)
tree = st.recursive(
    scalars,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(keys, children, max_size=5),
    max_leaves=20,
)
tensors = st.fixed_dictionaries(
    {"name": string_values, "datatype": string_values, "shape": st.lists(numbers, max_size=3)},
    optional={"data": tree, "parameters": st.dictionaries(keys, scalars, max_size=3)},
)
requests = st.fixed_dictionaries(
    {"inputs": st.lists(tensors | tree, max_size=3)},
    optional={"outputs": tree, "parameters": tree, "id": scalars},
)


def test_the_corpus_has_every_target() -> None:
    assert {path.parent.name for path in FILES} == set(targets.TARGETS)
    assert sum(path.stat().st_size for path in FILES) < 100_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_corpus(path: Path) -> None:
    targets.TARGETS[path.parent.name](path.read_bytes())


def test_failing_inputs_are_reproducible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that breaks a target is stored, and is the same for the same seed."""
    monkeypatch.chdir(tmp_path)
    inputs: list[bytes] = []

    def target(data: bytes) -> None:
        inputs.append(data)
        assert len(inputs) != 50

    for _ in range(2):
        inputs.clear()
        with pytest.raises(AssertionError):
            search(target, [b"corpus", b"other"], 60, seed=7)
        (kept_input,) = tmp_path.iterdir()
        assert kept_input.name == "crash-7-49" and kept_input.read_bytes() == inputs[-1]
    assert search(len, [b"corpus"], 0, seed=7) == 1


def test_an_unexplained_difference_is_a_finding() -> None:
    """The table explains only listed differences, and each entry occurs."""
    assert find_known_difference("ngh2", "DATA over: PROTOCOL_ERROR x | -") is None
    assert (
        find_known_difference("cut", "SETTINGS over: - | PROTOCOL_ERROR SETTINGS: unexpected ACK")
        is None
    )
    explanation = find_known_difference(
        "ngh2", "SETTINGS over: - | PROTOCOL_ERROR SETTINGS: unexpected ACK"
    )
    assert explanation is not None and explanation.why
    closed_stream_error = "DATA over: STREAM_CLOSED a frame on closed stream 1 | -"
    assert find_known_difference("h2", closed_stream_error) is not None
    assert find_known_difference("h2", f"{closed_stream_error} behind a reset") is None


@pytest.mark.parametrize("name", targets.TARGETS)
@given(st.binary(max_size=300))
def test_any_bytes(name: str, data: bytes) -> None:
    """Bytes are refused with a text for clients, or parsed to the sent message."""
    targets.TARGETS[name](data)


@given(requests | tree, st.integers(0, 20))
def test_any_request(request: Any, tail_size: int) -> None:
    """Any JSON with the protocol's names is refused or is consistent."""
    targets.http(b"\0" + bytes([tail_size]) + json.dumps(request).encode())


@given(
    st.text(max_size=10),
    st.fixed_dictionaries(
        {},
        optional={
            "key": scalars | st.text("/.a\0é", max_size=6),
            **dict.fromkeys(("offset", "byte_size", "lifetime"), scalars),
        },
    ),
)
@example("..", {"key": "/..", "byte_size": 1})
def test_any_registration(name: str, body: dict[str, Any]) -> None:
    """No registration names anything but a plain object."""
    targets.register(name.encode() + b"\n" + json.dumps(body).encode())


msgpack_bytes = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["FP32", "BYTES", *frames._CLASSES_BY_TAG]),
    lambda children: (
        st.lists(children, max_size=10) | st.dictionaries(st.text(max_size=3), children)
    ),
    max_leaves=30,
)


@given(st.sampled_from([b"i", b"a", b"m"]), msgpack_bytes)
def test_any_message(kind: bytes, value: Any) -> None:
    """Data that unpacks as MessagePack is a complete message, or malformed."""
    if kind == b"m" and type(value) is list:
        value = [frames.VERSION, *value]
    targets.wire(kind + msgpack.packb(value))


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_host_and_any_token(host: str, token: str) -> None:
    """A malformed header gives no access."""
    rules = Authorisation({"ab" * 32: ("inference",)}, {})
    for kind in (ListenerKind.LOOPBACK, ListenerKind.REMOTE):
        access_error = ClientIdentity(ListenerRules(kind, rules, None), None).find_access_error(
            "inference", {"Host": host, "Authorization": f"Bearer {token}"}
        )
        assert access_error is not None and access_error.status in (401, 421)
