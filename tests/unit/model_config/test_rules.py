"""Every rule of a configuration, with Triton's text, its key, and the key's position."""

from pathlib import Path

import pytest

from shmserve.errors import InvalidArgument
from shmserve.model_config import LoadProblem, normalise, validate
from tests.rigs.marked_configs import PYTHON, TENSORS, parse_pbtxt, place, positions, problems

DIM_TEXT = "dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m"
BATCH = "max_batch_size: 4 " + TENSORS
DYNAMIC_BATCHING = BATCH + "dynamic_batching { "
DELAY_POLICY = "value { timeout_action: DELAY default_timeout_microseconds: 1 }"
NO_DELAY = (
    "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m"
)
LEVEL = "priority_levels: 1 default_priority_level: 1 "
METRICS = (
    TENSORS + 'model_metrics { metric_control { metric_identifier { family: "f" } '
    "histogram_options { buckets: [ %s ] } } }"
)
BUCKETS = "model_metrics.metric_control[0].histogram_options.buckets"
SORTED_ERROR = "histogram buckets must be finite and in ascending order for m"
STRATEGY = 'parameters { key: "batching_strategy" value { string_value: "%s" } }'
TARGET = 'parameters { key: "target_p99_ms" value { string_value: "%s" } }'
IDLE_UNLOAD = 'parameters { key: "idle_unload_secs" value { string_value: "%s" } }'
STREAMS = 'parameters { key: "max_streams" value { string_value: "%s" } }'
MIN_INSTANCES = 'parameters { key: "min_instances" value { string_value: "%s" } }'
MAX_INSTANCES = 'parameters { key: "max_instances" value { string_value: "%s" } }'
WARMUP_BLOCK = 'model_warmup { name: "s" batch_size: 1 inputs { key: "I" value { %s } } }'
RULES = [
    (METRICS % "1, 2.5, @2.5, 3", f"{BUCKETS}[2]", SORTED_ERROR),
    (METRICS % "1, @inf", f"{BUCKETS}[1]", SORTED_ERROR),
    (METRICS % "@nan", f"{BUCKETS}[0]", SORTED_ERROR),
    (TENSORS + 'model_metrics { @metric_control { metric_identifier { family: "f" } } }',
     "model_metrics.metric_control[0]", "metric control must specify 'histogram_options' for m"),
    (TENSORS + "model_metrics { @metric_control { histogram_options { buckets: 1 } } }",
     "model_metrics.metric_control[0]", "metric control must specify 'metric_identifier' for m"),
    (METRICS.replace('metric_identifier { family: "f"', "@metric_identifier {") % "1",
     "model_metrics.metric_control[0].metric_identifier",
     "metric identifier must specify non-empty 'family' for m"),
    (METRICS.replace("buckets", "@buckets") % "", BUCKETS,
     "histogram options must specify non-empty 'buckets' for m"),
    ("@max_batch_size: -1" + TENSORS, "max_batch_size",
     "'max_batch_size' must be non-negative value for m"),
    ("@input { data_type: TYPE_FP32 dims: 1 }", "input[0].name",
     "model input must specify 'name' for m"),
    ('@input { name: "I" dims: 1 }', "input[0].data_type",
     "model input 'I' must specify 'data_type' for m"),
    ('@input { name: "I" data_type: TYPE_FP32 }', "input[0].dims",
     "model input 'I' must specify 'dims' for m"),
    ('output [\n @{ name: "O" data_type: TYPE_FP32 }\n]', "output[0].dims",
     "model output 'O' must specify 'dims' for m"),
    ('input { name: "I" data_type: TYPE_FP32 @dims: 0 }', "input[0].dims[0]",
     f"model input 'I' {DIM_TEXT}"),
    ('input { name: "I" data_type: TYPE_FP32 dims: [1, @-2] }', "input[0].dims[1]",
     f"model input 'I' {DIM_TEXT}"),
    (TENSORS + 'input { @name: "I" data_type: TYPE_FP32 dims: 1 }', "input[1].name",
     "model input 'I' is specified more than once for m"),
    ('input { name: "I" data_type: TYPE_FP32 dims: 1 @format: FORMAT_NHWC }', "input[0].format",
     "model input NHWC/NCHW require 3 dims for m"),
    ('input { name: "I" data_type: TYPE_FP32 dims: 1 @is_shape_tensor: true }',
     "input[0].is_shape_tensor", "shape tensors are only supported for TensorRT platform for m"),
    ('output { name: "I" data_type: TYPE_FP32 dims: 1 @is_non_linear_format_io: true }',
     "output[0].is_non_linear_format_io",
     "Non-linear IO format is only supported for the TensorRT platform for m"),
    (DYNAMIC_BATCHING + "@preferred_batch_size: 0 }", "dynamic_batching.preferred_batch_size[0]",
     "dynamic batching preferred size must be positive for m"),
    (DYNAMIC_BATCHING + "preferred_batch_size: 4 @preferred_batch_size: 5 }",
     "dynamic_batching.preferred_batch_size[1]",
     "dynamic batching preferred size must be <= max batch size for m"),
    (BATCH + "@dynamic_batching { priority_levels: 2 }", "dynamic_batching.default_priority_level",
     "default priority level must be in range [1, 2] for m"),
    (DYNAMIC_BATCHING + LEVEL + "@priority_queue_policy { key: 3 value {} } }",
     "dynamic_batching.priority_queue_policy[3]",
     "priority queue policy must have priority level in range [1, 1] for m"),
    (DYNAMIC_BATCHING + "preserve_ordering: true @priority_levels: 2 default_priority_level: 1 }",
     "dynamic_batching.priority_levels",
     "Only one priority level is allowed when 'preserve_ordering' is true for m"),
    (DYNAMIC_BATCHING + "preserve_ordering: true @default_queue_policy " + DELAY_POLICY[6:] + " }",
     "dynamic_batching.default_queue_policy", NO_DELAY),
    (
        DYNAMIC_BATCHING
        + "preserve_ordering: true "
        + LEVEL
        + "priority_queue_policy [ @{ key: 1 "
        + DELAY_POLICY
        + "} ] }",
        "dynamic_batching.priority_queue_policy[1]",
        NO_DELAY,
    ),
    (DYNAMIC_BATCHING + "} " + "@" + STRATEGY % "fast", 'parameters["batching_strategy"]',
     "parameter 'batching_strategy' must be one of 'prefer_batch', 'prefer_latency', "
     "'adaptive' for m, found 'fast'"),
    (DYNAMIC_BATCHING + "} " + "@" + STRATEGY % "adaptive", 'parameters["batching_strategy"]',
     "parameter 'batching_strategy' is 'adaptive' for m, which needs the parameter "
     "'target_p99_ms', a number of milliseconds"),
    (BATCH + "@" + STRATEGY % "prefer_latency", 'parameters["batching_strategy"]',
     "parameter 'batching_strategy' is 'prefer_latency' for m, which has no "
     "'dynamic_batching': add that block, or remove the parameter"),
    *((DYNAMIC_BATCHING + "} " + STRATEGY % "adaptive" + " @" + TARGET % value,
        'parameters["target_p99_ms"]',
        "parameter 'target_p99_ms' must be a number of milliseconds from 0.001 to 86400000 "
        f"(a day) for m, found '{value}'") for value in ("", "soon", "0", "-1", "nan", "inf",
        "1e9", "1e-300", "1_000", " 30 ")),
    *(
        (
            BATCH + "@" + STREAMS % value,
            'parameters["max_streams"]',
            f"parameter 'max_streams' must be an integer from 1 to 65536 for m, found '{value}'",
        )
        for value in ("0", "65537", "many", "1.5")
    ),
    *((BATCH + "@" + IDLE_UNLOAD % value, 'parameters["idle_unload_secs"]',
        f"parameter 'idle_unload_secs' must be a number of seconds from 0 to 1000000 for m, "
        f"found '{value}'") for value in ("", "soon", "-1", "nan", "1000001")),
    (DYNAMIC_BATCHING + "} " + STRATEGY % "prefer_batch" + " @" + TARGET % "5",
     'parameters["target_p99_ms"]',
     "parameter 'target_p99_ms' for m requires the parameter 'max_instances', or "
     "'batching_strategy' with the value 'adaptive' (found: 'prefer_batch')"),
    (DYNAMIC_BATCHING + "} @" + TARGET % "5", 'parameters["target_p99_ms"]',
     "parameter 'target_p99_ms' for m requires the parameter 'max_instances', or "
     "'batching_strategy' with the value 'adaptive' (found: none)"),
    *(
        (
            BATCH + "@" + MAX_INSTANCES % value,
            'parameters["max_instances"]',
            f"parameter 'max_instances' must be an integer from 1 to 4096 for m, found '{value}'",
        )
        for value in ("0", "4097", "many", "1.5")
    ),
    (BATCH + "@" + MIN_INSTANCES % "2", 'parameters["min_instances"]',
     "parameter 'min_instances' for m requires the parameter 'max_instances'"),
    (BATCH + MAX_INSTANCES % "2" + " @" + MIN_INSTANCES % "3", 'parameters["min_instances"]',
     "parameter 'min_instances' for m must be at most 'max_instances' (2), found 3"),
    (BATCH + "sequence_batching { } @" + MAX_INSTANCES % "2", 'parameters["max_instances"]',
     "parameter 'max_instances' requires a model whose requests are independent of each "
     "other, found a model with sequences: m"),
    (TENSORS + MAX_INSTANCES % "2" + " instance_group [ { count: 1 }, @{ count: 1 } ]",
     "instance_group[1]", "only one instance group is allowed for m, which has the parameter "
     "'max_instances', found 2"),
    (TENSORS + MAX_INSTANCES % "2" + " instance_group { @count: 3 }", "instance_group[0].count",
     "at most 2 instances are allowed for m, which has the parameter 'max_instances', found 3"),
    (TENSORS + "instance_group { @kind: KIND_GPU }", "instance_group[0].kind",
     "instance group m_0 of model m has kind KIND_GPU but no GPUs are available"),
    (TENSORS + "instance_group { kind: KIND_GPU @gpus: 3 }", "instance_group[0].gpus[0]",
     "instance group m_0 of model m specifies invalid or unsupported gpu id 3. "
     "GPUs with at least the minimum required CUDA compute compatibility of 6.000000 are: "),
    (TENSORS + "instance_group { @count: 2000000000 }", "instance_group[0].count",
     "instance group m_0 of model m has count 2000000000, more than 4096"),
    (TENSORS + "instance_group { kind: KIND_CPU @gpus: 0 }", "instance_group[0].gpus",
     "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs"),
    (TENSORS + "instance_group { kind: KIND_MODEL @gpus: [0, 1] }", "instance_group[0].gpus",
     "instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs"),
    (TENSORS + 'instance_group { kind: KIND_CPU @profile: "1" }', "instance_group[0].profile",
     "instance group m_0 of model m and platform specifies profile field which is only "
     "supported for TensorRT models"),
    (TENSORS + 'batch_input { target_name: "x" @data_type: TYPE_INT64 source_input: "I" }',
     "batch_input[0].data_type", "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"),
    (TENSORS + '@batch_input { target_name: "x" data_type: TYPE_INT32 }',
     "batch_input[0].source_input",
     "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m"),
    (TENSORS + '@batch_input { data_type: TYPE_INT32 source_input: "I" }',
     "batch_input[0].target_name", "batch input must specify 'target_name' for m"),
    (TENSORS + 'batch_input { target_name: [@"I"] data_type: TYPE_INT32 source_input: "I" }',
     "batch_input[0].target_name[0]",
     "batch input 'I' is created by the server and cannot be an input of clients for m"),
    (TENSORS + 'batch_output { target_name: "O" @source_input: "X" }',
     "batch_output[0].source_input[0]", "unknown source input name 'X' for m"),
    (TENSORS + 'batch_output { target_name: [@"X"] source_input: "I" }',
     "batch_output[0].target_name[0]", "unknown target output name 'X' for m"),
    (TENSORS + 'batch_output { target_name: ["O", @"O"] source_input: "I" }',
     "batch_output[0].target_name[1]", "target output name 'O' can only be specified once for m"),
    (TENSORS + (WARMUP_BLOCK % "data_type: TYPE_FP32 dims: [-1] zero_data: true").replace("inputs",
     "@inputs"), 'model_warmup[0].inputs["I"]',
     "warmup setting expects all variable-size dimensions are specified for input 'I' for m"),
    (TENSORS + (WARMUP_BLOCK % "data_type: TYPE_FP32 dims: [2]").replace("inputs", "@inputs"),
     'model_warmup[0].inputs["I"]',
     "warmup setting expects input 'I' to have input_data_type set for m"),
    (TENSORS + (WARMUP_BLOCK % "dims: [2] zero_data: true").replace("inputs", "@inputs"),
     'model_warmup[0].inputs["I"]', "warmup setting of input 'I' must specify 'data_type' for m"),
    (
        TENSORS
        + (WARMUP_BLOCK % "data_type: TYPE_FP32 dims: [2] zero_data: true").replace(
            "batch_size: 1", "@batch_size: 2"
        ),
        "model_warmup[0].batch_size",
        "warmup sample 's': batch size 2, max allowed is 1 for m",
    ),
    (TENSORS + "response_cache { @enable: true } sequence_batching {}", "response_cache.enable",
     "Response Cache does not currently support model m with sequence batching scheduler. "
     "Please disable the response cache."),
    (TENSORS + "response_cache { @enable: true } model_transaction_policy { decoupled: true }",
     "response_cache.enable",
     "Response Cache does not currently support model m with 'decoupled' transaction policy. "
     "Please disable the response cache."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "key", "expected"), RULES)
