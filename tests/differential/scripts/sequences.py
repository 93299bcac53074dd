"""Sequences: both strategies, backlog, restart, controls, state in the model, iterations."""

from typing import Any

from tests.differential.script import (
    Cancel,
    Drain,
    Elapse,
    Group,
    Known,
    Model,
    Release,
    Responded,
    Script,
    Send,
    Step,
    recorder,
)
from tests.support.sequence_models import IDLE_TIME, controls

DIRECT_STRATEGY = "direct { }"
OLDEST_STRATEGY = "oldest { max_candidate_sequences: 4 }"


def model(
    name: str,
    strategy: str = DIRECT_STRATEGY,
    *,
    control: str = "",
    idle: str = IDLE_TIME,
    **options: Any,
) -> Model:
    """Return a sequence model with batches of at most 2."""
    config = f"sequence_batching {{ {strategy} {idle} {control or controls()} }}"
    fields: dict[str, Any] = {"max_batch_size": 2, **options}
    return recorder(name, config, **fields)


def scene(name: str, steps: list[Step], strategy: str = DIRECT_STRATEGY, **options: Any) -> Script:
    return Script(name, [model(name, strategy, **options)], steps)


class SequenceRequests:
    """Makes requests of sequences of a model; the label is the sequence and a letter."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count: dict[int | str, int] = {}

    def __call__(
        self, sequence: int | str, start: bool = False, end: bool = False, timeout_us: int = 0
    ) -> Send:
        count = self._count[sequence] = self._count.get(sequence, 0) + 1
        label = f"{sequence}{'abcdefgh'[count - 1]}"
        return Send(
            label, self._name, count, sequence=sequence, start=start, end=end, timeout_us=timeout_us
        )


def direct_two_instances() -> Script:
    """Sequences 1 to 6 on 2 instances of 2 slots: 4 ends, 5 takes its slot, then 2 and 6 follow."""
    name = "direct_two_instances"
    send = SequenceRequests(name)
    steps: list[Step] = [send(number, start=True) for number in range(1, 7)]
    steps += [Release("1a"), Release("2a"), send(4, end=True), Release("4a"), Release("4b")]
    steps += [send(2, end=True), Release("5a"), Release("2b"), Release("6a"), Release("3a")]
    return scene(name, [*steps, Drain()], instances=2)


def direct_one_instance() -> Script:
    """A lone first request, and then two slots in one batch."""
    name = "direct_one_instance"
    send = SequenceRequests(name)
    steps: list[Step] = [send(1, start=True), Release("1a"), send(1), send(1), send(2, start=True)]
    return scene(name, [*steps, Release("1b"), Drain()])


def direct_single_requests() -> Script:
    """A lone first request of an instance whose other slot never had a sequence: one row."""
    name = "direct_lone"
    return scene(name, [SequenceRequests(name)(1, start=True), Drain()], instances=2)


def direct_lone_beside_idle() -> Script:
    """Four slots have had a first request, and are idle; then lone ones of each slot, and lone
    first ones beside an idle one: one row for slot 0, a null row before slot 1's.
    """
    name = "direct_lone_beside_idle"
    send = SequenceRequests(name)
    steps: list[Step] = []
    for number in (1, 2, 3, 4):
        steps += [send(number, start=True), Drain()]
    for request in (send(1), send(3), send(1, end=True), send(5, start=True), send(3, end=True)):
        steps += [request, Drain()]
    return scene(name, [*steps, send(6, start=True), Drain()], instances=2)


def oldest() -> Script:
    """Sequences A to D as 1 to 4; sequence 5 waits until one of them ends."""
    name = "oldest"
    send = SequenceRequests(name)
    steps: list[Step] = [send(number, start=True) for number in (1, 2, 3, 4)]
    steps += [send(1), send(4), send(4, end=True), send(5, start=True), Drain()]
    return scene(name, steps, OLDEST_STRATEGY)


def whole_and_restarted(name: str, strategy: str) -> Script:
    """START of a live id ends its old sequence; the new one has the same slot."""
    send = SequenceRequests(name)
    steps: list[Step] = [send(1, start=True), send(1), send(1, start=True), send(1, end=True)]
    return scene(name, [*steps, Drain()], strategy)


def restarted_after_its_end(name: str, strategy: str, size: int = 2) -> Script:
    """START of an id whose END still waits.

    Batches have one request, because it is random whether Triton forms the next batch before the
    END joins it.
    """
    send = SequenceRequests(name)
    steps: list[Step] = [
        send(1, start=True),
        send(1, end=True),
        send(1, start=True),
        send(1, end=True),
    ]
    return scene(name, [*steps, Drain()], strategy, max_batch_size=size)


def backlog() -> Script:
    """Two slots and four sequences in order of arrival; a complete one is in the backlog."""
    name = "backlog"
    send = SequenceRequests(name)
    steps: list[Step] = [send(1, start=True), send(2, start=True)]
    steps += [send(3, start=True), send(4, start=True, end=True), send(3), send(3, end=True)]
    steps += [send(1, end=True), send(2, end=True), Drain()]
    return scene(name, steps)


def backlog_oldest() -> Script:
    name = "backlog_oldest"
    send = SequenceRequests(name)
    steps: list[Step] = [send(1, start=True), send(2, start=True), send(3, start=True)]
    steps += [send(2, end=True), send(3, end=True), send(1, end=True), Drain()]
    return scene(name, steps, "oldest { max_candidate_sequences: 1 }")


def backlog_timeout() -> Script:
    name = "backlog_timeout"
    send = SequenceRequests(name)
    steps: list[Step] = [send(1, start=True), send(1, timeout_us=60_000_000)]
    steps += [send(2, start=True), send(3, start=True, timeout_us=50_000), send(3)]
    steps += [Responded("3a"), Responded("3b"), send(3), Drain()]
    return scene(name, steps, max_batch_size=2)


def refused_requests() -> Script:
    name = "refused"
    send = SequenceRequests(name)
    steps: list[Step] = [
        Send("no_id", name), Send("no_start", name, sequence=7),
        Send("rows", name, rows=2, sequence=8, start=True), send(1, start=True, end=True), Drain(),
        send(1), Drain(),
    ]  # fmt: skip
    return scene(name, steps)


def of_another_type() -> Script:
    """A string as the sequence id of a model with numeric ids."""
    name = "id_of_another_type"
    steps: list[Step] = [Send("text", name, sequence="eight", start=True), Drain()]
    return Script(name, [model(name)], steps, [Known("*", "as in later versions of Triton")])


def typed_controls(name: str, id_type: str, pair: str, *sequences: int | str) -> Script:
    """Control inputs of another datatype."""
    send = SequenceRequests(name)
    steps: list[Step] = []
    for number in sequences:
        steps += [send(number, start=True), Release(f"{number}a"), send(number, end=True)]
        steps.append(Release(f"{number}b"))
    return scene(name, steps, control=controls(id_type, pair))


def of_text() -> Script:
    name = "typed_string"
    sequence_model = model(name, control=controls("TYPE_STRING", "int32"))
    steps: list[Step] = [Send("a", name, sequence="first", start=True), Drain()]
    reason = "Triton 2.51 reads the CORRID of a Python model as more than one text, and fails"
    return Script(name, [sequence_model], steps, [Known("*", reason)])


def shapes_apart() -> Script:
    """Requests of two slots with different shapes run in separate batches."""
    name = "shapes_apart"
    steps: list[Step] = [
        Send("a", name, 1, sequence=1, start=True),
        Send("b", name, 2, sequence=1, columns=3),
        Send("c", name, 3, sequence=2, columns=2, start=True),
        Drain(),
    ]
    return scene(name, steps)


def cancelled_sequences(name: str, strategy: str) -> Script:
    send = SequenceRequests(name)
    steps: list[Step] = [
        send(1, start=True), send(1), send(2, start=True), Cancel("1b"), Elapse(0.3),
    ]  # fmt: skip
    return scene(name, [*steps, Drain()], strategy)


def unbatched(name: str, strategy: str) -> Script:
    """A model without a batch dimension has one slot per instance."""
    send = SequenceRequests(name)
    steps: list[Step] = [send(1, start=True), send(2, start=True), send(1, end=True), Drain()]
    sequence_model = model(name, strategy, max_batch_size=0, inputs=(UNBATCHED_INPUT,))
    return Script(name, [sequence_model], steps)


UNBATCHED_INPUT = '{ name: "INPUT0" data_type: TYPE_INT32 dims: [ -1, -1 ] }'

SCRIPTS = [
    direct_two_instances(),
    direct_one_instance(),
    direct_single_requests(),
    direct_lone_beside_idle(),
    oldest(),
    whole_and_restarted("restarted_direct", DIRECT_STRATEGY),
    whole_and_restarted("restarted_oldest", OLDEST_STRATEGY),
    restarted_after_its_end("begun_again_direct", DIRECT_STRATEGY),
    restarted_after_its_end("begun_again_oldest", OLDEST_STRATEGY, 1),
    backlog(),
    backlog_oldest(),
    backlog_timeout(),
    refused_requests(),
    of_another_type(),
    typed_controls("typed_int32", "TYPE_INT32", "bool", 5, 2**32 + 7),
    typed_controls("typed_int64", "TYPE_INT64", "fp32", 5, 2**62 + 7),
    typed_controls("typed_uint32", "TYPE_UINT32", "int32", 2**32 + 9),
    of_text(),
    shapes_apart(),
    cancelled_sequences("cancelled_direct", DIRECT_STRATEGY),
    cancelled_sequences("cancelled_oldest", OLDEST_STRATEGY),
    unbatched("unbatched_direct", DIRECT_STRATEGY),
    unbatched("unbatched_oldest", "oldest { max_candidate_sequences: 2 }"),
]
GROUP = Group("sequences", SCRIPTS)
