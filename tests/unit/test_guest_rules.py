"""What a scheduler believes of what a guest says of its request."""

from __future__ import annotations

import pytest

from shmserve.ipc import messages as m
from shmserve.ipc.guests import FIRST, Seals
from shmserve.ipc.signature import Signature
from shmserve.ipc.tensors import Inference, TensorRef, pack_inference
from shmserve.scheduler.guests import GuestRules

CONFIG = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "X", "data_type": "TYPE_INT8", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_INT8", "dims": [2]}],
}
NOW = 10**15
SECOND = 10**9


@pytest.mark.parametrize(
    ("said", "believed"),
    [
        (NOW - 1, NOW - 1),
        (NOW - SECOND, NOW - SECOND),
        (NOW - SECOND - 1, NOW),
        (1, NOW),
        (0, NOW),
        (-(2**63), NOW),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_when_a_request_arrived_is_believed_within_a_second(
    said: int, believed: int, told: bool
) -> None:
    """One whole day, said of one request, would be the mean of all of them for months."""
    work = pack_inference(Inference("", (TensorRef("X", "INT8", (1, 2), b"ab"),), ()))
    rules = GuestRules(Seals(bytes(32)), Signature(CONFIG, "1"))
    submit = m.Submit(1, 0, b"", said, 0, 0, 0, work, "mine")
    checked = rules.checked(FIRST, submit, NOW)
    if told:  # what it counts as in a batch was right already
        submit = m.Submit(1, 1, checked.shape_key, said, 0, 0, 0, work, "mine")
        checked = rules.checked(FIRST, submit, NOW)
    assert checked.arrived_ns == believed
    assert (checked.batch_size, checked.request_id, checked.work) == (1, "mine", work)