def test_each_rule_has_tritons_text(text: str, key: str, expected: str) -> None:
    assert problems(PYTHON + text) == f"{place(PYTHON + text)}{key}: {expected}"


def test_every_broken_rule_is_named() -> None:
    text = (
        PYTHON
        + """@max_batch_size: -1
@input {
  name: "I"
  dims: [ 1, @0,
          @-3 ]
}
output [ @{ name: "O" } ]
dynamic_batching { @preferred_batch_size: 5 }
instance_group [ { @kind: KIND_GPU } ]
"""
    )
    size, first_input, dim, second_input, output_position, preferred, kind = positions(text)
    assert problems(text).splitlines() == [
        f"{size}max_batch_size: 'max_batch_size' must be non-negative value for m",
        f"{preferred}dynamic_batching.preferred_batch_size[0]: "
        "dynamic batching preferred size must be <= max batch size for m",
        f"{first_input}input[0].data_type: model input 'I' must specify 'data_type' for m",
        f"{dim}input[0].dims[1]: model input 'I' {DIM_TEXT}",
        f"{second_input}input[0].dims[2]: model input 'I' {DIM_TEXT}",
        f"{output_position}output[0].data_type: model output 'O' must specify 'data_type' for m",
        f"{output_position}output[0].dims: model output 'O' must specify 'dims' for m",
        f"{kind}instance_group[0].kind: "
        "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
    ]


