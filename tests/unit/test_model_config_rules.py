"""Every rule of a configuration, with Triton's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.errors import InvalidArgument
from shmserve.model_config import (
    LoadProblem,
    normalise,
    parse_pbtxt,
    validate,
)

IO = """
input { name: "I" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "O" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PYTHON = 'name: "m" backend: "python" '


def problems(text: str, *, complete: bool = True, gpus: int = 0, folder: Path | None = None) -> str:
    """What `validate` says of a configuration, "" when nothing."""
    config = normalise(parse_pbtxt(text), "m", gpus)
    try:
        validate(config, gpu_count=gpus, complete=complete, model_dir=folder)
    except InvalidArgument as error:
        return error.message
    return ""


# --- rules -------------------------------------------------------------------------------------

DIM_TEXT = "dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m"
BATCH = "max_batch_size: 4 " + IO
RULES = [
    ("max_batch_size: -1" + IO, "'max_batch_size' must be non-negative value for m"),
    ("input { data_type: TYPE_FP32 dims: 1 }", "model input must specify 'name' for m"),
    ('input { name: "I" dims: 1 }', "model input 'I' must specify 'data_type' for m"),
    ('input { name: "I" data_type: TYPE_FP32 }', "model input 'I' must specify 'dims' for m"),
    ('output { name: "O" data_type: TYPE_FP32 }', "model output 'O' must specify 'dims' for m"),
    ('input { name: "I" data_type: TYPE_FP32 dims: 0 }', f"model input 'I' {DIM_TEXT}"),
    ('input { name: "I" data_type: TYPE_FP32 dims: -2 }', f"model input 'I' {DIM_TEXT}"),
    (
        IO + 'input { name: "I" data_type: TYPE_FP32 dims: 1 }',
        "model input 'I' is specified more than once for m",
    ),
    (
        'input { name: "I" data_type: TYPE_FP32 dims: 1 format: FORMAT_NHWC }',
        "model input NHWC/NCHW require 3 dims for m",
    ),
    (
        'input { name: "I" data_type: TYPE_FP32 dims: 1 is_shape_tensor: true }',
        "shape tensors are only supported for TensorRT platform for m",
    ),
    (
        'output { name: "I" data_type: TYPE_FP32 dims: 1 is_non_linear_format_io: true }',
        "Non-linear IO format is only supported for the TensorRT platform for m",
    ),
    (
        BATCH + "dynamic_batching { preferred_batch_size: 0 }",
        "dynamic batching preferred size must be positive for m",
    ),
    (
        BATCH + "dynamic_batching { preferred_batch_size: 5 }",
        "dynamic batching preferred size must be <= max batch size for m",
    ),
    (
        BATCH + "dynamic_batching { priority_levels: 2 }",
        "default priority level must be in range [1, 2] for m",
    ),
    (
        BATCH + "dynamic_batching { priority_levels: 2 default_priority_level: 1 "
        "priority_queue_policy { key: 3 value {} } }",
        "priority queue policy must have priority level in range [1, 2] for m",
    ),
    (
        BATCH + "dynamic_batching { preserve_ordering: true priority_levels: 2 "
        "default_priority_level: 1 }",
        "Only one priority level is allowed when 'preserve_ordering' is true for m",
    ),
    (
        BATCH + "dynamic_batching { preserve_ordering: true default_queue_policy "
        "{ timeout_action: DELAY default_timeout_microseconds: 1 } }",
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
    ),
    (
        IO + "instance_group { kind: KIND_GPU }",
        "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
    ),
    (
        IO + "instance_group { kind: KIND_GPU gpus: 3 }",
        "instance group m_0 of model m specifies invalid or unsupported gpu id 3. Available GPUs "
        "are: ",
    ),
    (
        IO + "instance_group { count: 2000000000 }",
        "instance group m_0 of model m has count 2000000000, more than 4096",
    ),
    (
        IO + "instance_group { kind: KIND_CPU gpus: 0 }",
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
    ),
    (
        IO + "instance_group { kind: KIND_MODEL gpus: 0 }",
        "instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs",
    ),
    (
        IO + 'instance_group { kind: KIND_CPU profile: "1" }',
        "instance group m_0 of model m and platform specifies profile field which is only "
        "supported for TensorRT models",
    ),
    (
        IO + 'instance_group { name: "a" } instance_group { name: "a" }',
        "instance group a of model m is specified more than once",
    ),
    (
        IO + 'batch_input { target_name: "x" data_type: TYPE_INT64 source_input: "I" }',
        "batch input data type must be TYPE_INT32 or TYPE_FP32 for m",
    ),
    (
        IO + 'batch_input { target_name: "x" data_type: TYPE_INT32 }',
        "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m",
    ),
    (
        IO + 'batch_output { target_name: "O" source_input: "X" }',
        "unknown source input name 'X' for m",
    ),
    (
        IO + 'batch_output { target_name: ["X"] source_input: "I" }',
        "unknown target output name 'X' for m",
    ),
    (
        IO + 'batch_output { target_name: ["O", "O"] source_input: "I" }',
        "target output name 'O' can only be specified once for m",
    ),
    (
        IO + "response_cache { enable: true } sequence_batching {}",
        "Response Cache does not currently support model m with sequence batching scheduler. "
        "Please disable the response cache.",
    ),
    (
        IO + "response_cache { enable: true } model_transaction_policy { decoupled: true }",
        "Response Cache does not currently support model m with 'decoupled' transaction policy. "
        "Please disable the response cache.",
    ),
]


@pytest.mark.parametrize(("text", "expected"), RULES)
def test_each_rule_has_tritons_text(text: str, expected: str) -> None:
    assert problems(PYTHON + text) == expected


def test_every_broken_rule_is_named() -> None:
    found = problems(
        PYTHON + 'max_batch_size: -1 input { name: "I" dims: 0 } output { name: "O" }'
        "dynamic_batching { preferred_batch_size: 5 } instance_group { kind: KIND_GPU }"
    )
    assert found.splitlines() == [
        "'max_batch_size' must be non-negative value for m",
        "dynamic batching preferred size must be <= max batch size for m",
        "model input 'I' must specify 'data_type' for m",
        f"model input 'I' {DIM_TEXT}",
        "model output 'O' must specify 'data_type' for m",
        "model output 'O' must specify 'dims' for m",
        "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
    ]


def test_what_a_model_may_still_complete_is_no_mistake_yet() -> None:
    text = PYTHON + 'input { name: "I" } batch_output { target_name: "O" source_input: "I" }'
    assert problems(text, complete=False) == ""
    assert "must specify 'dims'" in problems(text)
    assert "dimension must be" in problems(PYTHON + 'input { name: "I" dims: 0 }', complete=False)


def test_gpus_are_checked_against_the_hosts() -> None:
    text = PYTHON + IO + "instance_group { kind: KIND_GPU gpus: [0, 2] }"
    assert problems(text, gpus=3) == ""
    assert problems(text, gpus=2).endswith(
        "invalid or unsupported gpu id 2. Available GPUs are: 0, 1"
    )


@pytest.mark.parametrize(
    ("dims", "shape", "batch", "expected"),
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
    dims: list[int], shape: list[int], batch: int, expected: str
) -> None:
    found = problems(
        f'{PYTHON} max_batch_size: {batch} input {{ name: "I" data_type: TYPE_FP32 dims: {dims} '
        f"reshape {{ shape: {shape} }} }}"
    )
    assert found.startswith(f"model input 'I' {expected}" if expected else "")
    assert bool(found) == bool(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (IO, "must specify 'platform' or 'backend' for 'm'"),
        ('platform: "tensorrt_plan"' + IO, "unexpected platform type 'tensorrt_plan' for m"),
        (
            'platform: "onnxruntime_onnx" backend: "pytorch"' + IO,
            "unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, pytorch",
        ),
        ('platform: "pytorch_libtorch" backend: "pytorch"' + IO, ""),
        ('backend: "mine"' + IO, ""),
    ],
)
def test_platform_and_backend_go_together(text: str, expected: str) -> None:
    assert problems(text) == expected


