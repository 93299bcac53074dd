"""The detection of deadlocks among the calls of several requests (no I/O).

A scheduler detects at once that a call waits for its own callers. It cannot detect a deadlock over
several chains of callers: request 1 runs in model A and calls B, while request 2 runs in model B
and calls A. Schedulers therefore report calls that have waited for long, at intervals, with the
executions that occupy the instances.

The reports form an AND-OR wait-for graph. An execution is stuck if any call that it waits for is
stuck. A call is stuck if every instance that may run it is occupied by a stuck execution, or needs
resources of the rate limiter that stuck executions hold. The largest such set is in deadlock.

Reports are not simultaneous. A deadlock lasts, so a call fails only if the deadlock is still found
after every scheduler in it has reported again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shmserve.ipc.messages.control_requests import CallDeadlocked, CallsWaiting
from shmserve.ipc.messages.inference import Caller
from shmserve.supervisor.processes.control_socket import Address

_VALIDITY_NS = 5_000_000_000  # the validity of a report; schedulers report five times a second

_Execution = tuple[int, int]  # the process of an instance, and the key of one request


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """Calls that wait for the same instances.

    Attributes:
        scheduler: The scheduler of the called model.
        model: The name of the called model.
        calls: For each call, by its key, the chain of callers that wait for it, outermost first.
        instances: The process of each instance, and the executions that occupy the instance.
    """

    scheduler: Address
    model: str
    calls: dict[int, list[Caller]]
    instances: list[tuple[int, set[_Execution]]]

    def waiting_executions(self) -> set[_Execution]:
        """Return the executions that wait for one of the calls."""
        return {(caller.pid, caller.key) for callers in self.calls.values() for caller in callers}


@dataclass(slots=True)
class _Report:
    received_ns: int
    waits: list[_Wait]


class _Suspicion(NamedTuple):
    key: int  # the key of the call that seems deadlocked
    unconfirmed_schedulers: set[Address]  # those that have not reported since the suspicion arose


class CallWaits:
    """The calls that wait, as reported by all schedulers.

    Args:
        find_holders: Returns which of the given processes hold resources that a scheduler's model
            needs. The set is empty if an instance could run while they hold the resources.
    """

    def __init__(self, find_holders: Callable[[Address, set[int]], set[int]]) -> None:
        self._find_holders = find_holders
        self._reports: dict[Address, _Report] = {}
        self._suspicions: dict[Address, _Suspicion] = {}

    def report(self, sender: Address, message: CallsWaiting, now_ns: int) -> CallDeadlocked | None:
        """Replace the report of a scheduler.

        Returns:
            The call of this scheduler that must fail to end a deadlock, if there is one.
        """
        waits = []
        for calls, instances in message.waits:
            waiting_calls = {key: Caller.parse(callers) for key, callers in calls}
            occupied_instances = [(pid, {(pid, key) for key in keys}) for pid, *keys in instances]
            waits.append(_Wait(sender, message.model, waiting_calls, occupied_instances))
        self._reports[sender] = _Report(now_ns, waits)
        for address, report in list(self._reports.items()):
            if now_ns - report.received_ns > _VALIDITY_NS:
                del self._reports[address]
                self._suspicions.pop(address, None)
        for suspicion in self._suspicions.values():
            suspicion.unconfirmed_schedulers.discard(sender)
        stuck_waits = self._find_stuck()
        deadlock = self._find_deadlock(sender, stuck_waits)
        suspicion_before = self._suspicions.pop(sender, None)
        if deadlock is None:
            return None
        unconfirmed_schedulers = {stuck_wait.scheduler for stuck_wait in stuck_waits} - {sender}
        if suspicion_before is not None and suspicion_before.key == deadlock.key:
            unconfirmed_schedulers &= suspicion_before.unconfirmed_schedulers
        if unconfirmed_schedulers:
            self._suspicions[sender] = _Suspicion(deadlock.key, unconfirmed_schedulers)
        else:
            for wait in waits:
                wait.calls.pop(deadlock.key, None)
            return deadlock
        return None

    def _find_stuck(self) -> list[_Wait]:
        """Return the largest set of waits that only wait for each other."""
        stuck_waits: list[_Wait] = []
        remaining_waits = [wait for report in self._reports.values() for wait in report.waits]
        while len(stuck_waits) != len(remaining_waits):
            stuck_waits = remaining_waits
            executions = {caller for wait in stuck_waits for caller in wait.waiting_executions()}
            pids = {pid for pid, _ in executions}
            remaining_waits = [
                wait for wait in stuck_waits if self._is_stuck(wait, executions, pids)
            ]
        return stuck_waits

    def _is_stuck(self, wait: _Wait, executions: set[_Execution], pids: set[int]) -> bool:
        return bool(wait.instances) and all(
            not occupants.isdisjoint(executions) or self._find_holders(wait.scheduler, pids)
            for _, occupants in wait.instances
        )

    def _find_deadlock(self, scheduler: Address, stuck_waits: list[_Wait]) -> CallDeadlocked | None:
        """Return the oldest call of a scheduler in a cycle of stuck waits, with the cycle."""
        for first_wait in (wait for wait in stuck_waits if wait.scheduler == scheduler):
            paths, visited_waits = [(first_wait, [first_wait.model])], {id(first_wait)}
            for wait, models in paths:  # the loop adds paths: a breadth-first search
                awaited_executions = self._awaited_executions(wait, stuck_waits)
                own_call = _oldest_awaited_call(awaited_executions, first_wait)
                if own_call is not None:
                    chain = [caller.model for caller in first_wait.calls[own_call.key]] + models
                    return CallDeadlocked(own_call.key, " -> ".join(chain))
                for successor in stuck_waits:
                    call = _oldest_awaited_call(awaited_executions, successor)
                    if call is None or id(successor) in visited_waits:
                        continue
                    visited_waits.add(id(successor))
                    # A caller in another model occupies no instance of this model, but holds
                    # resources that the instances need.
                    holder_models = [] if call.caller == wait.model else [call.caller]
                    paths.append((successor, [*models, *holder_models, successor.model]))
        return None

    def _awaited_executions(self, wait: _Wait, stuck: list[_Wait]) -> set[_Execution]:
        """Return the executions that must end before a call in `wait` can run."""
        executions = {caller for stuck_wait in stuck for caller in stuck_wait.waiting_executions()}
        holders = self._find_holders(wait.scheduler, {pid for pid, _ in executions})
        occupants = {
            occupant for _, instance_occupants in wait.instances for occupant in instance_occupants
        }
        return occupants | {execution for execution in executions if execution[0] in holders}


class _Call(NamedTuple):
    key: int
    caller: str  # the model of the execution that waits for the call


def _oldest_awaited_call(executions: set[_Execution], wait: _Wait) -> _Call | None:
    """Return the oldest call that one of these executions waits for."""
    for key, callers in wait.calls.items():
        for caller in callers:
            if (caller.pid, caller.key) in executions:
                return _Call(key, caller.model)
    return None