def test_fields_that_a_model_may_complete_are_no_errors() -> None:
    text = PYTHON + 'input { name: "I" } batch_output { target_name: "O" source_input: "I" }'
    assert problems(text, complete=False) == ""
    assert "must specify 'dims'" in problems(text)
    assert "dimension must be" in problems(PYTHON + 'input { name: "I" dims: 0 }', complete=False)


def test_a_warmup_sample_without_a_batch_size_is_not_checked() -> None:
    text = PYTHON + TENSORS + WARMUP_BLOCK % "dims: -1"
    assert problems(text.replace("batch_size: 1", "")) == ""


def test_gpus_are_checked_against_the_hosts() -> None:
    text = PYTHON + TENSORS + "instance_group { kind: KIND_GPU gpus: [0, 2] }"
    assert problems(text, gpus=3) == ""
    assert problems(text, gpus=2).endswith(
        "invalid or unsupported gpu id 2. GPUs with at least the minimum required CUDA compute "
        "compatibility of 6.000000 are: 0, 1"
    )


@pytest.mark.parametrize(
    ("dims", "shape", "size", "error"),
    [
        ([4], [2, 2], 0, ""),
        ([2, 4, -1, 6], [8, -1, 1, 6], 0, ""),
        ([1], [], 1, ""),
        ([1, 1], [], 1, ""),
        ([-1], [1, -1], 0, ""),
        ([1], [], 0, "cannot have empty reshape for non-batching model as scalar tensors are not"),
        ([2], [], 1, "has different size for dims and reshape"),
        ([4], [3], 0, "has different size for dims and reshape"),
        ([4], [-1], 0, "has different size for dims and reshape"),
        ([-1, 2], [-1, 3], 0, "has different size for dims and reshape"),
        ([-1, 2], [-1, -1], 0, "has different number of variable-size dimensions for dims and"),
        ([4], [0], 0, "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size"),
    ],
)
def test_a_reshape_keeps_the_elements(
    dims: list[int], shape: list[int], size: int, error: str
) -> None:
    text = (
        f'{PYTHON} max_batch_size: {size} input {{ name: "I" data_type: TYPE_FP32 dims: {dims} '
        f"reshape {{ @shape: {shape} }} }}"
    )
    key = "input[0].reshape.shape"
    if shape == [0]:
        key, text = f"{key}[0]", text.replace("@shape: [", "shape: [@")
    errors = problems(text)
    assert errors.startswith(f"{place(text)}{key}: model input 'I' {error}" if error else "")
    assert bool(errors) == bool(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TENSORS, "backend: must specify 'platform' or 'backend' for 'm'"),
        ('@platform: "tensor_plan"' + TENSORS,
         "platform: unexpected platform type 'tensor_plan' for m"),
        ('backend: "pytorch" @platform: "onnxruntime_onnx"' + TENSORS,
         "platform: unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, pytorch"),
        ('platform: "pytorch_libtorch" backend: "pytorch"' + TENSORS, ""),
        ('backend: "mine"' + TENSORS, ""),
    ],
)  # fmt: skip
def test_platform_and_backend_must_agree(text: str, expected: str) -> None:
    assert problems(text) == (place(text) + expected if expected else "")


