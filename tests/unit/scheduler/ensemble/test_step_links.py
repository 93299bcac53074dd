"""An ensemble's links to its steps' schedulers: what is known of those that were replaced."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from shmserve.ipc.messages.inference import Release
from shmserve.ipc.transport.router import Router
from shmserve.scheduler.ensemble.runner import StepSchedulers
from shmserve.scheduler.hosting.event_loop import InProcessLinks, Waiter

READ = Release(1, [0], 2)


class Neighbour:
    """A scheduler of the same process, at an endpoint, and what it was sent."""

    def __init__(self, links: InProcessLinks, endpoint: str) -> None:
        self.received: list[Any] = []
        links.enter(endpoint, self._take)

    def _take(self, sender: bytes, message: Any) -> None:
        self.received.append(message)


def test_what_was_read_goes_to_the_last_of_many_successors() -> None:
    links = InProcessLinks()
    steps = StepSchedulers(Waiter(), links, b"1.1", lambda endpoint, message: None)
    last = Neighbour(links, "s20")
    for number in range(20):
        steps.lose(f"s{number}", f"s{number + 1}")
    for number in range(20):
        steps.tell(f"s{number}", READ)
    links.deliver()
    assert last.received == [READ] * 20


def test_schedulers_that_were_lost_are_forgotten() -> None:
    steps = StepSchedulers(Waiter(), InProcessLinks(), b"1.1", lambda endpoint, message: None)
    for number in range(2_000):
        steps.lose(f"s{number}", f"s{number + 1}")
    assert len(steps._moved) <= 256
    steps.lose("s2000", "")  # its model was unloaded
    assert steps._moved == {}


def test_what_was_read_reaches_a_step_that_has_left_the_process(tmp_path: Path) -> None:
    """Nothing was submitted to it where it is now, so there is no link to it yet."""
    links, there = InProcessLinks(), f"ipc://{tmp_path}/s2"
    with contextlib.closing(Router(there)) as router:
        steps = StepSchedulers(Waiter(), links, b"1.1", lambda endpoint, message: None)
        with contextlib.closing(steps):
            Neighbour(links, "s1")
            links.leave("s1")
            steps.lose("s1", there)
            steps.tell("s1", READ)
            steps.flush()
            received: list[Any] = []
            while not received and router.wait(5.0):  # who it is comes before what it says
                received += [message for _, message in router.receive()]
            assert received == [READ]
