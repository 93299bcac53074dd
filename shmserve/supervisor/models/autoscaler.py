"""The autoscaler, which changes the number of a model's instances with its load.

The number stays within the bounds of the model's configuration. An instance is added if a new
request would wait too long in two consecutive samples, or if the mean wait of executed requests is
too long. Waits in a queue are approximately exponential, so their p99 is ln 100 times the mean
(L. Kleinrock, "Queueing Systems", vol. 1, 1975). No instance is added if the queue will be empty
within a second, or if the host lacks processors or memory.

An instance is removed if waits were short for twenty seconds, and the other instances would be busy
for at most 60 % of each half second. If an instance is added again soon after a
removal, this period is doubled, which avoids repeated changes under a periodic load.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

from shmserve.common.host import CpuUtilization, available_memory, memory_bytes, processors
from shmserve.errors import ShmserveError
from shmserve.ipc import model_spec
from shmserve.ipc.messages.publications import InstancesChanged
from shmserve.ipc.messages.supervision import CountChange
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.instance import Bounds, bounds_of
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import ModelEntry
from shmserve.supervisor.models.registry import ModelRegistry

logger = logging.getLogger(__name__)

_RETRY_S = 10.0  # the pause after an instance could not be added

# The parameters of the scaling policy.
SAMPLE_EVERY_S = 0.1
_LATE_SAMPLES = 2  # consecutive samples with a wait that is too long
_CATCH_UP_S = 1.0  # no instance is added if the queue will be empty by then
_MEAN_WINDOW_S = 5.0  # the window of the mean wait
_MIN_REQUESTS = 20  # the fewest requests for a mean
_P99_RATIO = math.log(100)  # the ratio of the p99 to the mean of an exponential distribution
_IDLE_S = 20.0  # the time without long waits before a removal
_BUSY_WINDOW_S = 0.5  # the window of the mean number of busy instances
_REMOVAL_PAUSE_S = 2.0  # the shortest time between a change and a removal
_TARGET_UTILIZATION = 0.6  # the highest utilization of the remaining instances
# If an instance is added again within this multiple of the idle time after a removal, the idle time
# that further removals require is doubled.
_SOON_FACTOR = 3.0
_MAX_IDLE_S = 320.0  # the maximum of that idle time
_MIN_SHARE = 0.25  # the lowest limit of the p99 of the wait, as a share of the latency target

# The parameters for measurements of the host's capacity.
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PRIVATE_KIB = re.compile(r"^Private_\w+: +(\d+) kB$", re.MULTILINE)
_MIN_FREE_MEMORY = 0.05  # the fraction of the host's memory that must stay available
_MEASURE_EVERY_S = 0.5  # the execution time after which the processors per instance are measured
_DECAY = 0.98  # the decay, per measurement, of the maximum of processors per instance
_READ_EVERY_S = 1.0  # the time between reads of the host's utilization
_FULLY_USED = 0.95  # the utilization at which the host's processors are fully used
_MIN_COMPETING = 0.25  # an instance that uses fewer processors does not compete for them
_EXCESS_PROCESSORS = 0.5  # the number of processors by which the demand may exceed the limit


@dataclass(slots=True, eq=False)
class _ScalingState:
    """The policy and the pending work of the autoscaler for one serving version."""

    policy: ScalingPolicy
    capacity: HostCapacity
    statistics: asyncio.Future[dict[str, Any]] | None = None  # the reply to the last request
    next_change_s: float = 0.0  # the earliest time of the next change
    is_changing: bool = False


@dataclass(slots=True, eq=False)
class Autoscaler:
    """The scaler of serving versions whose number of instances has a minimum and a maximum."""

    _context: SupervisorContext
    _registry: ModelRegistry
    _states: WeakKeyDictionary[ModelVersion, _ScalingState] = field(
        init=False, default_factory=WeakKeyDictionary
    )

    async def run(self) -> None:
        """Scale the versions until this coroutine is cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            try:
                self.sample()
            except Exception:  # for example, a file in /proc cannot be opened
                text = "the load of models could not be measured; the next attempt is in %g s"
                logger.exception(text, SAMPLE_EVERY_S)

    def sample(self) -> None:
        """Request the statistics of each scheduler that has answered the last request.

        Models with open orders are skipped, because the orders change their instances.
        """
        for model in self._registry.models.values():
            for version in model.serving.values():
                bounds = bounds_of(version.config)
                if bounds is not None and version.ready and not model.orders:
                    self._request_statistics(model, version, bounds)

    def _request_statistics(self, model: ModelEntry, version: ModelVersion, bounds: Bounds) -> None:
        state = self._states.get(version)
        if state is None:
            state = self._states[version] = _create_state(version.config, bounds)
        if state.statistics is None or state.statistics.done():
            state.statistics = version.scheduler.snapshot()
            state.statistics.add_done_callback(partial(self._on_statistics, model, version, state))

    def _on_statistics(
        self,
        model: ModelEntry,
        version: ModelVersion,
        state: _ScalingState,
        statistics: asyncio.Future[dict[str, Any]],
    ) -> None:
        if statistics.cancelled():
            return
        load = LoadSample.of(statistics.result(), time.monotonic(), version.config.decoupled)
        change = state.policy.sample(load, version.instances.count)
        if not version.instances.all_serve:
            return
        state.capacity.sample(version.instances.pids(), load.execution_s, load.at_s)
        if change is not None and not (state.is_changing or model.orders):
            self._apply(version, state, change)

    def _apply(self, version: ModelVersion, state: _ScalingState, change: Change) -> None:
        old_count, now_s = version.instances.count, time.monotonic()
        if now_s < state.next_change_s:
            return
        count = change.instance_count
        missing_text = state.capacity.missing_resources(count) if count > old_count else ""
        if missing_text:
            state.next_change_s = now_s + _RETRY_S
            logger.warning(
                "model '%s' keeps %d instances, although a change is due (%s): %s",
                version.spec.name,
                old_count,
                change.reason,
                missing_text,
            )
            return
        state.is_changing = True
        self._context.background(self._change(version, state, change))

    async def _change(self, version: ModelVersion, state: _ScalingState, change: Change) -> None:
        old_count, name = version.instances.count, version.spec.name
        try:
            await version.instances.resize(change.instance_count)
        except ShmserveError as error:
            state.next_change_s = time.monotonic() + _RETRY_S
            logger.error(
                "model '%s' cannot change its number of instances, which is still %d: %s",
                name,
                version.instances.count,
                error.message,
            )
            return
        finally:
            state.is_changing = False
        count = version.instances.count
        state.policy.record_change(time.monotonic(), old_count, count)
        logger.info(
            "model '%s' has %d instances (before: %d): %s", name, count, old_count, change.reason
        )
        event = InstancesChanged(name, version.spec.version, old_count, count, change.reason)
        self._context.events.publish(event)
        version.scheduler.send(CountChange(count > old_count))


