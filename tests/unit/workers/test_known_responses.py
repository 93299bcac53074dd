"""Small responses of a known schema are packed from a template, and validated as before."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.ipc.messages.inference import Work
from shmserve.ipc.tensors.descriptors import Range
from shmserve.ipc.tensors.schemas import (
    INLINE_LIMIT,
    RequestedOutput,
    RequestSchema,
    pack_inference,
)
from shmserve.workers.backends import Output, Request, Response
from shmserve.workers.batch import backend_request
from tests.rigs.worker_rig import (
    CLIENT_PID,
    Region,
    Rig,
    inference,
    model_config,
    tensor,
    tensor_config,
)

CONFIG = model_config(
    [tensor_config("X", "FP32", [-1])],
    [tensor_config("A", "FP32", [-1]), tensor_config("B", "INT32", [-1, 2])],
)
ZERO = tensor("X", np.zeros(1, np.float32))
OUTPUT_A = st.tuples(
    st.just("A"), st.sampled_from(["<f4", ">f4", "<f8"]), st.sampled_from([(1,), (3,)])
)
OUTPUT_B = st.tuples(
    st.just("B"), st.sampled_from(["<i4", ">i4"]), st.sampled_from([(1, 2), (2, 2), (2,)])
)
OUTPUT_C = st.tuples(st.just("C"), st.just("<i4"), st.just((1,)))
RESPONSES = st.lists(
    st.tuples(
        st.lists(
            st.one_of(OUTPUT_A, OUTPUT_B, OUTPUT_C), max_size=3, unique_by=lambda item: item[0]
        ),
        st.sampled_from([(), ("A",), ("B", "A")]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(responses=RESPONSES)
def test_repeated_responses_equal_single_ones(worker: Rig, responses: Any) -> None:
    model_responses: list[Response] = []
    worker.serve_function(lambda requests: [model_responses[-1]], CONFIG)
    for count, (outputs, expected, parameters) in enumerate(responses * 3):
        arrays = {
            name: (np.arange(np.prod(shape)) + count).astype(kind).reshape(shape)
            for name, kind, shape in outputs
        }
        kinds = {"A": "FP32", "B": "INT32", "C": "INT32"}
        model_responses.append(
            Response(
                [Output(name, kinds[name], value) for name, value in arrays.items()],
                {"n": 1} if parameters else {},
            )
        )
        requested = [RequestedOutput(name) for name in expected]
        reply = worker.infer(ZERO, outputs=requested)
        shown = {name: value for name, value in arrays.items() if name in (expected or ("A", "B"))}
        is_invalid = ("A" in shown and shown["A"].dtype == np.float64) or (
            "B" in shown and shown["B"].ndim != 2
        )
        assert (reply.code != "") == is_invalid, reply.message
        if is_invalid:
            continue
        assert [ref.name for ref in reply.outputs] == list(shown)
        assert reply.answer is not None
        assert reply.answer.parameters == ({"n": 1} if parameters else {})
        for name, value in shown.items():
            assert np.array_equal(reply.array(name), value)
        assert worker.finished.copied_output_bytes == sum(value.nbytes for value in shown.values())


@pytest.mark.parametrize("reuse", [False, True])
def test_outputs_with_client_ranges_are_written_each_time(
    worker: Rig, region: Region, reuse: bool
) -> None:
    """An unchanged input may stay in place; copies and other arrays are written."""
    requested_outputs = [RequestedOutput("A", region.memory_range(32, 16), reuse)]
    size = np.dtype("f4").itemsize

    def execute(requests: list[Request]) -> list[Response]:
        (request,) = requests
        if output_kind == "owned":
            request.inputs["X"].detach()
        rows = request.inputs["X"].numpy()
        variants = {"shorter": rows[:2] * 2, "swapped": (rows * 2).astype(">f4"), "new": rows * 2}
        return [Response([Output("A", "FP32", variants.get(output_kind, rows))])]

    worker.serve_function(execute, CONFIG)
    output_kinds = ["new", "returned", "owned", "shorter", "swapped"]
    for count, output_kind in enumerate((output_kinds + output_kinds[::-1]) * 2):
        numbers = np.arange(4, dtype="f4") + count
        sent_tensor = tensor("X", numbers, region.write(0, numbers))
        region.write(32, np.full(4, -1, "f4"))
        reply = worker.infer(sent_tensor, outputs=requested_outputs)
        (output,) = reply.outputs
        assert isinstance(output.data, Range)
        expected = numbers if output_kind in ("returned", "owned") else numbers * 2
        expected = expected[: 2 if output_kind == "shorter" else 4]
        stays_in_input = output_kind == "returned" and reuse
        assert output.data == region.memory_range(0 if stays_in_input else 32, size * len(expected))
        assert output.shape == expected.shape
        assert region.read(output.data.offset, output.data.byte_size) == expected.tobytes()
        assert worker.finished.copied_output_bytes == (0 if stays_in_input else expected.nbytes)


@pytest.mark.parametrize("has_range", [False, True])
def test_texts_of_all_sizes_are_written(worker: Rig, region: Region, has_range: bool) -> None:
    """A long text is too large for the message, and short texts of the same shape follow it."""
    config = model_config(
        [tensor_config("X", "FP32", [-1])],
        [tensor_config("T", "STRING", [-1]), tensor_config("N", "INT32", [-1])],
    )
    texts = [b"", b"a", b"bc", b"d" * INLINE_LIMIT, b"e", b"f" * INLINE_LIMIT]

    def execute(requests: list[Request]) -> list[Response]:
        return [Response([Output.of_values("T", "BYTES", [text]), Output("N", "INT32", number)])]

    worker.serve_function(execute, config)
    memory_range = region.memory_range(0, 2 * INLINE_LIMIT) if has_range else None
    requested = [RequestedOutput("T", memory_range), RequestedOutput("N")]
    for count, text in enumerate(texts * 2):
        number = np.full(1, count, np.int32)
        reply = worker.infer(ZERO, outputs=requested)
        output = reply.outputs[0]
        assert isinstance(output.data, Range) == (has_range or len(text) == INLINE_LIMIT)
        raw = output.data
        if isinstance(raw, Range):
            extent = raw.offset, raw.byte_size
            raw = region.read(*extent) if has_range else bytes(worker.context.arena.view(raw))
        assert raw == len(text).to_bytes(4, "little") + text
        assert reply.array("N", worker).tolist() == [count]
        assert worker.finished.copied_output_bytes == 4 + len(text) + number.nbytes


def test_rows_of_another_number_are_checked(worker: Rig) -> None:
    """The allowed shape of an output depends on the number of rows in the request."""
    config = model_config(
        [tensor_config("X", "FP32", [1])], [tensor_config("Y", "FP32", [1])], max_batch_size=8
    )

    def answer_two_rows(requests: list[Request]) -> list[Response]:
        return [Response([Output("Y", "FP32", np.ones((2, 1), np.float32))]) for _ in requests]

    worker.serve_function(answer_two_rows, config)
    for rows, code in [(2, "")] * 4 + [(3, "INTERNAL"), (2, "")]:
        reply = worker.infer(tensor("X", np.ones((rows, 1), np.float32)))
        assert reply.code == code


def test_requests_that_differ_outside_the_schema_are_parsed_once(
    worker: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, sequences and limits are outside the packed schema, and each request has its own."""
    executed_work: list[Any] = []
    read_schemas: list[bytes] = []

    def execute(requests: list[Request]) -> list[Response]:
        executed_work.extend(request.work for request in requests)
        return [Response([Output("A", "FP32", np.zeros(1, "f4"))]) for _ in requests]

    def read_counted(schema: bytes) -> RequestSchema:
        read_schemas.append(schema)
        return RequestSchema(schema)

    monkeypatch.setattr(backend_request, "RequestSchema", read_counted)
    worker.serve_function(execute, CONFIG)
    sent_work = [
        Work(
            1,
            CLIENT_PID,
            *pack_inference(inference(tensor("X", np.full(2, number, np.float32)))),
            request_id=f"id-{number}",
            flags=number % 4,
            correlation_id=number,
            correlation_text="x" * (number % 3),
            timeout_us=number,
            priority=number,
            deadline_ns=number,
        )
        for number in range(8)
    ]
    for unit_of_work in sent_work:
        worker.execute([unit_of_work])
    assert executed_work == sent_work
    assert read_schemas == [sent_work[0].schema]


