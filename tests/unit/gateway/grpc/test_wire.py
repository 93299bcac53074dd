"""ModelInferRequest and ModelInferResponse as bytes, the plans of requests, the table of RPCs."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument
from shmserve.gateway.grpc.wire.fingerprint import split_message
from shmserve.gateway.grpc.wire.response import (
    GrpcResponseTemplate,
    encode_stream_error,
    encode_streamed,
    encode_varint,
)
from shmserve.gateway.inference.infer_request import ANONYMOUS
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inferred
from shmserve.proto import grpc_service_pb2 as ours

pytest.importorskip("grpc")

from shmserve.gateway.grpc.wire.request import decode_request

triton_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")


def fields(messages: Iterable[Any]) -> set[tuple[object, ...]]:
    """Return all properties of the messages that appear on the wire or in a program."""
    return {
        described
        for message in messages
        for described in (
            *((message.full_name, f.name, f.number, f.type, f.is_repeated) for f in message.fields),
            *fields(message.nested_types),
        )
    }


def rpcs(module: Any) -> list[tuple[object, ...]]:
    (service,) = module.DESCRIPTOR.services_by_name.values()
    return [
        (m.name, m.input_type.name, m.output_type.name, m.client_streaming, m.server_streaming)
        for m in service.methods
    ]


def test_the_service_is_that_of_triton() -> None:
    """Both live in this process, and have the same messages, fields, numbers and RPCs."""
    own_types, tritons = (m.DESCRIPTOR.message_types_by_name.values() for m in (ours, triton_pb2))
    assert fields(own_types) == fields(tritons) and len(fields(own_types)) > 100
    assert rpcs(ours) == rpcs(triton_pb2)


def request(**parameters: object) -> ours.ModelInferRequest:
    built = ours.ModelInferRequest(model_name="m")
    for key, value in parameters.items():
        kind, _, expected = str(value).partition(":")
        typed = {"bool": expected == "True", "string": expected}.get(kind)
        setattr(built.parameters[key], f"{kind}_param", int(expected) if typed is None else typed)
    return built


def test_parameters() -> None:
    wire = decode_request(
        request(
            sequence_id="int64:-1",
            sequence_start="bool:True",
            sequence_end="bool:True",
            priority="uint64:3",
            timeout="int64:5",
            mine="string:x",
            triton_enable_empty_final_response="bool:True",
        )
    )
    assert (wire.correlation_id, wire.flags, wire.priority) == (2**64 - 1, 3, 3)
    assert (wire.timeout_us, wire.parameters) == (5, {"mine": "x"})


def test_narrow_integers_wrap() -> None:
    infer_request = request()
    tensor = infer_request.inputs.add(name="x", datatype="INT8", shape=[2])
    tensor.contents.int_contents.extend([257, -129])
    assert decode_request(infer_request).inputs[0].data == b"\x01\x7f"


@pytest.mark.parametrize("count", [1, 40, 5000])
@pytest.mark.parametrize(
    ("datatype", "tag", "value"),
    [
        ("BOOL", b"\x0a", b"\1"),
        ("FP32", b"\x32", b"\1\0\x80\x7f"),  # a signalling NaN: a read as a float alters it
        ("FP64", b"\x3a", b"\1\0\0\0\0\0\xf0\x7f"),
    ],
    ids=["BOOL", "FP32", "FP64"],
)
def test_typed_numbers_keep_their_bits(datatype: str, tag: bytes, value: bytes, count: int) -> None:
    infer_request = request()
    tensor = infer_request.inputs.add(name="x", datatype=datatype, shape=[count])
    unknown_field = b"\x7a\3abc"  # a field of a later version
    values = value * count
    tensor.contents.MergeFromString(unknown_field + tag + encode_varint(len(values)) + values)
    assert decode_request(infer_request).inputs[0].data == values


def output(**parameters: object) -> ours.ModelInferRequest:
    infer_request = request()
    parameter = infer_request.outputs.add(name="y").parameters["classification"]
    for kind, value in parameters.items():
        setattr(parameter, kind, value)
    return infer_request


def test_classification() -> None:
    assert decode_request(output(int64_param=3)).class_counts == {"y": 3}
    with pytest.raises(InvalidArgument, match="expected > 0, got 0"):
        decode_request(output(int64_param=0))
    with pytest.raises(InvalidArgument, match="expected int64_param"):
        decode_request(output(string_param="1"))


def test_a_negative_offset_is_reported_as_sent() -> None:
    infer_request = request()
    parameters = infer_request.outputs.add(name="y").parameters
    parameters["shared_memory_region"].string_param = "r"
    parameters["shared_memory_offset"].int64_param = -5
    text = "'shared_memory_offset' parameter for tensor 'y', expected >= 0, got -5"
    with pytest.raises(InvalidArgument, match=text):
        decode_request(infer_request)


def test_the_key_of_a_fingerprint() -> None:
    infer_request = request()
    infer_request.inputs.add(name="x", datatype="INT8", shape=[200])
    infer_request.raw_input_contents.append(bytes(200))
    infer_request.raw_input_contents.append(b"")
    key, contents, _ = split_message(infer_request.SerializeToString()) or pytest.fail("no plan")
    assert contents == [bytes(200), b""] and key[1] == (200, 0)
    del infer_request.raw_input_contents[:]
    assert key[0] == infer_request.SerializeToString()
    assert split_message(key[0]) == ((key[0], ()), [], ANONYMOUS)
    late_fields = infer_request.SerializeToString() + b":\x01a" + b"\x0a\x01n"
    assert ours.ModelInferRequest.FromString(late_fields).model_name == "n"
    assert split_message(late_fields) is None  # a field behind the contents


@pytest.mark.parametrize(
    "junk",
    [
        *(b"\x3a\x05abc", b"\x08\x01", b"\x3a\xff\xff\xff\xff\xff", b"\xff"),
        *(b"\x3a\x00\x3a", b"\x3a\x80", b"\x3a\x83\x80\x80\x80\x80\x00abc"),
    ],
)
def test_other_notations_have_no_fingerprint(junk: bytes) -> None:
    assert split_message(junk) is None


POSITIONS = st.fixed_dictionaries(
    {},
    optional={
        "sequence_id": st.integers(-(2**63), 2**63 - 1).map("int64:{}".format)
        | st.text(max_size=130).map("string:{}".format),
        "sequence_start": st.booleans().map("bool:{}".format),
        "sequence_end": st.booleans().map("bool:{}".format),
    },
)


@example("", {"sequence_id": "string:" + "\U00010000" * 32})
@given(st.text(max_size=200), POSITIONS)
def test_the_identity_is_not_part_of_the_fingerprint(name: str, fields: dict[str, str]) -> None:
    """Its id and its position in a sequence are read from each message."""
    plain_request = request(own="int64:1")
    plain_request.inputs.add(name="x", datatype="INT8", shape=[1])
    plain_request.raw_input_contents.append(b"1")
    infer_request = request(own="int64:1", **fields)
    infer_request.id = name
    infer_request.inputs.extend(plain_request.inputs)
    infer_request.raw_input_contents.append(b"1")
    parts, expected = (
        split_message(infer_request.SerializeToString()),
        split_message(plain_request.SerializeToString()),
    )
    if len(fields.get("sequence_id", "").encode()) > len("string:") + 127:
        assert parts is None  # the message may be overlong, so it is parsed completely
        return
    assert parts is not None and expected is not None
    assert parts.identity.is_identity_of(decode_request(infer_request))
    assert parts.key == expected.key and parts.contents == expected.contents


@pytest.mark.parametrize(
    "parameters",
    [{"sequence_start": "int64:1"}, {"sequence_id": "bool:True"}, {"sequence_else": "int64:1"}],
)
def test_other_notations_of_a_sequence_have_no_fingerprint(parameters: dict[str, str]) -> None:
    assert split_message(request(**parameters).SerializeToString()) is None


@given(st.binary(max_size=300))
def test_arbitrary_bytes_have_at_most_one_fingerprint(raw: bytes) -> None:
    parts = split_message(raw)
    if parts is not None:
        (head, sizes), contents, _ = parts
        assert tuple(map(len, contents)) == sizes
        joined_message = head + b"".join(b":" + encode_varint(len(c)) + c for c in contents)
        assert split_message(joined_message) == (*parts[:2], ANONYMOUS)


@given(st.integers(0, 2**62))
def test_varints_decode_as_in_protobuf(value: int) -> None:
    tag = b"\x20"  # field 4
    message = ours.ModelStatistics.FromString(tag + encode_varint(value))
    assert message.inference_count == value


def test_messages_of_a_stream() -> None:
    response = ours.ModelInferResponse(id="7", model_name="m" * 300)
    sent = triton_pb2.ModelStreamInferResponse.FromString(
        encode_streamed(response.SerializeToString())
    )
    assert sent.infer_response.id == "7" and sent.infer_response.model_name == "m" * 300
    assert sent.infer_response.parameters["triton_final_response"].bool_param
    failed = triton_pb2.ModelStreamInferResponse.FromString(encode_stream_error("why", "7"))
    assert (failed.error_message, failed.infer_response.id) == ("why", "7")
    assert not failed.infer_response.parameters
    anonymous = triton_pb2.ModelStreamInferResponse.FromString(encode_stream_error("", "7", "m"))
    assert anonymous.error_message  # or it would be a success
    assert anonymous.infer_response.id == "7"
    assert anonymous.infer_response.model_name == "m"
    assert anonymous.infer_response.parameters["triton_final_response"].bool_param


@given(
    st.text(max_size=4),
    st.lists(st.binary(max_size=300), min_size=1, max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9) | st.booleans(), max_size=2),
)
def test_a_filled_template_equals_an_encoded_response(
    request_id: str, contents: list[bytes], parameters: dict[str, Any]
) -> None:
    model: Any = SimpleNamespace(name="m", version="1")
    outputs = [TensorRef(f"Y{n}", "UINT8", (len(data),), data) for n, data in enumerate(contents)]
    template = GrpcResponseTemplate(model, Inferred(tuple(outputs), parameters), ())
    inverted_contents = [bytes(byte ^ 255 for byte in data) for data in contents]
    for data_parts in (contents, inverted_contents):
        filled_response = template.fill(request_id, data_parts)
        encoded = template.encode(request_id, data_parts)
        assert filled_response is not None and len(filled_response) == len(
            encoded
        )  # the fields' order may be another
        assert triton_pb2.ModelInferResponse.FromString(filled_response) == (
            triton_pb2.ModelInferResponse.FromString(encoded)
        )


@pytest.mark.parametrize("kind", ["UINT8", "BYTES"])
@pytest.mark.parametrize("placed", [(), ("Y", "Z")])
@pytest.mark.parametrize("data", [[], [b"a"], [b"a", b"b", b"c"], [b"a", 5], [b"a", None]])
def test_a_template_rejects_other_data(kind: str, placed: tuple[str, ...], data: list[Any]) -> None:
    model: Any = SimpleNamespace(name="m", version="1")
    outputs = tuple(TensorRef(name, kind, (1,), b"a") for name in ("Y", "Z"))
    template = GrpcResponseTemplate(model, Inferred(outputs), placed)
    filled_response = template.fill("7", data)
    assert filled_response is None or (
        placed and len(data) == 2
    )  # a memory range may be invalid here
