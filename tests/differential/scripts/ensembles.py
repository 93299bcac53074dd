"""Ensembles: order, pruning, errors, optional tensors, decoupled steps, and statistics."""

from collections.abc import Sequence

from tests.differential.script import Drain, Group, Known, Model, Script, Send, recorder, tensor
from tests.rigs.pipelines import step

IN, OUT = tensor("INPUT0"), tensor("OUT")
RETURN_INCREMENT = 'return self.response(OUTPUT0=self.input(request, "INPUT0") + 1)'
RETURN_SUM = (
    'return self.response(OUTPUT0=self.input(request, "INPUT0") + self.input(request, "MORE"))'
)
RETURN_FAILURE = 'return self.failure("it is wrong")'
RETURN_NOTHING = "return self.response()"
FAILURES = [Known("statistics.*", "a request that fails counts in fail, and once in an ensemble's")]
SEQUENCED = [Known("responses.e.parameters", "a response without outputs has its sequence, too")]
FINAL_RESPONSE = [
    Known("responses.r1", "its end is told by itself; Triton's may come with a response")
]
RESPONSE_STATISTICS = [Known("statistics.*.response_stats", "as in later versions of Triton")]
ADD_OPTIONAL = """
more = self.input(request, "MORE")
value = self.input(request, "INPUT0")
return self.response(OUTPUT0=value if more is None else value + more)
"""
COUNT = """
sender = request.get_response_sender()
for i in range(int(self.input(request, "INPUT0").flat[0])):
    sender.send(self.response(OUTPUT0=np.array([[i]], np.int32)))
sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
EXTRA_TENSOR = tensor("MORE")
OPTIONAL = tensor("MORE", extra_fields="optional: true")


def ensemble(
    name: str,
    *steps: str,
    inputs: Sequence[str] = (IN,),
    outputs: Sequence[str] = (OUT,),
    size: int = 8,
) -> Model:
    config = f"""
        platform: "ensemble"
        max_batch_size: {size}
        input [ {", ".join(inputs)} ]
        output [ {", ".join(outputs)} ]
        ensemble_scheduling {{ step [ {", ".join(steps)} ] }}
    """
    return Model(name, config)


def step_through(model: str, source: str, target: str, second_source: str = "") -> str:
    """Return a step from one tensor to another one."""
    inputs = {"INPUT0": source} | ({"MORE": second_source} if second_source else {})
    return step(model, inputs, {"OUTPUT0": target})


def one_by_one(*requests: Send) -> list[Send | Drain]:
    return [step for request in requests for step in (request, Drain())]


def two_step_ensemble(
    name: str, first: str, second: str, *requests: Send, known_differences: Sequence[Known] = ()
) -> Script:
    """Return two models and the ensemble that runs them in order, named after the script."""
    models = [recorder(f"{name}_1", method_body=first), recorder(f"{name}_2", method_body=second)]
    steps = step_through(f"{name}_1", "INPUT0", "MID"), step_through(f"{name}_2", "MID", "OUT")
    return Script(name, [*models, ensemble(name, *steps)], one_by_one(*requests), known_differences)


def both_outputs() -> Script:
    """Only the branches of requested outputs run."""
    name = "pruned"
    models = [recorder(f"{name}_{n}", method_body=RETURN_INCREMENT) for n in (1, 2)]
    steps = step_through(f"{name}_1", "INPUT0", "OUT"), step_through(f"{name}_2", "INPUT0", "ALSO")
    requests = Send("one", name, 1, outputs=["OUT"]), Send("other", name, 1, outputs=["ALSO"])
    ensemble_model = ensemble(name, *steps, outputs=[OUT, tensor("ALSO")])
    steps_of_script = one_by_one(*requests, Send("both", name, 1))
    return Script(name, [*models, ensemble_model], steps_of_script, unordered=True)


def diamond() -> Script:
    """Two branches that are joined."""
    name = "diamond"
    models = [recorder(f"{name}_{n}", method_body=RETURN_INCREMENT) for n in (1, 2)]
    models.append(recorder(f"{name}_sum", method_body=RETURN_SUM, inputs=[IN, EXTRA_TENSOR]))
    steps = [step_through(f"{name}_1", "INPUT0", "A"), step_through(f"{name}_2", "INPUT0", "B")]
    steps.append(step_through(f"{name}_sum", "A", "OUT", "B"))
    requests = one_by_one(Send("a", name, 1), Send("rows", name, 2, rows=2))
    return Script(name, [*models, ensemble(name, *steps)], requests, unordered=True)


def unbatched_step() -> Script:
    """A step without a batch dimension reads the output of a step with one."""
    name = "unbatched_step"
    batched = recorder(
        f"{name}_1",
        method_body=RETURN_INCREMENT,
        max_batch_size=8,
        inputs=[tensor("INPUT0", dims=[2])],
    )
    dims = {"inputs": [tensor("INPUT0", dims=[1, 2])], "outputs": [tensor("OUTPUT0", dims=[1, 2])]}
    plain = recorder(f"{name}_2", method_body=RETURN_INCREMENT, max_batch_size=0, **dims)  # type: ignore[arg-type]
    steps = step_through(f"{name}_1", "INPUT0", "MID"), step_through(f"{name}_2", "MID", "OUT")
    edges = {"inputs": [tensor("INPUT0", dims=[1, 2])], "outputs": [tensor("OUT", dims=[1, 2])]}
    whole = ensemble(name, *steps, size=0, **edges)
    return Script(name, [batched, plain, whole], one_by_one(Send("a", name, 1, columns=2)))


def optional() -> Script:
    """An optional input."""
    name = "optional_step"
    recording_model = recorder(f"{name}_1", method_body=ADD_OPTIONAL, inputs=[IN, OPTIONAL])
    made = ensemble(name, step_through(f"{name}_1", "INPUT0", "OUT", "MORE"), inputs=[IN, OPTIONAL])
    optional_input = {"MORE": ("INT32", [1, 1], [5])}
    requests = Send("with", name, 1, inputs=optional_input), Send("without", name, 1)
    return Script(name, [recording_model, made], one_by_one(*requests))


def decoupled() -> Script:
    """A decoupled step, each of whose responses runs the later steps."""
    name = "decoupled_step"
    models = [
        recorder(f"{name}_1", DECOUPLED, method_body=COUNT),
        recorder(f"{name}_2", method_body=RETURN_INCREMENT),
    ]
    steps = step_through(f"{name}_1", "INPUT0", "MID"), step_through(f"{name}_2", "MID", "OUT")
    requests = [Send(f"r{count}", name, count, stream=True) for count in (1, 0)]
    return Script(
        name,
        [*models, ensemble(name, *steps)],
        one_by_one(*requests),
        [*FINAL_RESPONSE, *RESPONSE_STATISTICS],
    )


def nested() -> Script:
    name = "nested"
    models = [
        recorder(f"{name}_1", method_body=RETURN_INCREMENT),
        recorder(f"{name}_2", method_body=RETURN_FAILURE),
    ]
    inner = ensemble(f"{name}_inner", step_through(f"{name}_1", "INPUT0", "OUT"))
    wrong = ensemble(f"{name}_wrong", step_through(f"{name}_2", "INPUT0", "OUT"))
    tensor_maps = {"INPUT0": "INPUT0"}, {"OUT": "OUT"}
    outer = ensemble(f"{name}_outer", step(f"{name}_inner", *tensor_maps))
    bad = ensemble(f"{name}_bad", step(f"{name}_wrong", *tensor_maps))
    requests = Send("good", f"{name}_outer", 1), Send("bad", f"{name}_bad", 1)
    return Script(name, [*models, inner, wrong, outer, bad], one_by_one(*requests), FAILURES)


SCRIPTS = [
    two_step_ensemble("two_steps", RETURN_INCREMENT, RETURN_INCREMENT, Send("a", "two_steps", 1),
        Send("b", "two_steps", 5, rows=3)),
    two_step_ensemble("first_fails", RETURN_FAILURE, RETURN_INCREMENT, Send("c", "first_fails", 1),
        known_differences=FAILURES),
    two_step_ensemble("second_fails", RETURN_INCREMENT, RETURN_FAILURE,
        Send("d", "second_fails", 1), known_differences=FAILURES),
    two_step_ensemble("no_tensor_made", RETURN_NOTHING, RETURN_INCREMENT,
        Send("e", "no_tensor_made", 1), known_differences=FAILURES),
    two_step_ensemble("no_output_made", RETURN_INCREMENT, RETURN_NOTHING,
        Send("e", "no_output_made", 1), known_differences=SEQUENCED),
    two_step_ensemble("flags_are_forwarded", RETURN_INCREMENT, RETURN_INCREMENT,
        Send("s", "flags_are_forwarded", 1, sequence=7, start=True),
        Send("t", "flags_are_forwarded", 1, sequence=7, end=True)),
    two_step_ensemble("refused_by_an_ensemble", RETURN_INCREMENT, RETURN_INCREMENT,
        Send("rows", "refused_by_an_ensemble", 1, rows=9),
        Send("output", "refused_by_an_ensemble", 1, outputs=["MID"]),
        Send("datatype", "refused_by_an_ensemble", None, inputs={"INPUT0": ("FP32", [1, 1], [1])})),
    both_outputs(),
    diamond(),
    unbatched_step(),
    optional(),
    decoupled(),
    nested(),
]  # fmt: skip
GROUP = Group("ensembles", SCRIPTS)
