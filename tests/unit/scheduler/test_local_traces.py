"""Traces of local clients' requests: which requests are traced, and the report at their end."""

import time
from dataclasses import asdict
from typing import Any

import pytest

from shmserve.common.trace_settings import TraceSettings
from shmserve.ipc.messages.inference import Failed, Finished, Responded, Settled, Submit
from shmserve.ipc.messages.supervision import RequestTraced, SetTracing
from shmserve.ipc.trace import TraceContext
from shmserve.scheduler.hosting.local_clients import LocalTraces

PEER = b"900.1.x"
CALLER_CONTEXT = TraceContext("1" * 32, "2" * 16, "3" * 16, is_sampled=True)


class FakeControlLink(list[Any]):
    """A fake control link."""

    malformed_messages = 0

    def post(self, message: Any) -> None:
        self.append(message)


def traces(slow_ms: int = 0, **settings: Any) -> tuple[LocalTraces, FakeControlLink]:
    control_link = FakeControlLink()
    local_traces = LocalTraces("m", "1", control_link)
    local_traces.apply_settings(SetTracing({"": asdict(TraceSettings(**settings))}, slow_ms))
    return local_traces, control_link


def submit(number: int, trace: str = "", age_ms: int = 0) -> Submit:
    arrived_ns = time.monotonic_ns() - age_ms * 1_000_000
    return Submit(number, b"", [], arrived_ns, 0, 0, 0, "id", trace=trace)


def test_no_records_without_a_trace_or_limit() -> None:
    local_traces, control_link = traces()
    assert not local_traces.is_active
    submitted_request = submit(1, CALLER_CONTEXT.encoded)
    assert local_traces.start_trace(PEER, submitted_request) is submitted_request
    local_traces.end_trace(PEER, Finished(1, b"", []))
    assert not control_link and not local_traces.measured_requests


def test_one_of_every_trace_rate_requests_is_reported() -> None:
    local_traces, link = traces(trace_level=("TIMESTAMPS",), trace_rate=2)
    assert local_traces.is_active
    for number in range(1, 5):
        assert bool(local_traces.start_trace(PEER, submit(number)).trace) is (number % 2 == 0)
        local_traces.end_trace(PEER, Finished(number, b"", [], spans=b"spans"))
    assert [(r.is_sampled, r.spans, r.error) for r in link] == [(True, b"spans", "")] * 2
    assert isinstance(link[0], RequestTraced) and link[0].request_id == "id"


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_caller_decides_for_opentelemetry(is_sampled: bool) -> None:
    tracer, link = traces(trace_level=("TIMESTAMPS",), trace_rate=1, trace_mode="opentelemetry")
    tracer.start_trace(PEER, submit(1, CALLER_CONTEXT._replace(is_sampled=is_sampled).encoded))
    tracer.end_trace(PEER, Finished(1, b"", []))
    assert [TraceContext.of(span.trace).trace_id for span in link] == ["1" * 32] * is_sampled
    tracer.start_trace(
        PEER, submit(2, TraceContext.new().encoded)
    )  # requests an explanation, but no trace
    tracer.end_trace(PEER, Finished(2, b"", []))
    assert len(link) == 1 + is_sampled


def test_slow_requests_are_reported_at_their_last_response() -> None:
    local_traces, control_link = traces(slow_ms=100)
    fast_request, slow_request, failing_request, cancelled_request = (
        submit(1),
        submit(2, age_ms=150),
        submit(3, age_ms=150),
        submit(4),
    )
    for r in (fast_request, slow_request, failing_request, cancelled_request):
        assert local_traces.start_trace(PEER, r).trace
    local_traces.end_trace(PEER, Finished(1, b"", []))
    local_traces.end_trace(PEER, Responded(2, "", "", b"x", [b"x"], final=False))
    assert not control_link
    local_traces.end_trace(PEER, Responded(2, "", "", b"", [], final=True))
    local_traces.end_trace(PEER, Failed(3, "INTERNAL", "boom", 0, early=True))
    local_traces.end_trace(PEER, Settled(3))
    assert [(r.is_sampled, r.error) for r in control_link] == [(False, ""), (False, "boom")]
    local_traces.process_exited(901)
    assert local_traces.measured_requests
    local_traces.start_trace(PEER, submit(5, age_ms=150))
    local_traces.process_exited(900)
    assert not local_traces.measured_requests
    assert [r.error for r in control_link[2:]] == [
        "the client has disconnected"
    ]  # the other request was faster than the limit of slow requests
