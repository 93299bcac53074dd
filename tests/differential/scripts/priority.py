"""Priority levels and queue policies."""

from dataclasses import replace

from tests.differential.script import (
    Ask,
    Cancel,
    Drain,
    Elapse,
    Group,
    Known,
    Script,
    Step,
    recorder,
)

LEVELS = """
    priority_levels: 3
    default_priority_level: 2
    default_queue_policy { max_queue_size: 2 }
    priority_queue_policy { key: 3 value { max_queue_size: 4 } }
"""
REJECT = """default_queue_policy {
    timeout_action: REJECT default_timeout_microseconds: %d allow_timeout_override: %s
}"""
DELAY = REJECT.replace("REJECT", "DELAY")
SHORT, FOREVER = 20_000, 60_000_000
TIMEOUT_ELAPSES = Elapse(0.2)
TIMED = [Known("*", "a request's own timeout holds, whatever the queue's policy")]
UNTIMED = [Known("*", "any timeout is shorter than none")]
FULL = [Known("statistics.*", "who finds the queue full counts in fail, too")]


def scene(
    name: str, batching: str, *steps: Step, known: list[Known] | None = None, size: int = 1
) -> Script:
    """Steps after an executing request, all for the model that has the scene's name."""
    recording_model = recorder(name, f"dynamic_batching {{ {batching} }}", max_batch_size=size)
    model_steps = [replace(step, model=name) if isinstance(step, Ask) else step for step in steps]
    return Script(name, [recording_model], [Ask("first", name), *model_steps, Drain()], known or [])


def ask(label: str, priority: int = 0, timeout_us: int = 0) -> Ask:
    """Return a request for the scene's model; the value of its input shows its level."""
    return Ask(label, "", priority, priority=priority, timeout_us=timeout_us)


SCRIPTS = [
    scene(
        "levels",
        LEVELS,
        ask("c", 3),
        ask("b"),
        ask("a", 1),
        ask("b_too", 9),
        ask("a_too", 1),
        ask("c_too", 3),
    ),
    scene(
        "a_batch_spans_levels", LEVELS, *(ask(f"r{level}", level) for level in (3, 2, 1)), size=2
    ),
    scene(
        "a_level_is_full", LEVELS, ask("b"), ask("b_too", 2), ask("full"), ask("a", 1), known=FULL
    ),
    scene(
        "rejected",
        REJECT % (SHORT, "false"),
        ask("a"),
        ask("b", timeout_us=FOREVER),
        TIMEOUT_ELAPSES,
        ask("c"),
    ),
    scene(
        "an_override_is_shorter",
        REJECT % (FOREVER, "true"),
        ask("a"),
        ask("b", timeout_us=SHORT),
        TIMEOUT_ELAPSES,
    ),
    scene(
        "an_override_is_longer",
        REJECT % (SHORT, "true"),
        ask("b", timeout_us=FOREVER),
        TIMEOUT_ELAPSES,
    ),
    scene(
        "an_override_without_a_default",
        REJECT % (0, "true"),
        ask("a"),
        ask("b", timeout_us=SHORT),
        TIMEOUT_ELAPSES,
        known=UNTIMED,
    ),
    scene(
        "no_override",
        REJECT % (FOREVER, "false"),
        ask("a"),
        ask("b", timeout_us=SHORT),
        TIMEOUT_ELAPSES,
        known=TIMED,
    ),
    scene(
        "delayed",
        DELAY % (FOREVER, "true"),
        ask("late", timeout_us=SHORT),
        ask("b"),
        TIMEOUT_ELAPSES,
        ask("c"),
    ),
    scene(
        "delayed_still_before_a_lower_level",
        "priority_levels: 2 default_priority_level: 2 " + DELAY % (FOREVER, "true"),
        ask("low", 2),
        ask("late", 1, timeout_us=SHORT),
        TIMEOUT_ELAPSES,
    ),
    scene("cancelled_in_its_level", LEVELS, ask("c", 3), ask("b"), ask("a", 1), Cancel("b")),
    Script(
        "no_queue_policy_without_a_batcher",
        [recorder("unbatched")],
        [
            Ask("first", "unbatched"),
            Ask("a", "unbatched", priority=3),
            Ask("b", "unbatched", priority=1),
            Drain(),
        ],
    ),
]
GROUP = Group("priority", SCRIPTS)
