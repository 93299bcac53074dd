"""The end of an inference whose client disconnects as its response arrives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.gateway.inference.inference import Inference
from shmserve.ipc.messages import inference as m

ANSWER = m.Finished(1, b"", [])


@pytest.mark.parametrize("answered", ["before", "after"])
def test_a_cancelled_inference_is_not_answered(answered: str) -> None:
    """Its memory would be released twice, and may be in use by another request."""
    discarded: list[Any] = []
    posted: list[Any] = []
    taken: list[Any] = []
    submit = m.Submit(1, b"", [], 0, 0, 0, 0, "1")
    inflight = SimpleNamespace(pending={1: None})
    scheduler: Any = SimpleNamespace(
        inflight=inflight, post=posted.append, discard=discarded.append
    )
    built: Any = SimpleNamespace(trace=None)
    inference = Inference(submit, "", scheduler, lambda: None, built, taken.append)
    if answered == "before":  # but the response is not taken yet
        inflight.pending.clear()
        inference.respond(ANSWER)
        assert inference.message is ANSWER
        taken.clear()
    inference.cancel()
    if answered == "after":
        inference.respond(ANSWER)
    assert posted == ([] if answered == "before" else [m.Cancel(1)])
    assert discarded == [ANSWER]
    assert not taken and inference.message is None
