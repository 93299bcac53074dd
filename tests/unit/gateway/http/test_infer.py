"""A request from its submission to its end: answers, cancellation, lost schedulers, held memory."""

import contextlib
import gzip
import json
import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.errors import Internal
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.messages import publications as m
from shmserve.ipc.messages.control_requests import RegionInUse, RegionReleased
from shmserve.ipc.messages.inference import Cancel, Failed, Finished, Release, Settled, Submit
from shmserve.ipc.messages.publications import (
    HealthChanged,
    ModelWithdrawn,
    ProcessExited,
    SchedulerLost,
)
from shmserve.ipc.messages.supervision import Drain, Drained, Stop
from shmserve.ipc.tensors.descriptors import Memory, Range, TensorRef, pack_range
from shmserve.ipc.tensors.schemas import Inference, Inferred
from tests.rigs.gateway_rig import (
    SIMPLE_CONFIG,
    Rig,
    Scheduler,
    accepts_connections,
    add_sub,
    echo,
    identity_config,
    model_config,
    publication,
    rig,
    simple_body,
    tensor_config,
)
from tests.support.messages import inference_of
from tests.support.waiting import until
from tests.support.wire.raw_http import (
    Http,
    Reply,
    in_region,
    raw_connection,
    read_reply,
    shm_input,
)

MIB = 1024 * 1024
ARENA = 32 * MIB
ONE_VALUE = [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [0]}]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path, arena_byte_size=ARENA) as model_rig:
        model_rig.open()
        until("it listens", lambda: accepts_connections(model_rig.port))
        yield model_rig


@pytest.fixture
def simple_scheduler(gateway: Rig) -> Scheduler:
    scheduler = gateway.serve(SIMPLE_CONFIG, add_sub)
    return scheduler


def send(
    connection: socket.socket, model: str, body: bytes, length: int = 0, header: int = 0
) -> None:
    """Send an inference; `size` is the body's when only a part of it is sent."""
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {length or len(body)}\r\n"
    if header:
        head += f"Inference-Header-Content-Length: {header}\r\n"
    connection.sendall(head.encode() + b"\r\n" + body)


class WaitingClient(threading.Thread):
    """A client that waits for its answer in a thread."""

    def __init__(self, port: int, model: str, body: Any, headers: Any = None) -> None:
        super().__init__(daemon=True)
        self._http = Http(port)
        self._request = (model, body, headers)
        self._reply: Reply | None = None
        self.start()

    def run(self) -> None:
        self._reply = self._http.infer(*self._request)
        self._http.close()

    def reply(self) -> Reply:
        self.join(10)
        assert self._reply is not None, "no answer"
        return self._reply


def held_client(
    gateway: Rig, scheduler: Scheduler, model: str, body: Any, fields: Any = None
) -> WaitingClient:
    """Return a client whose request the scheduler has received and does not answer."""
    scheduler.holds_responses = True
    caller = WaitingClient(gateway.port, model, body, fields)
    until("the request is there", lambda: scheduler.unanswered_submits)
    return caller


@contextlib.contextmanager
def held_connection(
    gateway: Rig, scheduler: Scheduler, model: str = "simple", body: bytes = b""
) -> Iterator[socket.socket]:
    """Yield a connection whose request the scheduler has received and does not answer."""
    scheduler.holds_responses = True
    with raw_connection(gateway.port) as connection:
        send(connection, model, body or simple_body())
        until("the request is there", lambda: scheduler.unanswered_submits)
        yield connection


def until_released(scheduler: Scheduler, memory_range: Range) -> None:
    release_message = Release(os.getpid(), [memory_range.offset])
    until("the output is released", lambda: release_message in scheduler.notifications)


def fail_first(
    scheduler: Scheduler, message: str = "no", *, is_early: bool = False, **fields: Any
) -> Submit:
    peer, submit = scheduler.unanswered_submits.pop(0)
    code, retry_after_s = fields.get("code", "UNAVAILABLE"), fields.get("retry_after_s", 0)
    scheduler.send(peer, Failed(submit.id, code, message, retry_after_s, is_early))
    return submit


# --- answers


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARG", 400), ("NOT_FOUND", 404), ("UNAVAILABLE", 503), ("UNSUPPORTED", 501),
        ("CANCELLED", 400), ("UNKNOWN", 400), ("INTERNAL", 500), ("never heard of", 500),
    ],
)  # fmt: skip
def test_failures_have_the_status_of_their_code(
    gateway: Rig, simple_scheduler: Scheduler, code: str, status: int
) -> None:
    caller = held_client(gateway, simple_scheduler, "simple", simple_body(id="q1"))
    fail_first(simple_scheduler, "as the model says", code=code)
    assert (caller.reply().status, caller.reply().error) == (status, "as the model says")
    if status == 500:  # the log arrives through a pipe, possibly after the response
        until("it is logged", lambda: "request=q1" in gateway.log)
    else:
        assert "request=q1" not in gateway.log


