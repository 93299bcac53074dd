"""Requests that differ only in id, position in a sequence and timeouts are parsed once."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmserve.gateway.context import GatewayModel
from shmserve.gateway.http import body as http
from shmserve.gateway.http.messages import HEADER_LENGTH, WholeBody
from shmserve.gateway.inference.infer_request import InferRequest
from shmserve.gateway.inference.prepare import BuiltRequest
from tests.rigs.gateway_rig import SIMPLE_CONFIG, Rig, add_sub, identity_config, publication, rig

pytest.importorskip("grpc")

from shmserve.gateway.grpc import infer as grpc
from shmserve.gateway.grpc.wire.fingerprint import TemplateCache, split_message
from shmserve.proto import grpc_service_pb2 as pb
from tests.support.messages import inference_of

grpc_client = pytest.importorskip("tritonclient.grpc")

# id, sequence, whether it begins and ends it
REQUEST_IDENTITIES: list[tuple[str, int | str, bool, bool]] = [
    ("one", 7, True, False), ("two", 7, False, False), ("", 7, False, True),
    ("three", 2**63 - 1, True, True), ("four", "a text", True, False), ("", 0, False, False),
    ("five", 0, False, False),
]  # fmt: skip


class ParseCounter:
    """Counts how often requests are read the long way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.count = 0
        self._original = getattr(module, name)
        monkeypatch.setattr(module, name, self._count_call)

    def _count_call(self, *arguments: Any) -> Any:
        self.count += 1
        return self._original(*arguments)


@pytest.fixture
def model() -> GatewayModel:
    endpoint: Any = SimpleNamespace(endpoint="ipc:///nowhere")
    return GatewayModel(publication(identity_config("m", "INT8", [1]), endpoint))


@pytest.fixture
def gateway(model: GatewayModel) -> Any:
    models = SimpleNamespace(resolve=lambda *_: model, find=lambda *_: model, revision=0)
    settings = SimpleNamespace(max_input_size=1 << 20, http_header_forward_pattern="")
    no_services: dict[str, Any] = {"arena": None, "body_budget": None, "regions": None}
    no_services["malloc_trim"] = SimpleNamespace(schedule=lambda size: None)
    return SimpleNamespace(models=models, settings=settings, is_draining=False, **no_services)


def check_distinct(build_request: Callable[[Any], BuiltRequest]) -> None:
    payloads = set()
    for iteration in range(5):
        for request_fields in REQUEST_IDENTITIES[iteration % 2 :]:
            request_id, sequence, start, end = request_fields
            built_request = build_request(request_fields)
            wire = built_request.infer_request
            assert (wire.id, wire.flags) == (request_id, start | end * 2)
            assert (wire.correlation_id, wire.timeout_us) == (sequence, 5)
            payloads.add((built_request.schema, tuple(built_request.data)))
            built_request.release()
    assert len(payloads) == 1


def test_similar_http_requests_are_not_confused(
    monkeypatch: pytest.MonkeyPatch, gateway: Any, model: GatewayModel
) -> None:
    parse_count = ParseCounter(monkeypatch, http, "parse_request")

    def build_request(request_fields: Any) -> BuiltRequest:
        request_id, sequence, start, end = request_fields
        position_members = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
        header: dict[str, Any] = {"id": request_id} if request_id else {}
        header["parameters"] = {**(position_members if sequence else {}), "timeout": 5}
        tensor = {"name": "IN", "datatype": "INT8", "shape": [1]}
        header["inputs"] = [{**tensor, "parameters": {"binary_data_size": 1}}]
        text = json.dumps(header).encode()
        request: Any = SimpleNamespace(
            headers={HEADER_LENGTH: str(len(text))}, content=WholeBody(text + b"x")
        )
        return asyncio.run(http.read_request(gateway, model, request))

    check_distinct(build_request)
    # With and without an id, and in a sequence and not: each form twice.
    assert parse_count.count == 4 * 2


def test_like_grpc_requests_are_not_confused(monkeypatch: pytest.MonkeyPatch, gateway: Any) -> None:
    parse_count = ParseCounter(monkeypatch, grpc, "decode_request")
    inferences = grpc.Inferences(gateway)

    def build_request(request_fields: Any) -> BuiltRequest:
        request_id, sequence, start, end = request_fields
        request = pb.ModelInferRequest(model_name="m", id=request_id)
        request.parameters["timeout"].int64_param = 5
        if isinstance(sequence, str):
            request.parameters["sequence_id"].string_param = sequence
        elif sequence:
            request.parameters["sequence_id"].int64_param = sequence
        if sequence:
            request.parameters["sequence_start"].bool_param = start
            request.parameters["sequence_end"].bool_param = end
        request.inputs.add(name="IN", datatype="INT8", shape=[1])
        request.raw_input_contents.append(b"x")
        return inferences._decode(request.SerializeToString(), {}, is_streamed=False)

    check_distinct(build_request)
    assert parse_count.count == 1


def _encode_request(request_id: str, content: bytes) -> bytes:
    request = pb.ModelInferRequest(model_name="m", id=request_id)
    request.inputs.add(name="IN", datatype="INT8", shape=[1])
    request.raw_input_contents.append(content)
    return request.SerializeToString()


