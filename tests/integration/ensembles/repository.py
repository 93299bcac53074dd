"""The models and ensembles of these tests, one for each rule."""

from pathlib import Path

from tests.rigs.pipelines import add_ensemble, add_model, step, tensor, xy_step

LARGE = 300_000  # number of elements, 1.2 MB in total
DECOUPLED = "model_transaction_policy { decoupled: true }"
COUNT = """
    sender = request.get_response_sender()
    for i in range(int(self.input(request, "X")[0])):
        sender.send(self.response(Y=np.full(self.SIZE, i, np.float32)))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Code of a model that returns the fields of its request as a text.
TELL_MODEL = """
    said = [request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
            request.parameters(), request.priority() if hasattr(request, "priority") else ""]
    return self.response(Y=np.array([repr(said)], object))
"""


def write(repository: Path) -> None:
    _models(repository)
    _ensembles(repository)


def _models(repository: Path) -> None:
    for name, operation in (("add", "+ 1"), ("double", "* 2")):
        model_code = f'return self.response(Y=self.input(request, "X") {operation})'
        add_model(repository, name, model_code, max_batch_size=4)
    add_model(repository, "plain", 'return self.response(Y=self.input(request, "X") + 1)')
    fixed = [tensor("X", dims=[LARGE])], [tensor("Y", dims=[LARGE])]
    model_code = 'return self.response(Y=self.input(request, "X") + 1)'
    add_model(repository, "fixed", model_code, *fixed, max_batch_size=2)
    add_model(repository, "same", 'return self.response(Y=self.input(request, "X"))', *fixed)
    add_model(repository, "boom", 'raise ValueError("boom")')
    model_code = """
        x = self.input(request, "X")
        return self.response(Y=x) if x[0] > 0 else self.response()
    """
    add_model(repository, "positive", model_code)
    model_code = """
        given = [name for name in ("X", "Z") if self.input(request, name) is not None]
        return self.response(Y=np.array([" ".join(given)], object))
    """
    inputs = [tensor("X"), tensor("Z", extra_fields="optional: true")]
    add_model(repository, "given", model_code, inputs, [tensor("Y", "BYTES")])
    model_code = 'return self.response(Y=self.input(request, "X") + self.input(request, "Z"))'
    add_model(repository, "sum", model_code, [tensor("X"), tensor("Z")])
    add_model(repository, "tell", TELL_MODEL, outputs=[tensor("Y", "BYTES")])
    for name, size in (("count", 1), ("count_large", LARGE)):
        add_model(repository, name, COUNT.replace("self.SIZE", str(size)), settings=DECOUPLED)
        code = repository / name / "1" / "model.py"
        return_line = "return [self.one(request) for request in requests]"
        code.write_text(code.read_text().replace(return_line, return_line.removeprefix("return ")))
    model_code = 'return self.response(Y=self.input(request, "X") > 0)'
    add_model(repository, "is_positive", model_code, outputs=[tensor("Y", "BOOL")])


def _ensembles(folder: Path) -> None:
    two_steps = [xy_step("add", "IN", "mid"), xy_step("double", "mid", "OUT")]
    add_ensemble(folder, "two", two_steps, max_batch_size=4)
    edge_tensors = [tensor("IN", dims=[LARGE])], [tensor("OUT", dims=[LARGE])]
    three_steps = [
        xy_step("fixed", "IN", "a"),
        xy_step("fixed", "a", "b"),
        xy_step("fixed", "b", "OUT"),
    ]
    add_ensemble(folder, "three", three_steps, *edge_tensors, max_batch_size=2)
    steps = [xy_step("fixed", "IN", "a"), xy_step("same", "a", "b"), xy_step("same", "b", "OUT")]
    add_ensemble(
        folder, "passes", steps, edge_tensors[0], [*edge_tensors[1], tensor("a", dims=[LARGE])]
    )
    add_ensemble(folder, "fails", [xy_step("boom", "IN", "m"), xy_step("plain", "m", "OUT")])
    add_ensemble(folder, "outer", [step("two", {"IN": "IN"}, {"OUT": "OUT"})], max_batch_size=4)
    add_ensemble(folder, "outer_fails", [step("fails", {"IN": "IN"}, {"OUT": "OUT"})])
    joined = [
        xy_step("plain", "IN", "a"),
        xy_step("plain", "a", "b"),
        step("sum", {"X": "a", "Z": "b"}, {"Y": "OUT"}),
    ]
    add_ensemble(folder, "diamond", joined)
    outputs = [tensor("GOOD"), tensor("BAD")]
    pruned = [xy_step("plain", "IN", "GOOD"), xy_step("boom", "IN", "BAD")]
    add_ensemble(folder, "pruned", pruned, outputs=outputs)
    add_ensemble(
        folder, "absent_required", [xy_step("positive", "IN", "m"), xy_step("plain", "m", "OUT")]
    )
    optional = [xy_step("positive", "IN", "m"), step("given", {"X": "IN", "Z": "m"}, {"Y": "OUT"})]
    texts = [tensor("OUT", "BYTES")]
    add_ensemble(folder, "absent_optional", optional, outputs=texts)
    two_out = [xy_step("positive", "IN", "OUT"), xy_step("plain", "IN", "ALWAYS")]
    outputs = [tensor("OUT"), tensor("ALWAYS")]
    add_ensemble(folder, "absent_output", two_out, outputs=outputs)
    inputs = [tensor("IN"), tensor("MORE", extra_fields="optional: true")]
    passed = [step("given", {"X": "IN", "Z": "MORE"}, {"Y": "OUT"})]
    add_ensemble(folder, "optional_input", passed, inputs, texts)
    add_ensemble(folder, "tells", [xy_step("tell", "IN", "OUT")], outputs=texts)
    add_ensemble(folder, "into_batch", [xy_step("plain", "IN", "m"), xy_step("double", "m", "OUT")])
    out_of = [xy_step("add", "IN", "m"), xy_step("plain", "m", "OUT")]
    add_ensemble(folder, "out_of_batch", out_of, max_batch_size=1)
    reshaped = [
        tensor("IN", dims=[-1, 1], extra_fields="reshape: { shape: [ -1 ] }"),
        tensor("OUT", dims=[1, -1], extra_fields="reshape: { shape: [ -1 ] }"),
    ]
    add_ensemble(folder, "reshaped", two_steps, reshaped[:1], reshaped[1:], max_batch_size=4)
    add_ensemble(
        folder, "wrong_shape", [xy_step("plain", "IN", "m"), xy_step("fixed1", "m", "OUT")]
    )
    model_code = 'return self.response(Y=self.input(request, "X"))'
    add_model(folder, "fixed1", model_code, [tensor("X", dims=[4])], [tensor("Y", dims=[4])])
    _streams(folder)
    _conditions(folder)


def _streams(repository: Path) -> None:
    add_ensemble(repository, "counts", [xy_step("count", "IN", "OUT")])
    following_steps = [xy_step("count", "IN", "m"), xy_step("plain", "m", "OUT")]
    add_ensemble(repository, "counts_then", following_steps)
    large_steps = [xy_step("count_large", "IN", "m"), xy_step("plain", "m", "OUT")]
    add_ensemble(repository, "counts_large", large_steps)
    limited = "max_inflight_requests: 2"
    add_ensemble(repository, "counts_limited", large_steps, scheduling=limited)
    meeting_steps = [xy_step("count", "IN", "m"), step("sum", {"X": "m", "Z": "IN"}, {"Y": "OUT"})]
    add_ensemble(repository, "counts_meets", meeting_steps)


def _conditions(repository: Path) -> None:
    condition = 'parameters { key: "step[%d].condition" value { string_value: "%s" } }'
    steps = [
        xy_step("is_positive", "IN", "needed"),
        xy_step("plain", "IN", "a"),
        xy_step("plain", "a", "SOMETIMES"),
        xy_step("plain", "IN", "ALWAYS"),
    ]
    outputs = [tensor("SOMETIMES"), tensor("ALWAYS")]
    configured_condition = condition % (1, "needed")
    add_ensemble(repository, "conditional", steps, outputs=outputs, settings=configured_condition)
    inputs = [tensor("IN"), tensor("RUN", "BOOL")]
    steps = [xy_step("plain", "IN", "OUT"), xy_step("plain", "IN", "ALWAYS")]
    outputs = [tensor("OUT"), tensor("ALWAYS")]
    configured_condition = condition % (0, "RUN")
    add_ensemble(repository, "asked", steps, inputs, outputs, settings=configured_condition)
