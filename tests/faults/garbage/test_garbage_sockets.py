"""Malformed data on every ZeroMQ socket in the run directory is dropped without further effects."""

import contextlib
import dataclasses
import itertools
import os
import random
import socket
import stat
import time
import typing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from shmserve.ipc.messages import inference, unions
from shmserve.ipc.messages.control_requests import UnregisterRegion
from shmserve.ipc.messages.inference import InstanceReady, Release
from shmserve.ipc.messages.supervision import Stop
from shmserve.ipc.transport import frames
from shmserve.ipc.transport.zmtp import Dealer
from tests.faults.scene import assert_recovers, scene
from tests.support.regions import SharedObject
from tests.support.servers import Server
from tests.support.waiting import until

RANDOM = random.Random(5)
MESSAGE_UNIONS = (
    unions.ClientToScheduler, inference.SchedulerToClient, unions.SchedulerToWorker,
    unions.WorkerToScheduler, unions.SupervisorToGateway, unions.GatewayToSupervisor,
    unions.SupervisorToScheduler, unions.SchedulerToSupervisor, unions.SupervisorToWorker,
    unions.WorkerToSupervisor,
)  # fmt: skip
TAGS = sorted({kind.TAG for union in MESSAGE_UNIONS for kind in typing.get_args(union)})
FIELDS = {
    kind.TAG: len(dataclasses.fields(kind))
    for union in MESSAGE_UNIONS
    for kind in typing.get_args(union)
}


def frame(*items: Any) -> bytes:
    """Return a frame of the current protocol version with these messages."""
    packed: bytes = msgpack.packb([frames.VERSION, *items])
    return packed


VALUES: tuple[Any, ...] = (None, -1, 2**63, 1.5, "x", b"x", [], {}, True, [[[]]])


def wrong_types() -> Iterator[bytes]:
    """Yield every message with fields of wrong types and in wrong numbers."""
    for tag in TAGS:
        for value in VALUES:
            yield frame([tag, *([value] * FIELDS[tag])])
        for count in (0, FIELDS[tag] + 1, 50):
            yield frame([tag, *([1] * count)])


def garbage() -> Iterator[bytes]:
    for size in (0, 1, 2, 10, 1000, 100_000):
        yield RANDOM.randbytes(size)
    yield msgpack.packb(None)
    yield msgpack.packb({"a": 1})
    yield msgpack.packb([])
    yield msgpack.packb([99])
    yield msgpack.packb([frames.VERSION, 7])
    yield msgpack.packb([frames.VERSION, []])
    yield msgpack.packb([frames.VERSION, [None]])
    yield msgpack.packb([frames.VERSION, ["NoSuchMessage"]])
    yield msgpack.packb([frames.VERSION, ["__class__", "os.system", "true"]])
    yield b"\x91" * 100_000  # deeply nested arrays
    yield b"\xdd\xff\xff\xff\xff"  # an array of four billion elements, none of which follows
    yield b"\xc6\xff\xff\xff\xff" + bytes(100)  # a binary value of 4 GiB, of which 100 bytes follow
    yield b"cos\nsystem\n(S'true'\ntR."  # a pickle
    yield bytes(8 << 20)
    yield from wrong_types()


def sockets(server: Server) -> list[Path]:
    sockets = {path for path in server.run_dir.iterdir() if stat.S_ISSOCK(path.stat().st_mode)}
    assert {"control", "handover"} < {path.name for path in sockets}
    return sorted(sockets - {server.run_dir / "handover"})


@pytest.mark.parametrize("garbage", [b"x", b"[]", b"7", b"[1, 2]", b"[" * 60_000])
def test_garbage_at_the_handover(server: Server, garbage: bytes) -> None:
    """A client that is no server takes over nothing, and does not prevent a take-over."""
    with scene(server) as stage:
        for _ in range(2):
            until("it is as if nobody had come", lambda: send_as_successor(server, garbage))
        assert_recovers(stage, time.monotonic(), 3.0)


