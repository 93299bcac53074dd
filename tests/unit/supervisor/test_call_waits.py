"""Deadlocks among the calls of several requests: which call fails, and when."""

from typing import Any

import pytest

from shmserve.ipc.messages.control_requests import AskTicket, CallDeadlocked, CallsWaiting
from shmserve.ipc.messages.inference import Caller
from shmserve.supervisor.resources.call_waits import CallWaits
from shmserve.supervisor.resources.rate_limiter import Needs, Tickets

SECOND = 1_000_000_000
A, B, C = 1, 2, 3  # schedulers
R = ("R", -1)

Call = tuple[int, str]


def call(key: int, *callers: tuple[int, int, str]) -> Call:
    """Return a call and its callers: process, key of the request, and model of each."""
    return key, "\n".join(Caller(*caller).line for caller in callers)


def report(model: str, *waits: tuple[list[Call], list[list[int]]]) -> CallsWaiting:
    return CallsWaiting(model, [[list(map(list, calls)), call_id] for calls, call_id in waits])


class CallGraph:
    def __init__(self, tickets: Tickets | None = None) -> None:
        self.waits = CallWaits((tickets or Tickets(False, {}, lambda *_: None)).find_holders)
        self.now_ns = 0

    def run_rounds(self, reports: dict[int, CallsWaiting], count: int = 4) -> list[tuple[int, Any]]:
        failed_calls = []
        for _ in range(count):
            for scheduler, message in reports.items():
                self.now_ns += SECOND // 10
                deadlocks = self.waits.report(scheduler, message, self.now_ns)
                failed_calls += [(scheduler, deadlocks)] if deadlocks is not None else []
        return failed_calls


# Request 5 runs in A (process 10) and calls B; request 6 runs in B (process 20) and calls A.
CALL_OF_A = report("a", ([call(8, (20, 6, "b"))], [[10, 5]]))
CALL_OF_B = report("b", ([call(9, (10, 5, "a"))], [[20, 6]]))


def test_two_requests_that_wait_for_each_other_fail_one_call_with_the_chain() -> None:
    failed_calls = CallGraph().run_rounds({A: CALL_OF_A, B: CALL_OF_B}, 2)
    assert failed_calls == [(B, CallDeadlocked(9, "a -> b -> a"))]


def test_after_the_failure_the_other_call_waits() -> None:
    graph = CallGraph()
    assert len(graph.run_rounds({A: CALL_OF_A, B: CALL_OF_B}, 2)) == 1
    assert graph.run_rounds({A: CALL_OF_A}, 5) == []


def test_a_cycle_of_three_with_nested_callers() -> None:
    reports = {
        A: report("a", ([call(1, (30, 7, "c"))], [[10, 5]])),
        B: report("b", ([call(2, (10, 5, "a"), (50, 1, "m"))], [[20, 6]])),
        C: report("c", ([call(3, (20, 6, "b"))], [[30, 7, 8, 9]])),
    }
    assert CallGraph().run_rounds(reports, 2) == [(C, CallDeadlocked(3, "b -> c -> a -> b"))]
    failed_calls = CallGraph().run_rounds({model: reports[model] for model in (C, A, B)}, 2)
    assert failed_calls == [(B, CallDeadlocked(2, "a -> m -> b -> c -> a"))]


@pytest.mark.parametrize("instances", [[[20, 6], [21, 4]], [[20, 6], [0]], [[20, 7]], []], ids=str)
def test_a_call_waits_while_an_instance_may_become_free(instances: list[list[int]]) -> None:
    """An instance runs something else, or has none to run, or the execution has ended."""
    call_of_b = report("b", ([call(9, (10, 5, "a"))], instances))
    assert CallGraph().run_rounds({A: CALL_OF_A, B: call_of_b}) == []


def test_a_call_that_only_waits_behind_a_deadlock_does_not_fail() -> None:
    """The call of C is not in the cycle of A and B, and is the older one."""
    queued_report = report("a", ([call(1, (30, 7, "c")), call(8, (20, 6, "b"))], [[10, 5]]))
    waits_report = report("c", ([call(2, (40, 1, "d"))], [[30, 7]]))
    failed_calls = CallGraph().run_rounds({C: waits_report, B: CALL_OF_B, A: queued_report}, 2)
    assert failed_calls == [(A, CallDeadlocked(8, "b -> a -> b"))]


def test_a_deadlock_that_has_ended_between_the_reports_fails_no_call() -> None:
    graph = CallGraph()
    assert graph.run_rounds({A: CALL_OF_A, B: CALL_OF_B}, 1) == []
    assert graph.run_rounds({A: CALL_OF_A}, 9) == []  # B has no calls that wait any more
    assert (
        graph.run_rounds({A: CALL_OF_A, B: report("b", ([call(9, (10, 5, "a"))], [[20, 7]]))}) == []
    )


def test_a_report_expires() -> None:
    graph = CallGraph()
    assert graph.run_rounds({B: CALL_OF_B}, 1) == []
    graph.now_ns += 6 * SECOND
    assert graph.run_rounds({A: CALL_OF_A}, 9) == []


def test_each_sequence_waits_for_its_own_instance() -> None:
    """A different instance of B is free, but the sequence cannot move there."""
    own_wait = ([call(9, (10, 5, "a"))], [[20, 6]])
    general_wait = ([call(7, (90, 1, "z"))], [[20, 6], [21]])
    failed_calls = CallGraph().run_rounds({B: report("b", general_wait, own_wait), A: CALL_OF_A}, 2)
    assert failed_calls == [(A, CallDeadlocked(8, "b -> a -> b"))]


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_deadlock_over_an_instance_and_a_resource(capacity: int) -> None:
    """Request 5 holds R in A and calls B; request 6 in B calls C, which needs R."""
    tickets = Tickets(True, {("R", None): capacity}, lambda *_: None)
    for member, scheduler in ((11, A), (13, C)):
        tickets.join(member, {0: Needs({R: 1}, 1)})
        tickets.bind(scheduler, member)
    tickets.handle(A, AskTicket(1, 0, 10))
    call_of_c = report("c", ([call(8, (20, 6, "b"))], [[30]]))
    for order, key, chain in (((C, B), 9, "a -> b -> c"), ((B, C), 8, "b -> c -> a -> b")):
        reports = {B: CALL_OF_B, C: call_of_c}
        failed_calls = CallGraph(tickets).run_rounds({model: reports[model] for model in order}, 2)
        assert failed_calls == ([(order[1], CallDeadlocked(key, chain))] if capacity == 1 else [])
