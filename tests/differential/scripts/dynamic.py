"""The dynamic batcher, with a queue policy, so that no batch is formed before it can run."""

from typing import Any

from tests.differential.script import (
    Cancel,
    Drain,
    Group,
    Known,
    Model,
    Script,
    Send,
    Step,
    recorder,
    tensor,
)

QUEUE_LIMIT = "default_queue_policy { max_queue_size: 100 }"
SHORT_DELAY = "max_queue_delay_microseconds: 1000"
LONG_DELAY = "max_queue_delay_microseconds: 60000000"


def model(name: str, batching: str = "", **options: Any) -> Model:
    return recorder(name, f"dynamic_batching {{ {QUEUE_LIMIT} {batching} }}", **options)


def queued(name: str, *rows: int) -> list[Step]:
    """Queue requests with these row counts behind an executing one; then release all."""
    waiting = [Send(f"r{n}", name, n, rows=count) for n, count in enumerate(rows, 1)]
    return [Send("first", name), *waiting, Drain()]


def scene(name: str, batching: str, *rows: int, **options: Any) -> Script:
    """Requests with these row counts, queued behind an executing one."""
    return Script(name, [model(name, batching, **options)], queued(name, *rows))


FAILING_METHOD = """
value = self.input(request, "INPUT0")
if value.flat[0] == 2:
    return self.failure("two is wrong")
return self.response(OUTPUT0=value)
"""
MIXED = [Send("b", "mixed", 1, columns=2), Send("c", "mixed", 2, columns=2), Send("d", "mixed", 3)]
OPTIONAL_INPUTS = [tensor("INPUT0"), tensor("MORE", "FP32", extra_fields="optional: true")]
EXTRA_INPUT = {"MORE": ("FP32", [1, 1], [0.5])}
RAGGED_INPUTS = [tensor("INPUT0", extra_fields="allow_ragged_batch: true")]
COUNTS = """
} batch_input [ {
  kind: BATCH_ELEMENT_COUNT target_name: "COUNTS" data_type: TYPE_FP32 source_input: "INPUT0"
} ]
parameters { key: "closes" value { string_value: "the block of the batcher" }
"""
FIXED_INPUTS = [tensor("INPUT0", dims=[2])]

NOT_FOUND = "a missing required input is found also beside an optional one"

SCRIPTS = [
    scene("fills_up", "", *[1] * 9),
    scene("sizes_are_summed", "", 4, 4, 1, 5, 4),
    scene("eight", "", 8, 8),
    scene("preferred_largest", "preferred_batch_size: [ 4, 6 ]", *[1] * 7),
    scene("preferred_passed_over", "preferred_batch_size: [ 6 ]", 3, 4),
    scene("preferred_with_delay", f"preferred_batch_size: [ 4, 6 ] {SHORT_DELAY}", *[1] * 7),
    scene("preferred_runs_at_once", f"preferred_batch_size: [ 2 ] {LONG_DELAY}", *[1] * 5),
    scene("preferred_past_the_largest", f"preferred_batch_size: [ 4 ] {SHORT_DELAY}", 3, 3, 2),
    scene("delay_over", f"preferred_batch_size: [ 3 ] {SHORT_DELAY}", 1, 1),
    scene("one_by_one", "", 1, 1, max_batch_size=1),
    Script("other_shapes_end_a_batch", [model("mixed")],
        [Send("a", "mixed"), *MIXED, Send("e", "mixed", 4), Drain()]),
    Script("ragged_shapes_share_a_batch", [model("ragged", inputs=RAGGED_INPUTS)],
        [Send("a", "ragged"), Send("b", "ragged", 1, columns=3), Send("c", "ragged", 2), Drain()]),
    Script("a_python_model_gets_no_batch_input", [model("counted", COUNTS, inputs=RAGGED_INPUTS)],
        [Send("a", "counted"), Send("b", "counted", 1, columns=3), Send("c", "counted", 2),
        Drain()]),
    Script("optional_inputs_share_a_batch_if_both_have_them",
        [model("optional", inputs=OPTIONAL_INPUTS)],
        [Send("a", "optional"), Send("b", "optional", 1), Send("c", "optional", 2),
        Send("d", "optional", 3, inputs=EXTRA_INPUT), Send("e", "optional", 4, inputs=EXTRA_INPUT),
        Send("f", "optional", 5), Drain()]),
    Script("a_missing_input_beside_an_optional_one", [model("missing", inputs=OPTIONAL_INPUTS)],
        [Send("a", "missing"), Send("none", "missing", None, inputs=EXTRA_INPUT), Drain()],
        known_differences=[Known("batches", NOT_FOUND), Known("responses.none.error.*", NOT_FOUND),
        Known("statistics.*", NOT_FOUND)]),
    Script("one_of_a_batch_fails", [model("failing", method_body=FAILING_METHOD)],
        queued("failing", 1, 1, 1),
        known_differences=[Known("statistics.*", "a request that fails counts in fail")]),
    Script("execute_raises", [model("raising", method_body='raise ValueError("all wrong")')],
        queued("raising", 1, 1),
        known_differences=[Known("batches",
        "a batch that raises is executed again, each request alone"),
        Known("responses.*.error.1", "the text is without file and line")]),
    Script("cancelled_in_the_queue", [model("cancelled")],
        [*queued("cancelled", 1, 1, 1)[:-1], Cancel("r2"), Drain()]),
    Script("wrong_requests_are_not_counted", [model("wrong", inputs=FIXED_INPUTS)],
        [Send("columns", "wrong", 1, columns=3), Send("rows", "wrong", 1, columns=2, rows=9),
        Send("datatype", "wrong", None, inputs={"INPUT0": ("FP32", [1, 2], [0, 0])}),
        Send("name", "wrong", None, inputs={"NOPE": ("INT32", [1, 2], [0, 0])}),
        Send("output", "wrong", 1, columns=2, outputs=["NOPE"]),
        Send("right", "wrong", 1, columns=2), Drain()]),
    Script("preserve_ordering",
        [model("ordered", "preserve_ordering: true", max_batch_size=1, instances=1)],
        queued("ordered", 1, 1, 1)),
    Script("no_batcher", [recorder("default")], queued("default", 2, 1, 1)),
    Script("no_batch_dimension",
        [recorder("plain", max_batch_size=0, inputs=[tensor("INPUT0", dims=[1, 1])])],
        queued("plain", 1, 1)),
]  # fmt: skip
GROUP = Group("dynamic", SCRIPTS)
