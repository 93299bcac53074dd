"""A channel that waits for responses receives all events, also those of other callers."""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shmserve.client
from shmserve.client import session
from shmserve.client.connection import ServerConnection
from shmserve.client.request import results
from shmserve.client.request.channel import ClientRequest, RequestChannel
from shmserve.client.request.prepare import PLAIN, PackedRequest
from shmserve.client.request.waiting import ThreadChannel
from shmserve.client.server_state import ClientModel
from shmserve.client.session import Session
from shmserve.errors import Disconnected, NotFound, Unavailable
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import publications as m
from shmserve.ipc.messages.control_requests import Welcome
from shmserve.ipc.messages.inference import Cancel
from shmserve.ipc.messages.publications import HealthChanged
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import Memory, Range
from shmserve.ipc.tensors.schemas import TensorSchema
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.router import MAX_ARRAY_LEN, UntrustedRouter
from tests.support.leaks import descriptor_count
from tests.support.waiting import until


@contextmanager
def listener(tmp_path: Path, *healths: HealthChanged) -> Iterator[None]:
    """Yield a server without models that admits one program and sends nothing more."""
    first_health, *later_healths = healths or [HealthChanged(True, True, False)]
    (tmp_path / "guests").mkdir(exist_ok=True)
    (tmp_path / "guests" / "door").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server_socket:
        server_socket.bind(str(tmp_path / "guests" / "door"))
        server_socket.listen()

        def welcome() -> None:
            connections.append(server_socket.accept()[0])
            connections[0].recv(4096)
            connections[0].send(frames.pack([Welcome(1, "token"), first_health]))
            for health in later_healths:
                connections[0].send(frames.pack([health]))

        connections: list[socket.socket] = []
        server = threading.Thread(target=welcome)
        server.start()
        yield
        server.join()
        connections[0].close()


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[ServerConnection]:
    with listener(tmp_path):
        connection = ServerConnection(tmp_path, 5.0)
        yield connection
        connection.close()