def _create_state(config: ModelSpec, bounds: Bounds) -> _ScalingState:
    target_text = config.parameters.get(model_spec.TARGET_PARAMETER, "")
    target_ms = model_spec.parse_target_ms(target_text) or 0.0
    batching = config.dynamic_batching
    delay_us = 0 if batching is None else batching.max_queue_delay_microseconds
    policy = ScalingPolicy(*bounds, target_s=target_ms / 1e3, delay_s=delay_us / 1e6)
    count, quota = processors()
    return _ScalingState(policy, HostCapacity(count if quota is None else min(count, quota)))


# --- the scaling policy (pure)


class LoadSample(NamedTuple):
    """The counters of a scheduler at one time.

    Attributes:
        executed_requests: The number of executed requests.
        succeeded_requests: The number of executed requests that succeeded.
        queued_count: The current number of requests in the queue.
        ready_count: The current number of ready instances.
        busy_count: The current number of executing instances.
    """

    at_s: float  # the time of the sample, on the monotonic clock
    executed_requests: int
    succeeded_requests: int
    queueing_s: float  # the total queueing time of executed requests
    executions: int  # the number of executions (batches)
    execution_s: float  # the total execution time
    queued_count: int
    ready_count: int
    busy_count: int

    @classmethod
    def of(cls, statistics: Mapping[str, Any], at_s: float, decoupled: bool = False) -> Self:
        """Create a sample from a `StatisticsSnapshot`.

        An instance of a decoupled model is busy as long as it has an open request.
        """
        instances, compute = statistics["instances"], statistics["compute_seconds"]
        slots = instances["idle"] + instances["busy"]
        success_count = statistics["success"] - statistics["cache_hit"]
        return cls(
            at_s=at_s,
            executed_requests=success_count + statistics["failures"]["BACKEND"],
            succeeded_requests=success_count,
            queueing_s=statistics["queue_ns"] / 1e9,
            executions=compute["count"],
            execution_s=compute["sum"],
            queued_count=statistics["pending"],
            ready_count=slots,
            busy_count=min(slots, statistics["executing"]) if decoupled else instances["busy"],
        )


class Change(NamedTuple):
    """A new number of instances, and the reason for it."""

    instance_count: int
    reason: str