def test_repeated_json_with_other_numbers(gateway: Rig, simple_scheduler: Scheduler) -> None:
    """From the third request on, templates replace parsing and encoding, with the same result."""

    def infer_sums(first_values: list[Any], second_values: list[Any], **members: Any) -> Reply:
        text = simple_body(**members).decode()
        for values in (first_values, second_values):
            text = text.replace(json.dumps([1] * 16), json.dumps(values), 1)
        return gateway.http.infer("simple", text.encode())

    rng = np.random.default_rng(7)
    one_output = [{"name": "OUTPUT1"}]
    binary_output = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}, {"name": "OUTPUT1"}]
    for members in ({}, {"outputs": one_output}, {"outputs": binary_output, "id": "7"}):
        for _ in range(5):
            first, second = rng.integers(2, 2**30, (2, 16))
            reply = infer_sums(first.tolist(), second.tolist(), **members)
            tensors = reply.tensors()
            assert tensors.pop("OUTPUT1").ravel().tolist() == (first - second).tolist()
            assert all(
                received.ravel().tolist() == (first + second).tolist()
                for received in tensors.values()
            )
            assert len(tensors) == (members.get("outputs") is not one_output)
        refusal = infer_sums([2] * 15 + [2.5], [3] * 16, **members)
        assert "attempt to access JSON non-signed-integer as signed-integer" in refusal.error


def test_a_full_queue_sends_retry_after(gateway: Rig, simple_scheduler: Scheduler) -> None:
    caller = held_client(gateway, simple_scheduler, "simple", simple_body())
    fail_first(simple_scheduler, "Exceeds maximum queue size", retry_after_s=3)
    assert (caller.reply().status, caller.reply().headers["Retry-After"]) == (503, "3")


def test_malformed_responses_are_internal_errors(gateway: Rig, simple_scheduler: Scheduler) -> None:
    caller = held_client(gateway, simple_scheduler, "simple", simple_body())
    peer, submit = simple_scheduler.unanswered_submits.pop()
    simple_scheduler.send(peer, Finished(submit.id + 1, b"", []))
    simple_scheduler.send(peer, Finished(submit.id, b"garbage", [b"garbage"]))
    simple_scheduler.send(peer, Finished(submit.id, b"garbage", [b"garbage"]))
    assert (caller.reply().status, caller.reply().error) == (500, Internal().message)
    simple_scheduler.holds_responses = False
    gateway.http.infer("simple", simple_body()).ok()


def test_an_output_of_wrong_size_is_internal(gateway: Rig, simple_scheduler: Scheduler) -> None:
    simple_scheduler.compute = lambda _: Inferred(
        (TensorRef("OUTPUT0", "INT32", (1, 16), b"xxxx"),)
    )
    reply = gateway.http.infer("simple", simple_body())
    assert "output 'OUTPUT0': expected 64 bytes for INT32 [1,16], got 4" in reply.error


@pytest.mark.parametrize(
    ("request_us", "default_us", "limit_us"),
    [
        (0, 0, 0), (500, 0, 500), (0, 700, 700), (500, 700, 500), (900, 700, 700),
        (2**64 - 1, 0, 10**15),
    ],
)  # fmt: skip
def test_the_shortest_deadline_counts(
    tmp_path: Path, request_us: int, default_us: int, limit_us: int
) -> None:
    with rig(tmp_path, request_timeout_us=default_us) as gateway:
        scheduler = gateway.serve(SIMPLE_CONFIG, add_sub)
        gateway.open()
        own_deadline = {"deadline_us": request_us, "timeout": 1}
        parameters = {**own_deadline, "priority": 3, "other": "x"} if request_us else {}
        before_ns = time.monotonic_ns()
        gateway.http.infer("simple", simple_body(parameters=parameters, id="7")).ok()
        (submit,) = scheduler.submits
    assert before_ns < submit.arrived_ns < time.monotonic_ns()
    assert submit.deadline_ns == (submit.arrived_ns + limit_us * 1000 if limit_us else 0)
    assert submit.request_id == "7"
    inference = inference_of(submit)
    if request_us:
        assert inference.parameters == {"other": "x"}
        assert submit.priority == 3


def test_a_header_limits_the_time_of_a_request(gateway: Rig, simple_scheduler: Scheduler) -> None:
    for _ in range(3):  # a repeated request has no limit of an earlier one
        gateway.http.infer("simple", simple_body(), {"X-Request-Timeout-Ms": "30000"}).ok()
        gateway.http.infer("simple", simple_body()).ok()
    limited_submit, unlimited = simple_scheduler.submits[-2:]
    assert limited_submit.deadline_ns == limited_submit.arrived_ns + 30_000_000_000
    assert limited_submit.deadline_origin == "the header 'X-Request-Timeout-Ms'"
    assert unlimited.deadline_ns == 0
    reply = gateway.http.infer("simple", simple_body(), {"X-Request-Timeout-Ms": "30s"})
    assert reply.status == 400 and "a number of milliseconds" in reply.error


