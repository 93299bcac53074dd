"""The load-time checks of an ensemble's graph and step models, with Triton's texts."""

import re

import pytest

from shmserve.model_config import GraphProblem, ModelConfig, compose
from shmserve.model_config.source import key_text
from tests.rigs.marked_configs import parse_pbtxt


def config(text: str) -> ModelConfig:
    return parse_pbtxt(text)


def model(
    name: str,
    data_type: str = "TYPE_FP32",
    dims: str = "-1",
    fields: str = "",
    inputs: tuple[str, ...] = ("X",),
) -> ModelConfig:
    steps_text = "".join(
        f'input {{ name: "{input_name}" data_type: {data_type} dims: [ {dims} ] }} '
        for input_name in inputs
    )
    output_text = f'output {{ name: "Y" data_type: {data_type} dims: [ {dims} ] }}'
    return config(f'name: "{name}" backend: "python" {steps_text} {output_text} {fields}')


OPTIONAL = 'input { name: "Z" data_type: TYPE_FP32 dims: [ -1 ] optional: true }'
DECOUPLED = "model_transaction_policy { decoupled: true }"
MODELS = {
    "add": model("add"),
    "addb": model("addb", fields="max_batch_size: 2"),
    "int": model("int", "TYPE_INT32"),
    "four": model("four", dims="4"),
    "five": model("five", dims="5"),
    "two": model("two", inputs=("X", "Z")),
    "opt": model("opt", fields=OPTIONAL),
    "dec": model("dec", fields=DECOUPLED),
    "dec2": model("dec2", fields=DECOUPLED),
}


def step(name: str, inputs: str, outputs: str, version: int = -1) -> str:
    """Return a step; "X=IN Z=b" maps names of the model to tensors of the ensemble."""
    maps = ""
    for kind, pairs in (("input_map", inputs), ("output_map", outputs)):
        for pair in pairs.split():
            key, value = pair.split("=")
            maps += f'{kind} {{ key: "{key}" value: "{value}" }} '
    return f'step {{ model_name: "{name}" model_version: {version} {maps} }}'


def build_ensemble(*steps: str, fields: str = "", out: tuple[str, ...] = ("OUT",)) -> ModelConfig:
    """Return the ensemble "e" from IN to OUT, after checking it against the available models."""
    texts = "".join(
        f'output {{ name: "{output_name}" data_type: TYPE_FP32 dims: [ -1 ] }} '
        for output_name in out
    )
    ensemble = config(
        'name: "e" platform: "ensemble" input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } '
        f"{texts} ensemble_scheduling {{ {' '.join(steps)} }} {fields}"
    )
    names = [step.model_name for step in ensemble.ensemble_scheduling.step]
    versions = [step.model_version > 1 for step in ensemble.ensemble_scheduling.step]
    models = [
        None if newest else MODELS.get(name) for name, newest in zip(names, versions, strict=True)
    ]
    failures = ["version 1 is at UNAVAILABLE state: broken;" * (n == "broken") for n in names]
    return compose(ensemble, models, [name in MODELS for name in names], failures)