@dataclass(slots=True, eq=False)
class ScalingPolicy:
    """The policy that decides the number of instances of a model.

    Attributes:
        minimum: The minimum number of instances.
        maximum: The maximum number of instances.
        target_s: The latency target, which includes the execution; 0 for none.
        delay_s: The allowed mean wait if there is no target. A wait up to the mean execution time
            is then always allowed.
    """

    minimum: int
    maximum: int
    target_s: float = 0.0
    delay_s: float = 0.0
    _loads: deque[LoadSample] = field(init=False, default_factory=deque)
    _last_change_s: float = field(init=False, default=-math.inf)
    _last_long_wait_s: float = field(init=False, default=-math.inf)
    _window_start_s: float = field(init=False, default=-math.inf)  # the start of the mean's window
    _last_progress_s: float = field(init=False, default=math.inf)  # last execution or empty queue
    _late_samples: int = field(init=False, default=0)  # consecutive samples with a long wait
    _mean_request_s: float = field(init=False, default=0.0)  # mean execution time per request
    _mean_execution_s: float = field(init=False, default=0.0)
    _idle_s: float = field(init=False, default=_IDLE_S)  # time without long waits before a removal
    _last_removal_s: float = field(init=False, default=-math.inf)  # the time of the last removal

    def sample(self, load: LoadSample, count: int) -> Change | None:
        """Return the change that a sample requires, or None; `count` is the number of instances."""
        self._update_estimates(load)
        if count < self.minimum:
            return Change(count + 1, f"at least {self.minimum} are configured")
        if count > self.maximum:
            return Change(count - 1, f"at most {self.maximum} are configured")
        wait_text = self._long_wait_text(load)
        if not wait_text:
            self._late_samples = 0
            return self._remove_idle(load, count)
        self._last_long_wait_s, self._late_samples = load.at_s, self._late_samples + 1
        if self._late_samples < _LATE_SAMPLES or count == self.maximum or self._catches_up(load):
            return None
        return Change(count + 1, wait_text)

    def record_change(self, at_s: float, old_count: int, new_count: int) -> None:
        """Record that the number of instances has changed at `at_s`."""
        if new_count < old_count:
            self._last_removal_s = at_s
        else:
            if at_s - self._last_removal_s < _SOON_FACTOR * self._idle_s:
                self._idle_s = min(2 * self._idle_s, _MAX_IDLE_S)
            self._last_removal_s, self._last_long_wait_s = -math.inf, at_s
        self._late_samples = 0
        self._window_start_s = self._last_change_s = at_s

    def _update_estimates(self, load: LoadSample) -> None:
        loads = self._loads
        previous_load = loads[-1] if loads else load
        if (
            load.executions < previous_load.executions
            or load.executed_requests < previous_load.executed_requests
        ):
            loads.clear()  # the counters of a new scheduler start at zero
            previous_load = load
        loads.append(load)
        while load.at_s - loads[0].at_s > self._idle_s:
            loads.popleft()
        executions = load.executions - previous_load.executions
        executed_requests = load.executed_requests - previous_load.executed_requests
        execution_s = load.execution_s - previous_load.execution_s
        if executions and executed_requests:
            # A moving average over about sixteen executions.
            gain = max(1 / 16, min(1.0, executions / 16)) if self._mean_execution_s else 1.0
            self._mean_request_s += (execution_s / executed_requests - self._mean_request_s) * gain
            self._mean_execution_s += (execution_s / executions - self._mean_execution_s) * gain
        if executions or not previous_load.queued_count:
            self._last_progress_s = load.at_s

    @property
    def _max_mean_wait_s(self) -> float:
        """Return the allowed mean wait in seconds: from `target_s`, or else from `delay_s`."""
        if self.target_s:
            max_wait_s = max(self.target_s - self._mean_execution_s, _MIN_SHARE * self.target_s)
            return max_wait_s / _P99_RATIO
        return max(self.delay_s, self._mean_execution_s)

    def _long_wait_text(self, load: LoadSample) -> str:
        """Return a description of the wait if it is too long, else ""."""
        allowed_s = self._max_mean_wait_s
        if not allowed_s:
            return ""  # nothing has been executed yet
        if load.queued_count and load.ready_count and load.busy_count == load.ready_count:
            wait_s = load.queued_count * self._mean_request_s / load.ready_count
            wait_s = max(wait_s, load.at_s - self._last_progress_s)
            if wait_s > _P99_RATIO * allowed_s:
                self._window_start_s = load.at_s
                return f"requests wait {_ms(wait_s)}, the limit is {_ms(_P99_RATIO * allowed_s)}"
        start_s = max(load.at_s - _MEAN_WINDOW_S, self._window_start_s)
        oldest_sample = next((sample for sample in self._loads if sample.at_s >= start_s), load)
        count = load.succeeded_requests - oldest_sample.succeeded_requests
        mean_s = (
            (load.queueing_s - oldest_sample.queueing_s) / count if count >= _MIN_REQUESTS else 0.0
        )
        if mean_s <= allowed_s:
            return ""
        return f"requests wait {_ms(mean_s)} on average, the limit is {_ms(allowed_s)}"

    def _catches_up(self, load: LoadSample) -> bool:
        """Check whether the queue shrinks so fast that it is empty within `_CATCH_UP_S` seconds."""
        oldest = self._loads[-min(4, len(self._loads))]
        elapsed_s, dequeued_count = load.at_s - oldest.at_s, oldest.queued_count - load.queued_count
        return dequeued_count > 0 and load.queued_count / dequeued_count * elapsed_s < _CATCH_UP_S

    def _remove_idle(self, load: LoadSample, count: int) -> Change | None:
        at_s, start_s = load.at_s, self._loads[0].at_s
        without_wait_s = at_s - max(self._last_long_wait_s, start_s)
        has_changed = at_s - self._last_change_s < _REMOVAL_PAUSE_S
        if count == self.minimum or has_changed or without_wait_s < 0.95 * self._idle_s:
            return None
        mean_busy = self._max_mean_busy()
        if mean_busy > _TARGET_UTILIZATION * (count - 1):
            return None
        return Change(
            count - 1, f"at most {mean_busy:.1f} instances were busy for {self._idle_s:g} s"
        )

    def _max_mean_busy(self) -> float:
        """Return the highest mean number of busy instances in any half second of the samples."""
        window = round(_BUSY_WINDOW_S / SAMPLE_EVERY_S)
        busy_counts = [load.busy_count for load in self._loads]
        ends = range(window, len(busy_counts) + 1, window)  # the ends of the windows
        return max((fmean(busy_counts[end - window : end]) for end in ends), default=math.inf)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


