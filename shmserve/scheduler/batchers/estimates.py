"""Online estimates of the adaptive batcher: durations of batches, arrivals of requests (pure)."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterator

_WEIGHT_DECAY = 1 - 1 / 64  # decay, per execution, of the weights in the line fit
_MIN_OBSERVATIONS = 8  # minimum number of observations for an estimate
_MAX_SPREADS = 4  # residuals beyond this many spreads are clamped
_MIN_VARIATION = 0.05  # minimum relative deviation of the sizes for which a slope is fitted

_EXACT_BITS = 6  # sizes below 2**6 are distinguished, larger ones to one part in 32
_MAX_MEAN_WEIGHT = 256.0  # maximum weight of a size's mean, in executions
_SHARED_GAIN = 1 / 32  # gain of the level and the spread, which all sizes share (`SizeTimes`)
_INITIAL_SPREAD, _MIN_SPREAD = 0.1, 0.02  # relative spread of durations
# `SizeTimes` sets its level anew after this many durations in a row far from the estimate.
_CHANGE_LENGTH = 8
# The minimum ratio of an outlier's duration to the estimate. Outliers agree on a change if these
# ratios differ at most by the second factor.
_MIN_CHANGE, _MAX_DISAGREEMENT = 1.5, 2.0
_DEVIATIONS_PER_SPREAD = 1.25  # standard deviations per spread, for a normal distribution
_EQUAL_RATES = 0.03  # relative difference below which rates count as equal
_SURE_ERRORS = 2.0  # standard errors by which a rate must be better
_MIN_TRIAL_RATIO = 1.1  # minimum ratio of an untried size's possible rate to the best rate
# Assumed initial speed-up, and slow-down, of an untried smaller batch.
_ASSUMED_SPEEDUP, _ASSUMED_SLOWDOWN = 4, 2
_MAX_TRIALS = 4  # executions after which trials of a size end
_DISTURBANCE_INTERVAL = 16  # a busy machine disturbs one execution in this many

_RATE_GAIN = 1 / 64  # minimum gain of the averages of the load
_MAXIMUM_DECAY = 1 - 1 / 1024  # decay of maxima, per batch
_STEADY_SHARE = 0.95  # share of arriving rows that are completed, at which the load is steady

_MAX_LEVELS = 512  # numbers of requests in flight above this one share their statistics
_MIN_CHANCE = 0.6  # minimum chance of a predicted arrival
_MIN_ARRIVALS = 3  # minimum number of observations for a prediction
_MARGIN_NS = 50_000  # allowance for the latency of the event loop


class _SizeDuration:
    """The mean duration of the batches of a size.

    Attributes:
        mean: The mean duration, divided by the level (see `SizeTimes`).
        weight: The number of batches in the mean.
    """

    def __init__(self, mean: float, first_execution: int) -> None:
        self.mean = mean
        self.weight = 1.0  # number of batches in the mean
        self._decayed_count, self._last_execution = 1.0, first_execution

    def decayed_count(self, execution: int) -> float:
        """Return the number of batches of this size; earlier ones count exponentially less."""
        return self._decayed_count * _WEIGHT_DECAY ** (execution - self._last_execution)

    def record_execution(self, execution: int) -> None:
        """Count a batch of this size, which was execution number `execution`."""
        self._decayed_count, self._last_execution = self.decayed_count(execution) + 1, execution


class SizeTimes:
    """The duration of batches by size.

    Each observed size has an exponentially weighted mean. Durations between two observed sizes are
    interpolated. A line through the recent sizes provides the slope above the largest size and the
    fixed duration. All sizes share a relative spread and a level. The level is the factor between
    the current durations and the means. If the machine becomes slower or faster, the level thus
    also adjusts sizes that do not occur. A smaller size is preferred only if its rate is
    higher by more than the standard errors of both rates. Bisection finds the size at which the
    duration jumps.

    The first execution is ignored, because models initialise themselves then.
    """

    def __init__(self, largest_size: int) -> None:
        self._sizes: dict[int, _SizeDuration] = {}  # the observed sizes by index
        self._observed_indices: list[int] = []  # the indices of the observed sizes
        self._last_index = _index(largest_size)
        self._level = 1.0  # factor between the current durations and the means
        # The fitted line of duration by size; the durations are divided by `_level`.
        self._setup_ns = self._slope_ns = 0.0
        self._spread = _INITIAL_SPREAD  # relative deviation of durations
        # The latest successive outliers, which are batches whose duration is far from the estimate.
        # Each entry has the level at which the estimate would have been right, and the size.
        self._outliers: deque[tuple[float, _SizeDuration]] = deque(maxlen=_CHANGE_LENGTH)
        self._observation_count = -1
        self._late_executions = 0  # executions while the target was out of reach
        # Values by size index, updated by `_refresh`: the expected durations, divided by the level,
        # and the best index up to each index by the mean rates (`_best_index`) and by the highest
        # plausible rates (`_optimistic_index`).
        self._times = [0.0] * (self._last_index + 1)
        self._best_index = list(range(self._last_index + 1))
        self._optimistic_index = self._best_index.copy()
        # The shortest plausible duration of each observed size.
        self._min_times: dict[int, float] = {}
        self._is_stale = False  # whether `_refresh` must update the values by index
        self._candidates: dict[int, tuple[int, float]] = {}  # `find_trial` by the last index

    @property
    def is_known(self) -> bool:
        """Return whether there were enough executions for an estimate."""
        return self._observation_count >= _MIN_OBSERVATIONS

    @property
    def can_compare(self) -> bool:
        """Return whether there were enough executions to compare sizes."""
        return self._observation_count >= 2

    @property
    def setup_ns(self) -> float:
        """Return the fixed duration of an execution, fitted to the recent sizes."""
        if self._is_stale:
            self._refresh()
        return self._setup_ns * self._level

    def expected_ns(self, rows: int) -> float:
        """Return the mean duration of a batch of this size."""
        if self._is_stale:
            self._refresh()
        return self._times[min(_index(rows), self._last_index)] * self._level

    def p99_ns(self, rows: int) -> float:
        """Return the duration of a batch at about the 99th percentile."""
        return self.expected_ns(rows) * (1 + 3 * self._spread)

    def best_size(self, rows: int, *, out_of_reach: bool = False) -> int:
        """Return the size up to `rows` with the highest row rate.

        If the rates of two sizes do not clearly differ, the larger size is preferred. If the target
        is `out_of_reach`, the result is the size with the highest plausible rate. Executions of
        that size then make its estimate precise (a bandit problem, as solved by UCB1: Auer et al.,
        2002).
        """
        if self._is_stale:
            self._refresh()
        index = min(_index(rows), self._last_index)
        best_index = (self._optimistic_index if out_of_reach else self._best_index)[index]
        return rows if best_index == index else _size(best_index)

    # --- learning -----------------------------------------------------------------------------

    def observe(self, rows: int, took_ns: float, *, out_of_reach: bool = False) -> None:
        """Record the duration of a batch.

        Args:
            rows: The size of the batch.
            took_ns: The duration.
            out_of_reach: Whether the target is out of reach and the arrivals do not decrease.
        """
        self._late_executions += out_of_reach
        self._observation_count += 1
        if not self._observation_count:
            return
        index = min(_index(rows), self._last_index)
        normalized_ns = max(took_ns, 1.0) / self._level
        size = self._sizes.get(index)
        if size is None:
            self._sizes[index] = _SizeDuration(normalized_ns, self._observation_count)
            insort(self._observed_indices, index)
            self._is_stale = True
            return
        size.record_execution(self._observation_count)
        normalized_ns = self._clamp_outlier(size, normalized_ns)
        size.weight = min(size.weight + 1, _MAX_MEAN_WEIGHT)
        change = (normalized_ns - size.mean) / size.weight
        size.mean += change
        if (
            size.weight < _MAX_TRIALS
            or abs(change) > size.mean / 50
            or not self._observation_count % 16
        ):
            self._is_stale = True

    def _clamp_outlier(self, size: _SizeDuration, duration: float) -> float:
        """Return a measured duration, clamped to the plausible range of its size.

        Update the level and the spread.
        """
        ratio = duration / size.mean
        if not 1 / _MIN_CHANGE < ratio < _MIN_CHANGE:
            self._outliers.append((self._level * ratio, size))
            if len(self._outliers) == _CHANGE_LENGTH and self._has_changed():
                return size.mean
        elif self._outliers:
            self._outliers.clear()
        if size.weight >= 4:
            # Noisier sizes contribute less to the drift (the gain of a Kalman filter). The ratio is
            # averaged, not its logarithm, because the mean logarithm of skewed durations is not 0.
            noise = max(1.0, self._spread / _INITIAL_SPREAD)
            self._level *= 1 + (min(max(ratio, 0.5), 2.0) - 1) * _SHARED_GAIN / noise
        deviation = abs(ratio - 1)
        max_deviation = _MAX_SPREADS * max(self._spread, 2 * _MIN_SPREAD)
        gain = max(_SHARED_GAIN, 1 / self._observation_count)
        self._spread += (min(deviation, 2 * max_deviation) - self._spread) * gain
        if deviation > max_deviation:  # an outlier, or a change if repeated: repetitions weigh more
            size.weight /= 2
            if size.weight >= 2:
                return size.mean * min(max(ratio, 1 - max_deviation), 1 + max_deviation)
        return duration

    def _has_changed(self) -> bool:
        """Check whether all durations have changed by about the same factor.

        The outliers must agree on the factor, and must have several sizes. If so, the level is set
        to their median, so that it applies to all sizes.
        """
        levels = sorted(level for level, _ in self._outliers)
        sizes = {id(size) for _, size in self._outliers}
        if len(sizes) < 2 or levels[-1] > levels[0] * _MAX_DISAGREEMENT:
            return False
        self._level, self._spread = levels[_CHANGE_LENGTH // 2], _INITIAL_SPREAD
        self._outliers.clear()
        self._is_stale = True
        return True

    # --- decisions -------------------------------------------------------------------------

    def find_trial(self, rows: int) -> tuple[int, float]:
        """Return a size up to `rows` to try, because its rate might exceed the best known rate.

        Returns:
            The size and its duration at worst; (0, 0.0) if no size may be better.
        """
        if self._is_stale:
            self._refresh()
        last_index = min(_index(rows), self._last_index)
        candidate = self._candidates.get(last_index)
        if candidate is None:
            candidate = self._candidates[last_index] = self._find_candidate(last_index)
        return candidate

    def _find_candidate(self, last_index: int) -> tuple[int, float]:
        times, min_times, best_index = self._times, self._min_times, self._best_index[last_index]
        rate = _size(best_index) / times[best_index]
        target_rate, candidate, worst_duration, lower_index = _MIN_TRIAL_RATIO * rate, 0, 0.0, 0
        speedup = _ASSUMED_SPEEDUP + math.log(1 + self._late_executions)
        for upper_index in self._observed_indices:
            # A size between two sizes takes at least the shorter and at most the longer duration.
            end_index = upper_index - 1 if upper_index <= last_index else last_index
            if end_index > lower_index:
                time = min_times[upper_index] / speedup
                if lower_index:
                    time = min(min_times[lower_index], min_times[upper_index])
                if _size(end_index) > target_rate * time:
                    target_rate = _size(end_index) / time
                    candidate = _middle_size(lower_index, end_index)
                    worst_duration = times[upper_index] * _ASSUMED_SLOWDOWN
                    if lower_index:
                        worst_duration = max(times[lower_index], times[upper_index])
            if upper_index > last_index:
                break
            lower_index = upper_index
            is_uncertain = (
                self._sizes[upper_index].weight < _MAX_TRIALS and upper_index != best_index
            )
            if is_uncertain and _size(upper_index) > target_rate * min_times[upper_index]:
                target_rate = _size(upper_index) / min_times[upper_index]
                candidate, worst_duration = _size(upper_index), times[upper_index]
        min_size = max(target_rate / _MIN_TRIAL_RATIO, rate) * min_times.get(lower_index, 0.0)
        if last_index > lower_index == self._observed_indices[-1] and _size(last_index) > min_size:
            # Larger sizes were never observed, and a batch may take long. The size therefore grows
            # in small steps.
            candidate = _middle_size(lower_index, last_index)
            worst_duration = times[last_index] * candidate / _size(lower_index)
        return candidate, worst_duration * self._level * (1 + 3 * self._spread)

    def _refresh(self) -> None:
        self._is_stale = False
        self._candidates.clear()
        self._fit_line()
        self._interpolate()
        times, sizes = self._times, self._sizes
        spread = _DEVIATIONS_PER_SPREAD * max(self._spread, _MIN_SPREAD)
        best_index, best_rate, best_error, best_score = 1, 0.0, 0.0, 0.0
        optimistic_index, optimistic_rate = 1, 0.0
        self._min_times = self._find_min_times(spread)
        disturbed_index, disturbed_rate = self._find_disturbed(self._min_times)
        highest = self._observed_indices[-1]
        for index in range(1, self._last_index + 1):
            rate, size = _size(index) / times[index], sizes.get(index)
            error, margin = spread**2, 0.0  # An interpolated rate gets no margin.
            if index > highest:
                self._best_index[index] = best_index
                self._optimistic_index[index] = optimistic_index
                continue
            if size is not None:
                error /= size.weight
                margin = _SURE_ERRORS * (error + best_error) ** 0.5
            self._best_index[index] = (
                index if rate * (1 + _EQUAL_RATES + margin) >= best_rate else best_index
            )
            possible_rate = _size(index) / self._min_times.get(index, times[index])
            if index == disturbed_index:
                possible_rate = disturbed_rate
            if possible_rate >= optimistic_rate:
                optimistic_index, optimistic_rate = index, possible_rate
            self._optimistic_index[index] = optimistic_index
            score = rate / (1 + error**0.5)
            if score >= best_score:
                best_index, best_rate, best_error, best_score = index, rate, error, score

    def _find_min_times(self, spread: float) -> dict[int, float]:
        """Return the shortest plausible duration of each observed size, by the size's index.

        Neighbours that do not clearly differ are pooled. Otherwise the luckiest of many sizes would
        seem to be the fastest, and each of them would be tried.
        """
        min_times: dict[int, float] = {}
        pooled_indices: list[int] = []
        mean = weight = 0.0
        for index in self._observed_indices:
            size = self._sizes[index]
            pooled_mean = (mean * weight + size.mean * size.weight) / (weight + size.weight)
            if pooled_indices:
                error = spread * pooled_mean * math.sqrt(1 / weight + 1 / size.weight)
                if abs(size.mean - mean) > _SURE_ERRORS * error:
                    pooled_indices, weight, pooled_mean = [], 0.0, size.mean
            mean, weight = pooled_mean, weight + size.weight
            pooled_indices.append(index)
            min_time = mean / (1 + spread / math.sqrt(weight))
            min_times.update(dict.fromkeys(pooled_indices, min_time))
        return min_times

    def _find_disturbed(self, min_times: dict[int, float]) -> tuple[int, float]:
        """Return a size that may have seemed slow only because other processes used the CPU.

        If a size has few executions, all of them may have been disturbed. The required number of
        executions grows with the logarithm of the number of all executions while the target is
        missed (Lai and Robbins, 1985).

        Returns:
            The index of the size, and its plausible rate; (0, 0.0) if there is no such size. The
            rate assumes the largest batch below the next observed size, and that this batch takes
            no longer than a batch of a smaller size.
        """
        best_rate = max(_size(index) / time for index, time in min_times.items())
        min_time = min(min_times.values())
        min_executions = math.log(1 + self._late_executions) / math.log(_DISTURBANCE_INTERVAL)
        for index, next_index in zip(
            self._observed_indices, [*self._observed_indices[1:], self._last_index + 1], strict=True
        ):
            if self._sizes[index].weight >= min_executions:
                min_time = min_times[index]
            elif _size(next_index - 1) > best_rate * min_time:
                return index, _size(next_index - 1) / min_time
        return 0, 0.0

    def _fit_line(self) -> None:
        """Fit a line through batch size and duration by least squares.

        If all recent batches have one size, the slope keeps its last value. The initial slope of 0
        is optimistic and leads to larger batches, which reveal the slope.
        """
        total_weight = mean_x = mean_y = sum_xx = sum_xy = 0.0
        for index in self._observed_indices:
            size = self._sizes[index]
            weight = size.decayed_count(self._observation_count)
            total_weight += weight
            delta_x, delta_y = _size(index) - mean_x, size.mean - mean_y
            mean_x += delta_x * weight / total_weight
            mean_y += delta_y * weight / total_weight
            sum_xx += weight * delta_x * (_size(index) - mean_x)
            sum_xy += weight * delta_x * (size.mean - mean_y)
        slope = self._slope_ns
        if sum_xx > total_weight * (_MIN_VARIATION * mean_x) ** 2:
            slope = sum_xy / sum_xx
        self._slope_ns = min(max(slope, 0.0), mean_y / mean_x)
        self._setup_ns = mean_y - self._slope_ns * mean_x

    def _interpolate(self) -> None:
        times, lower = self._times, 0
        end_slope = self._slope_ns
        for index in self._observed_indices:
            mean, high_size = self._sizes[index].mean, _size(index)
            if lower:
                slope = (mean - times[lower]) / (high_size - _size(lower))
            else:
                slope = min(end_slope, mean / high_size / 2)
            for inner_index in range(lower + 1, index):
                times[inner_index] = mean - slope * (high_size - _size(inner_index))
            times[index], lower = mean, index
        for upper_index in range(lower + 1, self._last_index + 1):
            times[upper_index] = times[lower] + end_slope * (_size(upper_index) - _size(lower))


def _index(rows: int) -> int:
    """Return the index of a batch size; large sizes that differ by less than 1/32 share one."""
    shift = max(rows.bit_length() - _EXACT_BITS, 0)
    return (shift << (_EXACT_BITS - 1)) + (rows >> shift)


def _size(index: int) -> int:
    """Return the largest batch size that has this index."""
    shift = max((index >> (_EXACT_BITS - 1)) - 1, 0)
    return ((index - (shift << (_EXACT_BITS - 1)) + 1) << shift) - 1


def _middle_size(lower: int, highest: int) -> int:
    return _size(lower + (highest - lower + 1) // 2)


class _ArrivalStatistics:
    """The statistics of arrivals while a certain number of requests is in flight.

    Attributes:
        chance: The moving average of the chance that another request follows soon.
        gap_ns: The mean time until the request arrives.
        deviation_ns: The mean deviation of this time.
    """

    def __init__(self) -> None:
        self.chance = 0.0  # probability that another request follows soon
        self.gap_ns = 0.0  # mean time until it arrives
        self.deviation_ns = 0.0  # mean deviation of this time
        self.observation_count = 0

    def record_gap(self, gap_ns: int) -> None:
        """Record that the next request arrived after this gap."""
        if self.chance:
            error = gap_ns - self.gap_ns
            self.gap_ns += error / 8
            self.deviation_ns += (abs(error) - self.deviation_ns) / 4
        else:
            self.gap_ns, self.deviation_ns = gap_ns, gap_ns / 2
        self._update_chance(1.0)

    def record_miss(self) -> None:
        """Record that no further request arrived within the limit of a short gap."""
        self._update_chance(0.0)

    def _update_chance(self, outcome: float) -> None:  # 1.0: a request arrived; 0.0: none
        self.observation_count += 1
        self.chance += (outcome - self.chance) / min(self.observation_count, 16)

    @property
    def patience_ns(self) -> int:
        """Return how long after the last event to wait for the next arrival."""
        return int(self.gap_ns + 6 * self.deviation_ns) + _MARGIN_NS


class Arrivals:
    """The expected times of the next requests.

    Clients that wait for a response send their next request after they have received it. Requests
    therefore arrive in bursts after the end of a batch, until every client has a request waiting.
    The number of requests in flight shows the progress of a burst. Each number has moving averages,
    like TCP's averages of round trips (RFC 6298): the chance that another request follows soon, and
    the gap before it.

    Events are arrivals and the ends of batches. `in_flight` is the number of requests that are not
    completed after an event, and `max_gap_ns` the limit of a short gap.
    """

    def __init__(self) -> None:
        self._by_in_flight: dict[int, _ArrivalStatistics] = {}
        self._in_flight = 0
        self._last_event_ns = 0

    def record_arrival(self, now_ns: int, in_flight: int, max_gap_ns: float) -> None:
        """Record the gap since the last event, or a miss if the gap exceeds `max_gap_ns`."""
        gap_ns = now_ns - self._last_event_ns
        if gap_ns <= max_gap_ns:
            self._current_statistics().record_gap(gap_ns)
        else:
            self._current_statistics().record_miss()
        self._last_event_ns, self._in_flight = now_ns, in_flight

    def record_batch(self, now_ns: int, in_flight: int, max_gap_ns: float) -> None:
        """Record the end of a batch, and a miss if no event occurred within `max_gap_ns` before."""
        if now_ns - self._last_event_ns > max_gap_ns:
            self._current_statistics().record_miss()
        self._last_event_ns, self._in_flight = now_ns, in_flight

    def _current_statistics(self) -> _ArrivalStatistics:
        in_flight = min(self._in_flight, _MAX_LEVELS)
        statistics = self._by_in_flight.get(in_flight)
        if statistics is None:
            statistics = self._by_in_flight[in_flight] = _ArrivalStatistics()
        return statistics

    def burst(self, max_requests: int) -> Iterator[tuple[float, float]]:
        """Yield expected counts and waits for at most `max_requests` further requests of the burst.

        Each item is the expected number of requests so far and the expected wait.
        """
        arrival_probability, expected_requests, wait_ns = 1.0, 0.0, 0.0
        for extra_count in range(max_requests):
            statistics = self._likely_statistics(self._in_flight + extra_count)
            if statistics is None:
                return
            miss_chance = 1 - statistics.chance
            wait_ns += arrival_probability * (
                statistics.chance * statistics.gap_ns + miss_chance * statistics.patience_ns
            )
            arrival_probability *= statistics.chance
            expected_requests += arrival_probability
            yield expected_requests, wait_ns

    @property
    def wait_until_ns(self) -> int:
        """Return the time until which waiting for the next request of a burst pays; 0: no burst."""
        statistics = self._likely_statistics(self._in_flight)
        return 0 if statistics is None else self._last_event_ns + statistics.patience_ns

    def _likely_statistics(self, in_flight: int) -> _ArrivalStatistics | None:
        statistics = self._by_in_flight.get(min(in_flight, _MAX_LEVELS))
        if (
            statistics is None
            or statistics.observation_count < _MIN_ARRIVALS
            or statistics.chance < _MIN_CHANCE
        ):
            return None
        return statistics


class Load:
    """Moving averages of the rows that arrive and that are completed, most of them per instance.

    The number of instances is estimated: it is the recent maximum of the average number of
    instances that are busy at the same time.
    """

    def __init__(self) -> None:
        self.batch_count = 0
        self.in_flight = 0  # requests that are not completed
        # The number of requests in flight, and the time, at the end of the last batch.
        self._last_in_flight = self._last_end_ns = 0
        # Averages of the values between the ends of two batches.
        self._arrived_rows = self._completed_rows = self._execution_ns = 0.0
        self._interval_ns = 1.0
        self._rows_per_request = self._busy_instances = 1.0
        self._max_in_flight = 0.0

    def record_batch(
        self, now_ns: int, in_flight: int, count: int, rows: int, took_ns: int
    ) -> None:
        """Record the completion of a batch.

        Args:
            now_ns: The time.
            in_flight: The number of requests that are not completed.
            count: The number of requests in the batch.
            rows: The size of the batch.
            took_ns: The duration of its execution.
        """
        if self.batch_count:
            gain = max(_RATE_GAIN, 1 / self.batch_count)
            self._rows_per_request += (rows / count - self._rows_per_request) * gain
            self._arrived_rows += (
                max(in_flight - self._last_in_flight + count, 0) * self._rows_per_request
                - self._arrived_rows
            ) * gain
            self._completed_rows += (rows - self._completed_rows) * gain
            self._execution_ns += (took_ns - self._execution_ns) * gain
            self._interval_ns += (now_ns - self._last_end_ns - self._interval_ns) * gain
            busy_instances = self._execution_ns / max(self._interval_ns, 1.0)
            self._busy_instances = max(self._busy_instances * _MAXIMUM_DECAY, busy_instances, 1.0)
        self._max_in_flight = max(in_flight + count, self._max_in_flight * _MAXIMUM_DECAY)
        self._last_end_ns, self._last_in_flight, self.in_flight = now_ns, in_flight, in_flight
        self.batch_count += 1

    @property
    def rows_per_ns(self) -> float:
        """Return the rows that arrive per ns for each instance."""
        return self._arrived_rows / max(self._interval_ns, 1.0) / self._busy_instances

    @property
    def row_interval_ns(self) -> float:
        """Return the mean time between the arrivals of two rows, over all instances."""
        return self._interval_ns / self._arrived_rows if self._arrived_rows else 0.0

    @property
    def waiting_rows(self) -> float:
        """Return the rows that are not completed, for each instance."""
        return self.in_flight * self._rows_per_request / self._busy_instances

    @property
    def max_in_flight(self) -> float:
        """Return the recent maximum of requests that were not completed, for each instance."""
        return self._max_in_flight / self._busy_instances

    @property
    def is_steady(self) -> bool:
        """Return whether the load is steady: about as many rows arrive as are completed."""
        return self._arrived_rows > _STEADY_SHARE * self._completed_rows
