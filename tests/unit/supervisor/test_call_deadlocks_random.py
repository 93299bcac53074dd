"""Random models that call each other: every deadlock ends, and only calls in a deadlock fail."""

import random
from collections import deque
from typing import Any

import pytest

from shmserve.ipc.messages.control_requests import CallsWaiting
from shmserve.ipc.messages.inference import Caller, Execute, Failed
from shmserve.supervisor.resources.call_waits import CallWaits
from tests.rigs.scheduler_rig import Rig

MS = 1_000_000
ROOTS = 12

Number = tuple[int, int]  # of a request: its model, and its number there


class Execution:
    """A request in an instance of a model, which makes the calls of its plan in turn."""

    def __init__(self, model: int, peer: bytes, batch: Execute) -> None:
        self.model, self.peer, self.batch = model, peer, batch
        self.plan: list[Any] = []
        self.number = model, int(batch.requests[0].data[0][1:])
        request = batch.requests[0]
        line = Caller(int(peer.partition(b".")[2]), request.key, f"m{model}").line
        self.callers = f"{request.callers}\n{line}"
        self.call: Number | None = None  # the call that it waits for


class CallSimulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rigs = [Rig(max_batch_size=1) for _ in range(self.random.randint(2, 4))]
        for model, rig in enumerate(self.rigs):
            for index in range(self.random.choice([1, 1, 1, 2])):
                rig.start(index, 100 * (model + 1) + index)
        self.waits = CallWaits(lambda *_: set())
        self.running: list[Execution] = []
        self.plans: dict[Number, list[Any]] = {}
        self.reports: deque[tuple[int, CallsWaiting]] = deque()
        self.failed: list[Number] = []
        self.roots = self.open = self.ended = 0

    def plan(self, depth: int = 3) -> list[Any]:
        """Draw the models that a request calls, each with the plan of that call."""
        calls = range(self.random.randint(0, 2) if depth else 0)
        return [(self.random.randrange(len(self.rigs)), self.plan(depth - 1)) for _ in calls]

    def submit(self, model: int, plan: list[Any], callers: str = "") -> Number:
        number = model, self.rigs[model].submit(callers=callers)[0]
        self.plans[number] = plan
        self.open += 1
        return number

    def collect(self) -> None:
        for model, rig in enumerate(self.rigs):
            for peer, batch in rig.take_batches():
                execution = Execution(model, peer, batch)
                execution.plan = list(self.plans[execution.number])
                self.running.append(execution)
            for answer in rig.answers():
                self.open -= 1
                self.on_answered((model, answer.id), isinstance(answer, Failed))
            self.reports += [(model, r) for r in rig.take_supervisor_messages(CallsWaiting)]

    def on_answered(self, number: Number, has_failed: bool) -> None:
        if has_failed:
            self.failed.append(number)
        for request in self.running:
            if request.call == number:
                request.call = None
                request.plan = [] if has_failed else request.plan

    def step(self) -> None:
        """Advance one execution, let time pass, or deliver a report."""
        self.collect()
        idle_executions = [request for request in self.running if request.call is None]
        if self.roots < ROOTS and self.random.random() < 0.3:
            self.roots += 1
            self.submit(self.random.randrange(len(self.rigs)), self.plan())
        elif idle_executions and self.random.random() < 0.7:
            chosen = self.random.choice(idle_executions)
            if chosen.plan:
                (model, plan), *chosen.plan = chosen.plan
                chosen.call = self.submit(model, plan, chosen.callers)
            else:
                self.running.remove(chosen)
                self.rigs[chosen.model].finish(chosen.peer, chosen.batch)
        elif self.reports and self.random.random() < 0.5:
            self.deliver(*self.reports.popleft())
        else:
            for rig in self.rigs:
                rig.pass_time(20 * MS)

    def deliver(self, model: int, report: CallsWaiting) -> None:
        deadlocks = self.waits.report(model, report, self.rigs[0].now)
        self.collect()
        if deadlocks is not None:
            deadlocked, failures = self.find_deadlocked(), len(self.failed)
            self.rigs[model].supervisor(deadlocks)
            self.collect()
            assert len(self.failed) == failures + 1
            assert self.failed[-1] in deadlocked, "the call could have gone on"
            self.ended += 1

    def find_deadlocked(self) -> set[Number]:
        """Return the calls that wait for ever in the true state of all schedulers."""
        by_number = {call.number: call for call in self.running}
        stuck = {call.number for call in self.running if call.call is not None}
        size = -1
        while size != len(stuck):
            size = len(stuck)
            for call in self.running:
                if call.call is None:
                    continue
                if call.call in by_number:
                    can_continue = call.call not in stuck
                else:
                    occupants = [
                        other.number for other in self.running if other.model == call.call[0]
                    ]
                    can_continue = not stuck.issuperset(occupants)
                if can_continue:
                    stuck.discard(call.number)
        return {call.call for call in self.running if call.call and call.number in stuck}


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_end_and_only_deadlocked_ones_fail(seed: int) -> None:
    simulation = CallSimulation(seed)
    for _ in range(20_000):
        simulation.step()
        if simulation.roots == ROOTS and not simulation.open:
            break
    assert not simulation.open and not simulation.running


def test_the_random_calls_have_deadlocks() -> None:
    simulations = [CallSimulation(seed) for seed in range(40)]
    for simulation in simulations:
        for _ in range(1_500):
            simulation.step()
    assert sum(simulation.ended for simulation in simulations) >= 20
