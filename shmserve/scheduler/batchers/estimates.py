"""Online estimates of the adaptive batcher: durations of batches, arrivals of requests (pure)."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterator

_KEPT = 1 - 1 / 64  # decay, per execution, of the weights in the line fit
_KNOWN = 8  # minimum number of observations for an estimate
_WIDEST = 4  # residuals beyond this many spreads are clamped
_LEAST_VARIATION = 0.05  # minimum relative deviation of the sizes for which a slope is fitted

_EXACT_BITS = 6  # sizes below 2**6 are distinguished, larger ones to one part in 32
_REMEMBERED = 256.0  # maximum weight of a size's mean, in executions
_GAIN = 1 / 32  # gain of the level and the spread, which all sizes share
_FIRST_SPREAD, _LEAST_SPREAD = 0.1, 0.02  # relative spread of durations
_CHANGED = 8  # number of durations in a row that are a change of the level if all differ from it
_STEP, _ALIKE = 1.5, 2.0  # minimum ratio of such a change; maximum ratio between such durations
_DEVIATION = 1.25  # standard deviations per spread, for a normal distribution
_SAME = 0.03  # relative difference below which rates count as equal
_SURE = 2.0  # standard errors by which a rate must be better
_WORTH = 1.1  # minimum ratio of an untried size's possible rate to the best rate
_FASTER, _SLOWER = 4, 2  # assumed initial speed-up, and slow-down, of an untried smaller batch
_OFTEN = 4  # executions after which trials of a size end
_DISTURBED = 16  # a busy machine disturbs one execution in this many

_RATE_GAIN = 1 / 64  # minimum gain of the averages of the load
_DECAY = 1 - 1 / 1024  # decay of maxima, per batch
_AS_MANY = 0.95  # share of arriving rows that are completed, at which the load is steady

_MOST_LEVELS = 512  # maximum number of requests in flight that has its own statistics
_LIKELY = 0.6  # minimum chance of a predicted arrival
_FIRST_SEEN = 3  # minimum number of observations for a prediction
_MARGIN_NS = 50_000  # allowance for the latency of the event loop


class _Size:
    """The mean duration of the batches of a size.

    Attributes:
        mean: The mean duration at a level of 1.
        weight: The number of batches in the mean.
    """

    def __init__(self, mean: float, number: int) -> None:
        self.mean = mean
        self.weight = 1.0
        self._recent, self._number = 1.0, number

    def recent(self, number: int) -> float:
        """Return the number of batches of this size, decayed up to the execution `number`."""
        return self._recent * _KEPT ** (number - self._number)

    def executed(self, number: int) -> None:
        """Count a batch of this size, which was the execution with this `number`."""
        self._recent, self._number = self.recent(number) + 1, number


class SizeTimes:
    """The duration of batches by size.

    Each observed size has an exponentially weighted mean. Durations between two observed sizes are
    interpolated. A line through the recent sizes provides the slope above the largest size and the
    fixed duration. All sizes share their relative spread and a level. The level also applies a
    drift to sizes that do not occur. A smaller size is preferred only if its rate is higher by more
    than the standard errors of both rates. Bisection finds a cliff between two sizes.

    The first execution is ignored, because models initialise themselves then.
    """

    def __init__(self, largest: int) -> None:
        self._sizes: dict[int, _Size] = {}
        self._order: list[int] = []  # the indices of the observed sizes
        self._last = _index(largest)
        self._level = 1.0
        self._setup_ns = self._each_ns = 0.0  # the fitted line of duration by size, at a level of 1
        self._spread = _FIRST_SPREAD
        # The last batches if all durations differ much from the level: matching level, and size.
        self._steps: deque[tuple[float, _Size]] = deque(maxlen=_CHANGED)
        self._seen = -1
        self._late = 0  # executions while the target was out of reach
        # These lists are by index of a size, as of the last refresh, at a level of 1.
        self._times = [0.0] * (self._last + 1)
        self._best = list(range(self._last + 1))
        self._hoped = self._best.copy()
        self._least: dict[int, float] = {}  # the shortest plausible duration of each observed size
        self._stale = False
        self._untried: dict[int, tuple[int, float]] = {}

    @property
    def is_known(self) -> bool:
        """Return whether there were enough executions for an estimate."""
        return self._seen >= _KNOWN

    @property
    def begun(self) -> bool:
        """Return whether there were enough executions to compare sizes."""
        return self._seen >= 2

    @property
    def setup_ns(self) -> float:
        """Return the fixed duration of an execution, fitted to the recent sizes."""
        if self._stale:
            self._refresh()
        return self._setup_ns * self._level

    def expected_ns(self, units: int) -> float:
        """Return the mean duration of a batch of this size."""
        if self._stale:
            self._refresh()
        return self._times[min(_index(units), self._last)] * self._level

    def most_ns(self, units: int) -> float:
        """Return the duration of a batch at about the 99th percentile."""
        return self.expected_ns(units) * (1 + 3 * self._spread)

    def best(self, units: int, *, late: bool = False) -> int:
        """Return the size up to `units` with the highest row rate; if uncertain, the larger one.

        If all requests are `late`, the result is the size with the highest possible rate, so that
        the uncertainty ends (a bandit problem, as solved by UCB1: Auer et al., 2002).
        """
        if self._stale:
            self._refresh()
        index = min(_index(units), self._last)
        best = (self._hoped if late else self._best)[index]
        return units if best == index else _size(best)

    # --- learning -----------------------------------------------------------------------------

    def observe(self, units: int, took_ns: float, *, late: bool = False) -> None:
        """Record the duration of a batch.

        Args:
            units: The size of the batch.
            took_ns: The duration.
            late: Whether the target is out of reach and the arrivals do not decrease.
        """
        self._late += late
        self._seen += 1
        if not self._seen:
            return
        index = min(_index(units), self._last)
        took = max(took_ns, 1.0) / self._level
        size = self._sizes.get(index)
        if size is None:
            self._sizes[index] = _Size(took, self._seen)
            insort(self._order, index)
            self._stale = True
            return
        size.executed(self._seen)
        took = self._believable(size, took)
        size.weight = min(size.weight + 1, _REMEMBERED)
        change = (took - size.mean) / size.weight
        size.mean += change
        if size.weight < _OFTEN or abs(change) > size.mean / 50 or not self._seen % 16:
            self._stale = True

    def _believable(self, size: _Size, took: float) -> float:
        """Return a measured duration, clamped to the plausible range of its size.

        Update the level and the spread.
        """
        ratio = took / size.mean
        if not 1 / _STEP < ratio < _STEP:
            self._steps.append((self._level * ratio, size))
            if len(self._steps) == _CHANGED and self._has_changed():
                return size.mean
        elif self._steps:
            self._steps.clear()
        if size.weight >= 4:
            # Noisier sizes contribute less to the drift (the gain of a Kalman filter). The mean
            # ratio is 1, whereas the mean logarithm of skewed durations is not 0.
            noise = max(1.0, self._spread / _FIRST_SPREAD)
            self._level *= 1 + (min(max(ratio, 0.5), 2.0) - 1) * _GAIN / noise
        off = abs(ratio - 1)
        widest = _WIDEST * max(self._spread, 2 * _LEAST_SPREAD)
        gain = max(_GAIN, 1 / self._seen)
        self._spread += (min(off, 2 * widest) - self._spread) * gain
        if off > widest:  # an outlier or a change: a repetition has more weight
            size.weight /= 2
            if size.weight >= 2:
                return size.mean * min(max(ratio, 1 - widest), 1 + widest)
        return took

    def _has_changed(self) -> bool:
        """Set the level if the last durations, of several sizes, differ from it by one factor."""
        levels = sorted(level for level, _ in self._steps)
        sizes = {id(size) for _, size in self._steps}
        if len(sizes) < 2 or levels[-1] > levels[0] * _ALIKE:
            return False
        self._level, self._spread = levels[_CHANGED // 2], _FIRST_SPREAD
        self._steps.clear()
        self._stale = True
        return True

    # --- decisions -------------------------------------------------------------------------

    def untried(self, units: int) -> tuple[int, float]:
        """Return a size up to `units` to try, because its rate might exceed that of `best`.

        Returns:
            The size and its duration at worst; (0, 0.0) if there is none.
        """
        if self._stale:
            self._refresh()
        last = min(_index(units), self._last)
        promising = self._untried.get(last)
        if promising is None:
            promising = self._untried[last] = self._most_promising(last)
        return promising

    def _most_promising(self, last: int) -> tuple[int, float]:
        times, least, best = self._times, self._least, self._best[last]
        rate = _size(best) / times[best]
        promised, promising, worst, lower = _WORTH * rate, 0, 0.0, 0
        faster = _FASTER + math.log(1 + self._late)
        for upper in self._order:
            # A size between two sizes takes at least the shorter and at most the longer duration.
            highest = upper - 1 if upper <= last else last
            if highest > lower:
                time = min(least[lower], least[upper]) if lower else least[upper] / faster
                if _size(highest) > promised * time:
                    promised, promising = _size(highest) / time, _middle(lower, highest)
                    worst = max(times[lower], times[upper]) if lower else times[upper] * _SLOWER
            if upper > last:
                break
            lower, doubted = upper, self._sizes[upper].weight < _OFTEN and upper != best
            if doubted and _size(upper) > promised * least[upper]:
                promised = _size(upper) / least[upper]
                promising, worst = _size(upper), times[upper]
        time = max(promised / _WORTH, rate) * least.get(lower, 0.0)
        if last > lower == self._order[-1] and _size(last) > time:
            # The larger a size beyond all observed sizes is, the longer a batch may take.
            promising = _middle(lower, last)
            worst = times[last] * promising / _size(lower)
        return promising, worst * self._level * (1 + 3 * self._spread)

    def _refresh(self) -> None:
        self._stale = False
        self._untried.clear()
        self._fit()
        self._interpolate()
        times, sizes = self._times, self._sizes
        spread = _DEVIATION * max(self._spread, _LEAST_SPREAD)
        best, top, top_error, top_score = 1, 0.0, 0.0, 0.0
        hoped, hope = 1, 0.0
        self._least = self._at_best(spread)
        again, promise = self._again(self._least)
        highest = self._order[-1]
        for index in range(1, self._last + 1):
            rate, size = _size(index) / times[index], sizes.get(index)
            error, margin = spread**2, 0.0  # An interpolated rate gets no margin.
            if index > highest:
                self._best[index], self._hoped[index] = best, hoped
                continue
            if size is not None:
                error /= size.weight
                margin = _SURE * (error + top_error) ** 0.5
            self._best[index] = index if rate * (1 + _SAME + margin) >= top else best
            may = _size(index) / self._least.get(index, times[index])
            if index == again:
                may = promise
            if may >= hope:
                hoped, hope = index, may
            self._hoped[index] = hoped
            score = rate / (1 + error**0.5)
            if score >= top_score:
                best, top, top_error, top_score = index, rate, error, score

    def _at_best(self, spread: float) -> dict[int, float]:
        """Return the shortest plausible duration of each observed size, by the size's index.

        Neighbours that do not clearly differ are pooled. Otherwise the luckiest of many sizes would
        seem to be the fastest, and each of them would be tried.
        """
        least: dict[int, float] = {}
        together: list[int] = []
        mean = weight = 0.0
        for index in self._order:
            size = self._sizes[index]
            pooled = (mean * weight + size.mean * size.weight) / (weight + size.weight)
            if together:
                error = spread * pooled * math.sqrt(1 / weight + 1 / size.weight)
                if abs(size.mean - mean) > _SURE * error:
                    together, weight, pooled = [], 0.0, size.mean
            mean, weight = pooled, weight + size.weight
            together.append(index)
            least.update(dict.fromkeys(together, mean / (1 + spread / math.sqrt(weight))))
        return least

    def _again(self, least: dict[int, float]) -> tuple[int, float]:
        """Return a size whose executions may all have been disturbed, and its highest rate.

        The number of executions that discard a size grows with the logarithm of the time for which
        the target is missed (Lai and Robbins, 1985).

        Returns:
            The size, and the highest rate of the sizes up to the next observed size if the size is
            as fast as a smaller size; (0, 0.0) if there is no such size.
        """
        top = max(_size(index) / time for index, time in least.items())
        below = min(least.values())
        enough = math.log(1 + self._late) / math.log(_DISTURBED)
        for index, above in zip(self._order, [*self._order[1:], self._last + 1], strict=True):
            if self._sizes[index].weight >= enough:
                below = least[index]
            elif _size(above - 1) > top * below:
                return index, _size(above - 1) / below
        return 0, 0.0

    def _fit(self) -> None:
        """Fit a line through batch size and duration by least squares.

        If all recent batches have one size, the slope keeps its last value. The initial slope of 0
        is optimistic and leads to larger batches, which reveal the slope.
        """
        total = mean_x = mean_y = xx = xy = 0.0
        for index in self._order:
            size = self._sizes[index]
            weight = size.recent(self._seen)
            total += weight
            off_x, off_y = _size(index) - mean_x, size.mean - mean_y
            mean_x += off_x * weight / total
            mean_y += off_y * weight / total
            xx += weight * off_x * (_size(index) - mean_x)
            xy += weight * off_x * (size.mean - mean_y)
        slope = self._each_ns
        if xx > total * (_LEAST_VARIATION * mean_x) ** 2:
            slope = xy / xx
        self._each_ns = min(max(slope, 0.0), mean_y / mean_x)
        self._setup_ns = mean_y - self._each_ns * mean_x

    def _interpolate(self) -> None:
        times, lower = self._times, 0
        each = self._each_ns
        for index in self._order:
            mean, high = self._sizes[index].mean, _size(index)
            if lower:
                slope = (mean - times[lower]) / (high - _size(lower))
            else:
                slope = min(each, mean / high / 2)
            for between in range(lower + 1, index):
                times[between] = mean - slope * (high - _size(between))
            times[index], lower = mean, index
        for above in range(lower + 1, self._last + 1):
            times[above] = times[lower] + each * (_size(above) - _size(lower))


def _index(units: int) -> int:
    shift = max(units.bit_length() - _EXACT_BITS, 0)
    return (shift << (_EXACT_BITS - 1)) + (units >> shift)


def _size(index: int) -> int:
    """Return the largest batch size that has this index."""
    shift = max((index >> (_EXACT_BITS - 1)) - 1, 0)
    return ((index - (shift << (_EXACT_BITS - 1)) + 1) << shift) - 1


def _middle(lower: int, highest: int) -> int:
    return _size(lower + (highest - lower + 1) // 2)


class _Level:
    """The statistics of arrivals while a certain number of requests is in flight."""

    def __init__(self) -> None:
        self.chance = 0.0
        self.gap_ns = 0.0
        self.deviation_ns = 0.0
        self.seen = 0

    def came(self, gap_ns: int) -> None:
        """Record that the next request arrived after this gap."""
        if self.chance:
            error = gap_ns - self.gap_ns
            self.gap_ns += error / 8
            self.deviation_ns += (abs(error) - self.deviation_ns) / 4
        else:
            self.gap_ns, self.deviation_ns = gap_ns, gap_ns / 2
        self._learn(1.0)

    def missed(self) -> None:
        """Record that no further request arrived soon."""
        self._learn(0.0)

    def _learn(self, outcome: float) -> None:
        self.seen += 1
        self.chance += (outcome - self.chance) / min(self.seen, 16)

    @property
    def patience_ns(self) -> int:
        """Return the time after the last event for which waiting for the next arrival pays."""
        return int(self.gap_ns + 6 * self.deviation_ns) + _MARGIN_NS


class Arrivals:
    """The expected times of the next requests.

    Clients that wait for a response send their next request after they have received it. Requests
    therefore arrive in bursts after the end of a batch, until every client has a request waiting.
    The number of requests shows the progress of a burst. For each number there are moving averages,
    like TCP's averages of round trips (RFC 6298): the chance that another request follows soon, and
    the gap before it.

    Events are arrivals and the ends of batches. `in_flight` is the number of requests that are not
    completed after an event, and `soon_ns` the limit of a short gap.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._in_flight = 0
        self._since_ns = 0

    def arrived(self, now_ns: int, in_flight: int, soon_ns: float) -> None:
        """Record an arrival."""
        gap_ns = now_ns - self._since_ns
        if gap_ns <= soon_ns:
            self._level().came(gap_ns)
        else:
            self._level().missed()
        self._since_ns, self._in_flight = now_ns, in_flight

    def returned(self, now_ns: int, in_flight: int, soon_ns: float) -> None:
        """Record the end of a batch."""
        if now_ns - self._since_ns > soon_ns:
            self._level().missed()
        self._since_ns, self._in_flight = now_ns, in_flight

    def _level(self) -> _Level:
        number = min(self._in_flight, _MOST_LEVELS)
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level()
        return level

    def burst(self, most: int) -> Iterator[tuple[float, float]]:
        """Yield expected numbers and waits for up to `most` further requests of the current burst.

        Each item is the expected number of requests so far and the expected wait.
        """
        chance, requests, wait_ns = 1.0, 0.0, 0.0
        for more in range(most):
            level = self._likely(self._in_flight + more)
            if level is None:
                return
            lost = 1 - level.chance
            wait_ns += chance * (level.chance * level.gap_ns + lost * level.patience_ns)
            chance *= level.chance
            requests += chance
            yield requests, wait_ns

    @property
    def next_by_ns(self) -> int:
        """Return the time until which waiting for the next request of a burst pays; 0: no burst."""
        level = self._likely(self._in_flight)
        return 0 if level is None else self._since_ns + level.patience_ns

    def _likely(self, in_flight: int) -> _Level | None:
        level = self._levels.get(min(in_flight, _MOST_LEVELS))
        if level is None or level.seen < _FIRST_SEEN or level.chance < _LIKELY:
            return None
        return level


