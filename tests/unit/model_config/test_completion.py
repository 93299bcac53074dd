"""The completion of a configuration by the server's defaults and by the model."""

import json
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.model_config import (
    ModelConfig,
    ModelDefaults,
    detect_backend,
    from_json,
    ignored_fields,
    merge_autocomplete,
    normalise,
    read_pbtxt,
    to_dict,
    warnings_of,
)
from shmserve.proto import model_config_pb2
from tests.rigs.marked_configs import PYTHON, parse_pbtxt, place
from tests.support.repositories import identity_config

RECORDED_CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("data").joinpath("triton_configs.json").read_text()
)
COMPLETED_CONFIG = {
    "max_batch_size": 4,
    "input": [
        {"name": "IN", "data_type": "TYPE_FP32", "dims": [-1, 3]},
        {"name": "MASK", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    ],
    "output": [{"name": "OUT", "data_type": "TYPE_BF16", "dims": [-1]}],
    "dynamic_batching": {},
}


@pytest.mark.parametrize(
    ("text", "files", "expected"),
    [
        ("", ["model.py"], ("python", "", "model.py")),
        ("", ["model.pt"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ("", ["model.pt2", "notes.txt"], ("pytorch", "pytorch_libtorch", "model.pt2")),
        ("", ["model.pt", "model.py"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ("", ["model.json"], ("vllm", "", "")),
        ("", ["model.json", "model.py"], ("python", "", "model.py")),
        ("", ["config.json", "pytorch_model.bin"], ("llm", "", "")),
        ("", ["config.json", "model.bin", "model.xml"], ("openvino", "", "")),
        ("", ["other"], ("", "", "")),
        ('platform: "pytorch_libtorch"', [], ("pytorch", "pytorch_libtorch", "model.pt")),
        ('platform: "tensorrt_plan"', ["model.py"], ("tensorrt", "tensorrt_plan", "")),
        ("", ["model.plan"], ("tensorrt", "", "")),
        ("", ["model.savedmodel"], ("tensorflow", "", "")),
        ('platform: "ensemble"', ["model.py"], ("", "ensemble", "")),
        ('backend: "pytorch"', ["model.py"], ("pytorch", "pytorch_libtorch", "model.py")),
        ('backend: "pytorch" runtime: "model.py"', ["model.pt"], ("pytorch", "", "model.py")),
        ('backend: "python"', ["x.py"], ("python", "", "model.py")),
        ('default_model_filename: "net.pt2"', [], ("pytorch", "pytorch_libtorch", "net.pt2")),
        ('default_model_filename: "net.py"', ["model.pt"], ("python", "", "net.py")),
        ('backend: "mine" default_model_filename: "a"', [], ("mine", "", "a")),
    ],
)
def test_the_backend_is_found(text: str, files: list[str], expected: tuple[str, str, str]) -> None:
    config = detect_backend(parse_pbtxt(text), "m", files)
    assert (config.backend, config.platform, config.default_model_filename) == expected
    assert config.name == "m"


@pytest.mark.parametrize(
    ("groups", "gpus", "expected"),
    [
        ("", 0, [("m", "KIND_CPU", 1, [])]),
        ("", 2, [("m", "KIND_GPU", 1, [0, 1])]),
        ("instance_group { count: 3 }", 0, [("m_0", "KIND_CPU", 3, [])]),
        ("instance_group { count: -3 }", 0, [("m_0", "KIND_CPU", 1, [])]),
        ("instance_group { gpus: 1 }", 2, [("m_0", "KIND_GPU", 1, [1])]),
        ("instance_group { gpus: 2 }", 2, [("m_0", "KIND_CPU", 1, [2])]),
        ("instance_group { kind: KIND_CPU }", 2, [("m_0", "KIND_CPU", 1, [])]),
        ("instance_group { kind: KIND_MODEL }", 2, [("m_0", "KIND_MODEL", 1, [])]),
        (
            'instance_group { name: "a" kind: KIND_GPU gpus: 0 } instance_group { kind: KIND_GPU }',
            2,
            [("a", "KIND_GPU", 1, [0]), ("m_1", "KIND_GPU", 1, [0, 1])],
        ),
    ],
)
def test_instances_are_resolved(
    groups: str, gpus: int, expected: list[tuple[str, str, int, list[int]]]
) -> None:
    config = to_dict(normalise(parse_pbtxt(groups), "m", gpus))
    resolved_groups = [
        (group["name"], group["kind"], group["count"], group["gpus"])
        for group in config["instance_group"]
    ]
    assert resolved_groups == expected


def test_the_servers_defaults_fill_only_unset_fields() -> None:
    defaults = ModelDefaults(dynamic_batching=True, max_batch_size=4, max_queue_delay_us=7)

    def fill_defaults(text: str) -> ModelConfig:
        return normalise(parse_pbtxt(text), "m", 0, defaults)

    open_ = fill_defaults("")
    assert open_.max_batch_size == 4
    assert list(open_.dynamic_batching.preferred_batch_size) == [4]
    assert open_.dynamic_batching.max_queue_delay_microseconds == 7
    assert not fill_defaults("max_batch_size: 0").HasField("dynamic_batching")
    assert fill_defaults("max_batch_size: 2").max_batch_size == 2
    set_ = fill_defaults("dynamic_batching { max_queue_delay_microseconds: 0 }")
    assert set_.dynamic_batching.max_queue_delay_microseconds == 0
    assert (
        fill_defaults("sequence_batching {}").WhichOneof("scheduling_choice") == "sequence_batching"
    )
    assert fill_defaults('platform: "ensemble" ensemble_scheduling {}').max_batch_size == 0
    assert normalise(parse_pbtxt(""), "m", 0, ModelDefaults()).max_batch_size == 0
    assert not normalise(parse_pbtxt("max_batch_size: 2"), "m", 0).HasField("dynamic_batching")


def test_the_servers_defaults_do_not_replace_the_zero_of_a_class() -> None:
    defaults = ModelDefaults(max_batch_size=4)
    config = parse_pbtxt('backend: "native"')
    merged = merge_autocomplete(config, {"max_batch_size": 0})
    assert normalise(merged, "m", 0, defaults).max_batch_size == 0


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ('input { name: "IN" @data_type: TYPE_INT32 }', "input[0].data_type",
         "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'IN', "
         "model provides TYPE_FP32"),
        ('output { name: "OUT" @dims: 3 }', "output[0].dims",
         "model 'm', tensor 'OUT': the model expects dims [-1] but the model configuration "
         "specifies dims [3]"),
        ("@max_batch_size: 8", "max_batch_size",
         "configuration specified max_batch_size 8, but in auto-complete-config function for "
         "model 'm' specified max_batch_size 4"),
        ("@sequence_batching {}", "sequence_batching",
         "Configuration specified scheduling_choice as 'sequence_batching', but "
         "auto-complete-config function for model 'm' tries to set scheduling_choice as "
         "'dynamic_batching'"),
    ],
)  # fmt: skip
def test_a_model_contradicting_its_configuration_fails(text: str, key: str, expected: str) -> None:
    text = PYTHON + text
    config, source = read_pbtxt(text.replace("@", ""), "f")
    with pytest.raises(InvalidArgument) as caught:
        merge_autocomplete(config, COMPLETED_CONFIG, source)
    assert caught.value.message == f"{place(text)}{key}: {expected}"


def test_completion_keeps_the_authors_values_but_raises_the_batch_size() -> None:
    config = parse_pbtxt(
        'name: "m" max_batch_size: 2 input { name: "IN" format: FORMAT_NHWC dims: [-1, 3] } '
        'output { name: "MORE" } dynamic_batching { preferred_batch_size: 1 }'
        "model_transaction_policy { decoupled: false }"
    )
    dict_before = to_dict(config)
    merged = merge_autocomplete(config, {**COMPLETED_CONFIG, "instance_group": [{"count": 9}]})
    assert to_dict(config) == dict_before
    assert merged.max_batch_size == 4
    assert [tensor.name for tensor in merged.input] == ["IN", "MASK"]
    assert merged.input[0].data_type == model_config_pb2.TYPE_FP32
    assert merged.input[0].format == model_config_pb2.ModelInput.FORMAT_NHWC
    assert merged.input[1].optional
    assert [tensor.name for tensor in merged.output] == ["MORE", "OUT"]
    assert list(merged.dynamic_batching.preferred_batch_size) == [1]
    assert not merged.instance_group
    with pytest.raises(InvalidArgument, match="trying to change decoupled property"):
        merge_autocomplete(config, {"model_transaction_policy": {"decoupled": True}})
    with pytest.raises(
        InvalidArgument, match=r"auto-completed configuration: input\[0\].dims\[0\]"
    ):
        merge_autocomplete(config, {"input": [{"name": "X", "dims": ["a"]}]})


def test_many_inputs_and_outputs_take_linear_time() -> None:
    """The supervisor is blocked meanwhile; the time is compared with parsing."""
    config = parse_pbtxt(identity_config("m", "FP32", [1], inputs=4000))
    completed = to_dict(config)
    start_s = process_time()
    from_json(completed)
    parse_s = process_time() - start_s
    start_s = process_time()
    assert merge_autocomplete(config, completed) == config
    assert process_time() - start_s < 4 * parse_s


def test_a_model_may_add_its_batching_strategy_and_no_other_parameter() -> None:
    config = parse_pbtxt(
        'name: "m" parameters { key: "target_p99_ms" value { string_value: "7" } }'
    )
    strategy_settings = {"batching_strategy": "adaptive", "target_p99_ms": "9", "other": "x"}
    strategy_settings["adapters"] = "french"  # of the backend vllm
    parameters = {name: {"string_value": value} for name, value in strategy_settings.items()}
    merged_parameters = merge_autocomplete(config, {"parameters": parameters}).parameters
    values = {name: merged_parameters[name].string_value for name in merged_parameters}
    strategy = {"batching_strategy": "adaptive", "target_p99_ms": "7"}
    assert values == {**strategy, "adapters": "french"}


@pytest.mark.parametrize(("backend", "ignored"), [("python", ["runtime"]), ("pytorch", [])])
def test_a_runtime_has_an_effect_for_pytorch_only(backend: str, ignored: list[str]) -> None:
    config = parse_pbtxt(f'backend: "{backend}" runtime: "model.py"')
    assert ignored_fields(normalise(config, "m", 0)) == ignored


def test_fields_without_effect_are_listed() -> None:
    config = normalise(parse_pbtxt(RECORDED_CONFIGS["rich"]["pbtxt"]), "rich", 0)
    assert ignored_fields(config) == [
        "batch_input", "batch_output", "cc_model_filenames", "metric_tags", "model_operations",
        "optimization.graph", "optimization.cuda", "optimization.execution_accelerators",
        "optimization.priority", "optimization.input_pinned_memory",
        "instance_group[1].host_policy",
    ]  # fmt: skip
    assert (
        ignored_fields(normalise(parse_pbtxt(RECORDED_CONFIGS["simple"]["pbtxt"]), "simple", 0))
        == []
    )


def test_unlikely_values_are_warned_of() -> None:
    config = parse_pbtxt(
        """instance_group [ { count: 2 passive: true }, { count: -1 } ]
        dynamic_batching { }
        model_warmup [ { name: "a" batch_size: 1 }, { name: "b" } ]
        parameters { key: "batching_strateg" value { string_value: "adaptive" } }
        parameters { key: "execution_timeout_second" value { string_value: "1" } }
        parameters { key: "my_own" value { string_value: "${x}" } }"""
    )
    assert warnings_of(config, normalise(config, "m", 0)) == [
        "instance_group[1].count: -1 is replaced by the default, because a count must be at "
        "least 1",
        "instance_group[0].passive: no effect: the instances receive requests, unlike passive "
        "instances of Triton",
        "parameters: 'batching_strateg' is unknown; did you mean 'batching_strategy'?",
        "parameters: 'execution_timeout_second' is unknown; did you mean "
        "'execution_timeout_seconds'?",
        "parameters['my_own']: '${x}' is a placeholder of a template; fill it in",
        "model_warmup[1]: no effect because batch_size is 0",
        "dynamic_batching: no effect because max_batch_size is 0",
    ]
    config = parse_pbtxt("instance_group { } max_batch_size: 1 dynamic_batching { }")
    assert warnings_of(config, config) == []
    config = parse_pbtxt("sequence_batching { control_input { control { } control { } } }")
    (warning,) = warnings_of(config, config)
    assert "only one kind can set a tensor" in warning


@pytest.mark.parametrize(("config_text", "count"), [("", 3), ("instance_group { count: 2 }", 2)])
def test_a_model_sets_its_instances_if_not_configured(config_text: str, count: int) -> None:
    config, source = read_pbtxt(f'backend: "native" {config_text}', "m/config.pbtxt")
    completed = {"instance_group": [{"count": 3}]}
    merged_config = merge_autocomplete(normalise(config, "m", 0), completed, source)
    assert [group.count for group in merged_config.instance_group] == [count]