# --- clients that leave


def test_a_disconnect_cancels_the_request(gateway: Rig, simple_scheduler: Scheduler) -> None:
    simple_scheduler.holds_responses = True
    remaining_call = WaitingClient(gateway.port, "simple", simple_body(id="stays"))
    until("the request is there", lambda: simple_scheduler.unanswered_submits)
    with raw_connection(gateway.port) as connection:
        send(connection, "simple", simple_body(id="leaves"))
        until("the second request is there", lambda: len(simple_scheduler.unanswered_submits) == 2)
    leaving = next(s for _, s in simple_scheduler.unanswered_submits if s.request_id == "leaves")
    until("it is cancelled", lambda: Cancel(leaving.id) in simple_scheduler.notifications)
    assert [notice for notice in simple_scheduler.notifications if isinstance(notice, Cancel)] == [
        Cancel(leaving.id)
    ]
    simple_scheduler.answer_all()
    assert remaining_call.reply().ok().json()["id"] == "stays"


def test_outputs_of_cancelled_calls_are_released(gateway: Rig, simple_scheduler: Scheduler) -> None:
    arena = Arena(MIB)
    place = arena.allocate(64)
    with held_connection(gateway, simple_scheduler):
        pass
    until("it is cancelled", lambda: simple_scheduler.notifications)
    simple_scheduler.compute = lambda request: Inferred(
        (TensorRef("OUTPUT0", "INT32", (1, 16), place),)
    )
    simple_scheduler.answer_all()
    until_released(simple_scheduler, place)
    arena.close()


# --- schedulers that die


@pytest.mark.parametrize("published_first", [True, False])
def test_the_loss_of_a_scheduler_loses_no_response(
    gateway: Rig, simple_scheduler: Scheduler, published_first: bool
) -> None:
    simple_scheduler.holds_responses = True
    callers = [WaitingClient(gateway.port, "simple", simple_body(id=str(n))) for n in range(5)]
    until("the requests are there", lambda: len(simple_scheduler.unanswered_submits) == 5)
    first_submits = {submit.id: submit for _, submit in simple_scheduler.unanswered_submits}
    simple_scheduler.close()
    successor = Scheduler(gateway.run_dir, 99, add_sub)
    gateway.schedulers.append(successor)
    if published_first:
        gateway.publish(SIMPLE_CONFIG, successor)
    gateway.send(SchedulerLost(simple_scheduler.endpoint, successor.endpoint))
    if not published_first:
        # The move is not published yet, and requests go to the successor all the same.
        assert gateway.http.infer("simple", simple_body(id="new")).ok().json()["id"] == "new"
        gateway.publish(SIMPLE_CONFIG, successor)
    assert {caller.reply().ok().json()["id"] for caller in callers} == set("01234")
    resubmits = {submit.id: submit for submit in successor.submits if submit.request_id != "new"}
    assert resubmits == first_submits
    gateway.http.infer("simple", simple_body()).ok()


def test_a_cancelled_request_is_not_resubmitted(gateway: Rig, simple_scheduler: Scheduler) -> None:
    with held_connection(gateway, simple_scheduler):
        pass
    until("it is cancelled", lambda: simple_scheduler.notifications)
    successor = gateway.serve(SIMPLE_CONFIG, add_sub)
    gateway.send(SchedulerLost(simple_scheduler.endpoint, successor.endpoint))
    gateway.http.infer("simple", simple_body(id="next")).ok()
    assert [submit.request_id for submit in successor.submits] == ["next"]


def test_a_withdrawn_model_finishes_its_requests(gateway: Rig, simple_scheduler: Scheduler) -> None:
    http = gateway.http
    caller = held_client(gateway, simple_scheduler, "simple", simple_body())
    gateway.apply(lambda number: ModelWithdrawn("simple", "1", number))
    unknown_model = "Request for unknown model: 'simple'"
    for path, status, text in (
        ("simple", 404, "has no available versions"),
        ("simple/versions/1", 503, "version 1 is not at ready state"),
        ("simple/versions/01", 503, "version 1 is not at ready state"),
        ("simple/versions/2", 404, "version 2 is not found"),
    ):
        reply = http.infer(path, simple_body())
        assert (reply.status, reply.error) == (status, f"{unknown_model} {text}")
    simple_scheduler.answer_all()
    caller.reply().ok()
    gateway.publish(SIMPLE_CONFIG, simple_scheduler)
    simple_scheduler.holds_responses = False
    http.infer("simple", simple_body()).ok()


