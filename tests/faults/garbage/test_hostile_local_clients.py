"""Hostile programs at the native listener: only they are affected by their actions."""

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack
import numpy as np
import pytest

import shmserve.client
from shmserve.ipc import endpoints
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.control_requests import Refused, ShareMemory, WithdrawMemory
from shmserve.ipc.messages.publications import Acknowledged
from shmserve.ipc.tensors.descriptors import Range, TensorRef, unpack_memory
from shmserve.ipc.tensors.schemas import Inference, RequestedOutput, pack_inference
from shmserve.ipc.transport import frames, zmtp
from tests.faults.conftest import make_repository
from tests.faults.garbage.test_garbage_sockets import garbage, has_ended
from tests.faults.scene import Scene, State, assert_is_as_it_was, assert_recovers, scene
from tests.rigs.arrivals import encode_zmtp, receive_arrived, send_raw
from tests.rigs.local_clients import Guest, answer, memfd, small_tensor, submit
from tests.support.leaks import cpu_seconds
from tests.support.load import Load
from tests.support.regions import punch
from tests.support.servers import Server, running
from tests.support.waiting import until

MIB = 1 << 20
_SEAL_FUTURE_WRITE = 0x10  # from linux/fcntl.h, because Python does not define it


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(make_repository(tmp_path_factory.mktemp("guests"))) as running_server:
        with Load(running_server):
            pass
        yield running_server


def check_honest_client(stage: Scene) -> None:
    """Check that another local client can connect and is served."""
    with contextlib.closing(Guest(stage.server).hello()) as local_client:
        link = local_client.link("identity")
        link.send(submit((small_tensor(),)))
        assert isinstance(answer(link), m.Finished)


# --- attacks, each by a local client that then disconnects


def garbage_as_frames(client: Guest, stage: Scene) -> None:
    """Send malformed frames on a link, which is closed after a few."""
    frames = list(garbage())
    while frames:
        link = client.link("identity", f"{client.number}.{client.token}.g{len(frames)}")
        send_raw(link, b"", b"".join(encode_zmtp(frames.pop()) for _ in range(min(8, len(frames)))))
        link.send(submit((small_tensor(),)))
        replies = receive_arrived(link)
        assert all(isinstance(reply, m.Finished | m.Failed) for reply in replies)
        link.close()
    link = client.link("identity", f"{client.number}.{client.token}.flood")
    send_raw(link, b"", encode_zmtp(b"x") * 50_000)
    until("it is ended", partial(has_ended, link))


def no_zeromq(client: Guest, stage: Scene) -> None:
    """Send bytes that are no frames, and incomplete frames."""
    stream = (
        zmtp.GREETING + zmtp.ready_command("DEALER", b"%d.x" % client.number) + encode_zmtp(b"abc")
    )
    with contextlib.ExitStack() as stack:
        for endpoint in client.models.values():
            for text in (
                os.urandom(5000),
                *(stream[:length] for length in range(0, len(stream), 7)),
            ):
                unix_socket = stack.enter_context(socket.socket(socket.AF_UNIX))
                unix_socket.connect(endpoint.removeprefix("ipc://"))
                with contextlib.suppress(OSError):
                    unix_socket.sendall(text)
        assert_recovers(stage, time.monotonic())
        check_honest_client(stage)


