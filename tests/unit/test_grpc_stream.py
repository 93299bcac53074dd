"""A stream whose client does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shmserve.errors import Unavailable
from shmserve.gateway.grpc.infer import Refused, Submitted
from shmserve.gateway.grpc.stream import stream_infer


class Asked(Submitted):
    """A request that is answered at once."""

    def __init__(self, abandoned: list[str], name: str) -> None:
        self.request_id = name
        self._abandoned = abandoned

    async def answer(self) -> bytes:
        return b""

    def abandon(self) -> None:
        self._abandoned.append(self.request_id)

    def leave(self) -> None:
        pass


class Deaf:
    """The call of a client that takes one response."""

    def __init__(self) -> None:
        self.taken = 0

    def invocation_metadata(self) -> None:
        return None

    def time_remaining(self) -> None:
        return None

    async def write(self, response: bytes) -> None:
        if self.taken:
            await asyncio.Event().wait()
        self.taken += 1


def test_a_refusal_that_waits_holds_nothing() -> None:
    """Its request can be large, and many may wait behind a slow one."""

    def refuse(raw: bytes) -> None:
        try:
            raise KeyError(raw)
        except KeyError:
            raise Refused(Unavailable("no"), "1") from None

    with pytest.raises(Refused) as caught:
        refuse(b"large")
    refused = caught.value.bare()
    for error in (refused, refused.error):
        assert error.__traceback__ is None and error.__context__ is None


def test_who_does_not_read_is_cut_off() -> None:
    """R15: what waits behind a response that is not taken is given up."""
    abandoned: list[str] = []

    class Inferences:
        def submit(self, raw: bytes, caller: Any, remaining_s: Any) -> Submitted:
            return Asked(abandoned, raw.decode())

    async def requests() -> AsyncIterator[bytes]:
        for name in ("taken", "stuck", "behind", "further behind"):
            yield name.encode()
        await asyncio.Event().wait()

    caller: Any = None
    inferences: Any = Inferences()
    with pytest.raises(Unavailable):
        asyncio.run(stream_infer(inferences, caller, requests(), Deaf(), 0.05))
    assert abandoned == ["behind", "further behind"]

    async def cancelled_twice() -> None:
        streaming = stream_infer(inferences, caller, requests(), Deaf(), 60.0)
        call = asyncio.create_task(streaming)
        for _ in range(100):  # until it is stuck
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    abandoned.clear()
    asyncio.run(cancelled_twice())
    assert abandoned == ["behind", "further behind"]
