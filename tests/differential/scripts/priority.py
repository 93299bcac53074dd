"""Priority levels and queue policies."""

from dataclasses import replace

from tests.differential.script import (
    Cancel,
    Drain,
    Elapse,
    Group,
    Known,
    Script,
    Send,
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
OUTLAST = Elapse(0.2)
TIMED = [Known("*", "a request's own timeout holds, whatever the queue's policy")]
UNTIMED = [Known("*", "any timeout is shorter than none")]
FULL = [Known("statistics.*", "who finds the queue full counts in fail, too")]


def scene(
    name: str,
    batching: str,
    *steps: Step,
    known_differences: list[Known] | None = None,
    size: int = 1,
) -> Script:
    """Steps after an executing request, all for the model that has the scene's name."""
    recording_model = recorder(name, f"dynamic_batching {{ {batching} }}", max_batch_size=size)
    model_steps = [replace(step, model=name) if isinstance(step, Send) else step for step in steps]
    return Script(
        name,
        [recording_model],
        [Send("first", name), *model_steps, Drain()],
        known_differences or [],
    )


def send(label: str, priority: int = 0, timeout_us: int = 0) -> Send:
    """Return a request for the scene's model; the value of its input shows its level."""
    return Send(label, "", priority, priority=priority, timeout_us=timeout_us)


SCRIPTS = [
    scene(
        "levels",
        LEVELS,
        send("c", 3),
        send("b"),
        send("a", 1),
        send("b_too", 9),
        send("a_too", 1),
        send("c_too", 3),
    ),
    scene(
        "a_batch_spans_levels", LEVELS, *(send(f"r{level}", level) for level in (3, 2, 1)), size=2
    ),
    scene(
        "a_level_is_full",
        LEVELS,
        send("b"),
        send("b_too", 2),
        send("full"),
        send("a", 1),
        known_differences=FULL,
    ),
    scene(
        "rejected",
        REJECT % (SHORT, "false"),
        send("a"),
        send("b", timeout_us=FOREVER),
        OUTLAST,
        send("c"),
    ),
    scene(
        "an_override_is_shorter",
        REJECT % (FOREVER, "true"),
        send("a"),
        send("b", timeout_us=SHORT),
        OUTLAST,
    ),
    scene(
        "an_override_is_longer", REJECT % (SHORT, "true"), send("b", timeout_us=FOREVER), OUTLAST
    ),
    scene(
        "an_override_without_a_default",
        REJECT % (0, "true"),
        send("a"),
        send("b", timeout_us=SHORT),
        OUTLAST,
        known_differences=UNTIMED,
    ),
    scene(
        "no_override",
        REJECT % (FOREVER, "false"),
        send("a"),
        send("b", timeout_us=SHORT),
        OUTLAST,
        known_differences=TIMED,
    ),
    scene(
        "delayed",
        DELAY % (FOREVER, "true"),
        send("late", timeout_us=SHORT),
        send("b"),
        OUTLAST,
        send("c"),
    ),
    scene(
        "delayed_still_before_a_lower_level",
        "priority_levels: 2 default_priority_level: 2 " + DELAY % (FOREVER, "true"),
        send("low", 2),
        send("late", 1, timeout_us=SHORT),
        OUTLAST,
    ),
    scene("cancelled_in_its_level", LEVELS, send("c", 3), send("b"), send("a", 1), Cancel("b")),
    Script(
        "no_queue_policy_without_a_batcher",
        [recorder("unbatched")],
        [
            Send("first", "unbatched"),
            Send("a", "unbatched", priority=3),
            Send("b", "unbatched", priority=1),
            Drain(),
        ],
    ),
]
GROUP = Group("priority", SCRIPTS)