def test_labels_lie_in_the_models_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "labels.txt").write_text("a\n")
    (tmp_path / "secret.txt").write_text("a\n")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    text = PYTHON + 'output {{ name: "O" data_type: TYPE_FP32 dims: 1 label_filename: "{}" }}'
    assert problems(text.format("labels.txt"), folder=folder) == ""
    for outside in ("../secret.txt", "link.txt", "/etc/passwd"):
        assert problems(text.format(outside), folder=folder) == (
            f"label file '{outside}' of output 'O' for m must be inside the model directory"
        )
    assert problems(text.format("none.txt"), folder=folder).endswith("for m does not exist")
    assert problems(text.format("a\\0b"), folder=folder).endswith("for m is not a valid path")


@pytest.mark.parametrize("field", ["default_model_filename", "runtime"])
@pytest.mark.parametrize("file", ["../2/model.py", "/etc/passwd", "a/../../x.py", "..", "a\\0b"])
def test_model_files_lie_in_the_version_folder(field: str, file: str) -> None:
    """R17: nothing that a configuration names is outside of the model."""
    found = problems(f'{PYTHON} {IO} {field}: "{file}"')
    assert found.startswith(f"'{field}' for m must be inside the version folder, got: ")
    for inside in ("model.py", "code/my..model.py"):
        assert problems(f'{PYTHON} {IO} {field}: "{inside}"') == ""


