"""Schedulers that start when a number of requests wait, so that batches are equal."""

from tests.differential.script import Drain, Group, Script, Send, Step, recorder
from tests.differential.scripts.sequences import SequenceRequests, model

SIX_DELAYED = {"TRITONSERVER_DELAY_SCHEDULER": "6", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "0"}
BACKLOG_ENVIRONMENT = {
    "TRITONSERVER_DELAY_SCHEDULER": "4",
    "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "2",
}


def scene(name: str, batching: str, *rows: int, size: int = 8) -> Script:
    """Requests with these row counts, which are all queued when the batcher starts."""
    recording_model = recorder(name, f"dynamic_batching {{ {batching} }}", max_batch_size=size)
    steps: list[Step] = [Send(f"r{n}", name, n, rows=count) for n, count in enumerate(rows)]
    return Script(name, [recording_model], [*steps, Drain()])


def sequences(name: str, strategy: str) -> Script:
    """Two sequences of three requests, which are all queued at the start."""
    send = SequenceRequests(name)
    steps: list[Step] = [send(1, start=True), send(1), send(1, end=True)]
    steps += [send(2, start=True), send(2), send(2, end=True)]
    return Script(name, [model(name, strategy)], [*steps, Drain()])


def backlogged(name: str, strategy: str) -> Script:
    """Two sequences in slots and two in the backlog, which are all queued at the start."""
    send = SequenceRequests(name)
    steps: list[Step] = [send(number, start=True) for number in (1, 2, 3, 4)]
    steps += [send(number, end=True) for number in (1, 2, 3, 4)]
    return Script(name, [model(name, strategy)], [*steps, Drain()])


GROUPS = [
    Group(
        "begun_late",
        [
            scene("six_at_once", "", *[1] * 6),
            scene("six_in_pairs", "", *[1] * 6, size=2),
            scene("six_preferred", "preferred_batch_size: [ 4 ]", *[1] * 6),
            scene("six_of_rows", "", 1, 2, 4, 3, 5, 1),
            sequences("two_whole_direct", "direct { }"),
        ],
        SIX_DELAYED,
    ),
    Group("backlogged", [backlogged("four_whole_direct", "direct { }")], BACKLOG_ENVIRONMENT),
]
