"""The notifications to a service manager, and the sockets that it passes."""

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.supervisor.host.service_manager import ServiceManager, progress_line


@pytest.fixture(params=["path", "abstract"])
def address_and_socket(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[str, socket.socket]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        if request.param == "path":
            address = str(tmp_path / "notify")
            sock.bind(address)
        else:
            sock.bind(f"\0shmserve-{os.getpid()}")
            address = f"@shmserve-{os.getpid()}"
        sock.setblocking(False)
        yield address, sock


def test_each_state_is_notified_once(address_and_socket: tuple[str, socket.socket]) -> None:
    address, sock = address_and_socket
    environment = {"NOTIFY_SOCKET": address, "OTHER": "1"}
    manager = ServiceManager.from_environment(environment)
    assert environment == {"OTHER": "1"}
    for state in ("a", "a", "b"):
        manager.notify_status(state)
    manager.notify_ready("c")
    manager.notify_status("c")
    manager.notify_alive()
    before_us = time.monotonic_ns() // 1000
    manager.report_reloading()
    manager.notify_ready("c")
    manager.report_stopping("d")
    manager.notify_status("e")
    manager.close()
    manager.notify_status("f")
    notifications = [sock.recv(1000) for _ in range(7)]
    reloading = notifications.pop(4).decode().split()
    assert before_us <= int(reloading.pop(1).removeprefix("MONOTONIC_USEC="))
    assert reloading == ["RELOADING=1", "STATUS=reloading"]
    with pytest.raises(BlockingIOError):
        sock.recv(1000)
    ready_message, stopping = b"READY=1\nSTATUS=c", b"STOPPING=1\nSTATUS=d"
    assert notifications == [
        b"STATUS=a", b"STATUS=b", ready_message, b"WATCHDOG=1", ready_message, stopping,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("expected_environment", "watchdog_s"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_the_watchdog_interval(
    address_and_socket: tuple[str, socket.socket],
    expected_environment: dict[str, str],
    watchdog_s: float,
) -> None:
    environment = {"NOTIFY_SOCKET": address_and_socket[0], **expected_environment}
    manager = ServiceManager.from_environment(environment)
    assert (manager.watchdog_s, environment) == (watchdog_s, {})
    manager.close()


async def test_the_start_timeout_is_extended(address_and_socket: tuple[str, socket.socket]) -> None:
    address, sock = address_and_socket
    manager = ServiceManager(address)
    waiting_task = asyncio.ensure_future(manager.extend_timeout())
    await asyncio.sleep(0)
    waiting_task.cancel()
    manager.close()
    assert sock.recv(1000) == b"EXTEND_TIMEOUT_USEC=60000000"


def test_notifications_queue_up_without_watchdog_messages(
    address_and_socket: tuple[str, socket.socket],
) -> None:
    address, sock = address_and_socket
    count = 40  # more than the kernel queues (net.unix.max_dgram_qlen, 10 by default)
    names = [f"FDSTORE=1\nFDNAME=kept-{number}\nFDPOLL=0" for number in range(count)]

    async def fill_socket(files: list[int]) -> list[tuple[str, tuple[int, int]]]:
        manager = ServiceManager(address)
        received: list[tuple[str, tuple[int, int]]] = []
        for number, fd in enumerate(files):
            manager.keep(str(number), [fd])
            os.close(fd)  # the waiting descriptor is a duplicate
            manager.notify_alive()
        while not received or received[-1][0] != names[-1]:
            await asyncio.sleep(0)
            try:
                data, (fd,), _, _ = socket.recv_fds(sock, 1000, 1)
            except BlockingIOError:
                continue
            except ValueError:  # a watchdog message sent while the queue had space
                continue
            received.append((data.decode(), (os.fstat(fd).st_dev, os.fstat(fd).st_ino)))
            os.close(fd)
        manager.notify_alive()
        manager.close()
        return received

    files = [os.memfd_create(f"kept-{number}") for number in range(count)]
    identities = [(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in files]
    assert asyncio.run(fill_socket(files)) == list(zip(names, identities, strict=True))
    assert sock.recv(1000) == b"WATCHDOG=1"


async def test_a_flush_ends_when_no_message_waits(
    address_and_socket: tuple[str, socket.socket],
) -> None:
    address, sock = address_and_socket
    count = 40  # more than the kernel queues
    manager = ServiceManager(address)
    for number in range(count):
        manager.keep(str(number), [0])
    flush_task, read_count = asyncio.ensure_future(manager.wait_until_flushed()), 0
    async with asyncio.timeout(5):
        while not flush_task.done():
            await asyncio.sleep(0)
            with contextlib.suppress(BlockingIOError):
                sock.recv(1000)
                read_count += 1
    manager.close()
    queued_count = 0
    with contextlib.suppress(BlockingIOError):
        while sock.recv(1000):
            queued_count += 1
    assert read_count > 0
    assert read_count + queued_count == count


@pytest.mark.parametrize("address", [None, "", "/nowhere/notify"])
def test_without_a_service_manager_nothing_is_sent(address: str | None) -> None:
    manager = ServiceManager(address)
    manager.notify_ready("a")
    asyncio.run(asyncio.wait_for(manager.wait_until_flushed(), 1))
    asyncio.run(asyncio.wait_for(manager.extend_timeout(), 5))


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        ({}, "0/0 models ready"),
        ({"a": "ready", "b": "loading", "c": "loading"}, "1/3 models ready; loading b, c"),
        ({"a": "ready", "b": "failed: why"}, "1/2 models ready; failed b"),
        (dict.fromkeys("abcdefg", "loading"), "0/7 models ready; loading a, b, c, d, e and 2 more"),
    ],
)
def test_progress_is_a_line(progress: dict[str, str], line: str) -> None:
    assert progress_line(progress) == line


_PRINT_SOCKETS = """
import os
from shmserve.errors import InvalidArgument
from shmserve.supervisor.host.service_manager import take_inherited
os.environ["LISTEN_PID"] = os.environ["LISTEN_PID"].replace("self", str(os.getpid()))
try:
    found, kept = take_inherited(os.environ)
except InvalidArgument as error:
    print(error.message)
else:
    about = lambda sock: (sock.getsockname()[1], sock.get_inheritable())
    print({name: list(map(about, sockets)) for name, sockets in found.items()})
print([name for name in os.environ if name.startswith("LISTEN_")])
"""


def inherited_sockets(sockets: list[socket.socket], names: str, pid: str = "self") -> list[str]:
    """Return what a process finds that received these sockets as its first descriptors."""

    def place_sockets() -> None:
        copies = [
            fcntl.fcntl(socket, fcntl.F_DUPFD, 100) for socket in sockets
        ]  # above the numbers that are passed on
        for number, copy in enumerate(copies):
            os.dup2(copy, 3 + number)

    environment = {"LISTEN_PID": pid, "LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": names}
    completed = subprocess.run(
        [sys.executable, "-c", _PRINT_SOCKETS],
        env={**os.environ, **environment},
        pass_fds=range(3, 3 + len(sockets)),
        preexec_fn=place_sockets,
        capture_output=True,
        text=True,
        check=True,
    )
    return completed.stdout.splitlines()


def test_inherited_sockets_are_matched_by_name() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.create_server(("127.0.0.1", 0)) as grpc,
    ):
        ports = [listener.getsockname()[1] for listener in (http, grpc)]
        addresses = {"http": [(ports[0], False)], "grpc": [(ports[1], False)]}
        assert inherited_sockets([http, grpc], "http:grpc") == [str(addresses), "[]"]
        assert inherited_sockets([http], "http", pid="1") == ["{}", "[]"]
        (mismatch, remaining) = inherited_sockets([http, grpc], "http:other")
        assert mismatch == (
            "LISTEN_FDNAMES: unknown socket name 'other' (allowed for FileDescriptorName=: http, "
            "grpc, "
            "metrics, local)"
        )
        assert remaining == "[]"


def test_a_socket_that_does_not_listen_is_refused() -> None:
    with socket.socket() as sock:
        assert inherited_sockets([sock], "http")[0] == (
            "LISTEN_FDS: descriptor 3 ('http') is not a listening socket"
        )
