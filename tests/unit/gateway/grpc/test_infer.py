"""The life of a request that came over gRPC."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.gateway.grpc.infer import Inferences, Submitted
from shmserve.ipc.messages import inference as m

ANSWER = m.Finished(1, b"", [])


@pytest.mark.parametrize("answered", ["before", "after"])
def test_who_leaves_as_the_answer_comes_has_left_once(answered: str) -> None:
    """What was given up is not answered, too: its memory would be given back twice, and by then it
    may be another's."""
    discarded: list[Any] = []
    posted: list[Any] = []
    taken: list[str] = []
    submit = m.Submit(1, b"", [], 0, 0, 0, 0, "1")
    schedulers: Any = SimpleNamespace(
        cancel=posted.append, discard=lambda endpoint, message: discarded.append(message)
    )
    built: Any = SimpleNamespace(trace=None)
    gateway: Any = SimpleNamespace(draining=False, models=None)
    inferences = Inferences(gateway)
    model: Any = SimpleNamespace(name="m")
    submitted = Submitted(submit, schedulers, lambda: None, inferences, model, built)
    inferences.active += 1
    if answered == "before":  # but nobody takes it yet
        submitted.respond(ANSWER)
        assert submitted.done
    submitted.cancel()
    submitted.when_done(lambda: taken.append("done"))
    if answered == "after":
        submitted.respond(ANSWER)
    assert posted == [submitted]
    assert discarded == [ANSWER]
    assert inferences.active == 0
    assert not taken and not submitted.done
