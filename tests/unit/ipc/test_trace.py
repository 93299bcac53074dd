"""Trace contexts, and the spans that processes report."""

from typing import Any

import msgpack
import numpy as np
import pytest

from shmserve.ipc.tensors.arrays import elements_as_text
from shmserve.ipc.trace import (
    Span,
    TraceContext,
    TracedTensor,
    is_encoded_trace,
    phase_durations,
    unpack_spans,
)

TRACE, CALLER_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def span(span_id: str, parent_id: str, began_us: int = 0, **fields: Any) -> Span:
    """Return a span that is enqueued at once, and whose other times are 10 us apart."""
    times_ns = [us * 1000 for us in range(began_us, began_us + 60, 10)]
    template = Span._make([span_id, parent_id, "m", "1", "", times_ns[0], *times_ns, 4, "full"])
    return template._replace(**fields)


def test_a_header_is_read_and_passed_on() -> None:
    caller = TraceContext.of_header(f" 00-{TRACE}-{CALLER_SPAN}-01 ")
    assert caller == (TRACE, CALLER_SPAN, "", True, False)
    child = caller.child()
    assert child.traceparent == f"00-{TRACE}-{child.span_id}-01"
    assert (child.trace_id, child.parent_id) == (TRACE, CALLER_SPAN)
    assert child.span_id != CALLER_SPAN
    assert TraceContext.of(child.encoded) == child


@pytest.mark.parametrize(
    ("header", "is_valid"),
    [
        (f"00-{TRACE}-{CALLER_SPAN}-00", True),
        (f"01-{TRACE}-{CALLER_SPAN}-01-more", True),
        (f"ff-{TRACE}-{CALLER_SPAN}-01", False),
        (f"00-{TRACE}-{CALLER_SPAN}", False),
        (f"00-{'0' * 32}-{CALLER_SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{CALLER_SPAN}-01", False),
        ("x" * 100_000, False),
    ],
)
def test_a_malformed_trace_header_is_ignored(header: str, is_valid: bool) -> None:
    assert (TraceContext.of_header(header) is not None) is is_valid


def test_spans_are_concatenated() -> None:
    spans = [span("a", ""), span("b", "a")]
    assert unpack_spans(b"".join(member.packed() for member in spans)) == spans
    assert unpack_spans(b"") == []


@pytest.mark.parametrize(
    ("trace", "is_valid"),
    [
        (TraceContext.new().encoded, True),
        (TraceContext.new(is_sampled=True).child().encoded, True),
        ("", False),
        (TraceContext.new().traceparent, False),
        (f"00-{TRACE.upper()}-{CALLER_SPAN}-01-", False),
        (f"00-{TRACE}-{CALLER_SPAN}-01-{CALLER_SPAN}x", False),
    ],
)
def test_a_trace_message_is_validated(trace: str, is_valid: bool) -> None:
    assert is_encoded_trace(trace) is is_valid


@pytest.mark.parametrize("wrong_fields", [{"span_id": "x"}, {"parent_id": "-"}, {"version": "one"}])
def test_a_malformed_span_is_rejected(wrong_fields: dict[str, Any]) -> None:
    first_span, second_span = span("a", ""), span("b", "a")._replace(**wrong_fields)
    assert unpack_spans(first_span.packed() + second_span.packed()) == [first_span]


@pytest.mark.parametrize(
    "junk", [b"\xc1", b"\x01", b"\x91\x01", msgpack.packb(["a"] * 14), b"\xdd"]
)
def test_malformed_data_end_the_spans(junk: bytes) -> None:
    assert unpack_spans(span("a", "").packed() + junk) == [span("a", "")]


def test_an_explanation_has_the_times_of_all_calls() -> None:
    own_span = span("a", "g", 100)
    call = span("b", "a", 110, model="other")
    phases = phase_durations([own_span, call, span("z", "elsewhere")], "a", 50_000, 80_000, 200_000)
    assert phases == {
        "total_us": 150,
        "receive_us": 30,
        "batch_size": 4,
        "batch_closed": "full",
        "queue_us": 30,
        "compute_input_us": 10,
        "compute_infer_us": 10,
        "compute_output_us": 10,
        "calls": [
            {
                "model": "other",
                "version": "1",
                "total_us": 50,
                "batch_size": 4,
                "batch_closed": "full",
                "queue_us": 10,
                "compute_input_us": 10,
                "compute_infer_us": 10,
                "compute_output_us": 10,
            }
        ],
        "respond_us": 60,
    }


def test_an_explanation_of_an_ensemble_has_steps() -> None:
    ensemble = span("a", "g", compute_start_ns=0, compute_end_ns=0, close_reason="")
    explanation = phase_durations([ensemble, span("b", "a", model="step")], "a", 0, 0, 100_000)
    assert [step["model"] for step in explanation["steps"]] == ["step"]
    assert "queue_us" not in explanation
    assert phase_durations([], "a", 0, 1000, 2000) == {"total_us": 2, "receive_us": 1}


def test_tensors_travel_beside_the_spans() -> None:
    traced_tensor = TracedTensor("ab", True, "Y", "FP32", "1,2", "0.5,1")
    traced_tensors: list[TracedTensor] = []
    packed_span = span("ab", "").packed()
    assert unpack_spans(packed_span + traced_tensor.packed() + packed_span, traced_tensors) == [
        span("ab", ""),
        span("ab", ""),
    ]
    assert traced_tensors == [traced_tensor]
    context = TraceContext.new(is_sampled=True, with_tensors=True)
    assert is_encoded_trace(context.encoded)
    assert TraceContext.of(context.child().encoded).with_tensors
    assert not TraceContext.of(TraceContext.new(is_sampled=True).encoded).with_tensors
    assert context.traceparent.endswith("-01")


@pytest.mark.parametrize(
    ("datatype", "array", "text"),
    [
        ("FP32", np.array([[0.1, 2.0], [1e10, -3.25]], np.float32), "0.1,2,1e+10,-3.25"),
        ("FP16", np.array([1.5], np.float16), "1.5"),
        ("BF16", np.array([0x3FC0], np.uint16), "1.5"),
        ("INT8", np.array([-1, 65], np.int8), "-1,65"),
        ("UINT64", np.array([2**64 - 1], np.uint64), "18446744073709551615"),
        ("BOOL", np.array([True, False]), "1,0"),
        ("BYTES", np.array([b"a", "b", b"\xff"], np.object_), '"a","b","\ufffd"'),
        ("FP32", np.zeros((0, 3), np.float32), ""),
    ],
)
def test_trace_elements_equal_tritons(datatype: str, array: Any, text: str) -> None:
    assert elements_as_text(datatype, array) == text
