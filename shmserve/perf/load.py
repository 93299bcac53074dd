"""A load: slots that have one request in flight each, their schedule, and the measured times.

closed loop    each slot sends its next request when the previous one has completed
open loop      requests follow a schedule of offsets from the start. A request without a free
               slot is queued; its latency counts from its scheduled time
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.protocols import Lane, LaneFactory
from shmserve.protocols.connection import EventLoop

_MAX_ERRORS = 20  # maximum number of distinct error texts that are counted
_OTHER_ERRORS = "other errors"
_CHECK_INTERVAL_NS = 1_000_000_000
_MAX_LOADS = 1000  # maximum number of loads in a sweep
# The minimum is far below a useful load, the maximum far above what one process can send.
_MIN_LOAD, _MAX_LOAD = 0.001, 1_000_000
_NS_PER_S = 1e9
_clock = time.monotonic_ns


def _column() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Records:
    """The measured times of successful requests, in order of completion, and the errors.

    All times are nanoseconds of the same clock.

    Attributes:
        scheduled_ns: The scheduled time of each request.
        delays_ns: The delay between the scheduled time and the sending of each request.
        first_ns: The time of each request's first response.
        ended_ns: The time of each request's completion.
        responses: The number of responses to each request.
        gaps_ns: The times between consecutive responses to the same request, for all requests.
        errors: The number of failures by error text.
    """

    scheduled_ns: array[int] = field(default_factory=_column)
    delays_ns: array[int] = field(default_factory=_column)
    first_ns: array[int] = field(default_factory=_column)
    ended_ns: array[int] = field(default_factory=_column)
    responses: array[int] = field(default_factory=_column)
    gaps_ns: array[int] = field(default_factory=_column)
    errors: Counter[str] = field(default_factory=Counter)

    def failed_count(self) -> int:
        """Return the number of failed requests."""
        return sum(self.errors.values())


class Mark(NamedTuple):
    """The counts at the boundary between two windows.

    Attributes:
        at_ns: The time of the boundary.
        requests: The number of successful requests.
        gaps: The number of times between responses, `Records.gaps_ns`.
        failed_count: The number of failed requests.
        cpu_s: The CPU time of this process.
    """

    at_ns: int
    requests: int
    gaps: int
    failed_count: int
    cpu_s: float


class LoadSlot:
    """A lane (`Lane`), which is a channel to the server, and the requests that it sends in turn."""

    def __init__(self, load: LoadGenerator, requests: Sequence[Any]) -> None:
        self._load = load
        self._requests = itertools.cycle(requests)
        self._scheduled_ns = self._delay_ns = self._first_ns = self._last_response_ns = 0
        self._response_count = 0
        self.lane: Lane

    def start(self, scheduled_ns: int, now_ns: int) -> None:
        """Send the next request, whose scheduled time is `scheduled_ns`."""
        self._scheduled_ns = scheduled_ns
        self._delay_ns = now_ns - scheduled_ns
        self._response_count = 0
        self.lane.send(next(self._requests))

    def on_response(self) -> None:
        """Record a response; implements `LaneObserver`."""
        now_ns = _clock()
        if self._response_count:
            self._load.records.gaps_ns.append(now_ns - self._last_response_ns)
        else:
            self._first_ns = now_ns
        self._last_response_ns = now_ns
        self._response_count += 1

    def on_end(self, error: str = "", response_count: int = -1) -> None:
        """Record the completion of the request; implements `LaneObserver`."""
        now_ns = _clock()
        if error:
            self._load.count_error(error)
        else:
            records = self._load.records
            records.scheduled_ns.append(self._scheduled_ns)
            records.delays_ns.append(self._delay_ns)
            records.first_ns.append(self._first_ns if self._response_count else now_ns)
            records.ended_ns.append(now_ns)
            records.responses.append(self._response_count if response_count < 0 else response_count)
        self._load.finish_slot(self, now_ns)


class LoadGenerator:
    """A load generator, whose slots send requests in a closed loop, or in an open loop."""

    def __init__(
        self,
        loop: EventLoop,
        lane_factory: LaneFactory,
        requests: Callable[[int], Sequence[Any]],
        concurrency: int,
        schedule: Iterator[int] | None,
        patience_s: float,
    ) -> None:
        """Open the slots.

        Args:
            loop: The event loop.
            lane_factory: The factory of the slots' lanes.
            requests: A function that returns the requests of slot n, which it sends in turn.
            concurrency: The number of slots, each with at most one request in flight.
            schedule: The offsets of requests from the start, in nanoseconds; None: a closed loop.
            patience_s: Seconds without a response after which the server counts as lost.

        Raises:
            Unavailable: The server cannot be reached.
        """
        self.records = Records()
        self.is_decoupled = lane_factory.is_decoupled
        self._loop = loop
        self._patience_ns = int(patience_s * 1e9)
        self._schedule = schedule
        self._start_ns = 0
        self._next_due_ns = 0
        self._queued_times: deque[int] = deque()  # scheduled times of requests without a free slot
        self._is_running = False
        self._free_slots: list[LoadSlot] = []
        self._concurrency = concurrency
        self._last_completion_ns = 0
        for number in range(concurrency):
            slot = LoadSlot(self, requests(number))
            slot.lane = lane_factory.lane(slot)
            self._free_slots.append(slot)
        self._lanes = [slot.lane for slot in self._free_slots]

    def begin(self) -> None:
        """Start to send requests."""
        self._is_running = True
        self._start_ns = now_ns = self._last_completion_ns = _clock()
        if self._schedule is None:
            free_slots, self._free_slots = self._free_slots, []
            for slot in free_slots:
                slot.start(now_ns, now_ns)
        else:
            self._next_due_ns = now_ns + next(self._schedule)

    def run(self, seconds: float) -> None:
        """Run for `seconds`, and then until at least one request has completed.

        Raises:
            Unavailable: The server stops responding.
        """
        completed_before = self._completed_count()
        end_ns = _clock() + int(seconds * 1e9)
        while (now_ns := _clock()) < end_ns or self._completed_count() == completed_before:
            wait_ns = max(end_ns - now_ns, 0) or _CHECK_INTERVAL_NS
            self._loop.run_turn(min(wait_ns, _CHECK_INTERVAL_NS, self._send_due(now_ns)))
            self._check_alive()

    def _completed_count(self) -> int:
        return len(self.records.ended_ns) + self.records.failed_count()

    def _check_alive(self) -> None:
        now_ns = _clock()
        if len(self._free_slots) == self._concurrency:
            self._last_completion_ns = now_ns
        elif now_ns - self._last_completion_ns > self._patience_ns:
            text = f"the server has not responded to a request for {self._patience_ns / 1e9:g} s"
            raise Unavailable(text)

    def _send_due(self, now_ns: int) -> int:
        """Send the requests that are due, and return the nanoseconds until the next one."""
        if self._schedule is None:
            return _CHECK_INTERVAL_NS
        while self._next_due_ns <= now_ns:
            if self._free_slots:
                self._free_slots.pop().start(self._next_due_ns, now_ns)
            else:
                self._queued_times.append(self._next_due_ns)
            self._next_due_ns = self._start_ns + next(self._schedule)
        return self._next_due_ns - now_ns

    def finish_slot(self, slot: LoadSlot, now_ns: int) -> None:
        """Send the next request on a slot whose request has ended, or free the slot."""
        self._last_completion_ns = now_ns
        if self._is_running and self._schedule is None:
            slot.start(now_ns, now_ns)
        elif self._is_running and self._queued_times:
            slot.start(self._queued_times.popleft(), now_ns)
        else:
            self._free_slots.append(slot)

    def count_error(self, error: str) -> None:
        """Count a failed request by the text of its error."""
        errors = self.records.errors
        name = error if error in errors or len(errors) < _MAX_ERRORS else _OTHER_ERRORS
        errors[name] += 1

    def mark(self) -> Mark:
        """Return the counts of requests at this time, the boundary of a window."""
        records = self.records
        # An interrupt may leave an incomplete row, so the column that is written last is counted.
        request_counts = (len(records.responses), len(records.gaps_ns), records.failed_count())
        return Mark(_clock(), *request_counts, time.process_time())

    def finish(self) -> None:
        """Stop sending, and wait for requests in flight.

        Raises:
            Unavailable: The server stops responding.
        """
        self._is_running = False
        self._queued_times.clear()
        self._last_completion_ns = _clock()
        while len(self._free_slots) < self._concurrency:
            self._loop.run_turn(_CHECK_INTERVAL_NS)
            self._check_alive()

    def close(self) -> None:
        """Close the lanes; after an interrupt, requests may still be in flight."""
        self._is_running = False
        self._queued_times.clear()
        for lane in self._lanes:
            lane.close()


class Probe:
    """The observer of a lane that sends a single request."""

    def __init__(self) -> None:
        self.error: str | None = None

    def on_response(self) -> None:
        """Ignore a response; implements `LaneObserver`."""

    def on_end(self, error: str = "", response_count: int = -1) -> None:
        """Record the error of the request, or "" for success; implements `LaneObserver`."""
        self.error = error


def probe(loop: EventLoop, lane_factory: LaneFactory, request: Any, patience_s: float) -> str:
    """Send a single request, and return its error or "".

    Raises:
        Unavailable: The server has not responded within `patience_s` seconds.
    """
    observer = Probe()
    lane = lane_factory.lane(observer)
    end_ns = _clock() + int(patience_s * 1e9)
    try:
        lane.send(request)
        while observer.error is None:
            if _clock() > end_ns:
                raise Unavailable(f"the server has not responded within {patience_s:g} s")
            loop.run_turn(_CHECK_INTERVAL_NS)
        return observer.error
    finally:
        lane.close()


def constant(per_second: float) -> Iterator[int]:
    """Yield evenly spaced offsets in nanoseconds."""
    for index in itertools.count():
        yield round(index * _NS_PER_S / per_second)


def poisson(per_second: float, seed: int) -> Iterator[int]:
    """Yield the offsets of a Poisson process in nanoseconds."""
    draw_interval_s = random.Random(seed).expovariate
    offset_s = 0.0
    while True:
        offset_s += draw_interval_s(per_second)
        yield round(offset_s * _NS_PER_S)


# The schedules by kind, as functions of the rate per second and a seed.
SCHEDULES: dict[str, Callable[[float, int], Iterator[int]]] = {
    "poisson": poisson,
    "constant": lambda per_second, _: constant(per_second),
}


def parse_loads(text: str, flag: str, number_type: type[int] | type[float]) -> list[float]:
    """Return the loads of a flag: "1,2,8", or "FIRST:LAST[:STEP]" with both ends included.

    Raises:
        InvalidArgument: A number is out of range, or there are too many loads.
    """
    allowed_text = f"allowed: N, N,N,... or FIRST:LAST[:STEP], from {_MIN_LOAD} to {_MAX_LOAD}"
    invalid_loads = InvalidArgument(f"--{flag}: '{text}' is invalid ({allowed_text})")
    try:
        if ":" not in text:
            loads = [float(number_type(part)) for part in text.split(",")]
        else:
            first_load, last_load, step = [*map(number_type, text.split(":")), number_type(1)][:3]
            if step <= 0 or last_load < first_load or text.count(":") > 2:
                raise invalid_loads
            count = int((last_load - first_load) / step + 1e-9) + 1
            if count > _MAX_LOADS:
                raise InvalidArgument(
                    f"--{flag}: '{text}' defines {count} loads, but at most {_MAX_LOADS} are "
                    "allowed"
                )
            loads = [float(first_load + step * number) for number in range(count)]
    except (ValueError, OverflowError):
        raise invalid_loads from None
    if any(not _MIN_LOAD <= load <= _MAX_LOAD for load in loads):
        raise invalid_loads
    return loads