class Load:
    """Moving averages of the rows that arrive and that are completed, per instance.

    The number of instances is estimated as the maximum of the average number of busy instances.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.in_flight = 0  # requests that are not completed
        self._in_flight_before = self._returned_ns = 0  # values at the end of the last batch
        # Averages of the time between the ends of two batches.
        self._came = self._done = self._took_ns = 0.0
        self._passed_ns = 1.0
        self._each = self._instances = 1.0
        self._most = 0.0

    def returned(self, now_ns: int, in_flight: int, count: int, units: int, took_ns: int) -> None:
        """Record the completion of a batch.

        Args:
            now_ns: The time.
            in_flight: The number of requests that are not completed.
            count: The number of requests in the batch.
            units: The number of rows in the batch.
            took_ns: The duration of its execution.
        """
        if self.batches:
            gain = max(_RATE_GAIN, 1 / self.batches)
            self._each += (units / count - self._each) * gain
            self._came += (
                max(in_flight - self._in_flight_before + count, 0) * self._each - self._came
            ) * gain
            self._done += (units - self._done) * gain
            self._took_ns += (took_ns - self._took_ns) * gain
            self._passed_ns += (now_ns - self._returned_ns - self._passed_ns) * gain
            at_work = self._took_ns / max(self._passed_ns, 1.0)
            self._instances = max(self._instances * _DECAY, at_work, 1.0)
        self._most = max(in_flight + count, self._most * _DECAY)
        self._returned_ns, self._in_flight_before, self.in_flight = now_ns, in_flight, in_flight
        self.batches += 1

    @property
    def per_ns(self) -> float:
        """Return the rows that arrive per ns."""
        return self._came / max(self._passed_ns, 1.0) / self._instances

    @property
    def row_ns(self) -> float:
        """Return the mean time between the arrivals of two rows, over all instances."""
        return self._passed_ns / self._came if self._came else 0.0

    @property
    def waiting(self) -> float:
        """Return the rows that are not completed."""
        return self.in_flight * self._each / self._instances

    @property
    def most(self) -> float:
        """Return the recent maximum of requests that were not completed."""
        return self._most / self._instances

    @property
    def stays(self) -> bool:
        """Return whether the load is steady: about as many rows arrive as are completed."""
        return self._came > _AS_MANY * self._done
