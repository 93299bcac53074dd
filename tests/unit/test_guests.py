"""Programs at the door that do not stay."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from shmserve.guests import Guests
from shmserve.ipc import endpoints, frames
from shmserve.ipc import messages as m
from shmserve.ipc.guests import Seals
from shmserve.regions import Registrar
from shmserve.trust import NO_GROUP, ShmPolicy
from tests.guests import memfd

POLICY = ShmPolicy(None, NO_GROUP, 8, 4, 1 << 30, 1 << 30, 1 << 20, "warn")


def test_what_a_program_shares_that_is_gone_before_its_welcome(tmp_path: Path) -> None:
    """It said hello and shared memory in one message: all of it goes with the program."""

    async def serve() -> None:
        left = asyncio.Event()
        registrar = Registrar(_nobody, list, lambda message: None, POLICY)

        def gone(number: int) -> None:
            registrar.give_back(number)
            left.set()

        guests = Guests(tmp_path, NO_GROUP, Seals(bytes(32)), registrar, list, gone)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as program, memfd() as fd:
            program.connect(str(endpoints.door(tmp_path)))
            words = frames.pack([m.Hello(frames.VERSION), m.ShareMemory(1, 4096, False)])
            socket.send_fds(program, [words], [fd])
        async with asyncio.timeout(10):
            await left.wait()
        assert not registrar._lent
        guests.close()
        registrar.close()

    asyncio.run(serve())


async def _nobody(make: object) -> None:
    raise AssertionError("no gateway hears of guests' memory")