def test_a_moved_scheduler_gets_later_requests(gateway: Rig, simple_scheduler: Scheduler) -> None:
    http = gateway.http
    http.infer("simple", simple_body()).ok()
    moved_scheduler = gateway.serve(SIMPLE_CONFIG, add_sub)
    http.infer("simple", simple_body()).ok()
    assert (len(simple_scheduler.submits), len(moved_scheduler.submits)) == (1, 1)


# --- memory of the gateway


def read_content(memory_range: Any) -> bytes:
    assert isinstance(memory_range, Range)
    fd = os.open(f"/proc/{memory_range.memory.pid}/fd/{memory_range.memory.fd}", os.O_RDONLY)
    try:
        assert os.fstat(fd).st_ino == memory_range.memory.inode
        return os.pread(fd, memory_range.byte_size, memory_range.offset)
    finally:
        os.close(fd)


@pytest.fixture
def any_size(gateway: Rig) -> Scheduler:
    """Publish a model that accepts any input and returns one byte."""

    def compute(request: Inference) -> Inferred:
        return Inferred((TensorRef("OUT", "INT8", (1,), b"\x07"),))

    tensors = [tensor_config("A", "FP32", [-1]), tensor_config("B", "BYTES", [-1])]
    config = model_config("large", 0, tensors, [tensor_config("OUT", "INT8", [1])])
    scheduler = gateway.serve(config, compute)
    return scheduler


