"""The trace settings of --trace-config."""

import pytest

from shmserve.common.trace_settings import TraceSettings, parse_trace_config
from shmserve.errors import InvalidArgument


def test_trace_flags_equal_tritons() -> None:
    assert parse_trace_config([]) == TraceSettings()
    flags = ["level=TIMESTAMPS", "rate=5", "rate=6", "count=7", "triton,file=/t"]
    expected = TraceSettings(("TIMESTAMPS",), 6, 7, 8, "/t")
    assert parse_trace_config([*flags, "mode=triton", "triton,log-frequency=8"]) == expected
    flags = ["mode=opentelemetry", "opentelemetry,url=http://h/v1/traces", "level=TIMESTAMPS"]
    trace_config = parse_trace_config([*flags, "opentelemetry,resource=a=b"])
    assert trace_config.exporter == (("url", "http://h/v1/traces"), ("resource", "a=b"))
    assert trace_config.is_on


@pytest.mark.parametrize(
    ("flags", "expected_error"),
    [
        (["rate"], "'rate' is not SETTING=VALUE, where SETTING is one of mode, level"),
        (["file=/x"], "'file=/x' is not SETTING=VALUE"),
        (["mode=zipkin"], "mode=zipkin is not one of triton, opentelemetry"),
        (["rate=x"], "Unable to parse 'trace_rate', got: x"),
        (["level=TENSOR"], "Unable to parse 'trace_level', got: TENSOR"),
        (["mode=opentelemetry", "opentelemetry,url=grpc://h:1"], "url=grpc://h:1 is not an http"),
        (["mode=opentelemetry", "opentelemetry,resource=x"], "resource=x is not KEY=VALUE"),
        (["mode=opentelemetry", "opentelemetry,bsp_schedule_delay=0"], "=0 is not a number"),
    ],
)
def test_unknown_trace_settings_are_refused(flags: list[str], expected_error: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_trace_config(flags)
    assert caught.value.message.startswith("--trace-config: ")
    assert expected_error in caught.value.message