@pytest.mark.parametrize(
    ("steps", "fields", "key", "expected"),
    [
        ((step("nosuch", "X=IN", "Y=m"), step("nor", "X=m", "Y=OUT")), "", "step[0].model_name",
         "ensemble e contains models that are not available or ambiguous: nosuch, nor"),
        ((step("nosuch", "X=IN", "Y=m"), step("broken", "X=m", "Y=OUT")), "", "step[1].model_name",
         "ensemble 'e' depends on 'broken' which has no loaded version. Model 'broken' loading "
         "failed with error: version 1 is at UNAVAILABLE state: broken;"),
        ((step("add", "X=IN", "Y=OUT", version=7), ), "", "step[0].model_version",
         "ensemble 'e' depends on 'add' whose required version 7 is not loaded."),
        ((step("add", "Q=IN", "Y=OUT"), ), "", 'step[0].input_map["Q"]',
         "in ensemble e, ensemble tensor IN is mapping to non-existing input Q in model add"),
        ((step("add", "X=IN", "Q=OUT"), ), "", 'step[0].output_map["Q"]',
         "in ensemble e, ensemble tensor OUT is mapped from non-existing output Q in model add"),
        ((step("two", "X=IN", "Y=OUT"), ), "", "step[0].input_map",
         "in ensemble e, input Z in model two is not mapped to any ensemble tensors"),
        ((step("add", "X=IN", "Y=m"), step("int", "X=m", "Y=n"), step("add", "X=n", "Y=OUT")), "",
         'step[1].input_map["X"]',
         "in ensemble e, ensemble tensor m: inconsistent data type: TYPE_FP32 is inferred from "
         "model add while TYPE_INT32 is inferred from model int"),
        ((step("four", "X=IN", "Y=m"), step("five", "X=m", "Y=OUT")), "", 'step[1].input_map["X"]',
         "in ensemble e, ensemble tensor m: inconsistent shape: [4] is inferred from model four "
         "while [5] is inferred from model five"),
        ((step("addb", "X=IN", "Y=OUT"), ), "max_batch_size: 4", "max_batch_size",
         "ensemble e allows maximum batch size 4, but it contains model addb which only allows "
         "maximum batch size to be 2"),
        ((step("dec", "X=IN", "Y=a"), step("dec2", "X=IN", "Y=b"), step("two", "X=a Z=b", "Y=OUT")),
         "", "step[2]",
         "in ensemble e, step of model 'two' receives inputs originated from different "
         "decoupled models"),
        ((step("dec", "X=IN", "Y=OUT"), ), "response_cache { enable: true }",
         "response_cache.enable", "Response Cache does not currently support model e with "
         "'decoupled' transaction policy. Please disable the response cache."),
        ((step("add", "X=IN", "Y=m"), step("add", "X=IN", "Y=OUT")),
         'parameters { key: "step[1].condition" value { string_value: "m" } }',
         'parameters["step[1].condition"]',
         "in ensemble e, the condition of step 1, ensemble tensor m, is TYPE_FP32 and not "
         "TYPE_BOOL"),
    ],
)  # fmt: skip
def test_steps_that_do_not_fit_are_refused(
    steps: tuple[str, ...], fields: str, key: str, expected: str
) -> None:
    with pytest.raises(GraphProblem, match=f"^{re.escape(expected)}$") as caught:
        build_ensemble(*steps, fields=fields)
    assert key_text(caught.value.key).removeprefix("ensemble_scheduling.") == key


def test_an_optional_input_need_not_be_mapped() -> None:
    build_ensemble(step("opt", "X=IN", "Y=OUT"))


def test_batching_models_and_other_models_may_be_mixed() -> None:
    """A composing model's max_batch_size is 0 or at least the ensemble's."""
    build_ensemble(
        step("addb", "X=IN", "Y=m"), step("add", "X=m", "Y=OUT"), fields="max_batch_size: 2"
    )


@pytest.mark.parametrize(("name", "expected"), [("add", False), ("dec", True)])
@pytest.mark.parametrize("fields", ["", "model_transaction_policy { decoupled: true }"])
def test_an_ensemble_is_decoupled_if_a_step_is(name: str, expected: bool, fields: str) -> None:
    steps = (step(name, "X=IN", "Y=m"), step("add", "X=m", "Y=OUT"))
    ensemble = build_ensemble(*steps, fields=fields)
    assert ensemble.model_transaction_policy.decoupled is expected
    assert ensemble.HasField("model_transaction_policy")


def test_decoupled_and_single_tensors_may_be_joined() -> None:
    """Triton rejects this, because it counts the ensemble's inputs as another stream."""
    build_ensemble(step("dec", "X=IN", "Y=m"), step("two", "X=m Z=IN", "Y=OUT"))