@pytest.mark.parametrize(
    ("repeats", "parameters", "error"),
    [
        (4096, {}, ""),
        (4097, {}, "a response may have at most 4096 outputs, got 4097"),
        (1, {str(index): index for index in range(4096)}, ""),
        (1, {str(index): 0 for index in range(4097)}, "at most 4096 parameters, got 4097"),
        (1, {"a": "b" * (1 << 20)}, "at most 1048576 bytes are allowed"),
    ],
    ids=["4,096 outputs", "4,097 outputs", "4,096 parameters", "4,097 parameters", "1 MiB"],
)
def test_the_size_of_a_response_is_limited(
    worker: Rig, repeats: int, parameters: dict[str, Any], error: str
) -> None:
    """Without limits, a response would block the processes that other clients use."""
    output = Output("A", "FP32", np.zeros(1, np.float32))
    response = Response([output] * repeats, parameters)
    worker.serve_function(lambda requests: [response], CONFIG)
    for _ in range(2):
        reply = worker.infer(ZERO)
        assert error in reply.message
        assert (reply.code != "") == bool(error), reply.message


def test_a_response_that_is_too_large_keeps_no_memory(worker: Rig) -> None:
    output = Output("A", "FP32", np.zeros(INLINE_LIMIT, np.float32))
    response = Response([output], {"a": "b" * (1 << 20)})
    worker.serve_function(lambda requests: [response], CONFIG)
    reply = worker.infer(ZERO)
    assert "at most 1048576 bytes are allowed" in reply.message
    assert len(worker.context.output_memory) == 0