def test_with_a_timeout_the_end_of_the_servers_start_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server accepts clients while it loads its models; its next message is awaited."""
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=time.monotonic))  # no `sleep`
    starting = HealthChanged(True, False, False, started=False)
    with (
        listener(tmp_path, starting, HealthChanged(True, False, False)),
        shmserve.client.connect(tmp_path, timeout=20) as client,
    ):
        assert client._session.connection().models.started
    with listener(tmp_path, starting), pytest.raises(Unavailable, match="still loads its models"):
        shmserve.client.connect(tmp_path, timeout=0.2)
    with listener(tmp_path, starting):
        waiting_session = Session(tmp_path, 1 << 20, 5.0)
        threading.Timer(0.1, waiting_session.close).start()
        with pytest.raises(Disconnected, match="this client is closed"):
            waiting_session.wait_started(time.monotonic() + 20)


def build_request(connection: ServerConnection) -> PackedRequest:
    config = {"name": "m", "max_batch_size": 0, "input": [], "output": []}
    model = m.ModelPublished(
        "m", "1", ModelSpec.of(config), {}, "ipc://nowhere", True, True, 0.0, 0
    )
    return PackedRequest(ClientModel(model, connection.models), b"work", [], PLAIN)


def test_a_model_of_an_ended_connection_is_not_unknown(connection: ServerConnection) -> None:
    """A call may have got the connection before the server exited."""
    with pytest.raises(NotFound, match="unknown model: 'm'"):
        connection.models.resolve("m", "")
    connection.close()
    with pytest.raises(Disconnected, match="the server is no longer running"):
        connection.models.resolve("m", "")


def readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def test_a_loss_during_a_check_wakes_the_waiter_again(
    connection: ServerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(RequestChannel(connection, lambda _: None, lambda _: None)) as channel:
        channel.wake()
        connection.loss_count += 1  # something is, or it would not look

        def wake_waiter() -> None:
            channel.wake()  # another thread, as soon as it has looked

        monkeypatch.setattr(channel, "_check_server", wake_waiter)
        channel.process_events([channel.waker])
        assert readable(channel.waker)
        monkeypatch.undo()
        channel.process_events([channel.waker])
        assert not readable(channel.waker)


def test_a_task_that_arrives_while_answers_are_read_is_run(
    connection: ServerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = connection._channel
    original_take, task_ran = channel.process_events, threading.Event()

    def take_with_task(events: Any) -> None:
        monkeypatch.undo()
        connection.call(lambda _: task_ran.set())
        original_take(events)

    monkeypatch.setattr(channel, "process_events", take_with_task)
    os.eventfd_write(channel.waker, 1)
    assert task_ran.wait(5)


def test_a_submission_during_close_fails_with_disconnected(
    connection: ServerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter = ThreadChannel(connection)
    closing_thread = threading.Thread(target=waiter.close)
    connect = waiter.requests._links.connect

    def connect_while_closing(endpoint: str) -> Any:
        closing_thread.start()
        if not waiter.lock.locked():
            closing_thread.join()
        return connect(endpoint)

    monkeypatch.setattr(waiter.requests._links, "connect", connect_while_closing)
    pending = waiter.submit(build_request(connection))
    closing_thread.join()
    with pytest.raises(Disconnected):
        waiter.wait(pending)
    with pytest.raises(Disconnected, match="this client is closed"):
        waiter.submit(build_request(connection))


def test_a_cancellation_during_a_wait_does_not_block(connection: ServerConnection) -> None:
    """As the generator of `map` does where it is collected."""
    waiter = ThreadChannel(connection)
    cancelled, remaining = (waiter.submit(build_request(connection)) for _ in range(2))
    cancelling = threading.Thread(target=waiter.cancel, args=([cancelled],), daemon=True)
    with waiter.lock:
        cancelling.start()
        cancelling.join(10)
        assert not cancelling.is_alive() and not cancelled.is_abandoned

    def close_after_cancel() -> None:
        with contextlib.suppress(AssertionError):
            until("it is cancelled", lambda: cancelled.is_abandoned)
        connection.close()

    ending_thread = threading.Thread(target=close_after_cancel)
    ending_thread.start()
    with pytest.raises(Disconnected):
        waiter.wait(remaining)
    ending_thread.join()
    assert cancelled.is_abandoned
    waiter.close()


def test_a_callback_that_uses_the_connection_keeps_no_client_open(tmp_path: Path) -> None:
    with listener(tmp_path):
        session = Session(tmp_path, 1 << 20, 5.0)
        errors: list[Exception] = []

        def callback(_: RequestChannel) -> None:
            until("the client is closed", lambda: session._is_closed)
            try:
                session.connection()
            except Disconnected as error:
                errors.append(error)

        session._connection.call(callback)
        closing_thread = threading.Thread(target=session.close, daemon=True)
        closing_thread.start()
        closing_thread.join(10)
        assert not closing_thread.is_alive()
        assert str(errors[0]) == "this client is closed"


def test_a_running_callback_does_not_prevent_a_new_connection(tmp_path: Path) -> None:
    was_submitted, at_work, may_continue = threading.Event(), threading.Event(), threading.Event()
    with listener(tmp_path):
        session = Session(tmp_path, 1 << 20, 5.0)
        lost = session._connection

        def callback(_: ClientRequest) -> None:
            at_work.set()
            may_continue.wait(60)

        def submit(channel: RequestChannel) -> None:
            channel.submit(build_request(lost), callback)
            was_submitted.set()

        lost.call(submit)
        assert was_submitted.wait(10)
    assert at_work.wait(10)
    errors: list[Exception] = []

    def open_connection() -> None:
        try:
            session.connection()
        except Disconnected as error:
            errors.append(error)

    opening_thread = threading.Thread(target=open_connection, daemon=True)
    with listener(tmp_path):
        opening_thread.start()
        opening_thread.join(10)
        assert not opening_thread.is_alive() and not errors and session._connection is not lost
    may_continue.set()
    lost._thread.join(10)
    session.close()


def test_answers_are_copied_by_several_at_a_time(
    connection: ServerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread may copy in the middle of another's copy."""
    original_open = Mappings._open
    copies: list[bytearray] = []

    def copy() -> None:
        copies.append(connection.copy_range(last))

    def open_during_copy(mappings: Mappings, memory: Memory) -> Any:
        monkeypatch.setattr(Mappings, "_open", original_open)
        opened_memory = mappings._open(memory)
        copier = threading.Thread(target=copy, daemon=True)
        copier.start()
        copier.join(10)
        return opened_memory

    monkeypatch.setattr(Mappings, "_open", open_during_copy)
    fd = os.memfd_create("answers")
    try:
        os.write(fd, bytes(4095) + b"!")
        last = Range(Memory(1, os.getpid(), fd, os.fstat(fd).st_ino, 4096, sealed=True), 4095, 1)
        copy()
        assert copies == [b"!", b"!"]
        assert descriptor_count(fd) == 1 + 2  # one mapping has two descriptors
    finally:
        os.close(fd)


def test_an_output_in_the_memory_of_a_worker_is_copied_once() -> None:
    copy = bytearray(np.arange(4, dtype=np.float32).tobytes())
    packed_response = SimpleNamespace(segments=(), as_torch=False)
    reader: Any = SimpleNamespace(packed_request=packed_response, copy_range=lambda _: copy)
    memory_range = Range(Memory(1, 1, 3, 7, 4096, sealed=True), 0, 16)
    array = results._map_output(reader, None, TensorSchema("Y", "FP32", (4,), 16), memory_range)
    assert array.tolist() == [0, 1, 2, 3] and array.flags.writeable
    assert np.shares_memory(array, np.frombuffer(copy, np.float32))


def test_a_schedulers_credit_is_not_exceeded(connection: ServerConnection, tmp_path: Path) -> None:
    """However many are cancelled at once."""
    count = 2 * MAX_ARRAY_LEN
    router = UntrustedRouter(f"ipc://{tmp_path}/scheduler", lambda identity: True)
    channel = RequestChannel(connection, lambda fd: None, lambda fd: None)
    try:
        for number in range(count):
            channel._links.queue(router.endpoint, Cancel(number))
        channel.flush()
        (link,) = channel._links._links_by_endpoint.values()
        numbers: list[int] = []

        def all_arrived() -> bool:
            numbers.extend(message.id for _, message in router.receive())
            link.receive()  # sends the messages that were waiting for credit
            return len(numbers) == count

        until("all are there", all_arrived)
        assert numbers == [*range(count)]
        assert not router.malformed_messages
    finally:
        channel.close()
        router.close()