def send_as_successor(server: Server, garbage: bytes) -> bool:
    """Send bytes in place of a successor server; return whether it could have taken over."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(5)
        link.connect(str(server.run_dir / "handover"))
        data, fds, _, _ = socket.recv_fds(link, 4096, 100)
        for fd in fds:
            os.close(fd)
        if fds:
            link.send(garbage)
            assert not link.recv(100)
    return b"sockets" in data


OUR_OWN = b"%d.%d" % (os.getpid(), os.getpid())
STREAM_ENDINGS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


@pytest.mark.parametrize(
    "identity",
    [*(OUR_OWN, None, b"x", b"gateway.0.1", b"worker.1.0.1", b"0.1", b"99999.abc"), b"\xff" * 200],
)
def test_frames(server: Server, identity: bytes | None) -> None:
    """Malformed frames are dropped one by one; a peer with another pid is disconnected."""
    context = zmq.Context()
    dropped = server.metric("shmserve_malformed")
    min_count, patience_ms = (len(TAGS), 2000) if identity == OUR_OWN else (0, 300)
    with scene(server) as stage:
        for path in sockets(server):
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = patience_ms
                if identity is not None:
                    dealer.setsockopt(zmq.IDENTITY, identity)
                dealer.sndtimeo = patience_ms
                monitor = dealer.get_monitor_socket(STREAM_ENDINGS)
                dealer.connect(f"ipc://{path}")
                # A peer that only publishes has no connection to this kind of socket.
                with contextlib.suppress(zmq.Again):
                    for frame in garbage():
                        dealer.send(frame)
                    dealer.send_multipart([b"", b"a", b"b", b"c"] * 10)
                is_ended = identity == OUR_OWN or monitor.poll(2000)
                dealer.disable_monitor()
                monitor.close()
                assert is_ended, path
        context.term()
        until("it arrived", lambda: server.metric("shmserve_malformed") > dropped + min_count)
        assert_recovers(stage, time.monotonic(), 3.0)
        assert stage.load.troubles() == []


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.PUSH, zmq.PUB, zmq.REQ, zmq.PAIR])
def test_other_kinds_of_sockets(server: Server, kind: int) -> None:
    context = zmq.Context()
    with scene(server) as stage:
        for path in sockets(server):
            with context.socket(kind) as foreign_socket:
                foreign_socket.linger = 0
                foreign_socket.connect(f"ipc://{path}")
                with contextlib.suppress(zmq.ZMQError):
                    foreign_socket.send(b"hello", zmq.NOBLOCK)
        context.term()
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []


def test_a_stolen_identity(server: Server) -> None:
    """The peer is rejected, and the connected process stays connected."""
    context = zmq.Context()
    pids = [process.pid for process in server.tree()]
    with scene(server) as stage:
        for path in sockets(server):
            for pid in pids:
                for start in ("gateway.0", "gateway.1", "scheduler.1", "worker.1.0", "0"):
                    with context.socket(zmq.DEALER) as dealer:
                        dealer.linger = 200
                        dealer.setsockopt(zmq.IDENTITY, f"{start}.{pid}".encode())
                        dealer.connect(f"ipc://{path}")
                        dealer.send(os.urandom(20))
        context.term()
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []


def has_ended(link: Dealer) -> bool:
    link.receive()
    return not link.connected


def test_model_code_cannot_impersonate_a_server_process(server: Server) -> None:
    """Code of a model may connect to internal sockets, but not as a gateway or another worker."""
    with scene(server) as stage, SharedObject(4096) as shared_object:
        stage.http.register("kept", shared_object.key, 4096).ok()
        for path, process in itertools.product(sockets(server), server.tree()):
            pid = process.pid
            names = [f"gateway.0.{pid}", f"0.{pid}", f"{pid}.abc", f"other.{pid}", str(pid), ""]
            for name in names:
                intruder = Dealer(f"ipc://{path}", name)
                intruder.send(UnregisterRegion(1, "", 0, []))
                intruder.send(InstanceReady(0, pid))
                intruder.send(Release(pid, list(range(0, 1 << 20, 4096))))
                intruder.send(Stop())
                until("it is ended", partial(has_ended, intruder))
                intruder.close()
        assert "kept" in [region["name"] for region in stage.http.regions().json()]
        stage.http.unregister("kept").ok()
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []


def test_peers_that_do_not_speak_zeromq(server: Server) -> None:
    """Peers send plain bytes instead of a ZeroMQ greeting, half a greeting, or nothing."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    with scene(server) as stage, contextlib.ExitStack() as stack:
        for path in sockets(server):
            for text in (
                b"",
                b"\xff",
                RANDOM.randbytes(100_000),
                greeting[:10],
                greeting,
                greeting + RANDOM.randbytes(5000),
            ):
                unix_socket = stack.enter_context(socket.socket(socket.AF_UNIX))
                unix_socket.connect(str(path))
                with contextlib.suppress(OSError):
                    unix_socket.sendall(text)
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []
