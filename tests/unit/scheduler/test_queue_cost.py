"""The cost of a scheduling decision does not grow with the number of queued requests."""

import sys
from types import FrameType
from typing import Any

import pytest

from bench.load.queue_cost import CONFIG, BusyQueue

_TURN_COUNT = 200
_FLAGS = {
    "batching_strategy": {"string_value": "adaptive"},
    "target_p99_ms": {"string_value": "50"},
}


def calls_per_request(queued_count: int, config: dict[str, Any]) -> float:
    busy_queue, calls = BusyQueue(queued_count, config), 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(_TURN_COUNT):
        busy_queue.turn()
    sys.setprofile(count)
    try:
        requests = sum(busy_queue.turn() for _ in range(_TURN_COUNT))
    finally:
        sys.setprofile(None)
    return calls / requests


@pytest.mark.parametrize("parameters", [{}, _FLAGS], ids=["prefer_batch", "adaptive"])
def test_a_request_costs_no_more_with_many_queued(parameters: dict[str, Any]) -> None:
    """Priorities, timeouts that reject and delay, and cancellations in the queue."""
    config = {**CONFIG, "parameters": parameters}
    few_cost, many_cost = (calls_per_request(queued, config) for queued in (100, 20_000))
    assert many_cost < few_cost * 1.15
