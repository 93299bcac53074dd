"""The module that models import: tensors, responses, requests, configurations, metrics."""

import json
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.dlpack import from_dlpack

from shmserve.errors import NotFound
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.tensors.arrays import encode_bytes
from shmserve.ipc.tensors.schemas import Inference, OutputSchema, RequestSchema, pack_inference
from shmserve.workers.backends.python import metrics, server
from shmserve.workers.backends.python.errors import to_model_error, to_server_error
from shmserve.workers.backends.python.importable import triton_python_backend_utils as pb_utils
from shmserve.workers.backends.python.importable.triton_python_backend_utils import (
    Tensor,
    TritonModelException,
)
from shmserve.workers.backends.python.request import ReceivedRequest, to_response
from shmserve.workers.backends.python.tensor import Lender
from shmserve.workers.batch.backend_request import Input, Request

TYPES = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]


def received_request(*inputs: Input, **fields: Any) -> ReceivedRequest:
    schema, data = pack_inference(Inference((), (), fields.pop("parameters", {})))
    expected = {"OUT": OutputSchema("OUT", has_range=False, may_reuse_input=False)}
    origin = Request(
        Work(1, 42, schema, data, "id-1", **fields),
        RequestSchema(schema),
        0,
        {item.name: item for item in inputs},
        expected,
    )
    return ReceivedRequest(origin, Lender("m", Mappings()))


def make_input(array: Any, datatype: str, name: str = "IN") -> Input:
    array = np.asarray(array)
    raw = encode_bytes(array) if datatype == "BYTES" else array.tobytes()
    return Input(name, datatype, array.shape, memoryview(bytearray(raw)), model="m")


# --- tensors


@pytest.mark.parametrize("kind", TYPES)
def test_a_tensor_of_numpy(kind: str) -> None:
    array = np.ones((2, 3), dtype=kind)
    tensor = Tensor("x", array)
    assert tensor.as_numpy() is array
    assert (tensor.name(), tensor.shape(), tensor.is_cpu()) == ("x", [2, 3], True)
    number = pb_utils.numpy_to_triton_type(array.dtype)
    assert tensor.triton_dtype() == number == pb_utils.numpy_to_triton_type(array.dtype.type)
    assert number is not None and pb_utils.triton_to_numpy_type(number) == array.dtype
    assert tensor.as_output().data is array


def test_a_tensor_of_strings() -> None:
    for array in (np.array([b"a", "\u00fc", 3], dtype=object), np.array([b"a", b"bb"])):
        tensor = Tensor("x", array)
        assert tensor.triton_dtype() == 13 and tensor.as_output().datatype == "BYTES"
        assert tensor.as_numpy() is array


