"""The numbered rules of the schedulers; the docstring of a test names each rule that it checks."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[3]

RULES = {
    "3.0": "default scheduler: first in, first out, one request an execution, no queue policies",
    "3.1.1": "the unit is the request's batch size, at least 1; the sum never passes the maximum",
    "3.1.2": "the walk stops at the first request that does not fit or has other shapes",
    "3.1.3": "the largest preferred size reached; past the largest one, what is there",
    "3.1.4": "a preferred size runs exactly, at once, while the delay is not over",
    "3.1.5": "when the delay is over everything runs, up to the maximum",
    "3.1.6": "no delay: what is there; else wait for the delay, from the oldest, or a timeout",
    "3.1.7": "the largest preferred size runs at once; by default that is the maximum",
    "3.1.8": "a batch is formed when an instance can take it; with policies only then",
    "3.1.9": "preserve_ordering: responses in the order of requests",
    "3.1.10": "shutdown refuses new requests",
    "3.2.1": "strict levels, 1 the highest; 0 and no level are the default; batches span levels",
    "3.2.2": "a policy a level; its bound counts waiting and delayed requests of that level",
    "3.2.3": "timeouts count from the enqueue; a request's own, if allowed and shorter",
    "3.2.4": "REJECT refuses, DELAY puts behind the level, without a timeout any more",
    "3.2.5": "expiry by a timer, whatever instances do",
    "3.2.6": "more than the timeout's microseconds must have passed",
    "3.8.1": "a cache if server and model say so; none with sequences, or decoupled",
    "3.8.2": "the key: model, version, inputs with shapes and types, parameters, outputs",
    "3.8.3": "a hit executes nothing, counts as success, queue and hit, and keeps the order",
    "3.8.4": "a miss inserts after the execution; what is too large is logged, and a miss",
    "3.8.5": "bounded by bytes; the least recently used is evicted",
    "3.9.1": "an instance executes with its resources; the capacity is the most that one needs",
    "3.9.2": "what could never run, or is global and a device's, does not load",
    "3.9.3": "the fewest executions times the priority first; nobody is held up by who waits",
    "3.9.4": "warm-up before ready, by instance: N requests of one, count times; 0 is skipped",
    "3.9.5": "a sample that fails, or has a variable dimension, fails the load",
}


def _tested_rules() -> set[str]:
    texts = (path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    return {number for text in texts for number in re.findall(r"Rule (\d+\.\d+(?:\.\d+)?)\b", text)}


@pytest.mark.parametrize("number", RULES)
def test_a_rule_has_a_test_that_names_it(number: str) -> None:
    assert number in _tested_rules()


def test_tests_name_only_existing_rules() -> None:
    assert _tested_rules() <= set(RULES)
