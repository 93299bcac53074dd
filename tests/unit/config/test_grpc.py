"""The environment that gRPC's core is started in."""

import pytest

from shmserve.config.grpc import environment


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("", "-event_engine_listener"),
        ("tcp_rcv_lowat", "tcp_rcv_lowat,-event_engine_listener"),
        ("event_engine_listener", "event_engine_listener"),
        ("a,-event_engine_listener", "a,-event_engine_listener"),
    ],
)
def test_gRPC_has_no_threads_that_read_unless_somebody_decided(given: str, made: str) -> None:
    before = {"HOME": "/root", "GRPC_EXPERIMENTS": given}
    assert environment(before) == {"HOME": "/root", "GRPC_EXPERIMENTS": made}
    assert environment({}) == {"GRPC_EXPERIMENTS": "-event_engine_listener"}