@pytest.mark.parametrize("kind", TYPES)
def test_dlpack_import_and_export(kind: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(kind)
    tensor = Tensor("x", array)
    assert tensor.__dlpack_device__() == (1, 0)
    for source in (tensor, tensor.to_dlpack(), torch.from_numpy(array)):
        imported_tensor = Tensor.from_dlpack("y", source)
        assert (imported_tensor.name(), imported_tensor.shape()) == ("y", [2, 3])
        assert imported_tensor.triton_dtype() == tensor.triton_dtype()
        assert (imported_tensor.as_numpy() == array).all()
    assert (from_dlpack(tensor) == torch.from_numpy(array)).all()
    assert (np.from_dlpack(tensor) == array).all()
    if kind != "bool":
        np.from_dlpack(tensor).flat[0] = 7
        assert array.flat[0] == 7  # the array shares its memory with the tensor


def test_dlpack_of_bf16() -> None:
    value = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    tensor = Tensor.from_dlpack("x", value)
    assert tensor.triton_dtype() == 14 and tensor.as_output().data is not None
    assert torch.equal(from_dlpack(tensor), value)
    with pytest.raises(TritonModelException, match="Tensor dtype is BF16"):
        tensor.as_numpy()
    bits = make_input(value.view(torch.uint16).numpy(), "BF16")
    received_tensor = received_request(bits).inputs()[0]
    assert torch.equal(from_dlpack(received_tensor), value)
    with pytest.raises(TritonModelException, match="Tensor dtype is BF16"):
        received_tensor.as_numpy()
    assert (received_tensor.as_output().data == value.view(torch.uint16).numpy()).all()


UNTYPED: Any = Tensor  # accepts arguments of wrong types
UNSUPPORTED_ARRAYS: tuple[Any, ...] = (
    np.zeros(1, complex), np.array(["a"]), np.zeros(1, ">f4"), np.zeros(1, "M8[s]"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        *((partial(UNTYPED, "x", array), TritonModelException, "NumPy dtype is not supported")
          for array in UNSUPPORTED_ARRAYS),
        (partial(UNTYPED, "X", torch.zeros(1)), TypeError, "(Tensor.from_dlpack takes one)"),
        (partial(UNTYPED, "x", [1, 2]), TypeError, "expected a numpy.ndarray, not builtins.list"),
        (partial(UNTYPED, 3, np.zeros(1)), TypeError, "the name of a Tensor must be a str"),
        (partial(UNTYPED, "", np.zeros(1)), TritonModelException,
         "Tensor name cannot be an empty string"),
        (Tensor("x", np.array([b"a"], dtype=object)).to_dlpack, TritonModelException,
         "does not have support for string tensors"),
        (partial(Tensor.from_dlpack, "x", 3), TritonModelException,
         "Tensor must be a DLPack capsule"),
        (partial(Tensor.from_dlpack, "x", torch.zeros(4, 4).T), TritonModelException,
         "not contiguous"),
        (partial(Tensor.from_dlpack, "x", torch.zeros(2, dtype=torch.complex64)),
         TritonModelException, "not supported"),
        (partial(Tensor.from_dlpack, "", torch.zeros(2)), TritonModelException, "empty string"),
    ],
)  # fmt: skip
def test_unsupported_tensors_are_refused(
    make: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_dlpack_of_a_read_only_array_is_a_copy() -> None:
    array = np.zeros(2)
    array.flags.writeable = False
    from_dlpack(Tensor("x", array)).fill_(1)
    assert not array.any()


@pytest.mark.gpu
def test_dlpack_of_a_tensor_on_a_device() -> None:
    value = torch.arange(4, device="cuda")
    tensor = Tensor.from_dlpack("x", value)
    assert not tensor.is_cpu()
    assert torch.equal(from_dlpack(tensor), value)
    with pytest.raises(TritonModelException, match="stored in GPU"):
        tensor.as_numpy()
    assert tensor.as_call_input().data == value.cpu().numpy().tobytes()


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_the_wire_form_of_strings(items: list[bytes]) -> None:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    encoded_strings = pb_utils.serialize_byte_tensor(array)
    assert encoded_strings is not None
    assert pb_utils.deserialize_bytes_tensor(encoded_strings).tolist() == items
    if encoded_strings:
        with pytest.raises(ValueError, match="beyond its end"):
            pb_utils.deserialize_bytes_tensor(encoded_strings[:-1])


def test_numbers_have_no_string_encoding() -> None:
    assert pb_utils.serialize_byte_tensor(np.zeros(2)) is None


def test_names_of_types() -> None:
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is bool
    assert pb_utils.triton_string_to_numpy("TYPE_FP16") is np.float16
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_BF16")
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13


# --- errors and responses


@pytest.mark.parametrize(
    ("code", "status"), [("INTERNAL", 500), ("NOT_FOUND", 404), ("UNAVAILABLE", 503)]
)
def test_errors(code: str, status: int) -> None:
    error = pb_utils.TritonError("why", getattr(pb_utils.TritonError, code))
    assert (error.message(), error.code().name) == ("why", code)
    assert to_server_error(error).status == status
    assert len(to_server_error(pb_utils.TritonError("w" * 10**6)).message) < 20_000
    assert to_model_error(to_server_error(error)).code() is error.code()


@pytest.mark.parametrize(
    ("constant", "name"),
    [
        (pb_utils.TritonError.NOT_FOUND, "ErrorCode.NOT_FOUND"),
        (pb_utils.Logger.INFO, "LogLevel.INFO"),
        (pb_utils.MetricFamily.GAUGE, "MetricKind.GAUGE"),
        (pb_utils.TRITONSERVER_MEMORY_CPU, "MemoryType.TRITONSERVER_MEMORY_CPU"),
    ],
)
def test_a_constant_has_its_name_as_text(constant: object, name: str) -> None:
    assert str(constant) == f"{constant}" == name


def test_an_error_without_a_code_is_internal() -> None:
    assert pb_utils.TritonError("why").code() == pb_utils.TritonError.INTERNAL == 1
    assert to_model_error(NotFound("x")).code() == pb_utils.TritonError.NOT_FOUND
    for wrong_value in ((3,), ("a", 3)):
        with pytest.raises(TypeError):
            pb_utils.TritonError(*wrong_value)


def test_responses() -> None:
    tensor = Tensor("x", np.zeros(2))
    response = pb_utils.InferenceResponse([tensor], parameters={"a": 1, "b": "c", "d": True})
    assert response.output_tensors() == [tensor]
    assert not response.has_error() and response.error() is None
    assert json.loads(response.parameters()) == {"a": 1, "b": "c", "d": True}
    assert pb_utils.get_output_tensor_by_name(response, "x") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "y") is None
    answer = to_response(response)
    assert answer.error is None and answer.parameters == {"a": 1, "b": "c", "d": True}
    failed = pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError("no"))
    assert failed.has_error()
    assert str(to_response(failed).error) == "no"


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"output_tensors": [None]}, TritonModelException, "Output tensor .* should not be empty"),
        ({"output_tensors": [3]}, TypeError, "an output must be a Tensor"),
        ({"output_tensors": Tensor("OUT", np.zeros(1))}, TypeError, "must be a list, not Tensor"),
        ({"output_tensors": pb_utils.TritonError("e")}, TypeError, "a list, not TritonError"),
        ({"error": "e"}, TypeError, "the error must be a TritonError"),
    ],
)
def test_a_response_of_a_wrong_type_is_refused(
    fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        pb_utils.InferenceResponse(**fields)


def test_a_misspelt_name_is_reported_by_the_name_of_the_module() -> None:
    text = r"^module 'triton_python_backend_utils' .*'Tensor'\?$"
    with pytest.raises(AttributeError, match=text):
        _ = pb_utils.Tensr


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (3, "Expect dict, got <class 'int'>"),
        ({1: 1}, "keys to have type str, found type <class 'int'>"),
        ({"a": 1.5}, "values to have type bool/int/str, found type <class 'float'>"),
        ({"a": [1]}, "values to have type bool/int/str, found type <class 'list'>"),
        ({"a": 2**63}, "out of the range"),
    ],
)
def test_other_parameter_types_are_refused(parameters: Any, text: str) -> None:
    with pytest.raises(TritonModelException, match=text):
        pb_utils.InferenceResponse(parameters=parameters)


