"""The gateways' processes, as the supervisor starts and ends them."""

from __future__ import annotations

import asyncio

from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.kept.gateways import Gateways
from tests.rigs.process_rig import Processes, turns


def test_a_gateway_that_does_not_listen_yet_is_not_waited_for() -> None:
    """What it is told before it has made contact is lost, and it would not end."""

    async def live() -> str:
        processes = Processes()
        gateways = Gateways(processes.context, Listeners(), list)
        starting = asyncio.ensure_future(gateways.start())
        await turns()
        (child,) = processes.started
        await gateways.stop()
        starting.cancel()
        return await child.exited

    assert asyncio.run(live()) == "signal 9"
