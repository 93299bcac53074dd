"""The autoscaler: its changes of instances, its policy, and the capacity of the host."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.common.host import CpuUtilization
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import InstancesChanged
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models import autoscaler
from shmserve.supervisor.models.autoscaler import (
    SAMPLE_EVERY_S,
    Autoscaler,
    Change,
    HostCapacity,
    LoadSample,
    ScalingPolicy,
    private_bytes,
    processor_time_s,
)
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import Order, OrderKind
from shmserve.supervisor.models.registry import ModelRegistry
from tests.rigs.process_rig import CONFIG, FakeChild, Processes, plan, run_loop_turns

STATISTICS: dict[str, Any] = {
    "success": 1, "cache_hit": 0, "failures": {"BACKEND": 0}, "queue_ns": 0, "pending": 0,
    "compute_seconds": {"count": 1, "sum": 0.1}, "executing": 0, "base": {},
    "instances": {"idle": 1, "busy": 0},
}  # fmt: skip


class Rig:
    """A version of one to three instances, whose policy proposes `target_count`."""

    def __init__(self, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
        parameters = {"max_instances": {"string_value": "3"}}
        config = ModelSpec.of(CONFIG | {"parameters": parameters})
        spec = replace(plan(), config=config)
        registry = ModelRegistry()
        self.target_count = 1
        self.sent: list[Any] = []
        self.events: list[Any] = []
        self.processes = processes
        self.model = registry.model("m")
        self.version = processes.version(spec)
        self.model.serving["1"] = self.version
        self.autoscaler = Autoscaler(processes.context, registry)
        monkeypatch.setattr(processes.context.events, "publish", self.events.append)
        monkeypatch.setattr(self.version.scheduler, "send", self.sent.append)
        monkeypatch.setattr(
            ScalingPolicy, "sample", lambda policy, load, count: self._propose_change(count)
        )

    def _propose_change(self, count: int) -> Change | None:
        step = (self.target_count > count) - (self.target_count < count)
        return Change(count + step, "it is wanted") if step else None

    async def sample_once(self, answers: bool = True) -> int:
        """Look once, and have the scheduler answer; how many instances there are then."""
        self.autoscaler.sample()
        was_queried = self.sent.count(m.SnapshotStatistics())
        if answers and was_queried:
            self.version.scheduler._on_scheduler_message(
                self.version.scheduler.counters, m.StatisticsSnapshot(STATISTICS, [])
            )
        await run_loop_turns()
        return self.version.instances.count

    def changes(self) -> list[Any]:
        """Return the instance counts that the scheduler received."""
        kinds = (m.RetireInstance, m.CountChange)
        return [message for message in self.sent if isinstance(message, kinds)]


@contextlib.asynccontextmanager
async def running_rig(monkeypatch: pytest.MonkeyPatch, *flags: str) -> AsyncIterator[Rig]:
    """Yield a started version."""
    rig = Rig(Processes(*flags), monkeypatch)
    await rig.version.instances.complete_config()
    await rig.version.instances.load()
    rig.version.has_loaded = True
    monkeypatch.setattr(ModelVersion, "ready", True)
    yield rig
    await rig.processes.end()


async def test_instances_change_one_at_a_time_and_every_change_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running_rig(monkeypatch) as rig:
        rig.target_count = 3
        assert [await rig.sample_once() for _ in range(3)] == [2, 3, 3]
        rig.target_count = 2
        assert await rig.sample_once() == 2
        assert rig.changes() == [
            *(m.CountChange(True), m.CountChange(True)),
            *(m.RetireInstance(2), m.CountChange(False)),
        ]
        assert rig.events == [
            InstancesChanged("m", "1", 1, 2, "it is wanted"),
            InstancesChanged("m", "1", 2, 3, "it is wanted"),
            InstancesChanged("m", "1", 3, 2, "it is wanted"),
        ]
        assert "model 'm' has 3 instances (before: 2): it is wanted" in caplog.text


async def test_no_scaling_during_an_order_or_without_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_rig(monkeypatch) as rig:
        rig.target_count = 3
        rig.model.orders.append(Order(rig.model, OrderKind.LOAD))
        assert await rig.sample_once() == 1
        assert rig.sent.count(m.SnapshotStatistics()) == 0
        rig.model.orders.clear()
        assert [await rig.sample_once(answers=False) for _ in range(3)] == [1, 1, 1]
        # The scheduler is not queried again meanwhile.
        assert rig.sent.count(m.SnapshotStatistics()) == 1
        rig.model.orders.append(Order(rig.model, OrderKind.LOAD))
        assert await rig.sample_once() == 1
        rig.model.orders.clear()
        assert await rig.sample_once() == 2


async def test_an_instance_that_does_not_load_is_not_retried_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_rig(monkeypatch) as rig:
        rig.target_count = 2
        rig.processes.on_start = FakeChild.kill
        assert await rig.sample_once() == 1
        assert "instances, which is still 1: the process of instance 'm_0_1'" in caplog.text
        rig.processes.on_start = lambda child: None
        started_count = len(rig.processes.children)
        assert await rig.sample_once() == 1
        assert len(rig.processes.children) == started_count
        monkeypatch.setattr(autoscaler, "_RETRY_S", 0)
        for watch in rig.autoscaler._states.values():
            watch.next_change_s = 0
        assert await rig.sample_once() == 2
        assert not [event for event in rig.events if event.count == event.before]


async def test_no_instance_is_added_without_capacity_of_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_rig(monkeypatch) as rig:
        rig.target_count = 2
        monkeypatch.setattr(
            HostCapacity, "missing_resources", lambda capacity, count: f"room for {count}"
        )
        assert [await rig.sample_once() for _ in range(3)] == [1, 1, 1]
        text = "model 'm' keeps 1 instances, although a change is due (it is wanted): room for 2"
        assert caplog.text.count(text) == 1
        rig.target_count = 1
        assert not rig.events


async def test_a_reload_starts_the_instances_the_load_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_rig(monkeypatch) as rig:
        rig.target_count = 3
        await rig.sample_once()
        await rig.sample_once()
        instances, spec = rig.version.instances, rig.version.spec
        same_update = instances.update_to(spec, instances.config)
        assert (same_update.added_instances, same_update.removed_instances) == ([], [])
        (group,) = instances.config.instance_group
        two_instances = replace(instances.config, instance_group=(replace(group, count=2),))
        other_update = instances.update_to(spec, two_instances)
        assert other_update.config_differs is True
        assert (other_update.added_instances, other_update.removed_instances) == ([], [])
        reloaded_version = rig.processes.version(spec)
        assert reloaded_version.instances.count == 1
        reloaded_version.instances.adopt_count(instances)
        assert reloaded_version.instances.count == 3
        await reloaded_version.instances.complete_config()
        assert reloaded_version.instances.count == 3
        await reloaded_version.kill()


async def test_an_error_does_not_end_the_autoscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Mock(side_effect=[OSError, ValueError, asyncio.CancelledError])
    monkeypatch.setattr(Autoscaler, "sample", sample)
    monkeypatch.setattr(autoscaler, "SAMPLE_EVERY_S", 0)
    with pytest.raises(asyncio.CancelledError):
        await Autoscaler(Mock(), ModelRegistry()).run()
    assert sample.call_count == 3


def load(at_s: float, **sample_fields: Any) -> LoadSample:
    """Return the load of two idle instances that took 50 ms for each of 100 requests."""
    counts = dict.fromkeys(("executed_requests", "succeeded_requests", "executions"), 100)
    times = {"queueing_s": 0.0, "execution_s": 5.0}
    instances = {"queued_count": 0, "ready_count": 2, "busy_count": 0}
    fields: dict[str, Any] = {**counts, **times, **instances, **sample_fields}
    return LoadSample(at_s=at_s, **fields)


def informed_policy(min_count: int = 1, **limits: float) -> ScalingPolicy:
    """Return a policy of up to four instances that knows the duration of an execution."""
    policy = ScalingPolicy(min_count, 4, **limits)
    counts = dict.fromkeys(("executed_requests", "succeeded_requests", "executions"), 0)
    policy.sample(load(0.0, **counts, execution_s=0.0), 2)
    policy.sample(load(0.1), 2)
    return policy


def sample_changes(rule: ScalingPolicy, seconds: float, count: int, **fields: Any) -> list[Change]:
    """Return the changes after repeated samples of the same load for this time."""
    times_s = (0.2 + SAMPLE_EVERY_S * number for number in range(round(seconds / SAMPLE_EVERY_S)))
    decisions = (rule.sample(load(at_s, **fields), count) for at_s in times_s)
    return [change for change in decisions if change is not None]


def test_an_instance_is_added_if_the_queue_is_too_long_twice() -> None:
    """Ten that wait for two instances of 50 ms each wait for 250 ms."""
    queue = {"queued_count": 10, "busy_count": 2}
    policy = informed_policy(target_s=0.2)
    assert policy.sample(load(0.2, **queue), 2) is None
    change = Change(3, "requests wait 250 ms, the limit is 150 ms")
    assert policy.sample(load(0.3, **queue), 2) == change
    policy = informed_policy(target_s=0.2)
    assert policy.sample(load(0.2, **queue), 2) is None
    assert policy.sample(load(0.3), 2) is None  # the removed instance counts no longer
    assert policy.sample(load(0.4, **queue), 2) is None
    assert not sample_changes(informed_policy(target_s=0.4), 0.3, 2, **queue)


def test_no_scaling_while_the_queue_drains_soon() -> None:
    def final_change(queue_decrease: int) -> Change | None:
        policy = informed_policy(target_s=0.2)
        for number in range(7):
            queue = load(0.2 + number / 10, queued_count=60 - queue_decrease * number, busy_count=2)
            change = policy.sample(queue, 2)
        return change

    assert final_change(queue_decrease=1)
    assert final_change(queue_decrease=5) is None


def test_no_instance_is_added_beside_a_free_one_or_for_a_missing_one() -> None:
    """Such requests wait for their batch to fill, or for a worker that restarts."""
    policy = informed_policy(target_s=0.2)
    assert not sample_changes(policy, 1, 2, queued_count=10, busy_count=1)
    policy = informed_policy(target_s=0.2)
    assert not sample_changes(policy, 1, 2, queued_count=10, ready_count=0)


def test_an_instance_is_added_when_served_requests_waited() -> None:
    """A mean wait of 33 ms corresponds to 150 ms at p99."""
    policy = informed_policy(target_s=0.2)
    decisions = [sample_further(policy, number) for number in range(1, 7)]
    assert decisions[:5] == [None] * 5
    assert decisions[5] == Change(3, "requests wait 37.5 ms on average, the limit is 32.6 ms")


def sample_further(policy: ScalingPolicy, number: int) -> Change | None:
    """Return the change after ten further requests that waited for 100 ms each."""
    count = 100 + 10 * number
    counts = dict.fromkeys(("executed_requests", "succeeded_requests", "executions"), count)
    return policy.sample(
        load(0.1 + number / 10, **counts, execution_s=count / 20, queueing_s=1.0 * number), 2
    )


def test_an_instance_is_added_when_executions_hang() -> None:
    policy = informed_policy(target_s=1.0)
    assert not sample_changes(policy, 0.8, 2, queued_count=1, busy_count=2)
    (first_change, *_) = sample_changes(policy, 2, 2, queued_count=1, busy_count=2)
    assert first_change.instance_count == 3


def test_without_a_target_requests_may_wait_for_the_delay_or_an_execution() -> None:
    queue = {"queued_count": 10, "busy_count": 2}  # 250 ms
    assert sample_changes(informed_policy(delay_s=0.05), 0.3, 2, **queue)
    assert not sample_changes(informed_policy(delay_s=0.06), 0.3, 2, **queue)
    assert sample_changes(informed_policy(), 0.3, 2, **queue)
    policy = informed_policy()
    assert not sample_changes(policy, 0.3, 2, queued_count=9, busy_count=2)
    assert not sample_changes(ScalingPolicy(1, 4), 1, 2, **queue)  # nothing has been executed yet


def test_an_instance_idle_for_twenty_seconds_is_removed() -> None:
    assert not sample_changes(informed_policy(), 18, 2)
    (first_change, *_) = sample_changes(informed_policy(), 21, 2)
    assert first_change == Change(1, "at most 0.0 instances were busy for 20 s")
    assert not sample_changes(informed_policy(), 21, 2, busy_count=1)
    assert sample_changes(informed_policy(), 21, 3, busy_count=1)
    assert not sample_changes(informed_policy(min_count=2), 21, 2)


def test_an_instance_missed_soon_after_its_removal_is_kept_longer() -> None:
    policy = informed_policy()
    sample_changes(policy, 21, 2)
    policy.record_change(21.2, 2, 1)
    policy.record_change(30.0, 1, 2)
    decisions = [policy.sample(load(30 + number / 10), 2) for number in range(450)]
    first_change = next(number for number, change in enumerate(decisions) if change)
    assert first_change > 370
    assert decisions[first_change] == Change(1, "at most 0.0 instances were busy for 40 s")


def test_the_bounds_hold_for_any_previous_count() -> None:
    assert ScalingPolicy(2, 4).sample(load(0.0), 1) == Change(2, "at least 2 are configured")
    assert ScalingPolicy(2, 4).sample(load(0.0), 6) == Change(5, "at most 4 are configured")


states = st.tuples(*(st.integers(0, most) for most in (50, 100, 6, 6)))


@given(st.lists(states, max_size=300), st.floats(0, 1), st.floats(0, 1))
def test_the_count_changes_by_one_within_the_bounds(
    samples: list[tuple[int, int, int, int]], target_s: float, delay_s: float
) -> None:
    """Holds for any load. No instance is removed while requests wait for the existing ones."""
    policy, count, done_count = ScalingPolicy(2, 5, target_s, delay_s), 3, 0
    for number, (arrivals, pending, ready_count, busy_count) in enumerate(samples):
        done_count, at_s = done_count + arrivals, number / 10
        counts = dict.fromkeys(
            ("executed_requests", "succeeded_requests", "executions"), done_count
        )
        times = {"queueing_s": done_count / 50, "execution_s": done_count / 20}
        queue = {"queued_count": pending, "busy_count": min(ready_count, busy_count)}
        sample = load(at_s, **counts, **times, **queue, ready_count=ready_count)
        change = policy.sample(sample, count)
        if change is not None:
            assert abs(change.instance_count - count) == 1 and 2 <= change.instance_count <= 5
            policy.record_change(at_s, count, change.instance_count)
            count = change.instance_count


def test_the_load_from_a_schedulers_report() -> None:
    statistics = {
        "success": 12, "cache_hit": 2, "failures": {"BACKEND": 1, "REJECTED": 5},
        "queue_ns": 5 * 10**8, "compute_seconds": {"count": 4, "sum": 0.25}, "pending": 3,
        "executing": 8,
        "instances": {"idle": 1, "busy": 2, "expected": 1, "gone": 0, "doomed": 0},
    }  # fmt: skip
    expected = LoadSample(7.0, 11, 10, 0.5, 4, 0.25, 3, 3, 2)
    assert LoadSample.of(statistics, 7.0) == expected
    assert LoadSample.of(statistics, 7.0, decoupled=True) == expected._replace(busy_count=3)


MIB = 2**20


def test_a_process_is_measured() -> None:
    held_memory = bytearray(os.urandom(1)) * (32 * MIB)
    assert private_bytes(os.getpid()) > len(held_memory)
    time_before_s, start_s = processor_time_s(os.getpid()), time.process_time()
    while time.process_time() - start_s < 0.1:
        pass
    assert 0.05 < processor_time_s(os.getpid()) - time_before_s < 1
    assert (private_bytes(0), processor_time_s(0)) == (0, 0.0)


@pytest.fixture
def processor_times(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The processor time of processes that have no memory of their own."""
    latencies = {1: 10.0, 2: 20.0}
    monkeypatch.setattr(autoscaler, "processor_time_s", latencies.__getitem__)
    monkeypatch.setattr(autoscaler, "private_bytes", lambda pid: 0)
    monkeypatch.setattr(CpuUtilization, "read", lambda meter: 0.5)
    return latencies