# --- requests


def test_a_received_request() -> None:
    request = received_request(
        make_input([1.0, 2.0], "FP64"),
        make_input([b"a", b"b"], "BYTES", "S"),
        parameters={"x": 1, "y": "é"},
        correlation_text="s",
        flags=1,
        timeout_us=5,
    )
    assert request.request_id() == "id-1"
    assert (request.correlation_id(), request.flags(), request.timeout()) == ("s", 1, 5)
    assert request.parameters() == '{"x":1,"y":"é"}'
    assert request.requested_output_names() == {"OUT"}
    assert [tensor.name() for tensor in request.inputs()] == ["IN", "S"]
    assert request.trace().get_context() is None and not request.is_cancelled()
    tensor = pb_utils.get_input_tensor_by_name(request, "IN")
    assert tensor is not None and tensor.as_numpy().tolist() == [1.0, 2.0]
    assert tensor.as_numpy() is tensor.as_numpy()
    strings = pb_utils.get_input_tensor_by_name(request, "S")
    assert strings is not None and strings.as_numpy().tolist() == [b"a", b"b"]
    assert pb_utils.get_input_tensor_by_name(request, "T") is None
    request.inputs().clear()
    assert len(request.inputs()) == 2


def test_a_request_for_another_model() -> None:
    tensor = Tensor("x", np.zeros(2))
    request = pb_utils.InferenceRequest(
        model_name="other",
        inputs=[tensor],
        requested_output_names=["b", "a", "b"],
        parameters={"p": True},
        correlation_id=3,
    )
    assert request.inputs() == [tensor]
    assert pb_utils.get_input_tensor_by_name(request, "x") is tensor
    assert request.requested_output_names() == {"a", "b"}
    assert (request.request_id(), request.correlation_id(), request.timeout()) == ("", 3, 0)
    assert json.loads(request.parameters()) == {"p": True}
    request.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
    assert request.flags() == 1
    with pytest.raises(TritonModelException, match="response sender"):
        request.get_response_sender()
    with pytest.raises(TritonModelException, match="only possible in a model"):
        request.exec()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"inputs": [None]}, TritonModelException, "Input tensor for request with id 'q' and mo"),
        ({"inputs": [3]}, TypeError, "must be a Tensor"),
        ({"requested_output_names": [""]}, TritonModelException, "Requested output name for"),
        ({"correlation_id": 1.5}, TritonModelException, "must be integer or string"),
        ({"parameters": {"a": 1.5}}, TritonModelException, "bool/int/str"),
        ({"inputs": None}, TypeError, "needs inputs"),
        ({"correlation_id": -1}, RuntimeError, "Unable to cast Python instance to C"),
        ({"correlation_id": 2**64}, RuntimeError, "Unable to cast Python instance to C"),
        ({"correlation_id": None}, TypeError, "must not be None"),
        ({"requested_output_names": [3]}, TypeError, "an output's name must be a str"),
        ({"requested_output_names": "OUT"}, TypeError, "the outputs must be a list"),
        ({"inputs": "x"}, TypeError, "inputs must be a list"),
        ({"parameters": "{}"}, TritonModelException, "Expect dict, got <class 'str'>"),
        ({"trace": None}, TypeError, "trace must be of type InferenceTrace"),
        ({"preferred_memory": 5}, TypeError, "preferred_memory must be of type PreferredMemory"),
        ({"model_name": 3}, TypeError, "model_name must be a str"),
        ({"model_version": "1"}, TypeError, "model_version must be an int"),
        ({"timeout": -1}, TypeError, "timeout must be in the range"),
        ({"timeout": 1.5}, TypeError, "timeout must be an int"),
        ({"flags": None}, TypeError, "flags must be an int"),
    ],
)
def test_bad_requests_refused(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    defaults: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "other"}
    with pytest.raises(kind, match=text):
        pb_utils.InferenceRequest(request_id="q", **{**defaults, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"inputs": ()},
        {"requested_output_names": ("A", "A")},
        {"model_name": ""},
        {"model_version": -5},
        {"timeout": 2**63},
        {"flags": 99},
        {"correlation_id": True},
        {"trace": pb_utils.InferenceTrace()},
        {"preferred_memory": pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 1)},
        {"parameters": {"triton_x": 1}},
    ],
)
def test_request_options_are_kept(arguments: dict[str, Any]) -> None:
    defaults: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "other"}
    request = pb_utils.InferenceRequest(**{**defaults, **arguments})
    for name in ("flags", "correlation_id", "timeout"):
        assert getattr(request, name)() == arguments.get(name, 0)


