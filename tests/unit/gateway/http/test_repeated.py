"""Requests like earlier ones of their connection, without a turn of its task."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from shmserve.errors import Internal
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.messages.inference import Cancel, Failed, Finished, Release
from shmserve.ipc.messages.publications import ModelWithdrawn, SchedulerLost
from shmserve.ipc.messages.supervision import Drain, Drained
from shmserve.ipc.scheduler_client import NO_SCHEDULER
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inference, Inferred
from tests.rigs.gateway_rig import SIMPLE_CONFIG, Rig, Scheduler, add_sub, rig
from tests.support.waiting import until
from tests.support.wire.raw_http import Reply, raw_connection, read_reply

HEAD = "POST /v2/models/simple/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"
WARM_UPS = 5
ARENA = 1 << 20


def pack_request(value: Any) -> bytes:
    """Return a request whose head is the same for every value of two digits."""
    tensor = {"datatype": "INT32", "shape": [1, 16], "data": [value] * 16}
    body = json.dumps({"inputs": [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]})
    return (HEAD.format(len(body)) + body).encode()


@dataclass
class RepeatedConnection:
    """A connection whose repeated request is cached, with its gateway and scheduler."""

    gateway: Rig
    scheduler: Scheduler
    connection: socket.socket

    def send_request(self, value: Any) -> Reply:
        self.connection.sendall(pack_request(value))
        return read_reply(self.connection)

    def hold_request(self, value: int) -> None:
        """Send one more, which the scheduler has and keeps."""
        self.scheduler.holds_responses = True
        self.connection.sendall(pack_request(value))
        until("the request is there", lambda: self.scheduler.unanswered_submits)

    def end_request(self, response: Callable[[int], Any]) -> Reply:
        """Send the scheduler's response to the held request, by its number; return the reply."""
        ((peer, submit),) = self.scheduler.unanswered_submits
        self.scheduler.unanswered_submits.clear()
        self.scheduler.send(peer, response(submit.id))
        return read_reply(self.connection)

    def is_right(self, value: int) -> bool:
        """Return whether a further request is answered correctly."""
        self.scheduler.holds_responses = False
        return read_sums(self.send_request(value)) == [2 * value] * 16


def read_sums(reply: Reply) -> list[int]:
    output: list[int] = reply.ok().tensors()["OUTPUT0"].ravel().tolist()
    return output


@pytest.fixture
def repeated(tmp_path: Path) -> Iterator[RepeatedConnection]:
    with rig(tmp_path, arena_byte_size=ARENA) as gateway:
        scheduler = gateway.serve(SIMPLE_CONFIG, add_sub)
        gateway.open()
        until("it listens", lambda: gateway.http.get("/v2/health/live").status == 200)
        with raw_connection(gateway.port) as connection:
            repeated_connection = RepeatedConnection(gateway, scheduler, connection)
            for value in range(10, 10 + WARM_UPS):
                assert repeated_connection.is_right(value)
            yield repeated_connection


def test_an_invalid_request_is_refused(repeated: RepeatedConnection) -> None:
    assert "attempt to access JSON non-signed-integer" in repeated.send_request(2.5).error
    assert repeated.is_right(20) and repeated.is_right(21) and repeated.is_right(22)


@pytest.mark.parametrize(
    ("code", "status", "text"), [("UNAVAILABLE", 503, "no"), ("INTERNAL", 500, "why")]
)
def test_failures_are_sent(repeated: RepeatedConnection, code: str, status: int, text: str) -> None:
    repeated.hold_request(30)
    reply = repeated.end_request(lambda number: Failed(number, code, text, 0, False))
    assert (reply.status, reply.error) == (status, text)
    assert repeated.is_right(31)


def test_a_malformed_response_is_an_internal_error(repeated: RepeatedConnection) -> None:
    repeated.hold_request(32)
    reply = repeated.end_request(lambda number: Finished(number, b"garbage", [b"garbage"]))
    assert (reply.status, reply.error) == (500, Internal().message)
    assert repeated.is_right(33)


def test_a_response_with_another_schema_is_sent(repeated: RepeatedConnection) -> None:
    """The response has other outputs, in memory of a worker that is released afterwards."""
    values = np.arange(16, dtype=np.int32)
    arena = Arena(ARENA)
    memory_range = arena.allocate(values.nbytes)
    arena.view(memory_range)[:] = values.tobytes()

    def compute(request: Inference) -> Inferred:
        return Inferred((TensorRef("OUTPUT0", "INT32", (1, 16), memory_range),))

    repeated.scheduler.compute = compute
    reply = repeated.send_request(40)
    assert reply.ok().tensors()["OUTPUT0"].ravel().tolist() == values.tolist()
    release_message = Release(os.getpid(), [memory_range.offset])
    until("its output is released", lambda: release_message in repeated.scheduler.notifications)
    repeated.scheduler.compute = add_sub
    assert repeated.is_right(41)
    arena.close()


