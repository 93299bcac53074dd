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

PRIORITY_LEVELS = """
    priority_levels: 3
    default_priority_level: 2
    default_queue_policy { max_queue_size: 2 }
    priority_queue_policy { key: 3 value { max_queue_size: 4 } }
"""
REJECT_POLICY = """default_queue_policy {
    timeout_action: REJECT default_timeout_microseconds: %d allow_timeout_override: %s
}"""
DELAY_POLICY = REJECT_POLICY.replace("REJECT", "DELAY")
SHORT_TIMEOUT_US, LONG_TIMEOUT_US = 20_000, 60_000_000
TIMEOUT_PASSES = Elapse(0.2)
UNTIMED_REQUESTS = [Known("*", "any timeout is shorter than none")]
FULL_QUEUE_COUNT = [Known("statistics.*", "who finds the queue full counts in fail, too")]


def scene(
    name: str,
    batching: str,
    *steps: Step,
    known_differences: list[Known] | None = None,
    size: int = 1,
) -> Script:
    """Steps after an executing request, all for the model that has the scene's name."""
    model = recorder(name, f"dynamic_batching {{ {batching} }}", max_batch_size=size)
    model_steps = [replace(step, model=name) if isinstance(step, Send) else step for step in steps]
    return Script(
        name, [model], [Send("first", name), *model_steps, Drain()], known_differences or []
    )


def send(label: str, priority: int = 0, timeout_us: int = 0) -> Send:
    """Return a request for the scene's model; the value of its input shows its level."""
    return Send(label, "", priority, priority=priority, timeout_us=timeout_us)


SCRIPTS = [
    scene("levels", PRIORITY_LEVELS, send("c", 3), send("b"), send("a", 1), send("b_too", 9),
        send("a_too", 1), send("c_too", 3)),
    scene("a_batch_spans_levels", PRIORITY_LEVELS,
        *(send(f"r{level}", level) for level in (3, 2, 1)), size=2),
    scene("a_level_is_full", PRIORITY_LEVELS, send("b"), send("b_too", 2), send("full"),
        send("a", 1), known_differences=FULL_QUEUE_COUNT),
    scene("rejected", REJECT_POLICY % (SHORT_TIMEOUT_US, "false"), send("a"),
        send("b", timeout_us=LONG_TIMEOUT_US), TIMEOUT_PASSES, send("c")),
    scene("an_override_is_shorter", REJECT_POLICY % (LONG_TIMEOUT_US, "true"), send("a"),
        send("b", timeout_us=SHORT_TIMEOUT_US), TIMEOUT_PASSES),
    scene("an_override_is_longer", REJECT_POLICY % (SHORT_TIMEOUT_US, "true"),
        send("b", timeout_us=LONG_TIMEOUT_US), TIMEOUT_PASSES),
    scene("an_override_without_a_default", REJECT_POLICY % (0, "true"), send("a"),
        send("b", timeout_us=SHORT_TIMEOUT_US), TIMEOUT_PASSES, known_differences=UNTIMED_REQUESTS),
    scene("no_override", REJECT_POLICY % (LONG_TIMEOUT_US, "false"), send("a"),
        send("b", timeout_us=SHORT_TIMEOUT_US), TIMEOUT_PASSES),
    scene("delayed", DELAY_POLICY % (LONG_TIMEOUT_US, "true"),
        send("late", timeout_us=SHORT_TIMEOUT_US), send("b"), TIMEOUT_PASSES, send("c")),
    scene("delayed_still_before_a_lower_level",
        "priority_levels: 2 default_priority_level: 2 " + DELAY_POLICY % (LONG_TIMEOUT_US, "true"),
        send("low", 2), send("late", 1, timeout_us=SHORT_TIMEOUT_US), TIMEOUT_PASSES),
    scene("cancelled_in_its_level", PRIORITY_LEVELS, send("c", 3), send("b"), send("a", 1),
        Cancel("b")),
    Script("no_queue_policy_without_a_batcher", [recorder("unbatched")],
        [Send("first", "unbatched"), Send("a", "unbatched", priority=3),
        Send("b", "unbatched", priority=1), Drain()]),
]  # fmt: skip
GROUP = Group("priority", SCRIPTS)