@pytest.mark.parametrize(("version", "text"), [(-1, ""), (0, "0"), (-5, "-5"), (3, "3")])
def test_only_version_minus_one_is_the_latest(
    monkeypatch: pytest.MonkeyPatch, version: int, text: str
) -> None:
    names = ("trace", "deadline_ns", "origins", "caller_lines")
    api = SimpleNamespace(**dict.fromkeys(names, lambda: ()))
    monkeypatch.setattr(server, "current_server", lambda: api)
    request = pb_utils.InferenceRequest(
        inputs=[], requested_output_names=[], model_name="other", model_version=version
    )
    assert request._call_request().version == text


def test_invalid_memory_and_flags_are_refused() -> None:
    request = pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="other")
    wrong_value: Any
    for wrong_value in (0, None):
        with pytest.raises(TypeError, match="preferred_memory_type"):
            pb_utils.PreferredMemory(wrong_value)
    for wrong_value in ("x", -1, None):
        with pytest.raises(TypeError):
            request.set_release_flags(wrong_value)
        with pytest.raises(TypeError):
            request.set_flags(wrong_value)


def test_numpy_numbers_are_accepted() -> None:
    more: dict[str, Any] = {"correlation_id": np.uint64(7), "timeout": np.int32(5)}
    request = pb_utils.InferenceRequest(
        model_name="other", requested_output_names=[], inputs=[], **more
    )
    assert (request.correlation_id(), request.timeout()) == (7, 5)
    assert type(request.correlation_id()) is type(request.timeout()) is int


