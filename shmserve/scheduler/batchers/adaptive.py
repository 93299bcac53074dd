"""A batcher that selects batch size and delay to meet a latency target (pure).

The batcher learns the duration of batches by size and the arrival of requests (estimates.py):

1. A batch has the size with the highest row rate among the sizes up to the number of waiting rows.
   Batches thus stay smaller than a size at which the execution time jumps. The batcher tries an
   untried size whose rate may be higher. The budget of misses (see below) must cover the trial's
   cost, unless the known sizes do not keep up with the arrivals.
2. Waiting requests run as soon as an instance is free, unless rule 3 applies.
3. The batcher waits for further requests of a burst if waiting raises the rate of rows. The rows
   that join the batch, divided by the time by which the batch ends later, must exceed the average
   rate (the marginal value theorem: Charnov, 1976). The total wait is at most the setup time of an
   execution. Waiting therefore costs at most twice the optimum, as in the ski-rental problem
   (Karlin et al., 1988). Trials decide whether waiting pays, because a busy machine may wake the
   scheduler too late. No trial is needed if the larger batch would end before the smaller one.
4. A wait ends early enough for the oldest request to meet the target with a batch duration at the
   99th percentile. A configured delay also limits the wait.
5. If all waiting requests would be late in one batch and in time in two batches, two batches run.

Feedback controls the aim, the latency for which the batcher plans. Time outside the scheduler, or
an unexpectedly long tail, lowers the aim until one request in a hundred misses the target. If
misses accumulate (a cumulative sum: Page, 1954), the target is out of reach, and the batcher
maximises throughput with the size of the highest possible rate. Misses caused by trials affect
neither the aim nor this sum. Preferred sizes are ignored.

Trials have a budget. The target permits one request in a hundred to miss it, and a fifth of these
misses may be spent on trials. The budget contains the earned and unspent misses. A trial is made if
it causes no miss even at worst, if the budget covers its estimated misses, or if the target is
being missed already. `bench/measured.md` shows the effect of each mechanism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shmserve.ipc.transport.frames import Record
from shmserve.scheduler.batchers import (
    Batch,
    Batcher,
    CloseReason,
    PendingRequest,
    QueueHead,
    WaitUntil,
    closed_batch,
    gather,
)
from shmserve.scheduler.batchers.estimates import Arrivals, Load, SizeTimes
from shmserve.scheduler.requests.scheduled import NEVER
from shmserve.scheduler.settings import Batching

# The initial credit in misses, and the maximum credit after the learning period.
_INITIAL_CREDIT, _MAX_CREDIT = 64.0, 24.0
_CREDIT_PER_REQUEST = 0.002  # misses credited for each request that meets the target

# Batches between two trials of sizes: usually, and while learning.
_TRIAL_INTERVAL, _LEARNING_INTERVAL = 16, 2
LEARNING = 48  # number of first batches, in which trials are more frequent
_MIN_IDLE = 0.25  # minimum idle share of an instance: with less, clients block or requests are late

_EPOCH_BATCHES = 24  # number of batches in an epoch
_SETTLING_BATCHES = 4  # first batches of an epoch, which the previous epoch still affects
# The initial and the maximum number of epochs between two trials of the choice that seems worse.
_MIN_EXPLORE_INTERVAL, _MAX_EXPLORE_INTERVAL = 2, 160
_CLEAR_RATIO = 0.8  # ratio of the mean latencies with and without waiting below which waiting pays
_EPOCH_WEIGHT = 1 / 3  # weight of the newest epoch in moving averages
_AIM_STEP = 0.02  # relative reduction of the planned latency (the aim) per missed target
_ALLOWED_MISSES = 0.01  # share of requests that may miss the target
_MIN_AIM = 0.25  # minimum of the aim, as a share of the latency target
_TOLERATED_MISSES = 0.02  # share of requests that may miss the target before misses accumulate
# The accumulated misses at which the target is out of reach, and the limit of their number.
_HOPELESS_MISSES, _MAX_MISSES = 30, 60
_FULL_UTILISATION = 0.95  # utilisation above which an instance does not keep up
_CLEAR_DIFFERENCE = 0.1  # relative difference above which two durations differ clearly


class MissBudget:
    """The number of latency-target misses that trials may still cause."""

    def __init__(self) -> None:
        self.credit = _INITIAL_CREDIT
        self._trial_misses = 0.0

    def add_credit(self, on_time_count: int) -> None:
        """Credit the budget with permitted misses, for requests that met the latency target.

        Args:
            on_time_count: The number of these requests.
        """
        if self.credit < _MAX_CREDIT:
            self.credit += _CREDIT_PER_REQUEST * on_time_count

    def end_learning(self) -> None:
        """End the learning period: reduce the credit of permitted misses to its usual maximum."""
        self.credit = min(self.credit, _MAX_CREDIT)

    def subtract_misses(self, misses: float) -> None:
        """Subtract the misses of the latency target that a trial has caused."""
        self.credit -= misses
        self._trial_misses += misses

    def subtract_trial_misses(self, misses: int) -> int:
        """Return how many of `misses` of the latency target were not caused by trials.

        The method subtracts the misses that `subtract_misses` has attributed to trials, each of
        them once.
        """
        caused_by_trials = min(misses, int(self._trial_misses))
        self._trial_misses -= caused_by_trials
        return misses - caused_by_trials


class WaitingChoice:
    """The decision whether waiting for further requests pays, from measured latencies.

    An epoch is a number of successive batches, with the same choice for all of them. The mean
    latencies of the epochs with waiting and without are compared as moving averages. For clients
    that wait for their responses, shorter latencies also mean more requests. The better choice
    depends on the load, so some epochs test the other choice. Initially, every second epoch is a
    test. Tests become exponentially rarer while they confirm the choice, which bounds their cost.
    """

    def __init__(self, miss_budget: MissBudget) -> None:
        self._miss_budget = miss_budget
        self.should_wait = True
        self.waiting_clearly_pays = False  # whether waiting certainly has the lower latency
        self._waiting_is_better = True
        self._explore_interval = _MIN_EXPLORE_INTERVAL
        self._next_explore_epoch = 2 * _MIN_EXPLORE_INTERVAL
        self._mean_ns: dict[bool, float] = {}  # the mean latency with and without waiting
        self._explore_misses = 0  # misses in the last epoch with the choice that seems worse
        self._epoch_count = 0
        self._start_epoch()

    def _start_epoch(self) -> None:
        self._batch_count = self._request_count = self._total_latency_ns = self._miss_count = 0

    def record_batch(self, latencies_ns: Sequence[int], misses: int) -> None:
        """Record the latencies of a batch; `misses` of its requests missed the latency target."""
        self._batch_count += 1
        self._miss_count += misses
        if misses and self.should_wait is not self._waiting_is_better:
            self._miss_budget.subtract_misses(misses)
        if self._batch_count > _SETTLING_BATCHES:
            self._request_count += len(latencies_ns)
            self._total_latency_ns += sum(latencies_ns)
        if self._batch_count >= _EPOCH_BATCHES:
            self._end_epoch()

    def _end_epoch(self) -> None:
        mean_ns = self._total_latency_ns / max(1, self._request_count)
        old_mean_ns = self._mean_ns.get(self.should_wait, mean_ns)
        self._mean_ns[self.should_wait] = old_mean_ns + (mean_ns - old_mean_ns) * _EPOCH_WEIGHT
        if self.should_wait is not self._waiting_is_better:
            self._explore_misses = self._miss_count
        self._start_epoch()
        self._epoch_count += 1
        if len(self._mean_ns) < 2:
            self.should_wait = not self.should_wait
            return
        waiting_ns, no_waiting_ns = self._mean_ns[True], self._mean_ns[False]
        waiting_is_better = waiting_ns < no_waiting_ns
        if waiting_is_better is not self._waiting_is_better:
            self._waiting_is_better = waiting_is_better
            self._explore_interval = _MIN_EXPLORE_INTERVAL
            self._next_explore_epoch = self._epoch_count + _MIN_EXPLORE_INTERVAL
        self.should_wait = waiting_is_better
        self.waiting_clearly_pays = waiting_ns < _CLEAR_RATIO * no_waiting_ns
        if (
            self._epoch_count >= self._next_explore_epoch
            and self._explore_misses <= self._miss_budget.credit
        ):
            self.should_wait = not waiting_is_better
            self._explore_interval = min(self._explore_interval * 2, _MAX_EXPLORE_INTERVAL)
            self._next_explore_epoch = self._epoch_count + self._explore_interval


class TrialState(Record):
    """The state of an instance when a batch size is tried.

    Attributes:
        oldest_left_ns: The time until the oldest request misses the target.
        spare_ns: The additional time that a new request could wait and still meet the target.
        row_ns: The shortest duration per row.
        rows_per_ns: The rows that arrive per ns.
        max_in_flight: The recent maximum of requests that were not completed.
        is_overloaded: Whether the known sizes do not keep up with the arrivals.
    """

    oldest_left_ns: float  # until the oldest request misses the target
    spare_ns: float  # how long a new request may wait
    row_ns: float  # shortest duration per row
    rows_per_ns: float  # arrival rate
    max_in_flight: float
    is_overloaded: bool  # whether requests arrive faster than they run


class SizeTrials:
    """The trials of batch sizes, and the misses of the latency target that they may cause.

    The requests in a trial are late if the batch takes longer than the time left to them. If the
    size has a low row rate, the queue also grows, and requests behind the trial may be late. The
    instance shortens the queue only in its idle time, so that a trial is expensive if the load is
    high. If clients wait for their responses, at most one request of each client is late. The
    budget of permitted misses pays the actual cost of a trial, at most the estimated cost.
    """

    def __init__(self, miss_budget: MissBudget) -> None:
        self._miss_budget = miss_budget
        self._next_trial_batch = 0  # number of the batch
        self._trial_size = 0  # the size of the running trial; 0: no trial runs
        self._state = TrialState(0.0, 0.0, 0.0, 0.0, 0.0, False)
        self._idle_share = 1.0
        # The requests that may still be late because of the last trial, and the misses that may
        # still be charged to it.
        self._delayed_requests = self._chargeable_misses = 0.0

    def is_due(self, batches: int) -> bool:
        """Check whether a trial is due, given the number of batches executed so far."""
        return batches >= self._next_trial_batch

    def start_trial(self, size: int, worst_ns: float, state: TrialState, batches: int) -> bool:
        """Start a trial of at most `worst_ns`; return False if it may cause too many misses."""
        self._state = state
        self._idle_share = max(1 - state.rows_per_ns * state.row_ns, _MIN_IDLE)
        estimated_misses = self._estimate_misses(size, worst_ns, state.max_in_flight)
        if estimated_misses > max(self._miss_budget.credit, 0) and not state.is_overloaded:
            return False
        self._trial_size = size
        is_learning = batches < LEARNING or state.is_overloaded
        self._next_trial_batch = batches + (_LEARNING_INTERVAL if is_learning else _TRIAL_INTERVAL)
        return True

    def _estimate_misses(self, size: int, took_ns: float, max_in_flight: float) -> float:
        state = self._state
        own_misses = size if took_ns > state.oldest_left_ns else 0
        lost_ns = took_ns - size * state.row_ns - max(state.spare_ns, 0)
        lost_rows = max(lost_ns, 0) * state.rows_per_ns / self._idle_share
        return own_misses + min(lost_rows, max_in_flight)

    def record_batch(
        self, rows: int, took_ns: int, count: int, in_flight: int, misses: int
    ) -> None:
        """Record a batch of `count` requests, of which `misses` were late.

        Args:
            rows: The size of the batch.
            took_ns: The duration of its execution.
            count: The number of its requests.
            in_flight: The number of requests that are not completed.
            misses: The number of its requests that missed the target.
        """
        if rows == self._trial_size:
            self._delayed_requests = count + in_flight / self._idle_share
            self._chargeable_misses = self._estimate_misses(rows, took_ns, in_flight)
            self._trial_size = 0
        if self._delayed_requests > 0:
            self._delayed_requests -= count
            charged_misses = min(misses, self._chargeable_misses)
            self._chargeable_misses -= charged_misses
            self._miss_budget.subtract_misses(charged_misses)


class AdaptiveBatcher(Batcher):
    """A batcher that meets a latency target by the rules of this module's docstring."""

    is_learning = True

    def __init__(self, rules: Batching) -> None:
        self._rules = rules
        self._size_times = SizeTimes(rules.max_batch_size)
        self._arrivals = Arrivals()
        self._load = Load()
        self._miss_budget = MissBudget()
        self._waiting_choice = WaitingChoice(self._miss_budget)
        self._size_trials = SizeTrials(self._miss_budget)
        self._latency_aim_ns = float(rules.target_ns)
        self._excess_misses = 0.0  # the cumulative sum of misses beyond the tolerated share
        # The first request of the batch that is being formed, and the end of its wait.
        self._first_request: PendingRequest | None = None
        self._wait_end_ns = 0
        self._is_draining = False

    # --- learning -----------------------------------------------------------------------

    def record_arrival(self, now_ns: int, in_flight: int) -> None:
        self._arrivals.record_arrival(now_ns, in_flight, self._size_times.setup_ns)
        self._load.in_flight = in_flight

    def record_batch(
        self, now_ns: int, in_flight: int, rows: int, took_ns: int, latencies_ns: Sequence[int]
    ) -> None:
        count, target_ns = len(latencies_ns), self._rules.target_ns
        self._arrivals.record_batch(now_ns, in_flight, self._size_times.setup_ns)
        self._load.record_batch(now_ns, in_flight, count, rows, took_ns)
        misses = 0
        for latency_ns in latencies_ns:
            if latency_ns > target_ns:
                misses += 1
        out_of_reach = self._is_out_of_reach and self._load.is_steady and misses > 0
        self._size_times.observe(rows, took_ns, out_of_reach=out_of_reach)
        self._size_trials.record_batch(rows, took_ns, count, in_flight, misses)
        if self._load.batch_count > LEARNING:
            self._waiting_choice.record_batch(latencies_ns, misses)
        elif self._load.batch_count == LEARNING:
            self._miss_budget.end_learning()
        self._adjust_aim(count - misses, self._miss_budget.subtract_trial_misses(misses))

    def _adjust_aim(self, on_time_count: int, misses: int) -> None:
        """Adjust the aim, which is the latency for which the batcher plans.

        Args:
            on_time_count: The number of requests that met the target, which raise the aim.
            misses: The number of requests that missed it, except misses that trials have caused.
                These misses lower the aim.
        """
        self._miss_budget.add_credit(on_time_count)
        earlier_misses = max(self._excess_misses - _TOLERATED_MISSES * on_time_count, 0)
        self._excess_misses = min(earlier_misses + misses, _MAX_MISSES)
        raise_factor = 1 + _AIM_STEP * _ALLOWED_MISSES / (1 - _ALLOWED_MISSES) * on_time_count
        self._latency_aim_ns *= raise_factor * (1 - _AIM_STEP) ** misses
        target_ns = self._rules.target_ns
        self._latency_aim_ns = min(max(self._latency_aim_ns, _MIN_AIM * target_ns), target_ns)

    # --- decisions ----------------------------------------------------------------------

    def flush(self) -> None:
        self._is_draining = True

    def closed_batch(self, pending: Iterable[PendingRequest]) -> Batch | None:
        head = gather(pending, self._rules)
        batch = closed_batch(head)
        return batch if head is None or batch is None else self._shrink_to_best(head, batch)

    def decide(
        self, now_ns: int, pending: Iterable[PendingRequest], reserve_ns: int
    ) -> Batch | WaitUntil | None:
        head = gather(pending, self._rules)
        if head is None:
            return None
        # While a batch waits for a ticket of the rate limiter, the same requests are decided again.
        # The end of their wait is therefore set only when the first request changes.
        if not any(request is self._first_request for request in head.requests):
            self._first_request = head.requests[0]
            self._wait_end_ns = now_ns + int(self._size_times.setup_ns)
        batch = closed_batch(head)
        if self._is_draining or not self._size_times.can_compare:
            return batch or Batch(len(head.requests), CloseReason.IDLE)
        trial_count = self._start_trial(now_ns, head)
        if trial_count:
            return Batch(trial_count, CloseReason.PREFERRED)
        if batch is not None:
            return self._shrink_to_best(head, batch)
        if not self._size_times.is_known:
            return self._shrink_to_best(head, Batch(len(head.requests), CloseReason.IDLE))
        if head.flush_by_ns - reserve_ns <= now_ns:
            return self._shrink_to_best(head, Batch(len(head.requests), CloseReason.DEADLINE))
        return self._wait_or_run(now_ns, head, reserve_ns)

    def _wait_or_run(self, now_ns: int, head: QueueHead, reserve_ns: int) -> Batch | WaitUntil:
        """Return the time to wait for further requests, or the batch to run."""
        count = len(head.requests)
        burst_end_ns, batch_ends_sooner = self._burst_end(head)
        end_ns = self._start_by(head.oldest_ns, head.rows)
        if (
            batch_ends_sooner
            or (self._waiting_choice.should_wait and self._waiting_choice.waiting_clearly_pays)
            or self._is_out_of_reach
        ):
            end_ns = max(end_ns, burst_end_ns)
        reason = CloseReason.IDLE
        if end_ns <= now_ns:
            reason = CloseReason.TARGET
        elif self._rules.delay_ns:
            end_ns = min(end_ns, head.oldest_ns + self._rules.delay_ns)
        until_ns = min(end_ns, self._wait_end_ns, burst_end_ns)
        if until_ns > now_ns:
            return WaitUntil(min(until_ns, head.flush_by_ns - reserve_ns))
        batch = self._shrink_to_best(head, Batch(count, reason))
        if batch.reason is CloseReason.TARGET:
            return Batch(self._count_on_time(now_ns, head.requests) or count, reason)
        return batch

    @property
    def _is_out_of_reach(self) -> bool:
        """Return whether so many requests have missed the target that it cannot be met."""
        return self._excess_misses > _HOPELESS_MISSES

    def _best_size(self, rows: int) -> int:
        return self._size_times.best_size(rows, out_of_reach=self._is_out_of_reach)

    def _shrink_to_best(self, head: QueueHead, batch: Batch) -> Batch:
        """Return the batch, or its first requests if a smaller batch has a higher rate."""
        best_size = self._best_size(head.rows)
        if best_size >= head.rows:
            return batch
        return Batch(_count_fitting(head.requests, best_size), CloseReason.PREFERRED)

    def _burst_end(self, head: QueueHead) -> tuple[int, bool]:
        """Return the end of the wait for the next request of a burst, or 0 for no wait.

        Returns:
            The time, and whether the larger batch would end sooner than a batch without the wait.
        """
        size_times, rows, count = self._size_times, head.rows, len(head.requests)
        best_size = size_times.best_size(rows)
        batch_ns = size_times.expected_ns(best_size)  # without the wait
        rows_per_request = rows / count
        max_requests = int((self._rules.max_batch_size - rows) / rows_per_request)
        for request_count, wait_ns in self._arrivals.burst(max_requests):
            larger_rows = rows + request_count * rows_per_request
            added_ns = wait_ns + size_times.expected_ns(round(larger_rows)) - batch_ns
            batch_ends_sooner = added_ns < -_CLEAR_DIFFERENCE * batch_ns
            if batch_ends_sooner or (
                self._waiting_choice.should_wait
                and added_ns < (larger_rows - best_size) * self._load.row_interval_ns
            ):
                return self._arrivals.wait_until_ns, batch_ends_sooner
        return 0, False

    def _start_trial(self, now_ns: int, head: QueueHead) -> int:
        """Return the number of queued requests to run as a trial of a new batch size, or 0."""
        batches = self._load.batch_count
        if not self._size_trials.is_due(batches):
            return 0
        size, worst_ns = self._size_times.find_trial(head.rows)
        if not size:
            return 0
        state = self._trial_state(now_ns, head.oldest_ns)
        if not self._size_trials.start_trial(size, worst_ns, state, batches):
            return 0
        return _count_fitting(head.requests, size)

    def _trial_state(self, now_ns: int, oldest_ns: int) -> TrialState:
        load, target_ns = self._load, self._rules.target_ns
        best_size = self._best_size(self._rules.max_batch_size)
        best_ns = self._size_times.expected_ns(best_size)
        row_ns = best_ns / best_size
        spare_ns = target_ns - load.waiting_rows * row_ns - best_ns
        is_overloaded = load.rows_per_ns * row_ns > _FULL_UTILISATION and spare_ns < target_ns / 2
        if spare_ns < 0 and self._is_out_of_reach:
            # If the load is steady although requests are late, clients wait for their responses, or
            # the instance is fully used.
            is_overloaded = is_overloaded or load.is_steady
        oldest_left_ns = target_ns - (now_ns - oldest_ns)
        return TrialState(
            oldest_left_ns, spare_ns, row_ns, load.rows_per_ns, load.max_in_flight, is_overloaded
        )

    def _start_by(self, oldest_ns: int, rows: int) -> int:
        """Return the latest start (monotonic ns) of a batch whose oldest request meets the target.

        Args:
            oldest_ns: The time at which the oldest request was enqueued.
            rows: The size of the batch.
        """
        return int(oldest_ns + self._latency_aim_ns - self._size_times.p99_ns(rows))

    def _count_on_time(self, now_ns: int, requests: list[PendingRequest]) -> int:
        """Return how many requests at the head of the queue to run now so that all meet the target.

        The other requests run in a second batch. Return 0 if two batches would be late, too.
        """
        rows, oldest_ns = 0, NEVER
        # Rows, and oldest enqueue time, of the first n requests.
        prefixes: list[tuple[int, int]] = []
        for request in requests:
            rows, oldest_ns = rows + request.rows, min(oldest_ns, request.enqueued_ns)
            prefixes.append((rows, oldest_ns))
        tail_rows, tail_oldest_ns = 0, NEVER
        for count in range(len(requests) - 1, 0, -1):
            tail_rows += requests[count].rows
            tail_oldest_ns = min(tail_oldest_ns, requests[count].enqueued_ns)
            rows, oldest_ns = prefixes[count - 1]
            if now_ns > self._start_by(oldest_ns, rows):
                continue
            if now_ns + self._size_times.p99_ns(rows) <= self._start_by(tail_oldest_ns, tail_rows):
                return count
        return 0


def _count_fitting(requests: list[PendingRequest], rows: int) -> int:
    """Return how many requests at the head of the queue fit a batch of `rows` rows, at least 1."""
    for count, request in enumerate(requests):
        rows -= request.rows
        if rows < 0:
            return max(count, 1)
    return len(requests)