# --- the capacity of the host


def private_bytes(pid: int) -> int:
    """Return the private memory of a process in bytes; 0 if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * sum(map(int, _PRIVATE_KIB.findall(text)))


def processor_time_s(pid: int) -> float:
    """Return the processor time of a process in seconds; 0 if it has exited."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    # The name in parentheses may contain any character, so fields are counted from its end.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@dataclass(slots=True, eq=False)
class HostCapacity:
    """The resource usage of a model's workers, compared with the capacity of the host."""

    processors: float  # how many the server may use, possibly a fraction
    _processor_times: dict[int, float] = field(init=False, default_factory=dict)  # by pid
    _last_execution_s: float = field(init=False, default=0.0)  # `execution_s` of the last `sample`
    _used_s: float = field(init=False, default=0.0)  # processor time during `_executed_s`
    _executed_s: float = field(init=False, default=0.0)  # execution time since the last measurement
    _busy_processors: float = field(init=False, default=0.0)  # processors per busy instance
    _host_cpu: CpuUtilization = field(init=False, default_factory=CpuUtilization)
    _host_utilization: float = field(init=False, default=0.0)  # from 0 to 1
    _host_read_s: float = field(init=False, default=-math.inf)  # the time of the last read

    def sample(self, pids: list[int], execution_s: float, at_s: float) -> None:
        """Measure the processor time that a model's executions use, and the host's utilisation.

        Args:
            pids: The pids of the model's workers.
            execution_s: The total time of the model's executions so far, in seconds.
            at_s: The current time, on the monotonic clock.
        """
        if at_s - self._host_read_s >= _READ_EVERY_S:
            self._host_utilization, self._host_read_s = self._host_cpu.read(), at_s
        processor_times = {pid: processor_time_s(pid) for pid in pids}
        if self._processor_times and execution_s >= self._last_execution_s:
            self._used_s += sum(
                max(0.0, total_s - self._processor_times.get(pid, total_s))
                for pid, total_s in processor_times.items()
            )
            self._executed_s += execution_s - self._last_execution_s
        self._processor_times, self._last_execution_s = processor_times, execution_s
        if self._executed_s > _MEASURE_EVERY_S:
            # A worker that competes for processors uses less than it could, so the maximum counts,
            # and decays slowly.
            used_processors = self._used_s / self._executed_s
            self._busy_processors = max(used_processors, _DECAY * self._busy_processors)
            self._used_s = self._executed_s = 0.0

    def missing_resources(self, count: int) -> str:
        """Return a description of the resource that `count` instances lack, or ""."""
        if self._busy_processors * count > self.processors + _EXCESS_PROCESSORS:
            used_text = f"{self._busy_processors:.2g}"
            return f"there are {self.processors:g} processors, and a busy instance uses {used_text}"
        if self._busy_processors > _MIN_COMPETING and self._host_utilization > _FULLY_USED:
            return f"the processors are busy for {100 * self._host_utilization:.0f} % of the time"
        available_bytes = available_memory()
        largest_bytes = max(map(private_bytes, self._processor_times), default=0)
        if available_bytes - largest_bytes < _MIN_FREE_MEMORY * memory_bytes()[0]:
            return (
                f"{available_bytes >> 20} MiB of memory are free, and an instance needs "
                f"{largest_bytes >> 20} MiB"
            )
        return ""