def test_bytes_are_accepted_as_text() -> None:
    """Triton's BLS example passes a model name that it read from a BYTES tensor."""
    name: Any = np.array(["other"], dtype=object).astype(np.bytes_)[0]
    fields: dict[str, Any] = {"request_id": b"q", "requested_output_names": [b"b", "b", "\u00fc"]}
    tensor = Tensor(b"\xc3\xbc", np.zeros(1))  # type: ignore[arg-type]
    request = pb_utils.InferenceRequest(model_name=name, inputs=[tensor], **fields)
    assert request.requested_output_names() == {"b", "\u00fc"}
    assert (request.request_id(), request.inputs()[0].name()) == ("q", "\u00fc")
    assert pb_utils.TritonError(b"no").message() == "no"  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model_name must be UTF-8"):
        pb_utils.InferenceRequest(model_name=b"\xff", inputs=[], requested_output_names=[])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda: pb_utils.is_model_ready(3),  # type: ignore[arg-type]
        lambda: pb_utils.is_model_ready("other", 1),  # type: ignore[arg-type]
        lambda: pb_utils.load_model(None),  # type: ignore[arg-type]
        lambda: pb_utils.load_model("other", {}),  # type: ignore[arg-type]
        lambda: pb_utils.load_model("other", files={"file:1/model.py": "x"}),  # type: ignore[dict-item]
        lambda: pb_utils.load_model("other", files={1: b"x"}),  # type: ignore[dict-item]
        lambda: pb_utils.unload_model(b"\xff"),  # type: ignore[arg-type]
    ],
)
def test_calls_with_wrong_arguments_are_a_type_error(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        call()


# --- configurations


def config(**fields: Any) -> pb_utils.ModelConfig:
    base_config: dict[str, Any] = {"name": "m", "max_batch_size": 0, "input": [], "output": []}
    return pb_utils.ModelConfig(json.dumps({**base_config, **fields}))


INPUT_X = {"name": "X", "data_type": "TYPE_FP32", "dims": [4]}


def test_a_configuration_is_completed() -> None:
    made = config()
    made.set_max_batch_size(8)
    made.set_dynamic_batching()
    made.add_input({**INPUT_X, "optional": True})
    made.add_output(INPUT_X)
    made.set_model_transaction_policy({"decoupled": False})
    assert made.as_dict() == {
        "name": "m",
        "max_batch_size": 8,
        "input": [{**INPUT_X, "optional": True}],
        "output": [INPUT_X],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": False},
    }
    nameless = pb_utils.ModelConfig('{"input": []}')
    nameless.add_input(INPUT_X)
    assert nameless.as_dict() == {"input": [INPUT_X]}
    optional_x = {**INPUT_X, "optional": True}
    assert pb_utils.get_input_config_by_name(made.as_dict(), "X") == optional_x
    assert pb_utils.get_output_config_by_name(made.as_dict(), "X") == INPUT_X
    assert pb_utils.get_output_config_by_name(made.as_dict(), "Z") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(made.as_dict())
    assert not pb_utils.using_decoupled_model_transaction_policy({})


def test_equal_values_of_the_author_are_kept() -> None:
    tensor = {"name": "X", "data_type": "TYPE_INVALID", "dims": [], "format": "FORMAT_NONE"}
    kept = config(input=[tensor], max_batch_size=4, dynamic_batching={"preferred_batch_size": [4]})
    kept.add_input(INPUT_X)
    kept.set_max_batch_size(4)
    kept.set_dynamic_batching()
    assert kept.as_dict()["input"] == [{**INPUT_X, "format": "FORMAT_NONE"}]
    assert kept.as_dict()["dynamic_batching"] == {"preferred_batch_size": [4]}


@pytest.mark.parametrize(
    ("fields", "call", "text"),
    [
        ({"max_batch_size": 8}, lambda c: c.set_max_batch_size(4),
         "configuration specified max_batch_size 8, but in auto-complete-config function for "
         "model 'm' specified max_batch_size 4"),
        ({"sequence_batching": {}}, lambda c: c.set_dynamic_batching(),
         "Configuration specified scheduling_choice as 'sequence_batching', but "
         "auto-complete-config function for model 'm' tries to set scheduling_choice as "
         "'dynamic_batching'"),
        ({"input": [{**INPUT_X, "data_type": "TYPE_INT8"}]}, lambda c: c.add_input(INPUT_X),
         "unable to load model 'm', configuration expects datatype TYPE_INT8 for input 'X', "
         "model provides TYPE_FP32"),
        ({"output": [{**INPUT_X, "dims": [5]}]}, lambda c: c.add_output(INPUT_X),
         "model 'm', tensor 'X': the model expects dims [4] but the model configuration "
         "specifies dims [5]"),
        ({"input": [{**INPUT_X, "optional": False}]},
         lambda c: c.add_input({**INPUT_X, "optional": True}),
         "model 'm', tensor 'X': the model expects optional True but the model configuration "
         "specifies optional False"),
        ({}, lambda c: c.add_input({**INPUT_X, "reshape": {}}),
         "input 'X' in auto-complete-config function for model 'm' contains property other "
         "than 'name', 'data_type', 'dims' and 'optional'."),
        ({}, lambda c: c.add_output({**INPUT_X, "optional": True}),
         "output 'X' in auto-complete-config function for model 'm' contains property other "
         "than 'name', 'data_type' and 'dims'."),
        ({}, lambda c: c.add_output({"name": "X", "dims": [1]}),
         "output 'X' in auto-complete-config function for model 'm' is missing 'data_type' "
         "property."),
        ({}, lambda c: c.add_input({"dims": [1]}),
         "input in auto-complete-config function for model 'm' is missing 'name' property."),
        ({"model_transaction_policy": {"decoupled": True}},
         lambda c: c.set_model_transaction_policy({"decoupled": False}),
         "trying to change decoupled property in auto-complete-config for model 'm', which is "
         "already set to 'True'."),
        ({}, lambda c: c.set_model_transaction_policy({"coupled": False}),
         "model transaction property in auto-complete-config function for model 'm' contains "
         "property other than 'decoupled'."),
    ],
)  # fmt: skip
def test_contradicting_values_are_refused(fields: dict[str, Any], call: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        call(config(**fields))
    assert str(caught.value) == text


# --- metrics


@pytest.fixture
def no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_families", {})
    monkeypatch.setattr(metrics, "_has_changed", False)
    monkeypatch.setattr(metrics, "_on_change", None)  # a worker of an earlier test has set it


@pytest.mark.usefixtures("no_metrics")
def test_a_counter_and_a_gauge() -> None:
    family = pb_utils.MetricFamily("a_total", "what it is", pb_utils.MetricFamily.COUNTER)
    counter = family.Metric(labels={"x": "1"})
    counter.increment(2)
    counters = pb_utils.MetricFamily("a_total", "", pb_utils.MetricFamily.COUNTER)
    metric = counters.Metric({"x": "1"})
    metric.increment(0.5)
    assert counter.value() == metric.value() == 2.5
    with pytest.raises(TritonModelException, match="only be incremented monotonically"):
        counter.increment(-1)
    with pytest.raises(TritonModelException, match="COUNTER does not support Set"):
        counter.set(1)
    with pytest.raises(TritonModelException, match="COUNTER does not support Observe"):
        counter.observe(1)
    gauges = pb_utils.MetricFamily("b", "", pb_utils.MetricFamily.GAUGE)  # outlives its metric
    gauge = gauges.Metric()
    gauge.set(4)
    gauge.increment(-6.5)
    assert gauge.value() == -2.5
    changes = metrics.changes()
    assert changes is not None
    counter_record, histogram_record = changes
    assert counter_record == ["a_total", "what it is", "COUNTER", [[(("x", "1"),), [2.5], ()]]]
    assert histogram_record[3][0][0] == ()
    level, set_ns, increments = histogram_record[3][0][1]
    assert (level, increments) == (4, -6.5)
    assert set_ns > 0


@pytest.mark.usefixtures("no_metrics")
def test_changes_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[str] = []
    monkeypatch.setattr(metrics, "_on_change", lambda at_once: records.append("changed"))
    assert metrics.changes() is None
    family = pb_utils.MetricFamily("a", "", pb_utils.MetricFamily.COUNTER)
    assert metrics.changes() is None  # a family without metrics reports nothing
    counter = family.Metric()
    counter.increment(1)
    assert records == ["changed"]
    assert metrics.changes() == [["a", "", "COUNTER", [[(), [1], ()]]]]
    assert metrics.changes() is None
    counter.increment(1)
    assert records == ["changed"] * 2


@pytest.mark.usefixtures("no_metrics")
def test_a_histogram() -> None:
    family = pb_utils.MetricFamily("h", "", pb_utils.MetricFamily.HISTOGRAM)
    metric = family.Metric(buckets=[1, 2.5])
    for value in (0, 1, 2, 9):
        metric.observe(value)
    assert metrics.changes() == [["h", "", "HISTOGRAM", [[(), [12, 2, 1, 1], (1, 2.5)]]]]
    for call in (metric.value, lambda: metric.set(1), lambda: metric.increment(1)):
        with pytest.raises(TritonModelException, match="HISTOGRAM does not support"):
            call()


@pytest.mark.usefixtures("no_metrics")
def test_the_infinite_bucket_is_reported_once() -> None:
    family = pb_utils.MetricFamily("h", "", pb_utils.MetricFamily.HISTOGRAM)
    family.Metric(buckets=[1, float("inf")]).observe(7)
    assert metrics.changes() == [["h", "", "HISTOGRAM", [[(), [7, 0, 1], (1,)]]]]


@pytest.mark.usefixtures("no_metrics")
@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("COUNTER", {"labels": 3}, "Labels must be a dictionary."),
        ("COUNTER", {"buckets": [1]}, "Unexpected buckets found."),
        ("HISTOGRAM", {"buckets": 3}, "Buckets must be a list."),
        ("HISTOGRAM", {}, "Missing required buckets."),
        ("HISTOGRAM", {"buckets": [2, 1]}, "Bucket Boundaries must be strictly sorted"),
        ("HISTOGRAM", {"buckets": [1, 1]}, "Bucket Boundaries must be strictly sorted"),
        ("COUNTER", {"labels": {"a": 1}}, "attempt to access JSON non-string as string"),
        ("COUNTER", {"labels": {1: "a"}}, "Invalid label name"),
        ("HISTOGRAM", {"buckets": [2], "labels": {"le": "1"}}, "Invalid label name"),
        ("COUNTER", {"labels": {"a b": "1"}}, "Invalid label name"),
        ("GAUGE", {"labels": {"__a": "1"}}, "Invalid label name"),
    ],
)
def test_invalid_metrics_are_refused(kind: str, arguments: dict[str, Any], text: str) -> None:
    family = pb_utils.MetricFamily("m", "", getattr(pb_utils.MetricFamily, kind))
    with pytest.raises(TritonModelException, match=text):
        family.Metric(**arguments)


