"""A player of one script against one server, which records the outcome."""

import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.differential.calls import Call, Caller
from tests.differential.script import Cancel, Drain, Elapse, Release, Responded, Script, Send, Step
from tests.support.gates import Gate, Visit

_PATIENCE_S = 20.0
# How long a state must last to be taken for settled, in looks that wait so long for an execution.
_STEADY_LOOKS, _LOOK_S = 4, 0.02
_SETTLED_S = 5.0
_PENDING = re.compile(
    r'^nv_inference_pending_request_count\{[^}]*model="([^"]+)"[^}]*\} ([0-9.]+)', re.MULTILINE
)


@dataclass
class Record:
    """The record of a script; after the `unsettled` steps a request had no known state."""

    batches: list[dict[str, Any]] = field(default_factory=list)
    responses: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    unsettled: list[str] = field(default_factory=list)


class Player:
    """A player of one script."""

    def __init__(self, caller: Caller, metrics_port: int, gate: Gate, script: Script) -> None:
        self._caller = caller
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        self._gate = gate
        self._script = script
        self._names = {model.name for model in script.models}
        # Of an ensemble's requests, only its steps' wait.
        self._queues = {model.name for model in script.models if "ensemble" not in model.config}
        self._calls: dict[str, Call] = {}
        self._held: list[Visit] = []
        self._record = Record()

    def run(self) -> Record:
        """Play all steps; raise TimeoutError if a step does not complete."""
        try:
            for step in self._script.steps:
                self._take(step)
        finally:
            for visit in self._held:
                visit.release()
            for call in self._calls.values():
                call.close()
        self._record.responses = self._outcomes()
        self._record.statistics = {n: self._caller.statistics(n) for n in sorted(self._names)}
        if self._script.unordered:
            self._record.batches.sort(key=str)
        return self._record

    def _outcomes(self) -> dict[str, Any]:
        return {label: call.outcome() for label, call in self._calls.items() if call.is_done}

    def _take(self, step: Step) -> None:
        match step:
            case Send():
                self._calls[step.label] = self._caller.send_request(step)
                self._settle(str(step))
            case Release():
                matching_visits = [visit for visit in self._held if step.label in _labels(visit)]
                assert matching_visits, (
                    f"{step} of {list(map(_labels, self._held))}, {self._outcomes()}"
                )
                self._let_go(matching_visits[0])
                self._settle(str(step))
            case Drain():
                self._until(self._all_done, str(step))
            case Cancel():
                self._calls[step.label].cancel()
                self._settle("")  # Triton counts it until it next looks at its queue
            case Responded():
                self._until(lambda: self._calls[step.label].is_done, str(step), hold=True)
            case Elapse():
                time.sleep(step.seconds)
                self._settle("")

    def _all_done(self) -> bool:
        return all(call.is_done for call in self._calls.values())

    def _until(self, is_over: Callable[[], bool], awaited: str, hold: bool = False) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not is_over():
            if time.monotonic() > end:
                unanswered = [label for label, call in self._calls.items() if not call.is_done]
                raise TimeoutError(f"{awaited}: no response to {unanswered}")
            if not hold:
                while self._held:
                    self._let_go(self._held[0])
            self._look()

    def _let_go(self, visit: Visit) -> None:
        self._held.remove(visit)
        visit.release()

    def _look(self) -> None:
        """Record an execution if one arrives soon."""
        try:
            visit = self._gate.next(_LOOK_S)
        except TimeoutError:
            return
        self._held.append(visit)
        self._record.batches.append(_report_without_random_inputs(visit))

    def _settle(self, step: str) -> None:
        """Wait until each request waits, executes or is done, and that lasts."""
        end = time.monotonic() + (_SETTLED_S if step else 3 * _STEADY_LOOKS * _LOOK_S)
        previous, steady = (-1, -1, -1), 0
        while steady < _STEADY_LOOKS:
            self._look()
            answered_count = sum(call.is_done for call in self._calls.values())
            held_labels = {label for visit in self._held for label in _labels(visit)}
            state = (self._pending(), len(held_labels), answered_count)
            steady = steady + 1 if state == previous and sum(state) == len(self._calls) else 0
            previous = state
            if time.monotonic() > end:
                self._record.unsettled += [step] * bool(step)
                return

    def _pending(self) -> int:
        with urllib.request.urlopen(self._metrics, timeout=10) as page:
            ports = _PENDING.findall(page.read().decode())
        return sum(int(float(count)) for name, count in ports if name in self._queues)


def _report_without_random_inputs(visit: Visit) -> dict[str, Any]:
    """Return an execution's report without the random inputs of null rows."""
    message = {key: value for key, value in visit.message.items() if key not in ("pid", "rows")}
    for row in message["batch"]:
        if not row["id"] and "INPUT0" in row["tensors"]:
            row["tensors"]["INPUT0"][2] = None
    return message


def _labels(visit: Visit) -> list[str]:
    """Return the ids of the requests in an execution; a null row has no id."""
    return [row["id"] for row in visit.batch if row["id"]]
