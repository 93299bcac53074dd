"""Triton's two worked examples of sequences, step by step, with the controls that the model saw."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import repositories
from tests.support.gates import Visit
from tests.support.request_pool import RequestPool, request_pool
from tests.support.sequence_models import CONTROL_INPUTS, IDLE_TIME, instances
from tests.support.servers import Server, Start
from tests.support.wire.raw_http import Reply, json_input

Ask = Callable[..., "Future[Reply]"]


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    for name, count, kind in (("pair", 2, "direct { }"), ("single", 1, "direct { }")):
        config = f"{instances(count)} sequence_batching {{ {kind} {IDLE_TIME} {CONTROL_INPUTS} }}"
        repositories.add_as(models, name, "sequencer", config)
    return start(models, "--exit-timeout-secs=2")


@pytest.fixture
def pool(server: Server) -> Iterator[RequestPool]:
    with request_pool(server) as requests:
        yield requests
        server.gate.release_all()


def step_sender(pool: RequestPool, model: str) -> Ask:
    def send_step(sequence: int, start: bool = False, end: bool = False) -> Future[Reply]:
        parameters: dict[str, Any] = {"sequence_id": sequence}
        parameters |= {"sequence_start": start, "sequence_end": end}
        tensor = json_input("INPUT0", np.ones((1, 1), np.int32))
        return pool.infer(model, {"inputs": [tensor], "parameters": parameters})

    return send_step


def by_slot(visit: Visit, slots: int = 2) -> dict[str, list[Any]]:
    """Return the controls that a model saw by slot, with 0 for slots after the last row."""
    return {
        name: [int(value) for value in visit.message[name]]
        + [0] * (slots - len(visit.message[name]))
        for name in ("START", "END", "READY", "CORRID")
    }


def sums_of_replies(*replies: Future[Reply]) -> list[int]:
    return [reply.result().ok().json()["outputs"][0]["data"][0] for reply in replies]


def test_direct_strategy_with_two_instances_of_two_slots(server: Server, pool: RequestPool) -> None:
    """The ids of sequences 0 to 5 are 1 to 6."""
    send_step, gate = step_sender(pool, "pair"), server.gate
    first_replies = [send_step(1, start=True)]
    first_visit = gate.next()
    first_replies.append(send_step(2, start=True))
    second_visit = gate.next()
    assert first_visit.pid != second_visit.pid
    for s, waiting in ((3, 1), (4, 2), (5, 3), (6, 4)):
        first_replies.append(send_step(s, start=True))
        server.wait_pending("pair", waiting)
    for visit, s in ((first_visit, 1), (second_visit, 2)):
        assert by_slot(visit) == {
            "START": [1, 0],
            "END": [0, 0],
            "READY": [1, 0],
            "CORRID": [s, 0],
        }
    # Sequences 3 and 4 have the other two slots. Sequences 5 and 6 wait in the backlog.
    first_visit.release()
    third = gate.next()
    second_visit.release()
    fourth = gate.next()
    for visit, earlier_visit, s in ((third, first_visit, 3), (fourth, second_visit, 4)):
        assert visit.pid == earlier_visit.pid
        assert by_slot(visit) == {
            "START": [0, 1],
            "END": [0, 0],
            "READY": [0, 1],
            "CORRID": [0, s],
        }
    # Sequence 4 ends, and 5 takes its slot.
    end_reply = send_step(4, end=True)
    server.wait_pending("pair", 3)
    fourth.release()
    end = gate.next()
    assert by_slot(end)["END"] == [0, 1] and by_slot(end)["CORRID"] == [0, 4]
    end.release()
    fifth = gate.next()
    assert fifth.pid == second_visit.pid
    assert by_slot(fifth)["START"] == [0, 1] and by_slot(fifth)["CORRID"] == [0, 5]
    # Sequence 2 ends, and 6 takes its slot.
    ended_too = send_step(2, end=True)
    server.wait_pending("pair", 2)
    fifth.release()
    end = gate.next()
    assert by_slot(end)["END"] == [1, 0] and by_slot(end)["CORRID"] == [2, 0]
    end.release()
    sixth = gate.next()
    assert sixth.pid == second_visit.pid
    assert by_slot(sixth)["START"] == [1, 0] and by_slot(sixth)["CORRID"] == [6, 0]
    sixth.release()
    third.release()
    assert sums_of_replies(*first_replies) == [1] * 6
    assert sums_of_replies(end_reply, ended_too) == [2, 2]
    assert gate.is_idle()


def test_direct_strategy_with_requests_beside_an_idle_sequence(
    server: Server, pool: RequestPool
) -> None:
    """A lone request in slot 0 is one row; one in slot 1 is preceded by a null row."""
    send_step, gate = step_sender(pool, "single"), server.gate

    def controls_of(sequence: int, **flags: bool) -> tuple[list[int], list[int], list[int]]:
        response = send_step(sequence, **flags)
        visit = gate.next()
        visit.release()
        response.result().ok()
        message = visit.message
        return message["START"], message["READY"], message["CORRID"]

    for sequence in (1, 2):  # another test may have begun these sequences
        controls_of(sequence, start=True, end=True)
    assert controls_of(11, start=True) == ([1], [1], [11])
    assert controls_of(12, start=True) == ([0, 1], [0, 1], [0, 12])
    assert controls_of(11) == ([0], [1], [11])
    assert controls_of(12) == ([0, 0], [0, 1], [0, 12])
    controls_of(11, end=True)
    assert controls_of(13, start=True) == ([1], [1], [13])
    controls_of(12, end=True)
    assert controls_of(14, start=True) == ([0, 1], [0, 1], [0, 14])
    for sequence in (13, 14):
        controls_of(sequence, end=True)
