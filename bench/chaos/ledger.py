"""The ledger of requests, faults and events.

Each request is judged when it ends. The ledger also has each fault with its recovery time, and the
last events for the report of a failure.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.chaos.allowed import is_allowed

# The errors of a fault may arrive some seconds after all clients are served again: the fault's own
# client may have sent its request before.
_GRACE_S = 0.5
_SLOW_S = 1.0  # a recovery that is worth a line
_STEP_S = 0.01
_EVENTS = 200
_WINDOWS = 64


@dataclass
class Fault:
    """A fault: its name, its begin, and the time until which it may cause errors.

    Times are in monotonic seconds. A fault that has not ended has no such time.
    """

    what: str
    since: float
    until: float | None = None

    def overlaps(self, began: float, ended: float) -> bool:
        """Return whether a request of that time may have been affected by the fault."""
        return self.since <= ended and (self.until is None or began <= self.until)


@dataclass
class Ledger:
    """Shared by all threads of a run."""

    began: float = field(default_factory=time.monotonic)
    right: Counter[str] = field(default_factory=Counter)
    took_s: dict[str, float] = field(default_factory=dict)
    slowest_s: dict[str, float] = field(default_factory=dict)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=_EVENTS))

    def __post_init__(self) -> None:
        self._news = threading.Condition()
        self._faults: deque[Fault] = deque(maxlen=_WINDOWS)
        # By client: when the last request began that was answered right.
        self._served: dict[str, float] = {}

    @property
    def failed(self) -> bool:
        """Return whether a request has failed that should not have failed."""
        return bool(self.failures)

    def note(self, text: str) -> None:
        """Record an event."""
        self.events.append(f"{time.monotonic() - self.began:9.3f}  {text}")

    def fail(self, text: str) -> None:
        """Something that must not be."""
        with self._news:
            self.note(f"FAILURE {text}")
            self.failures.append(text)
            self._news.notify_all()

    # --- requests

    def joins(self, client: str) -> None:
        """Add a client. Each recovery waits for a response to it."""
        with self._news:
            self._served[client] = 0.0

    def answered(self, load: str, client: str, began: float) -> None:
        """Record a right response to a request that began at this time."""
        took = time.monotonic() - began
        with self._news:
            self.right[load] += 1
            self.took_s[load] = self.took_s.get(load, 0.0) + took
            self.slowest_s[load] = max(took, self.slowest_s.get(load, 0.0))
            self._served[client] = max(began, self._served[client])
            self._news.notify_all()

    def refuse(self, load: str, client: str, began: float, error: str) -> None:
        """Record a wrong or missing response, which only a fault at that time may allow."""
        ended = time.monotonic()
        with self._news:
            near = [fault.what for fault in self._faults if fault.overlaps(began, ended)]
        rule = next(filter(None, (is_allowed(what, load, error) for what in near)), "")
        self.note(f"{client}: {error} (asked {ended - began:.3f} s ago)")
        if rule:
            self.refused[load, rule] += 1
        else:
            self.fail(f"{client}: {error}; asked {ended - began:.3f} s ago, under {near}")

    # --- faults

    def begin(self, what: str) -> Fault:
        """Record a fault that is about to occur."""
        fault = Fault(what, time.monotonic())
        with self._news:
            self.note(f"FAULT {what}")
            self._faults.append(fault)
        return fault

    def recovered(
        self, fault: Fault, since: float, within_s: float, ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Wait until the server is `ready` and each client has a new right response.

        A response counts if its request was sent after `since`: the time of the fault, or the time
        at which its cause was removed.
        """
        last = ""

        def all_served() -> bool:
            nonlocal last
            late = [client for client, began in self._served.items() if began < since]
            last = late[0] if late else last
            return self.failed or not late

        with self._news:
            served = self._news.wait_for(all_served, within_s)
        while served and not self.failed and not ready():
            served, last = time.monotonic() < since + within_s, "readiness"
            time.sleep(_STEP_S)
        took = time.monotonic() - since
        fault.until = time.monotonic() + _GRACE_S
        self.note(line := f"served after {took:.3f} s, {last} last: {fault.what}")
        if took > _SLOW_S:
            self.slow.append(f"{fault.since - self.began:9.3f}  {line}")
        if not served:
            self.fail(f"not served within {within_s:g} s after {fault.what}: {last}")
        elif not self.failed:
            self.recoveries.setdefault(_kind(fault.what), []).append(took)


def _kind(what: str) -> str:
    """Return the first two words of a fault, or the kind of a zygote."""
    first, *rest = what.split()
    kind = rest[-1:] if rest[-1:] == ["zygote"] and rest[0] != "spare" else rest[:1]
    return " ".join([first, *kind])