def test_numbers_without_json_representation_are_refused(repeated: RepeatedConnection) -> None:
    """Or sent as they always are: the long way writes them."""

    def compute(value: float) -> Callable[[Inference], Inferred]:
        data = np.full((1, 16), value, np.float32).tobytes()
        return lambda request: Inferred((TensorRef("OUTPUT0", "FP32", (1, 16), data),))

    for value in (1.5, 2.5, 3.5):
        repeated.scheduler.compute = compute(value)
        assert repeated.send_request(50).ok().tensors()["OUTPUT0"].ravel().tolist() == [value] * 16
    repeated.scheduler.compute = compute(float("nan"))
    first_reply, second_reply = repeated.send_request(50), repeated.send_request(51)
    assert (first_reply.status, first_reply.body) == (second_reply.status, second_reply.body)


def test_a_disconnect_cancels_the_request(repeated: RepeatedConnection) -> None:
    repeated.hold_request(60)
    ((_, submit),) = repeated.scheduler.unanswered_submits
    repeated.connection.close()
    until("it is cancelled", lambda: Cancel(submit.id) in repeated.scheduler.notifications)
    repeated.scheduler.answer_all()
    repeated.gateway.send(Drain())
    until("nothing is left of it", lambda: repeated.gateway.received_of(Drained))


def test_pipelined_requests_are_answered_in_order(repeated: RepeatedConnection) -> None:
    """Whether it is like it or not, and whole or not."""
    repeated.hold_request(61)
    metadata_request = b"GET /v2/models/simple HTTP/1.1\r\nHost: localhost\r\n\r\n"
    repeated.connection.sendall(pack_request(62) + metadata_request + pack_request(63)[:50])
    repeated.gateway.http.get("/v2/health/live").ok()  # the gateway has had its turn
    repeated.scheduler.holds_responses = False
    repeated.scheduler.answer_all()
    with repeated.connection.makefile("rb") as stream:
        documents = [_next_json(stream) for _ in range(3)]
        repeated.connection.sendall(pack_request(63)[50:])
        documents.append(_next_json(stream))
    (first, second, model, last) = documents
    assert [a["outputs"][0]["data"][0] for a in (first, second, last)] == [122, 124, 126]
    assert model["name"] == "simple"


def _next_json(stream: BinaryIO) -> Any:
    size = 0
    while (line := stream.readline()) != b"\r\n":
        if line.startswith(b"Content-Length"):
            size = int(line.split()[1])
    return json.loads(stream.read(size))


def test_the_loss_of_a_scheduler_loses_no_response(repeated: RepeatedConnection) -> None:
    repeated.hold_request(64)
    repeated.scheduler.close()
    successor = repeated.gateway.scheduler(add_sub)
    repeated.gateway.send(SchedulerLost(repeated.scheduler.endpoint, successor.endpoint))
    assert read_sums(read_reply(repeated.connection)) == [128] * 16
    repeated.scheduler = successor
    assert repeated.is_right(65)


def test_a_request_without_a_scheduler_fails_at_once(repeated: RepeatedConnection) -> None:
    """Holds before the gateway receives the withdrawal of the model."""
    repeated.gateway.send(SchedulerLost(repeated.scheduler.endpoint, ""))
    repeated.gateway.http.get("/v2/health/live").ok()  # the gateway has had its turn
    for _ in range(2):
        reply = repeated.send_request(64)
        assert reply.status == 503 and reply.error.endswith(NO_SCHEDULER)
    repeated.gateway.publish(SIMPLE_CONFIG, repeated.gateway.scheduler(add_sub))
    assert repeated.is_right(65) and "Traceback" not in repeated.gateway.log


def test_a_moved_scheduler_receives_later_requests(repeated: RepeatedConnection) -> None:
    """Holds for a scheduler that was withdrawn without a successor, too."""
    moved_scheduler = repeated.gateway.scheduler(add_sub)
    repeated.gateway.publish(SIMPLE_CONFIG, moved_scheduler)
    assert repeated.is_right(66)
    assert len(moved_scheduler.submits) == 1
    repeated.gateway.apply(lambda number: ModelWithdrawn("simple", "1", number))
    assert repeated.send_request(67).status == 404
    assert "Request for unknown model" in repeated.send_request(67).error
    repeated.gateway.publish(SIMPLE_CONFIG, moved_scheduler)
    assert repeated.is_right(68)


def test_a_new_version_becomes_the_latest(repeated: RepeatedConnection) -> None:
    """Though the one before it is there still."""
    later_scheduler = repeated.gateway.scheduler(add_sub)
    repeated.gateway.publish(SIMPLE_CONFIG, later_scheduler, "2")
    assert repeated.is_right(69)
    assert len(later_scheduler.submits) == 1


def test_responses_during_a_drain_close_the_connection(repeated: RepeatedConnection) -> None:
    repeated.hold_request(70)
    with raw_connection(repeated.gateway.port) as idle_connection:
        repeated.gateway.http.get("/v2/health/live").ok()  # that is accepted
        repeated.gateway.send(Drain())
        assert idle_connection.recv(1) == b""
    assert not repeated.gateway.received_of(Drained)
    repeated.scheduler.answer_all()
    reply = read_reply(repeated.connection)
    assert read_sums(reply) == [140] * 16 and reply.headers["Connection"] == "close"
    assert repeated.connection.recv(1) == b""
    until("it says so", lambda: repeated.gateway.received_of(Drained))
    assert "Traceback" not in repeated.gateway.log