def test_labels_lie_in_the_models_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "labels.txt").write_text("a\n")
    (tmp_path / "secret.txt").write_text("a\n")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    text = PYTHON + 'output {{ name: "O" data_type: TYPE_FP32 dims: 1 @label_filename: "{}" }}'
    key = f"{place(text.format(''))}output[0].label_filename: "
    assert problems(text.format("labels.txt"), folder=folder) == ""
    assert problems(text.format("link.txt"), folder=folder) == ""
    for outside in ("../secret.txt", "/etc/passwd"):
        assert problems(text.format(outside), folder=folder) == (
            f"{key}label file '{outside}' of output 'O' for m must be inside the model directory"
        )
    assert problems(text.format("none.txt"), folder=folder).endswith("for m does not exist")
    assert problems(text.format("a\\0b"), folder=folder).endswith("for m is not a valid path")


@pytest.mark.parametrize("field", ["default_model_filename", "runtime"])
@pytest.mark.parametrize("file", ["../2/model.py", "/etc/passwd", "a/../../x.py", "..", "a\\0b"])
def test_model_files_lie_in_the_version_folder(field: str, file: str) -> None:
    """A configuration names no file outside of the model."""
    text = f'{PYTHON} {TENSORS} @{field}: "{file}"'
    errors = problems(text)
    expected = f"'{field}' for m must be inside the version folder, got: "
    assert errors.startswith(f"{place(text)}{field}: {expected}")
    for inside_file in ("model.py", "code/my..model.py"):
        assert problems(f'{PYTHON} {TENSORS} {field}: "{inside_file}"') == ""


STATE = """sequence_batching { state {
    input_name: "s" output_name: "t" data_type: TYPE_INT32 dims: 1
    initial_state { name: "i" data_type: TYPE_INT32 dims: [%s] zero_data: true } } }"""


@pytest.mark.parametrize(
    ("text", "is_version_error"),
    [
        ("instance_group { kind: KIND_GPU }", True),
        ('input { name: "I" dims: 0 }', True),
        ('input { name: "I" dims: 0 } max_batch_size: -1', False),
        (STATE % "1, 1", True),
        (STATE.replace("dims: 1", "dims: 0") % "1", False),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 5 }", False),
    ],
)
def test_errors_of_a_version_and_of_the_file_differ(text: str, is_version_error: bool) -> None:
    config = normalise(parse_pbtxt(PYTHON + text), "m", 0)
    with pytest.raises(InvalidArgument) as caught:
        validate(config, gpu_count=0, is_complete=False)
    assert isinstance(caught.value, LoadProblem) is is_version_error
