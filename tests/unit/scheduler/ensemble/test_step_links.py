"""An ensemble's links to its steps' schedulers, in the same process and in other processes."""

import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from shmserve.ipc.messages.inference import Release
from shmserve.ipc.scheduler_client import SchedulerClient
from shmserve.ipc.transport.router import Router
from shmserve.scheduler.ensemble.runner import InProcessLinks, StepLinks

READ_RELEASE = Release(1, [0], 2)


class Neighbour:
    """A scheduler in the same process, with the messages that it has received."""

    def __init__(self, links: InProcessLinks, endpoint: str) -> None:
        self.received: list[Any] = []
        links.register(endpoint, self._take)

    def _take(self, sender: bytes, message: Any) -> None:
        self.received.append(message)


def test_releases_reach_a_step_that_moved_to_another_process(tmp_path: Path) -> None:
    """A link must be opened first, because nothing was submitted to the new endpoint yet."""
    links, new_endpoint = InProcessLinks(), f"ipc://{tmp_path}/s2"
    with contextlib.closing(Router(new_endpoint)) as router:
        watch, unwatch = MagicMock(), MagicMock()
        steps = StepLinks(watch, unwatch, links, b"1.1", lambda endpoint, message: None)
        with contextlib.closing(steps):
            client: SchedulerClient[Any] = SchedulerClient(steps)
            neighbour = Neighbour(links, "s1")
            client.release("s1", [READ_RELEASE])
            assert neighbour.received == [READ_RELEASE]
            links.remove("s1")
            client.successors.add("s1", new_endpoint)
            client.handle_loss("s1")
            client.release("s1", [READ_RELEASE])
            steps.flush()
            received: list[Any] = []
            # The first frame contains only the peer's identity.
            while not received and router.wait(5.0):
                received += [message for _, message in router.receive()]
            assert received == [READ_RELEASE]


def test_a_client_is_served_at_once_and_answered_later() -> None:
    """No handler of a scheduler is called from within another scheduler's handler."""
    links = InProcessLinks()
    step, client = Neighbour(links, "s1"), Neighbour(links, "1.1")
    assert links.call("s1", "1.1", READ_RELEASE) and step.received == [READ_RELEASE]
    assert links.post("1.1", "s1", READ_RELEASE) and not client.received
    links.deliver()
    assert client.received == [READ_RELEASE] and not links.queued_messages
    assert not links.call("s2", "1.1", READ_RELEASE) and not links.post("s2", "1.1", READ_RELEASE)
