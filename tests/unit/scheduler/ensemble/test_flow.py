"""The data flow of a request: which steps run, in which order, with which tensors."""

from collections.abc import Callable, Mapping
from operator import attrgetter

from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.memory.lent import CallbackToken
from shmserve.scheduler.ensemble.flow import Firing, Flow, Graph, ModelProperties, Plan, StepNode
from shmserve.scheduler.ensemble.memory import SKIPPED, TensorKind, Value

TENSOR_KIND = TensorKind("BYTES", (1,))


def value(text: str, freed_values: list[str] | None = None, holds_value: bool = True) -> Value:
    memory = None if freed_values is None else CallbackToken(lambda: freed_values.append(text))
    return Value(TENSOR_KIND, text.encode(), memory, holds_value)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph without cycles, in which each step reads earlier tensors."""
    tensors = ["IN"]
    steps: list[StepNode] = []
    for index in range(draw(st.integers(1, 7))):
        read_tensors = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3, unique=True))
        condition = draw(st.sampled_from(["", "", *tensors]))
        tensor_names = [f"t{index}.{n}" for n in range(draw(st.integers(1, 2)))]
        inputs = {f"i{n}": tensor for n, tensor in enumerate(read_tensors)}
        outputs = {f"o{n}": tensor for n, tensor in enumerate(tensor_names)}
        steps.append(StepNode(index, "m", "", inputs, outputs, condition))
        tensors += tensor_names
    expected = draw(st.lists(st.sampled_from(tensors[1:]), min_size=1, max_size=3, unique=True))
    return Graph("e", tuple(draw(st.permutations(steps))), ("IN",), tuple(expected))


def models(
    stream_steps: tuple[int, ...] = (),
    optional: tuple[str, ...] = (),
    devices: Mapping[int, int] | None = None,
) -> Callable[[StepNode], ModelProperties]:
    """Return the models of a graph's steps.

    Args:
        stream_steps: The indices of the steps that give any number of responses.
        optional: The inputs that are optional for each step.
        devices: The devices of steps, by index.
    """
    return lambda step: ModelProperties(
        step.index in stream_steps, frozenset(optional), (devices or {}).get(step.index)
    )


def plan(graph: Graph, stream_steps: tuple[int, ...] = (), optional: tuple[str, ...] = ()) -> Plan:
    return Plan(graph, graph.outputs, models(stream_steps, optional))


def respond(flow: Flow, firing: Firing, values: dict[str, Value]) -> None:
    """Add a step's response, whose outputs have the names of the model."""
    outputs = firing.step.node.outputs
    flow.store_response(
        firing.step,
        firing.response_index,
        [(outputs[name], t) for name, t in values.items()],
    )


def expected_results(graph: Graph, false_tensors: set[str]) -> tuple[set[int], set[str]]:
    """Return the steps that run and the outputs that exist, computed from the definition."""
    needed_steps = graph.needed_steps(graph.outputs)
    expected_steps: set[int] = set()
    skipped_tensors: set[str] = set()
    for step in sorted(graph.steps, key=attrgetter("index")):  # each reads earlier tensors
        if step.index not in needed_steps:
            continue
        lacks_input = any(tensor in skipped_tensors for tensor in step.inputs.values())
        if lacks_input or (step.condition and step.condition in skipped_tensors | false_tensors):
            skipped_tensors.update(step.outputs.values())
        else:
            expected_steps.add(step.index)
    return expected_steps, set(graph.outputs) - skipped_tensors


@given(graphs(), st.data())
def test_every_needed_step_runs_once_and_nothing_is_kept(graph: Graph, data: st.DataObject) -> None:
    """In every order in which steps end, each value is released once."""
    tensor_names = sorted({"IN"}.union(*(step.outputs.values() for step in graph.steps)))
    falses = set(data.draw(st.lists(st.sampled_from(tensor_names), unique=True)))
    freed: list[str] = []
    flow = Flow(plan(graph))
    flow.begin([("IN", value("IN", freed, "IN" not in falses))])
    started_steps: list[int] = []
    created_tensors = ["IN"]
    running_firings: list[Firing] = []
    while True:
        running_firings += flow.firings
        flow.firings.clear()
        if not running_firings:
            break
        firing = running_firings.pop(data.draw(st.integers(0, len(running_firings) - 1)))
        started_steps.append(firing.step.index)
        routed = {n: t for n, t in firing.step.node.outputs.items() if t in flow.plan.routes}
        created_tensors += routed.values()
        respond(
            flow,
            firing,
            {n: value(t, freed, t not in falses) for n, t in routed.items()},
        )
        for used_value in firing.inputs.values():
            used_value.release()
    expected_steps, outputs = expected_results(graph, falses)
    assert sorted(started_steps) == sorted(expected_steps)
    (response,) = flow.responses
    assert response.keys() == outputs
    flow.close()
    assert sorted(freed) == sorted(created_tensors)