@pytest.mark.usefixtures("no_metrics")
def test_invalid_families_are_refused() -> None:
    with pytest.raises(TritonModelException, match="Invalid metric name"):
        pb_utils.MetricFamily("a b", "", pb_utils.MetricFamily.GAUGE)
    metric_family = pb_utils.MetricFamily("a", "", pb_utils.MetricFamily.GAUGE)
    with pytest.raises(TritonModelException, match="already exists with different type"):
        pb_utils.MetricFamily("a", "", pb_utils.MetricFamily.COUNTER)
    del metric_family
    pb_utils.MetricFamily("a", "", pb_utils.MetricFamily.COUNTER)
    kind: Any
    for kind in (5, "COUNTER", None, 0):
        with pytest.raises(TypeError, match="kind must be MetricFamily"):
            pb_utils.MetricFamily("c", "", kind)
    with pytest.raises(TypeError, match="description"):
        pb_utils.MetricFamily("b", None, pb_utils.MetricFamily.GAUGE)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_metrics")
def test_metric_values_must_be_numbers() -> None:
    wrong_value: Any
    families = {
        name: pb_utils.MetricFamily(name, "", getattr(pb_utils.MetricFamily, name.upper()))
        for name in ("counter", "gauge", "histogram")
    }
    counter, gauge = families["counter"].Metric(), families["gauge"].Metric()
    histogram = families["histogram"].Metric(buckets=[])
    for wrong_value in ("x", None, b"1", "1"):
        for change in (counter.increment, gauge.set, gauge.increment, histogram.observe):
            with pytest.raises(TypeError):
                change(wrong_value)
    with pytest.raises(RuntimeError, match="Unable to cast"):
        families["histogram"].Metric({"l": "1"}, buckets=[1, "x"])  # type: ignore[list-item]
    counter.increment(np.float32(0.5))  # type: ignore[arg-type]
    counter.increment(True)
    assert counter.value() == 1.5


