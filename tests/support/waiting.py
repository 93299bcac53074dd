"""Waits for conditions that have no event, and actions that are repeated during a wait."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

# The longest wait for an event that comes soon on an idle machine. Tests also run on busy ones.
DEADLINE_S = 60.0
_STEP_S = 0.005


def until(text: str, condition: Callable[[], object], within_s: float = DEADLINE_S) -> None:
    """Return as soon as a condition holds.

    The checks use at most half of a processor, because the awaited process needs the rest.

    Args:
        text: The condition in words, for the error.
        condition: The condition.
        within_s: The longest wait, in seconds.

    Raises:
        AssertionError: The condition does not hold within `within_s` seconds.
    """
    start_s = time.monotonic()
    deadline = start_s + within_s
    while not condition():
        now_s = time.monotonic()
        if now_s > deadline:
            raise AssertionError(f"not within {within_s} s: {text}")
        time.sleep(max(_STEP_S, now_s - start_s))
        start_s = time.monotonic()


async def until_async(condition: Callable[[], object], within_s: float = DEADLINE_S) -> None:
    """Return once a condition holds, while this loop runs; raise TimeoutError otherwise."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextlib.contextmanager
def repeating(*actions: Callable[[], object]) -> Iterator[None]:
    """Repeat each action in a thread of its own until the with block ends; raise their errors."""
    has_ended = threading.Event()

    def repeat(action: Callable[[], object]) -> None:
        while not has_ended.is_set():
            action()

    with ThreadPoolExecutor(len(actions)) as threads:
        futures = [threads.submit(repeat, action) for action in actions]
        try:
            yield
        finally:
            has_ended.set()
    for future in futures:
        future.result()


def run_and_count_turns(call: Coroutine[Any, Any, T]) -> tuple[T, int]:
    """Run a coroutine in a new loop; return its result, and the turns of another task."""
    turn_count = 0

    async def count_turns() -> None:
        nonlocal turn_count
        while True:
            turn_count += 1
            await asyncio.sleep(0)

    async def run() -> T:
        counter = asyncio.create_task(count_turns())
        try:
            return await call
        finally:
            counter.cancel()

    return asyncio.run(run()), turn_count