@pytest.mark.parametrize("encoding", ["binary", "chunked", "json", "mixed", "gzip"])
def test_large_tensors_go_through_arenas(gateway: Rig, any_size: Scheduler, encoding: str) -> None:
    large_array = np.random.default_rng(0).standard_normal(1_000_003).astype(np.float32)
    strings = b"".join(len(s).to_bytes(4, "little") + s for s in (b"x" * 5001, b"", b"yy"))
    texts = ["x" * 5001, "", "yy"]
    inputs: list[dict[str, Any]] = [
        {"name": "A", "datatype": "FP32", "shape": [len(large_array)]},
        {"name": "B", "datatype": "BYTES", "shape": [3]},
    ]
    tail_bytes = b""
    if encoding == "json":
        inputs[0]["data"] = large_array.astype(np.float64).tolist()
    else:
        inputs[0]["parameters"] = {"binary_data_size": large_array.nbytes}
        tail_bytes += large_array.tobytes()
    if encoding in ("json", "mixed"):
        inputs[1]["data"] = texts
    else:
        inputs[1]["parameters"] = {"binary_data_size": len(strings)}
        tail_bytes += strings
    header = json.dumps({"inputs": inputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    body: Any = header + tail_bytes
    if encoding == "json":
        headers = {}
    elif encoding == "gzip":
        body = gzip.compress(body, 1)
        headers["Content-Encoding"] = "gzip"
    elif encoding == "chunked":
        body = iter([body[offset : offset + 50_000] for offset in range(0, len(body), 50_000)])
    caller = held_client(gateway, any_size, "large", body, headers)
    first_input, second_input = inference_of(any_size.unanswered_submits[0][1]).inputs
    assert read_content(first_input.data) == large_array.tobytes()
    assert read_content(second_input.data) == strings
    assert first_input.data.offset % 64 == second_input.data.offset % 64 == 0  # type: ignore[union-attr]
    any_size.answer_all()
    assert caller.reply().ok().json()["outputs"][0]["data"] == [7]


def large_body(size: int) -> tuple[bytes, dict[str, str]]:
    inputs: list[dict[str, Any]] = [
        {"name": "A", "datatype": "FP32", "shape": [size // 4]},
        {"name": "B", "datatype": "BYTES", "shape": [0]},
    ]
    inputs[0]["parameters"] = {"binary_data_size": size}
    inputs[1]["parameters"] = {"binary_data_size": 0}
    header = json.dumps({"inputs": inputs}).encode()
    return header + bytes(size), {"Inference-Header-Content-Length": str(len(header))}


def input_range(submit: Submit) -> Range:
    memory_range = inference_of(submit).inputs[0].data
    assert isinstance(memory_range, Range)
    return memory_range


def test_a_block_is_free_after_the_response(gateway: Rig, any_size: Scheduler) -> None:
    http = gateway.http
    for _ in range(3):  # the arena has room for one of these at a time
        http.infer("large", *large_body(ARENA - 12 * MIB)).ok()
    assert len({input_range(submit).offset for submit in any_size.submits}) == 1


def test_a_block_is_kept_until_the_scheduler_responds(gateway: Rig, any_size: Scheduler) -> None:
    http = gateway.http
    caller = held_client(gateway, any_size, "large", *large_body(ARENA - 12 * MIB))
    peer = any_size.unanswered_submits[0][0]
    submit = fail_first(any_size, "Request timeout expired", is_early=True)
    assert (caller.reply().status, caller.reply().error) == (503, "Request timeout expired")
    any_size.holds_responses = False
    refusal = http.infer("large", *large_body(ARENA - 12 * MIB))
    assert refusal.status == 503
    assert "server memory for tensors is full" in refusal.error
    any_size.send(peer, Settled(submit.id))
    until("there is room", lambda: http.infer("large", *large_body(ARENA - 12 * MIB)).status == 200)


def test_tensors_larger_than_the_arena_are_refused(gateway: Rig, any_size: Scheduler) -> None:
    http = gateway.http
    found = http.infer("large", *large_body(ARENA + 8 * MIB))
    assert found.status == 400
    assert found.error == (
        f"server memory for tensors is too small: {ARENA + 8 * MIB} bytes are needed, "
        f"--arena-byte-size allows {ARENA}"
    )
    body, headers = large_body(ARENA + 8 * MIB)
    chunks = (body[offset : offset + MIB] for offset in range(0, len(body), MIB))
    found = http.infer("large", chunks, headers)
    assert found.status == 400
    assert found.error.endswith(
        f"the {ARENA} bytes of server memory for tensors (--arena-byte-size)"
    )
    http.infer("large", *large_body(MIB)).ok()


@pytest.mark.parametrize("part", ["header", "tensor"])
def test_an_aborted_upload_releases_its_block(gateway: Rig, any_size: Scheduler, part: str) -> None:
    body, headers = large_body(ARENA - 8 * MIB)
    size = int(headers["Inference-Header-Content-Length"])
    for _ in range(3):
        with raw_connection(gateway.port) as connection:
            send(
                connection,
                "large",
                body[: size - 9 if part == "header" else size + MIB],
                len(body),
                size,
            )
    until("there is room", lambda: gateway.http.infer("large", body, headers).status == 200)
    assert len(any_size.submits) == 1


def test_an_invalid_request_is_refused_before_its_upload(gateway: Rig, any_size: Scheduler) -> None:
    body, headers = large_body(ARENA - 8 * MIB)
    body = body.replace(b'"FP32"', b'"INT8"', 1)
    size = int(headers["Inference-Header-Content-Length"])
    with raw_connection(gateway.port) as connection:
        send(connection, "large", body[:size], len(body), size)
        reply = read_reply(connection)
    assert reply.status == 400
    assert "data-type is 'INT8', but model 'large' expects 'FP32'" in reply.error
    assert reply.headers["Connection"] == "close"


# --- memory of workers


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 * MIB)
    yield arena
    arena.close()


def answer_in_arena(arena: Arena, data: bytes, datatype: str = "FP32") -> tuple[Inferred, Range]:
    memory_range = arena.allocate(len(data))
    arena.view(memory_range)[:] = data
    return Inferred((TensorRef("OUT", datatype, (len(data) // 4,), memory_range),)), memory_range


@pytest.mark.parametrize("size", [20_000, 16 * MIB])
@pytest.mark.parametrize("encoding", ["", "gzip"])
@pytest.mark.parametrize("as_binary", [True, False])
def test_outputs_in_a_workers_arena_are_read_and_released(
    gateway: Rig, arena: Arena, size: int, encoding: str, as_binary: bool
) -> None:
    if size > MIB and (encoding or not as_binary):
        size = 4 * MIB  # 16 MiB take seconds to compress or to write as JSON
    data = np.arange(size // 4, dtype=np.float32)
    answer, memory_range = answer_in_arena(arena, data.tobytes())
    scheduler = gateway.serve(identity_config("m", "FP32", [-1]), lambda request: answer)
    request = {"inputs": ONE_VALUE, "parameters": {"binary_data_output": as_binary}}
    headers = {"Accept-Encoding": encoding} if encoding else {}
    reply = gateway.http.infer("m", request, headers).ok()
    if encoding:
        reply = Reply(200, reply.headers, zlib.decompress(reply.body, 47))
    assert np.array_equal(reply.tensors()["OUT"], data)
    until_released(scheduler, memory_range)


def test_outputs_are_kept_while_the_client_reads(gateway: Rig, arena: Arena) -> None:
    data = np.random.default_rng(1).bytes(16 * MIB)
    answer, memory_range = answer_in_arena(arena, data)
    scheduler = gateway.serve(identity_config("m", "FP32", [-1]), lambda request: answer)
    body = json.dumps({"inputs": ONE_VALUE, "parameters": {"binary_data_output": True}}).encode()
    with raw_connection(gateway.port) as connection:
        send(connection, "m", body)
        start = connection.recv(1000)
        gateway.http.get("/v2/health/live").ok()
        assert not scheduler.notifications
        chunks = [start]
        while sum(map(len, chunks)) < len(data):  # the head makes it more
            chunks.append(connection.recv(MIB))
        until_released(scheduler, memory_range)
        while not b"".join(chunks[-2:]).endswith(data[-100:]):
            chunks.append(connection.recv(MIB))
    assert b"".join(chunks).endswith(data)


def test_outputs_are_released_when_the_client_disconnects(gateway: Rig, arena: Arena) -> None:
    answer, memory_range = answer_in_arena(arena, bytes(16 * MIB))
    scheduler = gateway.serve(identity_config("m", "FP32", [-1]), lambda request: answer)
    body = json.dumps({"inputs": ONE_VALUE, "parameters": {"binary_data_output": True}}).encode()
    with raw_connection(gateway.port) as connection:
        send(connection, "m", body)
        assert connection.recv(1000)
    until_released(scheduler, memory_range)


def test_memory_of_an_exited_worker_fails_the_request(gateway: Rig) -> None:
    arena = Arena(MIB)
    answer, _ = answer_in_arena(arena, bytes(20_000))
    arena.close()
    gateway.serve(identity_config("m", "FP32", [-1]), lambda request: answer)
    gateway.serve(identity_config("e", "FP32", [-1]), echo)
    assert gateway.http.infer("m", {"inputs": ONE_VALUE}).status == 503
    gateway.http.infer("e", {"inputs": ONE_VALUE}).ok()


def test_an_exited_process_is_unmapped(gateway: Rig, arena: Arena) -> None:
    fds = Path(f"/proc/{gateway.process.pid}/fd")

    def count_arenas() -> int:
        events = 0
        for fd in fds.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                events += "memfd:shmserve-arena" in os.readlink(fd)
        return events

    arenas_before = count_arenas()
    answer, _ = answer_in_arena(arena, bytes(20_000))
    gateway.serve(identity_config("m", "FP32", [-1]), lambda request: answer)
    gateway.http.infer("m", {"inputs": ONE_VALUE}).ok()
    assert count_arenas() > arenas_before
    gateway.send(ProcessExited(os.getpid(), ""))
    until("the mapping is dropped", lambda: count_arenas() == arenas_before)


# --- memory of clients


def region(name: str, memory_id: int, byte_size: int = 1000, offset: int = 4096) -> Any:
    memory = Memory(memory_id, os.getpid(), 3, 77, offset + byte_size, sealed=False)
    memory_range = list(pack_range(Range(memory, offset, byte_size)))
    return lambda number: m.RegionPublished(name, "/key", memory_range, os.getuid(), -1, number)


@pytest.fixture
def region_scheduler(gateway: Rig) -> Scheduler:
    def compute(request: Inference) -> Inferred:
        memory_range = request.outputs[0].memory_range
        return Inferred((TensorRef("OUT", "FP32", (10,), memory_range or bytes(40)),))

    scheduler = gateway.serve(identity_config("m", "FP32", [-1]), compute)
    return scheduler


def region_request(name: str = "r", size: int = 40, offset: int = 8, **out: Any) -> dict[str, Any]:
    output_parameters = out or in_region(name, 40, 96)
    return {
        "inputs": [shm_input("IN", "FP32", [10], name, size, offset)],
        "outputs": [{"name": "OUT", "parameters": output_parameters}],
    }


def test_tensors_in_regions_are_passed_as_ranges(gateway: Rig, region_scheduler: Scheduler) -> None:
    gateway.apply(region("r", 5))
    reply = gateway.http.infer("m", region_request()).ok()
    assert reply.json()["outputs"] == [{"name": "OUT", "datatype": "FP32", "shape": [10]}]
    (submit,) = region_scheduler.submits
    inference = inference_of(submit)
    for place, offset in ((inference.inputs[0].data, 8), (inference.outputs[0].memory_range, 96)):
        assert isinstance(place, Range)
        assert (place.offset, place.byte_size) == (4096 + offset, 40)
        memory = place.memory
        assert (memory.id, memory.pid, memory.fd, memory.inode) == (5, os.getpid(), 3, 77)
        assert (memory.byte_size, memory.sealed) == (5096, False)


@pytest.mark.parametrize(
    ("size", "offset", "text"),
    [
        (40, 1000,
         "Invalid offset for shared memory region: 'r' (offset 1000; the region has 1000 bytes)"),
        (40, 961,
         "Invalid offset + byte size for shared memory region: 'r' (byte_size 40 at offset 961; "
         "the region has 1000 bytes)"),
        (2**63, 2**64 - 8,
         f"Invalid offset for shared memory region: 'r' (offset {2**64 - 8}; the region has "
         "1000 bytes)"),
        (2**64 - 1, 2,
         "Integer overflow detected: byte_size (18446744073709551615) + offset (2) exceeds "
         "maximum value (18446744073709551615) for region 'r'"),
        (36, 8, "[request id: <id_unknown>] input byte size mismatch for input 'IN' for model 'm'. "
         "Expected 40, got 36"),
    ],
)  # fmt: skip
def test_a_range_must_lie_in_its_region(
    gateway: Rig, region_scheduler: Scheduler, size: int, offset: int, text: str
) -> None:
    gateway.apply(region("r", 5))
    requests = [region_request(size=size, offset=offset)]
    if "input" not in text:
        requests.append(region_request(**in_region("r", size, offset)))
    for request in requests:
        reply = gateway.http.infer("m", request)
        assert (reply.status, reply.error) == (400, text)
    gateway.apply(lambda number: m.RegionWithdrawn("r", 5, number))
    until("it holds nothing", lambda: RegionReleased(5) in gateway.received)


def test_a_retired_region_is_usable_and_its_use_is_reported(
    gateway: Rig, region_scheduler: Scheduler
) -> None:
    http = gateway.http
    gateway.apply(region("r", 5))
    region_scheduler.holds_responses = True
    callers = [WaitingClient(gateway.port, "m", region_request())]
    until("the request is there", lambda: region_scheduler.unanswered_submits)
    gateway.apply(lambda number: m.RegionRetired(5, number))
    callers.append(WaitingClient(gateway.port, "m", region_request()))
    until("both are there", lambda: len(region_scheduler.unanswered_submits) == 2)
    assert gateway.received_of(RegionInUse) == [RegionInUse(5, True)]
    assert len(http.regions().json()) == 1
    region_scheduler.holds_responses = False
    region_scheduler.answer_all()
    for caller in callers:
        caller.reply().ok()
    reports = [RegionInUse(5, True), RegionInUse(5, False)]
    until("it is not used", lambda: gateway.received_of(RegionInUse) == reports)
    http.infer("m", region_request()).ok()
    until("its use is reported again", lambda: gateway.received_of(RegionInUse) == reports * 2)
    gateway.apply(lambda number: m.RegionWithdrawn("r", 5, number))
    until("it is released", lambda: gateway.received_of(RegionReleased) == [RegionReleased(5)])
    assert http.infer("m", region_request()).status == 404


def test_a_region_lasts_as_long_as_its_requests(gateway: Rig, region_scheduler: Scheduler) -> None:
    http = gateway.http
    gateway.apply(region("r", 5))
    caller = held_client(gateway, region_scheduler, "m", region_request())
    gateway.apply(lambda number: m.RegionWithdrawn("r", 5, number))
    assert http.infer("m", region_request()).status == 404
    assert http.regions().json() == []
    gateway.apply(region("r", 6))  # the name is free
    later_call = WaitingClient(gateway.port, "m", region_request())
    until("the second request is there", lambda: len(region_scheduler.unanswered_submits) == 2)
    assert not gateway.received_of(RegionReleased)
    region_scheduler.answer_all()
    caller.reply().ok()
    later_call.reply().ok()
    until("the old one is released", lambda: gateway.received_of(RegionReleased))
    ids = [input_range(submit).memory.id for submit in region_scheduler.submits]
    assert ids == [5, 6]
    gateway.apply(lambda number: m.RegionWithdrawn("r", 6, number))
    until(
        "both are",
        lambda: gateway.received_of(RegionReleased) == [RegionReleased(5), RegionReleased(6)],
    )


@pytest.mark.parametrize("kind", ["in the region", "as JSON"])
def test_a_changed_region_invalidates_templates(
    gateway: Rig, region_scheduler: Scheduler, kind: str
) -> None:
    """The same request again and again is not read anew, unless a name means something else."""
    body = region_request()
    if kind == "as JSON":
        numbers = [1.5] * 10
        body["inputs"] = [{"name": "IN", "datatype": "FP32", "shape": [10], "data": numbers}]
    for memory_id in (5, 6):
        assert gateway.http.infer("m", body).status == 404
        gateway.apply(region("r", memory_id))
        for _ in range(3):
            gateway.http.infer("m", body).ok()
        gateway.apply(lambda number: m.RegionWithdrawn("r", memory_id, number))  # noqa: B023
    until("both are released", lambda: len(gateway.received_of(RegionReleased)) == 2)
    ranges = [inference_of(s).outputs[0].memory_range for s in region_scheduler.submits]
    memory_ids = [memory_range and memory_range.memory.id for memory_range in ranges]
    assert memory_ids == [5] * 3 + [6] * 3


def test_a_region_is_used_until_the_response(gateway: Rig, region_scheduler: Scheduler) -> None:
    gateway.apply(region("r", 5))
    caller = held_client(gateway, region_scheduler, "m", region_request())
    peer = region_scheduler.unanswered_submits[0][0]
    submit = fail_first(region_scheduler, is_early=True)
    assert caller.reply().status == 503
    gateway.apply(lambda number: m.RegionWithdrawn("r", 5, number))
    assert not gateway.received_of(RegionReleased)
    region_scheduler.send(peer, Settled(submit.id))
    until("it is released", lambda: gateway.received_of(RegionReleased))


def test_a_disconnect_does_not_free_memory_in_use_by_a_worker(
    gateway: Rig, region_scheduler: Scheduler
) -> None:
    gateway.apply(region("r", 5))
    body = json.dumps(region_request()).encode()
    with held_connection(gateway, region_scheduler, "m", body):
        pass
    until("it is cancelled", lambda: region_scheduler.notifications)
    gateway.apply(lambda number: m.RegionWithdrawn("r", 5, number))
    assert not gateway.received_of(RegionReleased)
    region_scheduler.answer_all()
    until("it is released", lambda: gateway.received_of(RegionReleased))


def test_overlapping_outputs_are_logged(gateway: Rig, region_scheduler: Scheduler) -> None:
    gateway.apply(region("r", 5))
    region_scheduler.holds_responses = True
    pair = [
        WaitingClient(gateway.port, "m", region_request(**in_region("r", 40, 96 + by)))
        for by in (0, 40)
    ]
    until("the requests are there", lambda: len(region_scheduler.unanswered_submits) == 2)
    assert "overlapping" not in gateway.log
    pair.append(WaitingClient(gateway.port, "m", region_request(**in_region("r", 40, 100))))
    pair.append(WaitingClient(gateway.port, "m", region_request(**in_region("r", 40, 100))))
    until("the requests are there", lambda: len(region_scheduler.unanswered_submits) == 4)
    until("it is logged", lambda: "overlapping" in gateway.log)
    region_scheduler.answer_all()
    for caller in pair:
        caller.reply().ok()
    assert gateway.log.count("overlapping") == 1


def test_an_output_that_cannot_fit_its_region_is_not_computed(
    gateway: Rig, simple_scheduler: Scheduler
) -> None:
    gateway.apply(region("r", 5))
    body = json.loads(simple_body())
    body["outputs"] = [{"name": "OUTPUT0", "parameters": in_region("r", 63)}]
    reply = gateway.http.infer("simple", body)
    assert (reply.status, reply.error) == (
        500,
        "shared memory size specified with the request for output 'OUTPUT0' (63 bytes) "
        "should be at least 64 bytes to hold the results",
    )
    assert not simple_scheduler.submits


# --- the end


def test_a_drain_finishes_requests_in_flight(gateway: Rig, simple_scheduler: Scheduler) -> None:
    http = gateway.http
    http.infer("simple", simple_body()).ok()
    gateway.send(HealthChanged(live=True, ready=False, exiting=True))
    until("health says so", lambda: http.get("/v2/health/ready").status == 503)
    liveness = http.get("/v2/health/live")
    assert (liveness.status, liveness.error) == (503, "Server exiting")
    http.infer("simple", simple_body()).ok()  # no drain was requested yet
    caller = held_client(gateway, simple_scheduler, "simple", simple_body())
    with raw_connection(gateway.port) as idle_connection:
        gateway.send(Drain())
        assert idle_connection.recv(1) == b""
    assert not gateway.received_of(Drained)
    simple_scheduler.answer_all()
    assert caller.reply().ok().headers["Connection"] == "close"
    until("it says so", lambda: gateway.received_of(Drained))
    gateway.send(Stop())
    assert gateway.process.wait(5) == 0 and gateway.received_of(Drained) == [Drained()]
    assert " E " not in gateway.log and "Traceback" not in gateway.log


def test_a_closing_response_is_complete(gateway: Rig, simple_scheduler: Scheduler) -> None:
    with held_connection(gateway, simple_scheduler) as connection:
        gateway.send(Drain())
        simple_scheduler.answer_all()
        assert read_reply(connection).ok().headers["Connection"] == "close"
        assert connection.recv(1) == b""
    until("it says so", lambda: gateway.received_of(Drained))


def test_an_idle_gateway_is_drained_at_once(gateway: Rig) -> None:
    gateway.send(Drain())
    until("it says so", lambda: gateway.received_of(Drained))


def test_a_stop_does_not_wait_for_requests(gateway: Rig, simple_scheduler: Scheduler) -> None:
    with held_connection(gateway, simple_scheduler):
        gateway.send(Stop())
        assert gateway.process.wait(5) == 0
    assert "Traceback" not in gateway.log


def test_the_gateway_ignores_signals(gateway: Rig, simple_scheduler: Scheduler) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        gateway.process.send_signal(number)
    gateway.http.infer("simple", simple_body()).ok()


def test_no_connection_is_accepted_before_the_models_are_published(tmp_path: Path) -> None:
    with rig(tmp_path) as gateway, raw_connection(gateway.port) as connection:
        send(connection, "simple", simple_body())
        scheduler = gateway.scheduler(add_sub)
        gateway.send(
            publication(SIMPLE_CONFIG, scheduler),
            HealthChanged(live=True, ready=True, exiting=False),
        )
        assert read_reply(connection).status == 200
