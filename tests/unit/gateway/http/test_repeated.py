"""Requests that are like those before them on their connection: they are begun and answered without
a turn of its task, with no other result."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.messages.inference import Cancel, Failed, Finished, Release
from shmserve.ipc.messages.publications import ModelWithdrawn, SchedulerLost
from shmserve.ipc.messages.supervision import Drain, Drained
from shmserve.ipc.scheduler_client import NO_SCHEDULER
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.inference import Inference, Inferred
from tests.rigs.gateway_rig import SIMPLE, Rig, Scheduler, add_sub, rig
from tests.support.waiting import until
from tests.support.wire.raw_http import Reply, raw_connection, read_reply

HEAD = "POST /v2/models/simple/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"
WARM_UPS = 5
ARENA = 1 << 20


def packed(value: Any) -> bytes:
    """Return a request whose head is the same for every value of two digits."""
    tensor = {"datatype": "INT32", "shape": [1, 16], "data": [value] * 16}
    body = json.dumps({"inputs": [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]})
    return (HEAD.format(len(body)) + body).encode()


@dataclass
class Asked:
    """A connection that has asked the same often enough, and its gateway and scheduler."""

    gateway: Rig
    scheduler: Scheduler
    connection: socket.socket

    def ask(self, value: Any) -> Reply:
        self.connection.sendall(packed(value))
        return read_reply(self.connection)

    def reserve(self, value: int) -> None:
        """Send one more, which the scheduler has and keeps."""
        self.scheduler.held = True
        self.connection.sendall(packed(value))
        until("the request is there", lambda: self.scheduler.waiting)

    def is_right(self, value: int) -> bool:
        """Return whether a further request is answered correctly."""
        self.scheduler.held = False
        return sums(self.ask(value)) == [2 * value] * 16


def sums(reply: Reply) -> list[int]:
    output: list[int] = reply.ok().tensors()["OUTPUT0"].ravel().tolist()
    return output


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    with rig(tmp_path, arena_byte_size=ARENA) as gateway:
        scheduler = gateway.scheduler(add_sub)
        gateway.publish(SIMPLE, scheduler)
        gateway.open()
        until("it listens", lambda: gateway.http.get("/v2/health/live").status == 200)
        with raw_connection(gateway.port) as connection:
            asked_request = Asked(gateway, scheduler, connection)
            for value in range(10, 10 + WARM_UPS):
                assert asked_request.is_right(value)
            yield asked_request


def test_an_invalid_request_is_refused(asked: Asked) -> None:
    assert "attempt to access JSON non-signed-integer" in asked.ask(2.5).error
    assert asked.is_right(20)
    assert asked.is_right(21)
    assert asked.is_right(22)


@pytest.mark.parametrize(
    ("code", "status", "message"), [("UNAVAILABLE", 503, "no"), ("INTERNAL", 500, "why")]
)
def test_a_failure_is_reported(asked: Asked, code: str, status: int, message: str) -> None:
    asked.reserve(30)
    ((peer, submit),) = asked.scheduler.waiting
    asked.scheduler.waiting.clear()
    asked.scheduler.send(peer, Failed(submit.id, code, message, 0, False))
    reply = read_reply(asked.connection)
    assert (reply.status, reply.error) == (status, message)
    assert asked.is_right(31)


def test_a_malformed_response_is_an_internal_error(asked: Asked) -> None:
    asked.reserve(32)
    ((peer, submit),) = asked.scheduler.waiting
    asked.scheduler.waiting.clear()
    asked.scheduler.send(peer, Finished(submit.id, b"garbage", [b"garbage"]))
    reply = read_reply(asked.connection)
    assert (reply.status, reply.error) == (500, "internal error")
    assert asked.is_right(33)


def test_a_response_with_another_schema_is_sent(asked: Asked) -> None:
    """The response has other outputs, in memory of a worker that is released afterwards."""
    values = np.arange(16, dtype=np.int32)
    arena = Arena(ARENA)
    memory_range = arena.allocate(values.nbytes)
    arena.view(memory_range)[:] = values.tobytes()

    def compute(request: Inference) -> Inferred:
        return Inferred((TensorRef("OUTPUT0", "INT32", (1, 16), memory_range),))

    asked.scheduler.compute = compute
    reply = asked.ask(40)
    assert reply.ok().tensors()["OUTPUT0"].ravel().tolist() == values.tolist()
    release = Release(os.getpid(), [memory_range.offset])
    until("its output is released", lambda: release in asked.scheduler.notices)
    asked.scheduler.compute = add_sub
    assert asked.is_right(41)
    arena.close()


def test_numbers_without_json_representation_are_refused(asked: Asked) -> None:
    """Or sent as they always are: the long way writes them."""

    def compute(value: float) -> Callable[[Inference], Inferred]:
        data = np.full((1, 16), value, np.float32).tobytes()
        return lambda request: Inferred((TensorRef("OUTPUT0", "FP32", (1, 16), data),))

    for value in (1.5, 2.5, 3.5):
        asked.scheduler.compute = compute(value)
        assert asked.ask(50).ok().tensors()["OUTPUT0"].ravel().tolist() == [value] * 16
    asked.scheduler.compute = compute(float("nan"))
    first, second = asked.ask(50), asked.ask(51)
    assert (first.status, first.body) == (second.status, second.body)


def test_a_disconnect_cancels_the_request(asked: Asked) -> None:
    asked.reserve(60)
    ((_, submit),) = asked.scheduler.waiting
    asked.connection.close()
    until("it is cancelled", lambda: Cancel(submit.id) in asked.scheduler.notices)
    asked.scheduler.answer_all()
    asked.gateway.send(Drain())
    until("nothing is left of it", lambda: asked.gateway.received_of(Drained))


def test_pipelined_requests_are_answered_in_order(asked: Asked) -> None:
    """Whether it is like it or not, and whole or not."""
    asked.reserve(61)
    other = b"GET /v2/models/simple HTTP/1.1\r\nHost: localhost\r\n\r\n"
    asked.connection.sendall(packed(62) + other + packed(63)[:50])
    asked.gateway.http.get("/v2/health/live").ok()  # the gateway has had its turn
    asked.scheduler.held = False
    asked.scheduler.answer_all()
    with asked.connection.makefile("rb") as stream:
        documents = [_next_json(stream) for _ in range(3)]
        asked.connection.sendall(packed(63)[50:])
        documents.append(_next_json(stream))
    (first, second, model, last) = documents
    assert [answer["outputs"][0]["data"][0] for answer in (first, second, last)] == [122, 124, 126]
    assert model["name"] == "simple"


def _next_json(stream: BinaryIO) -> Any:
    size = 0
    while (line := stream.readline()) != b"\r\n":
        if line.startswith(b"Content-Length"):
            size = int(line.split()[1])
    return json.loads(stream.read(size))


def test_the_loss_of_a_scheduler_loses_no_response(asked: Asked) -> None:
    asked.reserve(64)
    asked.scheduler.close()
    successor = asked.gateway.scheduler(add_sub)
    asked.gateway.send(SchedulerLost(asked.scheduler.endpoint, successor.endpoint))
    assert sums(read_reply(asked.connection)) == [128] * 16
    asked.scheduler = successor
    assert asked.is_right(65)


def test_a_request_without_a_scheduler_fails_at_once(asked: Asked) -> None:
    """Holds before the gateway receives the withdrawal of the model."""
    asked.gateway.send(SchedulerLost(asked.scheduler.endpoint, ""))
    asked.gateway.http.get("/v2/health/live").ok()  # the gateway has had its turn
    for _ in range(2):
        reply = asked.ask(64)
        assert reply.status == 503 and reply.error.endswith(NO_SCHEDULER)
    successor = asked.gateway.scheduler(add_sub)
    asked.gateway.publish(SIMPLE, successor)
    assert asked.is_right(65)
    assert "Traceback" not in asked.gateway.log


def test_a_moved_scheduler_receives_later_requests(asked: Asked) -> None:
    """Holds for a scheduler that was withdrawn without a successor, too."""
    moved = asked.gateway.scheduler(add_sub)
    asked.gateway.publish(SIMPLE, moved)
    assert asked.is_right(66)
    assert len(moved.submits) == 1
    asked.gateway.apply(lambda number: ModelWithdrawn("simple", "1", number))
    assert asked.ask(67).status == 404
    assert "Request for unknown model" in asked.ask(67).error
    asked.gateway.publish(SIMPLE, moved)
    assert asked.is_right(68)


def test_a_new_version_becomes_the_latest(asked: Asked) -> None:
    """Though the one before it is there still."""
    later = asked.gateway.scheduler(add_sub)
    asked.gateway.publish(SIMPLE, later, "2")
    assert asked.is_right(69)
    assert len(later.submits) == 1


def test_responses_during_a_drain_close_the_connection(asked: Asked) -> None:
    asked.reserve(70)
    with raw_connection(asked.gateway.port) as idle:
        asked.gateway.http.get("/v2/health/live").ok()  # that is accepted
        asked.gateway.send(Drain())
        assert idle.recv(1) == b""
    assert not asked.gateway.received_of(Drained)
    asked.scheduler.answer_all()
    reply = read_reply(asked.connection)
    assert sums(reply) == [140] * 16
    assert reply.headers["Connection"] == "close"
    assert asked.connection.recv(1) == b""
    until("it says so", lambda: asked.gateway.received_of(Drained))
    assert "Traceback" not in asked.gateway.log