STREAM = Graph(
    "e",
    (
        StepNode(0, "many", "", {"X": "IN"}, {"Y": "m"}),
        StepNode(1, "one", "", {"X": "m", "Z": "once"}, {"Y": "OUT"}),
        StepNode(2, "one", "", {"X": "IN"}, {"Y": "once"}),
    ),
    ("IN",),
    ("OUT",),
)


@given(st.permutations(["many", "many", "many", "once"]))
def test_a_stream_is_joined_with_single_tensors_in_any_order(order: list[str]) -> None:
    flow = Flow(plan(STREAM, stream_steps=(0,)))
    flow.begin([("IN", value("IN"))])
    stream, single = sorted(flow.firings, key=lambda firing: firing.step.index)
    flow.firings.clear()
    for index, source in enumerate(order):
        respond(
            flow,
            stream if source == "many" else single,
            {"Y": value(f"{source}{index}")},
        )
    assert [firing.response_index for firing in flow.firings] == [0, 1, 2]
    for firing in flow.firings:
        respond(flow, firing, {"Y": value("out")})
    assert len(flow.responses) == 3


def test_a_step_that_waits_for_one_tensor_runs_in_the_order_of_the_outputs() -> None:
    """Steps run in the order of the outputs in the response that they read."""
    steps = (
        StepNode(0, "fork", "", {"X": "IN"}, {"L": "l", "R": "r"}),
        StepNode(1, "both", "", {"X": "IN", "L": "l"}, {"Y": "a"}),
        StepNode(2, "one", "", {"R": "r"}, {"Y": "b"}),
    )
    for names, order in ((("L", "R"), [1, 2]), (("R", "L"), [2, 1])):
        flow = Flow(plan(Graph("e", steps, ("IN",), ("a", "b"))))
        flow.begin([("IN", value("IN"))])
        (fork_firing,) = flow.firings
        flow.firings.clear()
        respond(flow, fork_firing, {name: value(name) for name in names})
        assert [firing.step.index for firing in flow.firings] == order


def test_a_skipped_stream_is_one_response_without_it() -> None:
    g = Graph("e", (StepNode(0, "many", "", {"X": "IN"}, {"Y": "OUT"}, "IN"),), ("IN",), ("OUT",))
    flow = Flow(plan(g, stream_steps=(0,)))
    flow.begin([("IN", value("IN", holds_value=False))])
    assert (flow.firings, flow.responses) == ([], [{}])


def test_a_skipped_tensor_is_omitted_for_an_optional_input() -> None:
    step = StepNode(0, "m", "", {"X": "IN", "Z": "Z"}, {"Y": "OUT"})
    graph = Graph("e", (step,), ("IN", "Z"), ("OUT",))
    for optional, must_run in (((), False), (("Z",), True)):
        flow = Flow(plan(graph, optional=optional))
        flow.begin([("IN", value("IN")), ("Z", SKIPPED)])
        assert bool(flow.firings) is must_run


@given(graphs(), st.dictionaries(st.integers(0, 6), st.integers(0, 1)))
def test_only_tensors_of_one_reader_stay_on_it(graph: Graph, devices: dict[int, int]) -> None:
    """Writer and readers are on this device; no output of the ensemble, no condition."""
    plan = Plan(graph, graph.outputs, models(devices=devices))
    for step in graph.steps:
        for tensor in step.outputs.values():
            readers = [r.index for r in plan.steps.values() if (tensor, True) in r.tensors]
            devices_around = {devices.get(index) for index in readers}
            devices_around.add(devices.get(step.index) if step.index in plan.steps else None)
            leaves_device = tensor in graph.outputs or tensor in graph.conditions
            stays_on_device = (
                readers
                and not leaves_device
                and len(devices_around) == 1
                and None not in devices_around
            )
            assert plan.devices.get(tensor) == (devices_around.pop() if stays_on_device else None)
