"""Who reads gRPC's connections."""

from __future__ import annotations

import functools
import threading

import pytest

from shmserve.gateway.grpc.core.readers import experiments, start


@pytest.mark.parametrize(
    ("given", "ours", "made"),
    [
        ("", True, "-event_engine_listener"),
        ("", False, "event_engine_listener"),
        ("tcp_rcv_lowat", False, "tcp_rcv_lowat,event_engine_listener"),
        ("event_engine_listener", True, "event_engine_listener"),
        ("a,-event_engine_listener", False, "a,-event_engine_listener"),
    ],
)
def test_our_threads_read_where_they_can_unless_somebody_decided(
    given: str, ours: bool, made: str
) -> None:
    assert experiments(given, ours=ours) == made


class _Queue:
    """As gRPC's: every thread that waits is kept until all are here."""

    def __init__(self, threads: int) -> None:
        self.all_here = threading.Barrier(threads)

    def _poll_wrapper(self) -> None:
        self.all_here.wait(10)

    def handle(self, loop: object) -> None:
        raise AssertionError("nothing has happened")


def test_several_threads_wait_beside_the_one_of_grpc() -> None:
    queue = _Queue(8)  # seven, and this one for gRPC's own
    start(functools.partial(queue.handle, object()))
    queue._poll_wrapper()


def test_what_is_not_gRPCs_queue_starts_nothing() -> None:
    before = threading.active_count()
    start(print)
    start(functools.partial(print, 1))
    assert threading.active_count() == before
