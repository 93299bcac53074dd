"""The waits of a scheduler's event loop: descriptors, timers and precision."""

import fcntl
import os
import resource
import time
from collections.abc import Iterator

import pytest

from shmserve.scheduler.hosting.host import DescriptorWaiter
from shmserve.scheduler.requests.scheduled import NEVER

_HIGH_FD = 1100  # a descriptor above the limit of select(2)

_WAITS_NS = (100_000, 20_000_000)  # the first uses ppoll(2), the second epoll_wait(2)


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    """Yield two pipes whose read ends have high descriptor numbers."""
    requests = []
    for _ in range(2):
        low_reader, writes = os.pipe()
        requests.append((fcntl.fcntl(low_reader, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD), writes))
        os.close(low_reader)
    yield requests
    for pipe_ends in requests:
        for fd in pipe_ends:
            os.close(fd)


@pytest.fixture
def occupied_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(soft, 2 * _HIGH_FD), max(hard, 2 * _HIGH_FD))
        )
    except (OSError, ValueError):
        pytest.skip("the limit of descriptors cannot be raised")
    low_fds = [os.open(os.devnull, os.O_RDONLY)]
    while low_fds[-1] < _HIGH_FD:
        low_fds.append(os.dup(low_fds[0]))
    yield
    for fd in low_fds:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("wait_ns", [*_WAITS_NS, NEVER])
def test_any_descriptor_wakes_in_the_order_of_registration(
    pipes: list[tuple[int, int]], wait_ns: int
) -> None:
    waiter = DescriptorWaiter()
    for read_fd, writes in reversed(pipes):
        waiter.watch(read_fd, lambda: None)
        os.write(writes, b"x")
    wake_ns = wait_ns if wait_ns == NEVER else time.monotonic_ns() + wait_ns
    ready_fds = [fd for fd, _ in waiter.wait(wake_ns, 0)]
    assert ready_fds == [read_fd for read_fd, _ in reversed(pipes)]


@pytest.mark.parametrize("wait_ns", _WAITS_NS)
def test_a_wait_without_messages_times_out(pipes: list[tuple[int, int]], wait_ns: int) -> None:
    waiter = DescriptorWaiter()
    for read_fd, _ in pipes:
        waiter.watch(read_fd, lambda: None)
    assert waiter.wait(time.monotonic_ns() + wait_ns, 0) == []


def test_an_unwatched_pipe_does_not_wake(pipes: list[tuple[int, int]]) -> None:
    waiter = DescriptorWaiter()
    (first_reader, writes), (second_reader, _) = pipes
    waiter.watch(first_reader, lambda: None)
    waiter.watch(second_reader, lambda: None)
    waiter.unwatch(first_reader)
    os.write(writes, b"x")
    assert waiter.wait(time.monotonic_ns() + _WAITS_NS[0], 0) == []
    assert list(waiter.handlers) == [second_reader]


@pytest.mark.usefixtures("occupied_descriptors")
@pytest.mark.parametrize("wait_ns", _WAITS_NS)
def test_descriptors_above_1023_are_watched(pipes: list[tuple[int, int]], wait_ns: int) -> None:
    waiter = DescriptorWaiter()
    assert waiter._epoll.fileno() > 1023
    (read_fd, writes), _ = pipes
    waiter.watch(read_fd, lambda: None)
    assert waiter.wait(time.monotonic_ns() + wait_ns, 0) == []
    os.write(writes, b"x")
    assert [fd for fd, _ in waiter.wait(time.monotonic_ns() + wait_ns, 0)] == [read_fd]
