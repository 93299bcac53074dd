"""The gateways' processes, as the supervisor starts and ends them."""

import asyncio
from typing import Any

from shmserve.ipc.messages import supervision as m
from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.kept import Gateways
from tests.rigs.process_rig import Processes, run_loop_turns


async def test_a_gateway_that_does_not_listen_yet_is_not_waited_for() -> None:
    """Messages before its contact are lost, so it would never acknowledge a stop."""
    processes = Processes()
    gateways = Gateways(processes.context, Listeners(), list)
    starting_task = asyncio.ensure_future(gateways.start())
    await run_loop_turns()
    (child,) = processes.children
    await gateways.stop()
    starting_task.cancel()
    assert (await child.exit_future) == "signal 9"


async def test_the_server_is_up_once_its_gateways_accept_connections() -> None:
    """A gateway receives the current state, opens its ports, and reports it."""
    processes = Processes()
    records: list[Any] = []
    gateways = Gateways(processes.context, Listeners(), lambda: ["what there is"])
    starting_task = asyncio.ensure_future(gateways.start())
    await run_loop_turns()
    (child,) = processes.children
    processes.context.control.send = (  # type: ignore[method-assign]
        lambda address, message: records.append(message)
    )
    states = []
    for message in (m.Started(), m.GatewayReady()):
        processes._dispatch(child.pid, message)
        await run_loop_turns()
        states += [starting_task.done(), "what there is" in records]
    assert states == [False, True, True, True]
