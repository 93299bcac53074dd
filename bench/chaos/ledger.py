"""The ledger of requests, faults and events.

Each request is judged when it ends: `ALLOWED` lists the errors that a client may receive under each
fault, and any other error is a failure. For example, no request of a batched model may fail because
a worker dies. The ledger also has each fault with its recovery time, and the last events for the
report of a failure.

An error is a text: "CODE: message" is an error of the server, "lost: ..." a connection that ended
before the response, and "wrong: ..." an incorrect response. An incorrect response is allowed only
if the client has changed its own memory.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Rule(NamedTuple):
    """An allowed error, and the reason.

    The regular expressions match the beginning of a fault's name, the beginning of a load's name,
    and a part of the error.
    """

    fault: str
    load: str
    error: str
    reason: str


_KILL = r"(kill|stop|crash)\S* "
_LOST = r"^lost: "

ALLOWED = (
    Rule(_KILL + "gateway http", "http", _LOST, "a gateway's connections end with it"),
    Rule(_KILL + "gateway grpc", "grpc", _LOST, "a gateway's connections end with it"),
    Rule(
        _KILL + "worker sums",
        ".*sequence",
        r"(the state of sequence .* is lost with it|was lost when the model's worker died)",
        "the state of a sequence is in the memory of its worker",
    ),
    Rule(
        _KILL + "scheduler sums",
        ".*sequence",
        "must specify the START flag on the first request",
        "the list of open sequences is in the memory of their scheduler",
    ),
    Rule(
        _KILL + "(scheduler|worker) repeat",
        ".*stream",
        r"(worker died before this request's last response|scheduler was lost after the request's"
        " first response)",
        "a stream is not restarted after its first response",
    ),
    Rule(
        _KILL + "scheduler tiny",
        "http-text-stream",
        "scheduler was lost after the request's first response",
        "a stream is not restarted after its first response",
    ),
    Rule("region", "http-cut-region", r"^(INVALID|wrong|[45]0)", "its region was truncated"),
    Rule(
        "unload", ".*swap", r"^(404|400|503|NOT_FOUND|UNAVAILABLE|INVALID)", "its model is unloaded"
    ),
    Rule("descriptors", "(http|grpc)", _LOST, "idle connections are closed, new ones rejected"),
)


def is_allowed(fault: str, load: str, error: str) -> str:
    """Return the reason why an error is allowed under a fault, or "" if it is not."""
    for rule in ALLOWED:
        is_concerned = re.match(rule.fault, fault) and re.match(rule.load, load)
        if is_concerned and re.search(rule.error, error):
            return rule.reason
    return ""


# The errors of a fault may arrive shortly after all clients are served again, because the client of
# the fault may have sent its request before.
_GRACE_S = 0.5
_SLOW_S = 1.0  # recoveries that take longer are printed
_STEP_S = 0.01
_EVENTS = 200
_WINDOWS = 64


@dataclass
class Fault:
    """A fault: its name, its start, and the time until which it may cause errors.

    Times are in monotonic seconds. `until` is None while the fault lasts.
    """

    name: str
    since: float
    until: float | None = None

    def overlaps(self, started_at: float, ended: float) -> bool:
        """Return whether the fault may have affected a request between these times."""
        return self.since <= ended and (self.until is None or started_at <= self.until)


@dataclass
class Ledger:
    """The record of a test run, shared by all threads of the run.

    Attributes:
        correct_counts: The number of correct responses, by load.
        total_s: The total duration of the requests with correct responses, by load.
        slowest_s: The duration of the slowest of these requests, by load.
        allowed_errors: The number of allowed errors, by load and reason.
        failures: The errors that no fault allows.
        recoveries: The recovery times in seconds, by kind of fault.
        slow_recoveries: A line for each recovery that took longer than `_SLOW_S`.
        events: The last events.
    """

    started_at: float = field(default_factory=time.monotonic)
    correct_counts: Counter[str] = field(default_factory=Counter)
    total_s: dict[str, float] = field(default_factory=dict)
    slowest_s: dict[str, float] = field(default_factory=dict)
    allowed_errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    slow_recoveries: list[str] = field(default_factory=list)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=_EVENTS))

    def __post_init__(self) -> None:
        self._condition = threading.Condition()
        self._faults: deque[Fault] = deque(maxlen=_WINDOWS)
        # By client: the start of the latest request that received a correct response.
        self._served_since: dict[str, float] = {}

    @property
    def has_failed(self) -> bool:
        """Return whether an error has occurred that no fault allows."""
        return bool(self.failures)

    def note(self, text: str) -> None:
        """Record an event for the report."""
        self.events.append(f"{time.monotonic() - self.started_at:9.3f}  {text}")

    def fail(self, text: str) -> None:
        """Record a failure of the run."""
        with self._condition:
            self.note(f"FAILURE {text}")
            self.failures.append(text)
            self._condition.notify_all()

    # --- requests

    def add_client(self, client: str) -> None:
        """Add a client. Each recovery waits for a response to this client."""
        with self._condition:
            self._served_since[client] = 0.0

    def record_response(self, load: str, client: str, started_at: float) -> None:
        """Record a correct response to a request that began at this time."""
        duration_s = time.monotonic() - started_at
        with self._condition:
            self.correct_counts[load] += 1
            self.total_s[load] = self.total_s.get(load, 0.0) + duration_s
            self.slowest_s[load] = max(duration_s, self.slowest_s.get(load, 0.0))
            self._served_since[client] = max(started_at, self._served_since[client])
            self._condition.notify_all()

    def record_error(self, load: str, client: str, started_at: float, error: str) -> None:
        """Record an incorrect or missing response, which is a failure unless a fault allows it."""
        end_s = time.monotonic()
        with self._condition:
            fault_names = [
                fault.name for fault in self._faults if fault.overlaps(started_at, end_s)
            ]
        rule = next(filter(None, (is_allowed(name, load, error) for name in fault_names)), "")
        self.note(f"{client}: {error} ({end_s - started_at:.3f} s after its request)")
        if rule:
            self.allowed_errors[load, rule] += 1
        else:
            duration = f"{end_s - started_at:.3f} s after its request"
            self.fail(f"{client}: {error} ({duration}, faults: {fault_names or 'none'})")

    # --- faults

    def begin(self, fault_name: str) -> Fault:
        """Record a fault that is about to occur."""
        fault = Fault(fault_name, time.monotonic())
        with self._condition:
            self.note(f"FAULT {fault_name}")
            self._faults.append(fault)
        return fault

    def wait_recovered(
        self,
        fault: Fault,
        since: float,
        within_s: float,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Wait until `is_ready()` is true and each client has a new correct response.

        A response counts if its request was sent after `since`: the time of the fault, or the time
        at which its cause was removed.
        """
        last_late_client = ""

        def are_all_served() -> bool:
            nonlocal last_late_client
            late_clients = [
                client for client, started_at in self._served_since.items() if started_at < since
            ]
            last_late_client = late_clients[0] if late_clients else last_late_client
            return self.has_failed or not late_clients

        with self._condition:
            is_recovered = self._condition.wait_for(are_all_served, within_s)
        while is_recovered and not self.has_failed and not is_ready():
            is_recovered, last_late_client = time.monotonic() < since + within_s, "readiness"
            time.sleep(_STEP_S)
        recovery_s = time.monotonic() - since
        fault.until = time.monotonic() + _GRACE_S
        line = f"recovered after {recovery_s:.3f} s ({last_late_client} last): {fault.name}"
        self.note(line)
        if recovery_s > _SLOW_S:
            self.slow_recoveries.append(f"{fault.since - self.started_at:9.3f}  {line}")
        if not is_recovered:
            text = f"not recovered within {within_s:g} s after {fault.name}: {last_late_client}"
            self.fail(text)
        elif not self.has_failed:
            self.recoveries.setdefault(_kind(fault.name), []).append(recovery_s)


def _kind(fault_name: str) -> str:
    """Return the kind of a fault: the first two words of its name, or "VERB zygote"."""
    first_word, *words = fault_name.split()
    kind = words[-1:] if words[-1:] == ["zygote"] and words[0] != "spare" else words[:1]
    return " ".join([first_word, *kind])
