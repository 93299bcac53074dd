"""Priority levels and queue policies."""

from __future__ import annotations

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
OVER = Elapse(0.2)
TIMED = [Known("*", "a request's own timeout holds, whatever the queue's policy")]
UNTIMED = [Known("*", "any timeout is shorter than none")]
FULL = [Known("statistics.*", "who finds the queue full counts in fail, too")]


def scene(
    name: str, batching: str, *steps: Step, known: list[Known] | None = None, size: int = 1
) -> Script:
    """Steps behind a request that executes."""
    made = recorder(name, f"dynamic_batching {{ {batching} }}", max_batch_size=size)
    return Script(name, [made], [Ask("first", name), *steps, Drain()], known or [])


def ask(label: str, model: str, priority: int = 0, timeout_us: int = 0) -> Ask:
    """A request; what it is full of says its level."""
    return Ask(label, model, priority, priority=priority, timeout_us=timeout_us)


SCRIPTS = [
    scene(
        "levels",
        LEVELS,
        ask("c", "levels", 3),
        ask("b", "levels"),
        ask("a", "levels", 1),
        ask("b_too", "levels", 9),
        ask("a_too", "levels", 1),
        ask("c_too", "levels", 3),
    ),
    scene(
        "a_batch_spans_levels",
        LEVELS,
        *(ask(f"r{level}", "a_batch_spans_levels", level) for level in (3, 2, 1)),
        size=2,
    ),
    scene(
        "a_level_is_full",
        LEVELS,
        ask("b", "a_level_is_full"),
        ask("b_too", "a_level_is_full", 2),
        ask("full", "a_level_is_full"),
        ask("a", "a_level_is_full", 1),
        known=FULL,
    ),
    scene(
        "rejected",
        REJECT % (SHORT, "false"),
        ask("a", "rejected"),
        ask("b", "rejected", timeout_us=FOREVER),
        OVER,
        ask("c", "rejected"),
    ),
    scene(
        "an_override_is_shorter",
        REJECT % (FOREVER, "true"),
        ask("a", "an_override_is_shorter"),
        ask("b", "an_override_is_shorter", timeout_us=SHORT),
        OVER,
    ),
    scene(
        "an_override_is_longer",
        REJECT % (SHORT, "true"),
        ask("b", "an_override_is_longer", timeout_us=FOREVER),
        OVER,
    ),
    scene(
        "an_override_without_a_default",
        REJECT % (0, "true"),
        ask("a", "an_override_without_a_default"),
        ask("b", "an_override_without_a_default", timeout_us=SHORT),
        OVER,
        known=UNTIMED,
    ),
    scene(
        "no_override",
        REJECT % (FOREVER, "false"),
        ask("a", "no_override"),
        ask("b", "no_override", timeout_us=SHORT),
        OVER,
        known=TIMED,
    ),
    scene(
        "delayed",
        DELAY % (FOREVER, "true"),
        ask("late", "delayed", timeout_us=SHORT),
        ask("b", "delayed"),
        OVER,
        ask("c", "delayed"),
    ),
    scene(
        "delayed_still_before_a_lower_level",
        "priority_levels: 2 default_priority_level: 2 " + DELAY % (FOREVER, "true"),
        ask("low", "delayed_still_before_a_lower_level", 2),
        ask("late", "delayed_still_before_a_lower_level", 1, timeout_us=SHORT),
        OVER,
    ),
    scene(
        "cancelled_in_its_level",
        LEVELS,
        ask("c", "cancelled_in_its_level", 3),
        ask("b", "cancelled_in_its_level"),
        ask("a", "cancelled_in_its_level", 1),
        Cancel("b"),
    ),
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