def _lengthen(raw: bytes, field: bytes) -> bytes:
    """Return the message with the one-byte length of this field encoded in two bytes."""
    assert raw.count(field) == 1
    return raw.replace(field, field[:1] + bytes((field[1] | 128, 0)) + field[2:])


NOTATIONS: dict[str, Callable[[int], bytes]] = {
    "id": lambda n: _lengthen(_encode_request(str(n), b"x"), b"\x1a\x01%d" % n),
    "contents": lambda n: _lengthen(_encode_request("", b"%d" % n), b"\x3a\x01%d" % n),
}


@pytest.mark.parametrize("notation", NOTATIONS)
def test_a_message_in_another_notation_is_parsed(gateway: Any, notation: str) -> None:
    """Ids and contents are parsed as in the message, though the size equals a known one."""
    inferences = grpc.Inferences(gateway)
    for _ in range(4):
        for number in range(1, 4):
            raw = NOTATIONS[notation](number)
            request_fields = pb.ModelInferRequest.FromString(raw)
            built_request = inferences._decode(raw, {}, is_streamed=False)
            assert built_request.infer_request.id == request_fields.id
            (tensor,) = inference_of(built_request).inputs
            assert tensor.data == request_fields.raw_input_contents[0]


def test_ids_and_values_are_cut_anywhere(monkeypatch: pytest.MonkeyPatch, gateway: Any) -> None:
    """The bytes may be those of fields; only the first messages of a schema are parsed."""
    split = ParseCounter(monkeypatch, grpc, "split_message")
    inferences = grpc.Inferences(gateway)
    request_count = 0
    for request_id in ("", "7", "\x1a\x011", "12", "\x3a\x01x", "é") * 3:
        for value in (b"x", b"\x1a", b":"):
            built = inferences._decode(_encode_request(request_id, value), {}, is_streamed=False)
            request_count += 1
            assert built.infer_request.id == request_id
            (tensor,) = inference_of(built).inputs
            assert tensor.data == value
    assert split.count < request_count / 3
    broken_message = _encode_request("7", b"x").replace(b"\x017", b"\x01\xff")
    with pytest.raises(grpc.RequestRefused):
        inferences._decode(broken_message, {}, is_streamed=False)


@pytest.mark.parametrize("first_index", [0, 1])
def test_ids_and_contents_are_not_confused(gateway: Any, first_index: int) -> None:
    """Though messages of one size have them in one place."""
    with_id = (
        _encode_request("", b"")[:-2] + b"\x1a\x01i" + b"\x3a\x01x"
    )  # the id behind the inputs
    plain_request = pb.ModelInferRequest(model_name="m")
    plain_request.inputs.add(name="IN", datatype="INT8", shape=[1])
    two_contents = plain_request.SerializeToString() + b"\x3a\x01i" + b"\x3a\x01x"
    assert len(with_id) == len(two_contents)
    cache = TemplateCache(gateway.models)
    requests = [SimpleNamespace(ids=[], contents=[]) for _ in range(2)]
    for iteration in range(4):
        for index in (first_index, 1 - first_index):
            raw, payload = (with_id, two_contents)[index], requests[index]
            parts = split_message(raw)
            assert parts is not None
            template: Any = SimpleNamespace(
                fill=lambda datas, payload=payload: (
                    payload.contents.append(list(datas))
                    or SimpleNamespace(
                        identify=lambda itself: payload.ids.append(itself.request_id)
                    )
                )
            )
            matched = cache.find_by_layout(raw) or cache.find_by_fingerprint(raw, parts)
            assert (matched is not None) == bool(iteration)
            if matched is None:
                request = InferRequest(parts.identity.request_id, [], [])
                model: Any = gateway.models.find()
                cache.store(parts, request, model, template)
    assert requests[0].contents == [[b"x"]] * 3
    assert requests[1].contents == [[b"i", b"x"]] * 3


@pytest.fixture
def grpc_rig(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path, grpc=True) as model_rig:
        model_rig.open()
        yield model_rig


def test_each_grpc_response_has_its_own_id(grpc_rig: Rig) -> None:
    scheduler = grpc_rig.serve(SIMPLE_CONFIG, add_sub)
    inputs = []
    for name in ("INPUT0", "INPUT1"):
        inputs.append(grpc_client.InferInput(name, [1, 16], "INT32"))
        inputs[-1].set_data_from_numpy(np.ones((1, 16), np.int32))
    with grpc_client.InferenceServerClient(f"127.0.0.1:{grpc_rig.port}") as client:
        for request_id, sequence, start, end in REQUEST_IDENTITIES * 3:
            parameters = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
            result = client.infer("simple", inputs, request_id=request_id, **parameters)
            assert result.get_response().id == request_id
            assert result.as_numpy("OUTPUT0").tolist() == [[2] * 16]
            submit = scheduler.submits[-1]
            assert (submit.request_id, submit.flags) == (request_id, start | end * 2)
            assert (submit.correlation_text or submit.correlation_id) == sequence
    assert len({(submit.schema, *submit.data) for submit in scheduler.submits}) == 1
