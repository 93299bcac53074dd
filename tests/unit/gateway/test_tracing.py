"""Which requests are traced, and the file that traces are written to."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from shmserve.common.trace_settings import Sampler, Samplers, TraceSettings
from shmserve.gateway.tracer import Tracer, append_entries, create_next_file

TRACE_SETTINGS = TraceSettings(("TIMESTAMPS",), trace_rate=3)
SAMPLED_HEADER = f"00-{'1' * 32}-{'2' * 16}-01"


@pytest.mark.parametrize(
    ("rate", "count", "expected_traces"),
    [(1, -1, 12), (3, -1, 4), (3, 2, 2), (0, -1, 0), (1, 0, 0), (100, -1, 0)],
)
def test_sampling_has_a_rate_and_a_count(rate: int, count: int, expected_traces: int) -> None:
    sampler = Sampler(TraceSettings(("TIMESTAMPS",), rate, count))
    assert sum(sampler.should_trace() for _ in range(12)) == expected_traces
    assert not Sampler(TraceSettings(trace_rate=rate, trace_count=count)).should_trace()


def test_unchanged_settings_keep_their_count() -> None:
    samplers = Samplers()
    assert not samplers.is_on
    settings = {"": asdict(TraceSettings()), "m": asdict(TRACE_SETTINGS)}
    samplers.set(settings)
    assert samplers.is_on and samplers.of("other") is samplers.of("")
    sampler = samplers.of("m")
    samplers.set(settings | {"": asdict(TRACE_SETTINGS)})
    assert samplers.of("m") is sampler and samplers.of("other") is not sampler


def test_no_trace_is_created_without_need() -> None:
    tracer = Tracer()
    assert not tracer.is_active and tracer.begin_trace("m", "1", "", 0, "", False) is None
    assert tracer.begin_trace("m", "1", "", 0, "nonsense", False) is None
    trace = tracer.begin_trace("m", "1", "", 0, "", True)
    assert trace is not None and not trace.is_sampled
    caller_trace = tracer.begin_trace("m", "1", "", 0, SAMPLED_HEADER, False)
    assert caller_trace is not None and caller_trace.scheduler_context.trace_id == "1" * 32
    assert (
        caller_trace.scheduler_context.is_sampled
    )  # the called request is sampled as its caller decides


def test_a_caller_decides_for_opentelemetry() -> None:
    tracer = Tracer()
    always_traced = TraceSettings(("TIMESTAMPS",), 1, trace_mode="opentelemetry")
    tracer.apply_settings({"": asdict(always_traced)})
    assert tracer.is_active
    unsampled_header = SAMPLED_HEADER[:-1] + "0"
    for header, is_sampled in ((SAMPLED_HEADER, True), (unsampled_header, False), ("", True)):
        trace = tracer.begin_trace("m", "1", "", 0, header, False)
        assert trace is not None and trace.is_sampled is is_sampled


def test_a_file_is_whole_after_each_write(tmp_path: Path) -> None:
    path = str(tmp_path / "traces")
    for number in range(3):
        append_entries(path, [{"id": number}, {"id": number}])
        assert len(json.loads(Path(path).read_text())) == 2 * (number + 1)
    assert create_next_file(path) == f"{path}.0"
    assert create_next_file(path) == f"{path}.1"


def test_files_of_other_formats_are_not_changed(tmp_path: Path) -> None:
    other_file = tmp_path / "notes"
    other_file.write_text("notes")
    with pytest.raises(ValueError, match="JSON array of traces"):
        append_entries(str(other_file), [{"id": 1}])
    assert other_file.read_text() == "notes"