@pytest.mark.usefixtures("no_metrics")
def test_operations_must_suit_the_metric_family() -> None:
    """A value is removed with the last live family object that has created it."""
    counters = pb_utils.MetricFamily("c", "first", pb_utils.MetricFamily.COUNTER)
    other_family = pb_utils.MetricFamily("c", "again", pb_utils.MetricFamily.COUNTER)
    counter, gauge = counters.Metric({"n": "1"}), counters.Metric({"n": "2"})
    other_metric = other_family.Metric({"n": "2"})
    gauge.increment(3)
    del gauge
    assert len(reported_labels()["c"]) == 2  # the value remains as long as its family
    del counters
    assert reported_labels() == {"c": [(("n", "2"),)]} and other_metric.value() == 3
    for use in (lambda: counter.increment(1), counter.value):
        with pytest.raises(TritonModelException, match="'MetricFamily' has been deleted"):
            use()
    del other_family
    assert reported_labels() == {}


def reported_labels() -> dict[str, list[Any]]:
    return {name: [labels for labels, _, _ in rows] for name, _, _, rows in metrics.changes() or []}


# --- the log


def test_invalid_log_messages_are_refused() -> None:
    wrong_value: Any
    for wrong_value in (None, 5):
        with pytest.raises(TypeError):
            pb_utils.Logger.log_info(wrong_value)
    for wrong_value in (5, "INFO", None):
        with pytest.raises(TypeError):
            pb_utils.Logger.log("a line", wrong_value)


def test_log_messages(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        pb_utils.Logger.log("one")
        pb_utils.Logger.log_warn("two %s")
        pb_utils.Logger.log_error("three")
        pb_utils.Logger.log_verbose("four")
        pb_utils.Logger.log("five", pb_utils.Logger.WARNING)
    records = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert records == [
        ("INFO", "one"), ("WARNING", "two %s"), ("ERROR", "three"), ("DEBUG", "four"),
        ("WARNING", "five"),
    ]  # fmt: skip
    with pytest.raises(TypeError):
        pb_utils.Logger.log_info(3)  # type: ignore[arg-type]
