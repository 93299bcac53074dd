"""Clients that cancel a request: waiting, executing, in a stream, or in an ensemble."""

from collections.abc import Sequence

from tests.differential.script import (
    Cancel,
    Drain,
    Elapse,
    Group,
    Known,
    Release,
    Script,
    Send,
    Step,
    recorder,
)
from tests.differential.scripts.ensembles import (
    COUNT,
    DECOUPLED,
    RETURN_INCREMENT,
    ensemble,
    step_through,
)

DYNAMIC_BATCHER = "dynamic_batching { default_queue_policy { max_queue_size: 100 } }"
FAILED_COUNT = Known("statistics.*", "who has given up has had no response: it counts in fail")
NOT_RUN = Known("batches", "what nobody waits for is not executed, whatever the scheduler")
LATE_COUNT = Known("unsettled", "Triton counts it as pending until it looks")


def waiting(name: str, scheduler: str, known: Sequence[Known] = ()) -> Script:
    """The second of three waiting requests is cancelled."""
    steps: list[Step] = [Send(f"r{n}", name, n) for n in range(4)]
    return Script(name, [recorder(name, scheduler)], [*steps, Cancel("r2"), Drain()], known)


def cancel_executing(name: str, scheduler: str = DYNAMIC_BATCHER) -> Script:
    """An executing request is cancelled: it completes without a response, and the next one runs."""
    steps: list[Step] = [Send("a", name, 1), Cancel("a"), Send("b", name, 2), Release("a")]
    return Script(name, [recorder(name, scheduler)], [*steps, Drain()], [FAILED_COUNT])


def one_of_a_batch() -> Script:
    """One request of a batch is cancelled; the others receive their responses."""
    name = "one_of_a_batch"
    steps: list[Step] = [Send(f"r{n}", name, n) for n in range(4)]
    steps += [Release("r0"), Elapse(1), Cancel("r2"), Release("r1")]
    return Script(name, [recorder(name, DYNAMIC_BATCHER)], [*steps, Drain()], [FAILED_COUNT])


def streamed_and_waiting() -> Script:
    name = "streamed_and_waiting"
    steps: list[Step] = [Send("a", name, 1), Send("s", name, 2, stream=True), Send("b", name, 3)]
    return Script(name, [recorder(name, DYNAMIC_BATCHER)], [*steps, Cancel("s"), Drain()])


def streamed_and_executing() -> Script:
    """A request of a decoupled model is closed just before a response."""
    name = "streamed_and_executing"
    steps: list[Step] = [Send("s", name, 2, stream=True), Cancel("s"), Release("s")]
    model = recorder(name, DECOUPLED, method_body=COUNT)
    return Script(name, [model], [*steps, Send("b", name, 1, stream=True), Drain()], [FAILED_COUNT])


def between_steps(name: str, first_scheduler: str, known_differences: Sequence[Known]) -> Script:
    """An ensemble's request is cancelled during its first step; the second step does not run."""
    models = [
        recorder(f"{name}_1", first_scheduler, method_body=RETURN_INCREMENT),
        recorder(f"{name}_2", first_scheduler, method_body=RETURN_INCREMENT),
    ]
    steps = step_through(f"{name}_1", "INPUT0", "MID"), step_through(f"{name}_2", "MID", "OUT")
    arrivals: list[Step] = [Send("a", name, 1), Cancel("a"), Release("a"), Send("b", name, 5)]
    return Script(name, [*models, ensemble(name, *steps)], [*arrivals, Drain()], known_differences)


def step_that_waits() -> Script:
    """An ensemble's request is cancelled while its first step waits in the queue of its model."""
    name = "step_that_waits"
    models = [
        recorder(f"{name}_{n}", DYNAMIC_BATCHER, method_body=RETURN_INCREMENT, max_batch_size=1)
        for n in (1, 2)
    ]
    steps = step_through(f"{name}_1", "INPUT0", "MID"), step_through(f"{name}_2", "MID", "OUT")
    ensemble_model = ensemble(name, *steps, size=1)
    arrivals: list[Step] = [Send("first", f"{name}_1", 1), Send("a", name, 2), Cancel("a")]
    arrivals += [Release("first"), Send("b", name, 5), Drain()]
    return Script(name, [*models, ensemble_model], arrivals, [FAILED_COUNT, NOT_RUN, LATE_COUNT])


SCRIPTS = [
    waiting("waits_for_the_batcher", DYNAMIC_BATCHER),
    waiting("waits_for_the_default", "", [FAILED_COUNT, NOT_RUN]),
    cancel_executing("executes_in_a_batcher"),
    cancel_executing("executes_by_default", ""),
    one_of_a_batch(),
    streamed_and_waiting(),
    streamed_and_executing(),
    between_steps("between_steps", "", [FAILED_COUNT, NOT_RUN, LATE_COUNT]),
    between_steps("between_batched_steps", DYNAMIC_BATCHER, [FAILED_COUNT]),
    step_that_waits(),
]
GROUP = Group("cancelled", SCRIPTS)
