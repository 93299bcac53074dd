"""Threads whose calls may block forever."""

import asyncio
import contextlib
import threading
import time

import pytest

from shmserve.common.tasks import DaemonThreadPool
from tests.support.servers import run_python
from tests.support.waiting import until

_PROGRAM = """
import asyncio, time
from shmserve.common.tasks import DaemonThreadPool

async def main():
    asyncio.get_running_loop().set_default_executor(DaemonThreadPool(2))
    blocked = asyncio.create_task(asyncio.to_thread(time.sleep, 600))
    print([await asyncio.to_thread(pow, 2, number) for number in range(3)])

asyncio.run(main())
"""


def test_a_blocked_call_delays_neither_other_calls_nor_the_end_of_the_process() -> None:
    result = run_python("-c", _PROGRAM, timeout_s=60)
    assert (result.stdout, result.stderr, result.returncode) == ("[1, 2, 4]\n", "", 0)


def test_the_number_of_threads_is_limited_and_idle_threads_exit() -> None:
    pool, released = DaemonThreadPool(3), threading.Event()
    idle_count = threading.active_count()
    futures = [pool.submit(released.wait, 60) for _ in range(10)]
    assert threading.active_count() - idle_count <= 3
    released.set()
    assert all(future.result(60) for future in futures)
    until("all threads have exited", lambda: threading.active_count() == idle_count)


async def test_exceptions_and_cancelled_calls() -> None:
    loop = asyncio.get_running_loop()
    pool = DaemonThreadPool(1)
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(pool, divmod, 1, 0)
    blocking = loop.run_in_executor(pool, time.sleep, 0.1)
    cancelled = loop.run_in_executor(pool, time.sleep, 600)
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    await blocking
    assert await loop.run_in_executor(pool, abs, -1) == 1
