"""Waiting sequences: idle ones, delays, minimum slot utilization, ids reused in the backlog."""

from tests.differential.script import Cancel, Drain, Elapse, Group, Known, Script, Send, Step
from tests.differential.scripts.sequences import (
    DIRECT_STRATEGY,
    OLDEST_STRATEGY,
    SequenceRequests,
    model,
    scene,
)

SHORT_IDLE_TIME = "max_sequence_idle_microseconds: 200000"
LONG_DELAY = "max_queue_delay_microseconds: 60000000"
ONE_CANDIDATE = "oldest { max_candidate_sequences: 1 }"


def idle(name: str, strategy: str) -> Script:
    """An idle sequence is evicted, and its next request must be a START."""
    send = SequenceRequests(name)
    steps: list[Step] = [send(1, start=True), Drain(), Elapse(1.5), send(1), send(1, start=True)]
    return Script(name, [model(name, strategy, idle=SHORT_IDLE_TIME)], [*steps, Drain()])


def idle_gives_way(name: str, strategy: str) -> Script:
    """The slot of an idle sequence is given to the backlog."""
    send = SequenceRequests(name)
    steps: list[Step] = [send(1, start=True), send(2, start=True), Drain()]
    sequence_model = model(name, strategy, idle=SHORT_IDLE_TIME, max_batch_size=1)
    return Script(name, [sequence_model], steps)


def utilization() -> Script:
    """A batch waits until the minimum share of slots is ready."""
    name = "utilization"
    send = SequenceRequests(name)
    strategy = f"direct {{ {LONG_DELAY} minimum_slot_utilization: 1 }}"
    steps: list[Step] = [send(1, start=True), send(1), send(2, start=True), send(2), Drain()]
    return scene(name, steps, strategy)


def preferred_sizes() -> Script:
    """The oldest strategy has preferred batch sizes and a delay."""
    name = "oldest_preferred"
    send = SequenceRequests(name)
    strategy = f"oldest {{ max_candidate_sequences: 4 preferred_batch_size: [ 2 ] {LONG_DELAY} }}"
    steps: list[Step] = [send(number, start=True) for number in (1, 2, 3, 4)]
    return scene(name, [*steps, Drain()], strategy, max_batch_size=4)


def again_in_the_backlog(name: str, strategy: str) -> Script:
    """An id is started again while it is in the backlog, ended or not."""
    send = SequenceRequests(name)
    steps: list[Step] = [send(1, start=True), send(2, start=True), send(2, start=True)]
    steps += [send(2, end=True), send(2, start=True), send(2, end=True), send(1, end=True), Drain()]
    return scene(name, steps, strategy, max_batch_size=1)


def cancelled_in_the_backlog(name: str, strategy: str) -> Script:
    send = SequenceRequests(name)
    steps: list[Step] = [
        send(1, start=True), send(2, start=True), send(2), Cancel("2a"), Elapse(0.3),
    ]  # fmt: skip
    sequence_model = model(name, strategy, max_batch_size=1)
    known_differences = [
        Known("responses.2b.error.1", "who is cancelled with another one is told why"),
        Known("unsettled", "Triton looks for cancelled ones in the backlog when it is their turn"),
    ]
    return Script(name, [sequence_model], [*steps, send(1, end=True), Drain()], known_differences)


def without_controls() -> Script:
    """A model without control inputs."""
    name = "without_controls"
    sequence_model = model(name, DIRECT_STRATEGY, control=" ")
    steps: list[Step] = [Send("a", name, sequence=1, start=True), Send("b", name, sequence=1)]
    return Script(name, [sequence_model], [*steps, Send("c", name, sequence=1, end=True), Drain()])


SCRIPTS = [
    idle("idle_direct", DIRECT_STRATEGY),
    idle("idle_oldest", OLDEST_STRATEGY),
    idle_gives_way("idle_gives_way_direct", DIRECT_STRATEGY),
    idle_gives_way("idle_gives_way_oldest", ONE_CANDIDATE),
    utilization(),
    preferred_sizes(),
    again_in_the_backlog("again_in_the_backlog_direct", DIRECT_STRATEGY),
    again_in_the_backlog("again_in_the_backlog_oldest", ONE_CANDIDATE),
    cancelled_in_the_backlog("cancelled_in_the_backlog_direct", DIRECT_STRATEGY),
    without_controls(),
]
GROUP = Group("waiting_sequences", SCRIPTS)
