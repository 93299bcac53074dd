"""The scheduling settings that a configuration results in."""

from typing import Any

import pytest

from shmserve.ipc.messages.supervision import SchedulingLimits
from shmserve.ipc.model_spec import LevelPolicy, ModelSpec
from shmserve.scheduler.settings import Batching, QueuePolicies, Settings


def read_settings(config: dict[str, Any], **server: Any) -> Settings:
    return Settings.read(
        ModelSpec.of({"name": "m", "max_batch_size": 8, **config}), "3", SchedulingLimits(**server)
    )


def test_without_a_batching_block_only_the_servers_bound_applies() -> None:
    settings = read_settings({}, max_queue_size=100, delay_scheduler=4)
    assert settings == Settings(
        "m", "3", 8, None, QueuePolicies(LevelPolicy(max_queue_size=100)), False, 0
    )


def test_every_setting_is_read() -> None:
    block = {
        "preferred_batch_size": [4, 6],
        "max_queue_delay_microseconds": 100,
        "preserve_ordering": True,
        "priority_levels": 2,
        "default_priority_level": 1,
        "default_queue_policy": {"timeout_action": "REJECT", "default_timeout_microseconds": 50,
            "allow_timeout_override": True, "max_queue_size": 10},
        "priority_queue_policy": {"1": {"max_queue_size": 1}},
    }  # fmt: skip
    settings = read_settings(
        {
            "dynamic_batching": block,
            "parameters": {"execution_timeout_seconds": {"string_value": "0.25"}},
        },
        max_queue_size=100,
        execution_timeout_s=60,
        request_timeout_is_deadline=True,
        delay_scheduler=4,
    )
    assert settings.batching == Batching(8, frozenset({4, 6}), 100_000)
    level = LevelPolicy("REJECT", 50, True, 10)
    assert settings.policies == QueuePolicies(level, 2, 1, {1: LevelPolicy(max_queue_size=1)}, True)
    assert settings.timeout_is_deadline and settings.preserve_ordering
    assert settings.execution_limit_ns == 250_000_000 and settings.hold_thresholds == (4, 0)


def test_a_priority_that_is_no_level_is_the_default_level() -> None:
    block = {
        "priority_levels": 3,
        "default_priority_level": 2,
        "default_queue_policy": {"max_queue_size": 9},
        "priority_queue_policy": {"3": {"default_timeout_microseconds": 7}},
    }
    policies = read_settings({"dynamic_batching": block}, max_queue_size=100).policies
    assert list(map(policies.level, (0, 1, 2, 3, 4, 2**64 - 1))) == [2, 1, 2, 3, 2, 2]
    assert policies.policy(1) == policies.policy(2) == LevelPolicy(max_queue_size=9)
    assert policies.policy(3) == LevelPolicy(default_timeout_microseconds=7, max_queue_size=100)


@pytest.mark.parametrize(
    ("block", "is_limited"),
    [
        ({}, False),
        ({"priority_levels": 1, "default_priority_level": 1}, False),
        ({"priority_levels": 2, "default_priority_level": 1}, True),
        ({"default_queue_policy": {"timeout_action": "DELAY"}}, False),
        ({"default_queue_policy": {"default_timeout_microseconds": 1}}, True),
        ({"default_queue_policy": {"max_queue_size": 1}}, True),
        ({"default_queue_policy": {"allow_timeout_override": True}}, True),
        ({"priority_levels": 1, "default_priority_level": 1,
         "priority_queue_policy": {"1": {"max_queue_size": 1}}}, True),
    ],
)  # fmt: skip
def test_a_queue_with_any_policy_is_limited(block: dict[str, Any], is_limited: bool) -> None:
    """Batches then form only when an instance is free."""
    assert (
        read_settings({"dynamic_batching": block}, max_queue_size=100).policies.has_limits
        is is_limited
    )


@pytest.mark.parametrize("preferred", [None, [], [0]])
def test_the_default_preferred_size_is_the_maximum(preferred: list[int] | None) -> None:
    config = {"max_batch_size": 0, "dynamic_batching": {"preferred_batch_size": preferred}}
    assert read_settings(config).batching == Batching(1, frozenset({1}), 0)
    config["max_batch_size"] = 8
    assert read_settings(config).batching == Batching(8, frozenset({8}), 0)


@pytest.mark.parametrize(
    ("strategy", "delay_ns", "target_ns"),
    [
        ("", 7_000, 0),
        ("prefer_batch", 7_000, 0),
        ("prefer_latency", 0, 0),
        ("adaptive", 7_000, 2_500_000),
    ],
)
def test_the_strategy_is_read(strategy: str, delay_ns: int, target_ns: int) -> None:
    parameters = {"batching_strategy": strategy, "target_p99_ms": "2.5" if target_ns else ""}
    config = {
        "dynamic_batching": {"max_queue_delay_microseconds": 7},
        "parameters": {name: {"string_value": text} for name, text in parameters.items()},
    }
    assert read_settings(config).batching == Batching(8, frozenset({8}), delay_ns, target_ns)


@pytest.mark.parametrize("value", ["", "soon", "-1", "inf", "nan", None])
def test_an_invalid_execution_timeout_keeps_the_servers(value: str | None) -> None:
    config = {"parameters": {"execution_timeout_seconds": {"string_value": value}}}
    assert read_settings(config, execution_timeout_s=1.5).execution_limit_ns == 1_500_000_000


def test_a_limit_of_zero_is_no_limit() -> None:
    config = {"parameters": {"execution_timeout_seconds": {"string_value": "0"}}}
    assert read_settings(config, execution_timeout_s=60).execution_limit_ns == 0