def a_handshake_without_end(local_client: Guest, stage: Scene) -> None:
    """Send an endless handshake; a valid one needs only a few bytes."""
    endless = b"\x06" + (64 * MIB).to_bytes(8, "big") + bytes(MIB)
    with socket.socket(socket.AF_UNIX) as unix_socket:
        unix_socket.settimeout(10)
        unix_socket.connect(local_client.models["identity"].removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            unix_socket.sendall(zmtp.GREETING + endless)
        with contextlib.suppress(ConnectionError):
            while unix_socket.recv(1000):
                pass


def never_read(local_client: Guest, stage: Scene) -> None:
    """Send requests without reading responses; the scheduler then stops reading."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(local_client.models["simple"].removeprefix("ipc://"))
    identity = f"{local_client.number}.{local_client.token}.deaf".encode()
    connection.sendall(zmtp.GREETING + zmtp.ready_command("DEALER", identity))
    connection.settimeout(1.0)
    frame = encode_zmtp(frames.pack([submit((small_tensor(),), number) for number in range(500)]))
    with contextlib.closing(connection), contextlib.suppress(TimeoutError):
        for _ in range(2000):
            connection.sendall(frame)
        raise AssertionError("a million requests were taken from who reads no answer")


def half_frames(client: Guest, stage: Scene) -> None:
    """Send large incomplete frames over many links at once."""
    links = [client.link("identity", f"{client.number}.{client.token}.{n}") for n in range(12)]
    start = b"\2" + (8 * MIB).to_bytes(8, "big") + bytes(8 * MIB - 1)
    for link in links:
        assert link._connection is not None
        link._connection.sock.settimeout(10)
        with contextlib.suppress(OSError):
            link._connection.sock.sendall(start)
        link._connection.sock.setblocking(False)

    def some_are_ended() -> bool:
        for link in links:
            link.receive()
        return sum(link.connected for link in links) <= 7

    until("some are ended", some_are_ended)
    check_honest_client(stage)


def a_frame_too_large(local_client: Guest, stage: Scene) -> None:
    for size in (8 * MIB + 1, 1 << 40, 2**64 - 1):
        link = local_client.link("identity", f"{local_client.number}.{local_client.token}.{size}")
        send_raw(link, b"", b"\2" + size.to_bytes(8, "big"))
        until("it is ended", partial(has_ended, link))


def a_request_too_large(local_client: Guest, stage: Scene) -> None:
    """Send a request that is too large for a message; large tensors must be in shared memory."""
    link = local_client.link("identity")
    link.send(submit((TensorRef("INPUT0", "FP32", (MIB,), bytes(4 * MIB)),)))
    failed_answer = answer(link)
    assert isinstance(failed_answer, m.Failed) and "shared memory" in failed_answer.message
    link.send(submit((small_tensor(),)))
    assert isinstance(answer(link), m.Finished)


def a_request_with_a_large_name(local_client: Guest, stage: Scene) -> None:
    link = local_client.link("identity")
    link.send(replace(submit((small_tensor(),)), request_id="x" * MIB))
    failed_answer = answer(link)
    assert isinstance(failed_answer, m.Failed) and "at most" in failed_answer.message


def all_in_one_frame(local_client: Guest, stage: Scene) -> None:
    """Send millions of messages, or invalid elements, in one frame; others are served meanwhile."""
    cpu_before = cpu_seconds(stage.server)["scheduler identity"]
    message = msgpack.packb(["Cancel", 1])
    nested = b"".join(b"\xdd" + (60_000).to_bytes(4, "big") + b"\x90" * 60_000 for _ in range(130))
    for number, data in enumerate((message * (7 * MIB // len(message)), nested, message * 6 * MIB)):
        count = data.count(b"\xdd") or len(data) // len(message)
        frame = encode_zmtp(b"\xdd" + (count + 1).to_bytes(4, "big") + b"\x01" + data)
        link = local_client.link("identity", f"{local_client.number}.{local_client.token}.{number}")
        assert link._connection is not None
        link._connection.sock.settimeout(20)
        with contextlib.suppress(OSError):
            link._connection.sock.sendall(frame)
        link._connection.sock.setblocking(False)
    check_honest_client(stage)
    assert cpu_seconds(stage.server)["scheduler identity"] - cpu_before < 5


def slow_to_close(local_client: Guest, stage: Scene) -> None:
    """Send descriptors that take long to close, wherever descriptors can be sent."""
    packed = [frames.pack([Acknowledged(1)]), b"\xff", b""]
    with contextlib.ExitStack() as stack:
        for words in packed:
            for count in (1, 4, 100):
                send_what_lingers(stack, Guest(stage.server).hello().listener, words, count)
        # Disconnects before all of its bytes are read.
        at_once = Guest(stage.server).hello().listener
        for words in (*packed, b""):
            send_what_lingers(stack, at_once, words, 1)
        at_once.close()
        scheduler = stack.enter_context(socket.socket(socket.AF_UNIX))
        scheduler.connect(local_client.models["identity"].removeprefix("ipc://"))
        send_what_lingers(stack, scheduler, zmtp.GREETING, 1)
        start_s = time.monotonic()
        check_honest_client(stage)
        with shmserve.client.connect(stage.server.run_dir) as program:
            assert program.models()
        assert time.monotonic() - start_s < LINGER_S / 2


LINGER_S = 10


def send_what_lingers(
    stack: contextlib.ExitStack, link: socket.socket, words: bytes, count: int
) -> None:
    """Send a socket whose last close blocks until its peer reads, or until a timeout."""
    stack.callback(link.close)
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    lingering = socket.create_connection(listener.getsockname())
    stack.enter_context(listener.accept()[0])
    lingering.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            lingering.send(bytes(MIB))
    lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    try:
        socket.send_fds(link, [words], [lingering.fileno()] * count)
    except OSError:  # the server has rejected or disconnected the client
        lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes(8))
    lingering.close()


def many_links(client: Guest, stage: Scene) -> None:
    """Open more links than allowed, and links without a token."""
    own_links = [client.link("identity", f"{client.number}.{client.token}.{n}") for n in range(40)]
    made_up = [client.link("identity", f"{client.number}.{'0' * 32}.{n}") for n in range(200)]
    for link in (*own_links, *made_up):
        link.send(submit((small_tensor(),)))
    until("those are ended", lambda: all(map(has_ended, made_up)))
    until("some are left", lambda: sum(map(has_ended, own_links)) == 24)
    check_honest_client(stage)


def another_s_identity(local_client: Guest, stage: Scene) -> None:
    """Open a link with the identity of another link."""
    link = local_client.link("identity")
    link.send(submit((small_tensor(),)))
    assert isinstance(answer(link), m.Finished)
    until("the second is ended", partial(has_ended, local_client.link("identity")))
    link.send(submit((small_tensor(),)))
    assert isinstance(answer(link), m.Finished)


def stay_after_leaving(local_client: Guest, stage: Scene) -> None:
    """Disconnect from the listener; all links are closed and cannot be opened again."""
    link = local_client.link("identity")
    link.send(submit((small_tensor(),)))
    assert isinstance(answer(link), m.Finished)
    local_client.listener.close()
    until("its link is ended", partial(has_ended, link))
    second_link = local_client.link("identity")
    second_link.send(submit((small_tensor(),)))
    until("so is the next", partial(has_ended, second_link))


def the_same_number_twice(local_client: Guest, stage: Scene) -> None:
    link = local_client.link("gated")
    numbers = TensorRef("INPUT0", "INT32", (1, 1), (7).to_bytes(4, "little"))
    link.send(submit((numbers,), 5))
    visit = stage.server.gate.next()
    for _ in range(100):
        link.send(submit((numbers,), 5))
    link.send(m.Cancel(99))
    link.send(submit((), 6))  # answered at once, although it was sent last
    failed_answer = answer(link)
    assert isinstance(failed_answer, m.Failed) and failed_answer.id == 6
    visit.release()
    assert isinstance(answer(link), m.Finished) and receive_arrived(link, 0.2) == []


def odd_numbers(local_client: Guest, stage: Scene) -> None:
    """Send extreme times, priorities and identifiers."""
    link = local_client.link("identity")
    work = pack_inference(Inference((small_tensor(),)))
    odd_values = (0, -1, 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1)
    number = 0
    for field in range(4):
        for value in odd_values:
            number += 1
            a, b, c, d = (value if field == n else 0 for n in range(4))
            link.send(m.Submit(number, *work, a, b, c, d, "x" * 70_000))
            reply = answer(link)
            assert isinstance(reply, m.Finished | m.Failed) and reply.id == number
    for value in odd_values:
        link.send(m.Submit(value, *work, 0, 0, 0, 0))
        assert answer(link).id == value


def release_what_is_others(local_client: Guest, stage: Scene) -> None:
    """Release memory that a worker has lent to another reader; the memory stays allocated."""
    values = np.arange(300_000, dtype=np.float32)
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    link = local_client.link("identity")
    workers = [process.pid for process in stage.server.find("worker identity")]
    stop = time.monotonic() + 1.0
    while time.monotonic() < stop:
        for pid in (*workers, stage.server.pid, 0, -1, 2**63):
            for offsets in (list(range(0, 64 * 4096, 4096)), [-1, 2**64 - 1], []):
                link.post(m.Release(pid, offsets))
        link.flush()
        reply = stage.http.infer_binary(
            "identity", [("INPUT0", "FP32", [len(values)], values.tobytes())], outputs=outputs
        )
        assert (reply.tensors()["OUTPUT0"] == values).all()


def tensors_that_cannot_be(local_client: Guest, stage: Scene) -> None:
    """Send invalid shapes, names, datatypes and strings; each request fails."""
    link = local_client.link("identity")
    shapes: list[Any] = [
        (-1,), (2**62,), (2**63, 2), (4, 0), (1,) * 10_000, (True,), (1.5,), ("4",),
    ]  # fmt: skip
    bad: list[list[Any]] = [["INPUT0", "FP32", list(shape)] for shape in shapes]
    bad += [["x" * 50_000, "FP32", [4]], [7, "FP32", [4]]]
    bad += [["INPUT0", kind, [4]] for kind in ("FP64", "BYTES", "NOPE", "", 3, None)]
    # Equal to the correct shape as a number, but of another type.
    bad.append(["INPUT0", "FP32", [4.0]])
    packed, data = pack_inference(Inference((small_tensor(),), ()))
    schema = msgpack.unpackb(packed)
    requests: list[tuple[Any, list[Any]]] = [([[tensor], *schema[1:]], data) for tensor in bad]
    contents: list[Any] = [b"", bytes(15), "x" * 16, None, 1, [], {}]
    contents += [[0] * count for count in range(1, 12)]
    memories: tuple[Any, ...] = (b"", b"\x90", "", 1, None, [], {})
    contents += [[memory, 0, 16] for memory in memories]
    requests += [(schema, [content]) for content in contents]
    requests += [(schema, []), (schema, [*data, *data])]
    for field in range(1, len(schema)):
        odd_values: tuple[Any, ...] = (b"x", [[1, 2, 3]], 1.5, True, {"k": []}, {1: 1}, None)
        requests += [([*schema[:field], value, *schema[field + 1 :]], data) for value in odd_values]
    link.send(submit((small_tensor(),)))
    assert isinstance(answer(link), m.Finished)
    for number, work in enumerate(requests, 2):
        link.send(m.Submit(number, msgpack.packb(work[0]), work[1], 0, 0, 0, 0))
        failed_answer = answer(link)
        assert isinstance(failed_answer, m.Failed) and failed_answer.id == number, work
        assert failed_answer.code == "INVALID_ARG", (work, failed_answer)
        assert len(failed_answer.message) < 200_000
        assert "Traceback" not in failed_answer.message


def deep_messages(local_client: Guest, stage: Scene) -> None:
    """Send deeply nested arrays as a message, as a request and in a parameter."""
    deep_schema = b"\x91" * 100_000 + b"\xc0"
    link = local_client.link("identity")
    link.send(m.Submit(1, deep_schema, [], 0, 0, 0, 0))
    assert isinstance(answer(link), m.Failed)
    send_raw(link, b"", encode_zmtp(bytes((0x92, frames.VERSION)) + deep_schema))
    link.send(submit((small_tensor(),), 2))
    assert answer(link).id == 2


def memory_of_which_little_is_there(c: Guest, stage: Scene) -> None:
    """Punch holes into sealed memory during a request; the worker reads zeros and survives."""
    size = 256 * 1024
    link = c.link("identity")
    with memfd(2 * size) as fd:
        shared = unpack_memory(c.request(ShareMemory(1, 2 * size, False), fd).payload["memory"])
        tensor = TensorRef("INPUT0", "FP32", (size // 4,), Range(shared, 0, size))
        output = RequestedOutput("OUTPUT0", Range(shared, size, size))
        for number in range(50):
            link.send(submit((tensor,), number, (output,)))
            punch(fd, 2 * size)
            assert isinstance(answer(link), m.Finished)


def memory_that_cannot_be_written(client: Guest, stage: Scene) -> None:
    """Seal memory against writing, before or after it is shared; no worker exits."""
    link = client.link("identity")
    log_length = len(stage.server.log())
    for number, seal in enumerate((fcntl.F_SEAL_WRITE, _SEAL_FUTURE_WRITE)):
        with memfd() as fd:
            memory = unpack_memory(
                client.request(ShareMemory(number, 4096, False), fd).payload["memory"]
            )
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
            memory_range = Range(memory, 0, 16)
            for work in (
                submit((TensorRef("INPUT0", "FP32", (4,), memory_range),)),
                submit((small_tensor(),), outputs=(RequestedOutput("OUTPUT0", memory_range),)),
            ):
                link.send(work)
                refused = answer(link)
                assert isinstance(refused, m.Failed) and "cannot be mapped" in refused.message
    assert " ended (" not in stage.server.log()[log_length:]


def many_memories(local_client: Guest, stage: Scene) -> None:
    """Share more memories than allowed; all are released when the local client disconnects."""
    refused_answer = None
    with memfd(4096) as fd:
        for number in range(5000):
            reply = local_client.request(ShareMemory(number, 4096, False), fd)
            if isinstance(reply, Refused):
                refused_answer = reply
                break
    assert refused_answer is not None and "at most" in refused_answer.message
    for number in (0, -1, 7, 2**63):
        with contextlib.suppress(OSError):
            local_client.send(WithdrawMemory(number))
    assert_recovers(stage, time.monotonic())


def many_descriptors_at_the_listener(local_client: Guest, stage: Scene) -> None:
    """Send more descriptors than requested, and some with malformed data."""
    with memfd() as fd:
        for count in (0, 2, 4, 5, 50, 250):
            other_client = Guest(stage.server).hello()
            with contextlib.closing(other_client), contextlib.suppress(OSError):
                other_client.send(ShareMemory(1, 1, False), *[fd] * count)
                other_client.send(Acknowledged(1), *[fd] * count)
                socket.send_fds(other_client.listener, [b"\xff" * 10], [fd] * count)


def crowd_at_the_listener(local_client: Guest, stage: Scene) -> None:
    """Open hundreds of silent connections; other clients can still connect."""
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            # A blocking socket waits for a place in the listen queue; a socket with a timeout would
            # fail.
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect(str(endpoints.listener(stage.server.run_dir)))
        check_honest_client(stage)
        with shmserve.client.connect(stage.server.run_dir) as program:
            assert program.models()
        assert_recovers(stage, time.monotonic())


CRIMES: list[Callable[[Guest, Scene], None]] = [
    garbage_as_frames, no_zeromq, a_handshake_without_end, never_read, half_frames,
    a_frame_too_large, a_request_too_large, a_request_with_a_large_name, all_in_one_frame,
    slow_to_close, many_links, another_s_identity, stay_after_leaving, the_same_number_twice,
    odd_numbers, release_what_is_others, tensors_that_cannot_be, deep_messages,
    memory_of_which_little_is_there, memory_that_cannot_be_written, many_memories,
    many_descriptors_at_the_listener, crowd_at_the_listener,
]  # fmt: skip


@pytest.mark.parametrize("crime", CRIMES, ids=lambda crime: crime.__name__)
@pytest.mark.usefixtures("state_before")
def test_local_client(server: Server, crime: Callable[[Guest, Scene], None]) -> None:
    with scene(server) as stage:
        with contextlib.closing(Guest(server).hello()) as local_client:
            crime(local_client, stage)
        check_honest_client(stage)
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []


def test_no_resources_remain_after_all_local_clients(server: Server, state_before: State) -> None:
    assert_is_as_it_was(server, state_before, 0)
    assert "Traceback" not in server.log()
    assert len(server.log()) < 200_000, "garbage fills the log"