def test_processors_suffice_for_all_busy_instances(processor_times: dict[int, float]) -> None:
    """Instances that take two processors each while they execute, or less while they wait."""
    host = HostCapacity(processors=4)
    host.sample([1], 5.0, 0.0)
    assert host.missing_resources(9) == ""  # the host's capacity is not known yet
    processor_times[1] += 2
    host.sample([1, 2], 6.0, 0.1)
    assert host.missing_resources(2) == ""
    assert host.missing_resources(3) == "there are 4 processors, and a busy instance uses 2"
    for number in range(100):
        processor_times[1] += 1
        host.sample([1, 2], 16.0 + 10 * number, 0.2)
        assert bool(host.missing_resources(3)) == (number < 14)


def test_no_capacity_while_all_processors_are_busy(
    processor_times: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostCapacity(processors=4)
    host.sample([1], 0.0, 0.0)
    processor_times[1] += 1
    monkeypatch.setattr(CpuUtilization, "read", lambda meter: 0.97)
    host.sample([1], 1.0, 0.5)
    assert host.missing_resources(2) == ""  # that was half a second ago
    host.sample([1], 1.0, 1.0)
    assert host.missing_resources(2) == "the processors are busy for 97 % of the time"
    idle_host = HostCapacity(processors=4)
    idle_host.sample([1], 0.0, 0.0)
    idle_host.sample([1], 1.0, 2.0)
    assert idle_host.missing_resources(9) == ""


def test_capacity_needs_memory_for_the_largest_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "private_bytes", {1: 100 * MIB, 2: 200 * MIB}.__getitem__)
    monkeypatch.setattr(autoscaler, "processor_time_s", lambda pid: 0.0)
    host = HostCapacity(processors=4)
    host.sample([1, 2], 0.0, 0.0)
    monkeypatch.setattr(autoscaler, "memory_bytes", lambda: (1000 * MIB, 0))
    monkeypatch.setattr(autoscaler, "available_memory", lambda: 251 * MIB)
    assert host.missing_resources(3) == ""
    monkeypatch.setattr(autoscaler, "available_memory", lambda: 249 * MIB)
    assert host.missing_resources(3) == "249 MiB of memory are free, and an instance needs 200 MiB"
