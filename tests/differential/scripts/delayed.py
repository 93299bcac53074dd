"""Schedulers that start when a number of requests wait, by Triton's test variables.

Batches are then equal even where no policy keeps Triton from forming them early.
"""

from tests.differential.script import Ask, Drain, Group, Script, Step, recorder
from tests.differential.scripts.sequences import Asking, model

SIX = {"TRITONSERVER_DELAY_SCHEDULER": "6", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "0"}
BACKLOGGED = {"TRITONSERVER_DELAY_SCHEDULER": "4", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "2"}


def scene(name: str, batching: str, *rows: int, size: int = 8) -> Script:
    """Requests with these row counts, which are all queued when the batcher starts."""
    recording_model = recorder(name, f"dynamic_batching {{ {batching} }}", max_batch_size=size)
    steps: list[Step] = [Ask(f"r{n}", name, n, rows=count) for n, count in enumerate(rows)]
    return Script(name, [recording_model], [*steps, Drain()])


def sequences(name: str, strategy: str) -> Script:
    """Two sequences of three requests, which are all queued at the start."""
    ask = Asking(name)
    steps: list[Step] = [ask(1, start=True), ask(1), ask(1, end=True)]
    steps += [ask(2, start=True), ask(2), ask(2, end=True)]
    return Script(name, [model(name, strategy)], [*steps, Drain()])


def backlogged(name: str, strategy: str) -> Script:
    """Two sequences in slots and two in the backlog, which are all queued at the start."""
    ask = Asking(name)
    steps: list[Step] = [ask(number, start=True) for number in (1, 2, 3, 4)]
    steps += [ask(number, end=True) for number in (1, 2, 3, 4)]
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
        SIX,
    ),
    Group("backlogged", [backlogged("four_whole_direct", "direct { }")], BACKLOGGED),
]
