"""The life of a request that came over gRPC."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.gateway.grpc.infer import Inferences, Submitted
from shmserve.ipc.messages import inference as m

ANSWER = m.Failed(1, "INTERNAL", "why", 0, False)


@pytest.mark.parametrize("answered", ["before", "after"])
def test_who_leaves_as_the_answer_comes_has_left_once(answered: str) -> None:
    """What was given up is not answered, too: its memory would be given back twice, and by then it
    may be another's."""
    given_up: list[Any] = []
    taken: list[Submitted] = []

    async def leave() -> Inferences:
        dispatcher = SimpleNamespace(cancel=given_up.append)
        gateway: Any = SimpleNamespace(draining=False, models=None, dispatcher=dispatcher)
        inferences = Inferences(gateway)
        wire: Any = SimpleNamespace(infer_request=SimpleNamespace(id="1"), trace=None)
        model: Any = SimpleNamespace(name="m")
        pending: Any = SimpleNamespace(future=asyncio.get_running_loop().create_future())
        submitted = Submitted(inferences, model, wire, pending, "1")
        inferences.active += 1
        submitted.when_done(taken.append)
        if answered == "before":  # but nobody has heard of it yet
            pending.future.set_result(ANSWER)
        submitted.cancel()
        await asyncio.sleep(0)
        assert given_up == [pending]
        return inferences

    assert asyncio.run(leave()).active == 0
    assert not taken
