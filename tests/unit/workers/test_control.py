"""A worker's link to the supervisor: requests from any thread, without lost messages."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.errors import NotFound
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.control_requests import Answered, FindModel, Refused
from shmserve.ipc.messages.publications import Loss, MemoryDropped, ModelWithdrawn
from shmserve.ipc.transport.router import Router
from shmserve.ipc.transport.zmtp import Dealer
from shmserve.workers.links import SupervisorLink
from tests.rigs.arrivals import receive_arrived

NAME = b"worker.1.0.1"


@pytest.fixture
def link_and_router(tmp_path: Path) -> Iterator[tuple[SupervisorLink, Router]]:
    router = Router(f"ipc://{tmp_path}/control")
    control = SupervisorLink(Dealer(f"ipc://{tmp_path}/control", NAME.decode()))
    control.send(m.WorkerStarted(1))
    assert receive_arrived(router)
    yield control, router
    control.close(0)
    os.close(control._wake_eventfd)
    router.close()


def question(number: int) -> FindModel:
    return FindModel(number, "other", "")


def received_lookup(router: Router) -> FindModel:
    ((_, message),) = receive_arrived(router)
    assert isinstance(message, FindModel)
    return message


def test_an_answer_and_a_refusal(link_and_router: tuple[SupervisorLink, Router]) -> None:
    control, router = link_and_router

    def supervise() -> None:
        router.post(NAME, Answered(received_lookup(router).id, {"version": "1"}))
        router.flush()
        router.post(NAME, Refused(received_lookup(router).id, "NOT_FOUND", "no such model"))
        router.flush()

    thread = threading.Thread(target=supervise)
    thread.start()
    assert control.ask(question) == {"version": "1"}
    with pytest.raises(NotFound, match="no such model"):
        control.ask(question)
    thread.join()


def test_a_message_that_arrives_with_a_response_wakes_the_loop(
    link_and_router: tuple[SupervisorLink, Router],
) -> None:
    """A thread of the model reads a message from the socket of the waiting loop."""
    control, router = link_and_router
    losses: list[Loss] = []
    control.follow_models(losses.append)
    withdrawal = ModelWithdrawn("other", "1", 0)
    asking = threading.Thread(target=control.ask, args=(question,))
    asking.start()
    number = received_lookup(router).id
    control.pump()
    for message in (MemoryDropped(7), withdrawal, m.Stop(), Answered(number, {})):
        router.post(NAME, message)
    router.flush()
    asking.join()
    assert losses == [withdrawal]
    control.wait()
    assert list(control.inbox) == [MemoryDropped(7), m.Stop()]


def test_the_loop_does_not_wait_for_a_message_it_has_read(
    link_and_router: tuple[SupervisorLink, Router],
) -> None:
    """A request sent within `execute` reads its response together with a message for the loop."""
    control, router = link_and_router

    def supervise() -> None:
        number = received_lookup(router).id
        for message in (m.Attach("ipc://successor"), Answered(number, {})):
            router.post(NAME, message)
        router.flush()

    thread = threading.Thread(target=supervise)
    thread.start()
    control.ask(question)
    thread.join()
    has_slept = threading.Event()

    def wake_control() -> None:
        has_slept.set()
        control.wake()

    timer = threading.Timer(10.0, wake_control)
    timer.start()
    control.wait()
    timer.cancel()
    assert not has_slept.is_set()
    assert list(control.inbox) == [m.Attach("ipc://successor")]