SEQUENCE = 'sequence_batching { control_input { name: "C" control { kind: CONTROL_SEQUENCE_%s } } }'
STATE = 'sequence_batching { state { input_name: "s" data_type: TYPE_INT32 dims: [%s] %s } }'
INITIAL = 'initial_state { name: "i" data_type: TYPE_INT32 dims: [%s] zero_data: true }'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SEQUENCE % "START bool_false_true: [false, true]", ""),
        (SEQUENCE % "CORRID data_type: TYPE_STRING", ""),
        (STATE % ("-1, 2", INITIAL % "3, 2"), ""),
        (
            SEQUENCE % "CORRID data_type: TYPE_FP32",
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types "
            "are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        ),
        (
            SEQUENCE % "START",
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or "
            "'bool_false_true' for CONTROL_SEQUENCE_START for m",
        ),
        (
            SEQUENCE % "START int32_false_true: [0,1] fp32_false_true: [0,1]",
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' "
            "and 'bool_false_true' for CONTROL_SEQUENCE_START for m",
        ),
        (
            SEQUENCE % "END int32_false_true: [0,1,2]",
            "sequence batching control 'int32_false_true' must have exactly 2 entries for "
            "CONTROL_SEQUENCE_END for m",
        ),
        (
            SEQUENCE % "CORRID data_type: TYPE_INT32 int32_false_true: [0,1]",
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
            "'bool_false_true' for CONTROL_SEQUENCE_CORRID for m",
        ),
        (
            SEQUENCE.replace('name: "C"', "") % "END int32_false_true: [0,1]",
            "sequence batching control tensor must have a name for m",
        ),
        (
            SEQUENCE.replace("} }", "} control { kind: CONTROL_SEQUENCE_END %s } }", 1)
            % ("END int32_false_true: [0,1]", "int32_false_true: [0,1]"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_END tensors for m",
        ),
        (
            "sequence_batching { direct { minimum_slot_utilization: 1.5 } }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
        (
            "sequence_batching { oldest { preferred_batch_size: 3 } }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        (
            STATE % ("1", INITIAL % "1" + INITIAL % "1"),
            "initial_state field for state input 's' must contain exactly one or zero element. "
            "Found '2' elements.",
        ),
        (
            STATE % ("1", (INITIAL % "1").replace('name: "i"', "")),
            "Field 'name' must be set when using initial_state for state input 's'.",
        ),
        (
            STATE % ("1", (INITIAL % "1").replace("INT32", "FP32")),
            "The data type used for 'initial_state' field of state 's' does not match the state "
            "data type.",
        ),
        (
            STATE % ("1", (INITIAL % "1").replace("zero_data: true", "")),
            "initial_state setting expects state's' to have state_data set",
        ),
        (
            STATE % ("1", INITIAL % "1, 1"),
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions "
            "for state input 's'. 2 != 1",
        ),
        (
            STATE % ("-1", INITIAL % "-1"),
            "'initial_state' field for state input name 's' contains variable dimensions.",
        ),
        (
            STATE % ("1", INITIAL % "2"),
            "'initial_state' dim for input name 's' doesn't match 'state' dim description. 2 != 1",
        ),
    ],
)  # fmt: skip
def test_sequences_are_checked_though_not_served(text: str, expected: str) -> None:
    assert problems(PYTHON + "max_batch_size: 2 " + IO + text) == expected


STEP = 'model_name: "x" input_map { key: "a" value: "I" } output_map { key: "b" value: "O" }'
ENSEMBLE = 'name: "m" platform: "ensemble"' + IO


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ensemble_scheduling { step { %s } }", ""),
        ("", "ensemble scheduling must be set for ensemble m whose platform is ensemble"),
        (
            "ensemble_scheduling { step { %s } } instance_group {}",
            "instance group should not be specified for ensemble 'm'",
        ),
        (
            "ensemble_scheduling { step { %s } } optimization {}",
            "optimization should not be specified for ensemble 'm'",
        ),
        (
            "ensemble_scheduling { step { %s } } model_warmup {}",
            "model_warmup can not be specified for ensemble 'm'",
        ),
        (
            'backend: "python" ensemble_scheduling { step { %s } }',
            "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
        ),
        (
            'input { name: "Z" data_type: TYPE_FP32 dims: 1 } ensemble_scheduling { step { %s } }',
            "ensemble input 'Z' for ensemble m' is not used",
        ),
        (
            'output { name: "Z" data_type: TYPE_FP32 dims: 1 } ensemble_scheduling { step { %s } }',
            "ensemble output 'Z' for ensemble m' is not used",
        ),
        (
            'ensemble_scheduling { step { %s output_map { key: "c" value: "O" } } }',
            "ensemble tensor 'O' can appear in an output map only once for ensemble 'm' step 0",
        ),
        (
            "ensemble_scheduling { step { %s } step {} }",
            "must specify 'model_name' in step 1 of ensemble 'm'\n"
            "must specify 'input_map' in step 1 of ensemble 'm'\n"
            "must specify 'output_map' in step 1 of ensemble 'm'",
        ),
    ],
)
def test_ensembles_are_checked_though_not_served(text: str, expected: str) -> None:
    assert problems(ENSEMBLE + text.replace("%s", STEP)) == expected


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("instance_group { kind: KIND_GPU }", True),
        ('input { name: "I" dims: 0 }', True),
        ('input { name: "I" dims: 0 } max_batch_size: -1', False),
        ("dynamic_batching { preferred_batch_size: 5 }", False),
    ],
)
def test_what_is_wrong_with_a_version_is_told_from_what_is_wrong_with_the_file(
    text: str, late: bool
) -> None:
    config = normalise(parse_pbtxt(PYTHON + text), "m", 0)
    with pytest.raises(InvalidArgument) as caught:
        validate(config, gpu_count=0, complete=False)
    assert isinstance(caught.value, LoadProblem) is late
