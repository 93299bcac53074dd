"""The rules of sequences and ensembles, with Triton's texts, the keys and the positions."""

import pytest

from tests.rigs.marked_configs import PYTHON, TENSORS, place, problems

SEQUENCE = (
    'sequence_batching { control_input { name: "C" @control { kind: CONTROL_SEQUENCE_%s } } }'
)
STATE = (
    'sequence_batching { state { input_name: "s" output_name: "t" data_type: TYPE_INT32 '
    "dims: [%s] %s } }"
)
INITIAL_STATE = 'initial_state { name: "i" data_type: TYPE_INT32 @dims: [%s] zero_data: true }'
CONTROL = "sequence_batching.control_input[0].control[0]"
STATE_KEY = "sequence_batching.state[0].initial_state[0]"


def mark_field(text: str, field: str) -> str:
    """Return `text` with its only mark, "@", moved before `field`."""
    return text.replace("@", "").replace(field, "@" + field, 1)


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        (SEQUENCE % "START bool_false_true: [false, true]", "", ""),
        (SEQUENCE % "CORRID data_type: TYPE_STRING", "", ""),
        (STATE % ("-1, 2", INITIAL_STATE % "3, 2"), "", ""),
        (mark_field(SEQUENCE % "CORRID data_type: TYPE_FP32", "data_type"), f"{CONTROL}.data_type",
         "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types "
         "are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"),
        (SEQUENCE % "START", CONTROL,
         "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or "
         "'bool_false_true' for CONTROL_SEQUENCE_START for m"),
        (mark_field(SEQUENCE % "START int32_false_true: [0,1] fp32_false_true: [0,1]", "fp32"),
         f"{CONTROL}.fp32_false_true",
         "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' "
         "and 'bool_false_true' for CONTROL_SEQUENCE_START for m"),
        (mark_field(SEQUENCE % "END int32_false_true: [0,1,2]", "int32"),
         f"{CONTROL}.int32_false_true",
         "sequence batching control 'int32_false_true' must have exactly 2 entries for "
         "CONTROL_SEQUENCE_END for m"),
        (mark_field(SEQUENCE % "CORRID data_type: TYPE_INT32 int32_false_true: [0,1]", "int32"),
         f"{CONTROL}.int32_false_true",
         "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
         "'bool_false_true' for CONTROL_SEQUENCE_CORRID for m"),
        (mark_field(SEQUENCE.replace('name: "C"', "") % "END int32_false_true: [0,1]",
         "control_input"), "sequence_batching.control_input[0].name",
         "sequence batching control tensor must have a name for m"),
        (SEQUENCE.replace("@", "").replace("} }", "} control { @kind: CONTROL_SEQUENCE_END %s } }",
         1) % ("END int32_false_true: [0,1]", "int32_false_true: [0,1]"),
         "sequence_batching.control_input[0].control[1].kind",
         "sequence batching specifies multiple CONTROL_SEQUENCE_END tensors for m"),
        ('sequence_batching { control_input { name: "C" control { kind: '
         "CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } } control_input { @name: 'C' "
         "control { kind: CONTROL_SEQUENCE_END int32_false_true: [0,1] } } }",
         "sequence_batching.control_input[1].name",
         "sequence batching control tensor 'C' is specified for multiple control kinds for m"),
        ("sequence_batching { oldest { @max_candidate_sequences: -1 } }",
         "sequence_batching.oldest.max_candidate_sequences",
         "sequence batching max candidate sequences must be >= 0 for m"),
        ("sequence_batching { @state { output_name: 't' data_type: TYPE_INT32 dims: 1 } }",
         "sequence_batching.state[0].input_name",
         "sequence batching state must specify 'input_name' for m"),
        ('sequence_batching { @state { input_name: "s" output_name: "t" dims: 1 } }',
         "sequence_batching.state[0].data_type",
         "sequence batching state must specify 'data_type' for m"),
        (STATE.replace("dims: [", "dims: [@") % ("0", ""), "sequence_batching.state[0].dims[0]",
         "sequence batching state 's' dimension must be integer >= 1, or -1 to indicate a "
         "variable-size dimension for m"),
        ("sequence_batching { direct { @minimum_slot_utilization: 1.5 } }",
         "sequence_batching.direct.minimum_slot_utilization",
         "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m"),
        ("sequence_batching { oldest { preferred_batch_size: [1, @3] } }",
         "sequence_batching.oldest.preferred_batch_size[1]",
         "sequence batching preferred batch size must be <= max batch size for m"),
        ("sequence_batching { oldest { @preferred_batch_size: 0 } }",
         "sequence_batching.oldest.preferred_batch_size[0]",
         "sequence batching preferred batch size must be positive for m"),
        (mark_field(STATE % ("1", INITIAL_STATE % "1" + INITIAL_STATE % "1"), "initial_state"),
         "sequence_batching.state[0].initial_state",
         "initial_state field for state input 's' must contain exactly one or zero element. "
         "Found '2' elements."),
        (mark_field(STATE % ("1", (INITIAL_STATE % "1").replace('name: "i"', "")), "initial_state"),
         f"{STATE_KEY}.name",
         "Field 'name' must be set when using initial_state for state input 's'."),
        (mark_field(STATE % ("1", (INITIAL_STATE % "1").replace("INT32", "FP32")),
         "data_type: TYPE_FP32"), f"{STATE_KEY}.data_type",
         "The data type used for 'initial_state' field of state 's' does not match the state "
         "data type."),
        (mark_field(STATE % ("1", (INITIAL_STATE % "1").replace("zero_data: true", "")),
         "initial_state"), STATE_KEY,
         "initial_state setting expects state's' to have state_data set"),
        (STATE % ("1", INITIAL_STATE % "1, 1"), f"{STATE_KEY}.dims",
         "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions "
         "for state input 's'. 2 != 1"),
        (mark_field(STATE % ("1, -1", INITIAL_STATE % "1, -1"), "-1] zero"), f"{STATE_KEY}.dims[1]",
         "'initial_state' field for state input name 's' contains variable dimensions."),
        (mark_field(STATE % ("1, 1", INITIAL_STATE % "1, 2"), "2] zero"), f"{STATE_KEY}.dims[1]",
         "'initial_state' dim for input name 's' doesn't match 'state' dim description. 2 != 1"),
    ],
)  # fmt: skip
def test_sequences_are_checked(text: str, key: str, expected: str) -> None:
    text = PYTHON + "max_batch_size: 2 " + TENSORS + text
    assert problems(text) == (f"{place(text)}{key}: {expected}" if expected else "")


LARGE_STEP = f"step[{'9' * 5000}].condition"  # more digits than int() accepts
STEP_FIELDS = 'model_name: "x" input_map { key: "a" value: "I" } output_map { key: "b" value: "O" }'
ENSEMBLE = 'name: "m" platform: "ensemble"' + TENSORS


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("ensemble_scheduling { step { %s } }", "", ""),
        ("", "ensemble_scheduling",
         "ensemble scheduling must be set for ensemble m whose platform is ensemble"),
        ("ensemble_scheduling { step { %s } } @instance_group {}", "instance_group",
         "instance group should not be specified for ensemble 'm'"),
        ("ensemble_scheduling { step { %s } } @optimization {}", "optimization",
         "optimization should not be specified for ensemble 'm'"),
        ("ensemble_scheduling { step { %s } } @model_warmup {}", "model_warmup",
         "model_warmup can not be specified for ensemble 'm'"),
        ('@backend: "python" ensemble_scheduling { step { %s } }', "backend",
         "Ensemble model 'm' must have platform type 'ensemble' and empty backend type"),
        ('input { @name: "Z" data_type: TYPE_FP32 dims: 1 } ensemble_scheduling { step { %s } }',
         "input[1].name", "ensemble input 'Z' for ensemble m' is not used"),
        ('output { @name: "Z" data_type: TYPE_FP32 dims: 1 }ensemble_scheduling { step { %s } }',
         "output[1].name", "ensemble output 'Z' for ensemble m' is not used"),
        ('ensemble_scheduling { step { %s @output_map { key: "c" value: "O" } } }',
         'ensemble_scheduling.step[0].output_map["c"]',
         "ensemble tensor 'O' can appear in an output map only once for ensemble 'm' step 0"),
        ('ensemble_scheduling { step { %s } step { %s model_name: "x" @input_map: [] } }',
         "ensemble_scheduling.step[1].input_map",
         "must specify 'input_map' in step 1 of ensemble 'm'"),
        ('ensemble_scheduling { step { %s } step { model_name: "x" '
         'input_map { key: "a" value: "I" } @output_map { key: "b" value: "lost" } } }',
         'ensemble_scheduling.step[1].output_map["b"]',
         "ensemble tensor 'lost' is unused in ensemble 'm'"),
        ('@parameters { key: "step[1].condition" value { string_value: "I" } } '
         "ensemble_scheduling { step { %s } }", 'parameters["step[1].condition"]',
         "parameter 'step[1].condition': ensemble 'm' has 1 steps, numbered from 0"),
        ('@parameters { key: "step[0].condition" value { string_value: "Q" } } '
         "ensemble_scheduling { step { %s } }", 'parameters["step[0].condition"]',
         "parameter 'step[0].condition': expected the name of a tensor of ensemble 'm', found 'Q'"),
        ('@parameters { key: "step[0].if" value { string_value: "I" } } '
         "ensemble_scheduling { step { %s } }", 'parameters["step[0].if"]',
         "parameter 'step[0].if' of ensemble 'm' is unknown (allowed: step[N].condition)"),
        (f'@parameters {{ key: "{LARGE_STEP}" value {{ string_value: "I" }} }} '
         "ensemble_scheduling { step { %s } }", f'parameters["{LARGE_STEP}"]',
         f"parameter '{LARGE_STEP}' of ensemble 'm' is unknown (allowed: step[N].condition)"),
    ],
)  # fmt: skip
def test_ensembles_are_checked(text: str, key: str, expected: str) -> None:
    second_step = STEP_FIELDS[STEP_FIELDS.index("output_map") :].replace('"O"', '"P"')
    text = ENSEMBLE + text.replace("%s", STEP_FIELDS, 1).replace("%s", second_step)
    assert problems(text) == (f"{place(text)}{key}: {expected}" if expected else "")


def test_a_missing_field_of_an_ensemble_is_reported_at_its_step() -> None:
    text = ENSEMBLE + f"ensemble_scheduling {{ step {{ {STEP_FIELDS} }} @step {{}} }}"
    step = place(text)
    assert problems(text).splitlines() == [
        f"{step}ensemble_scheduling.step[1].{field}: must specify '{field}' in step 1 of "
        "ensemble 'm'"
        for field in ("model_name", "input_map", "output_map")
    ]
    text = ENSEMBLE.replace('platform: "ensemble"', "") + "@ensemble_scheduling {}"
    assert problems(text).splitlines()[:2] == [
        "f: platform: unexpected platform type '' for m",
        f"{place(text)}ensemble_scheduling.step: must specify 'step' for ensemble 'm'",
    ]


@pytest.mark.parametrize(
    ("steps", "missing_tensor"),
    [
        (
            'step { model_name: "x" input_map [ { key: "a" value: "I" }, { key: "c" value: "r" } ] '
            'output_map { key: "b" value: "q" } } step { model_name: "y" '
            'input_map { key: "a" value: "q" } '
            'output_map [ { key: "b" value: "r" }, { key: "c" value: "O" } ] }',
            "q",
        ),
        (
            'step { model_name: "x" input_map [ { key: "a" value: "I" }, '
            '{ key: "c" value: "nowhere" } ] output_map { key: "b" value: "O" } }',
            "nowhere",
        ),
    ],
)
def test_cyclic_and_incomplete_graphs_are_refused(steps: str, missing_tensor: str) -> None:
    text = ENSEMBLE + f"ensemble_scheduling {{ {steps} }}"
    assert (
        "output[0].name: output 'O' for ensemble 'm' is not written: at least one of its depending "
        f"tensors, '{missing_tensor}', is not connected" in problems(text)
    )


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ('step { model_name: "x" input_map { key: "a" value: "q" } output_map { key: "b" value: '
         '"r" } } step { model_name: "y" input_map { key: "a" value: "r" } output_map { key: "b"'
         ' value: "q" } }',
         "step 0 of ensemble 'm', model 'x', can never run: its input tensor 'q' is produced "
         "only by steps that depend on it"),
        ('step { model_name: "x" input_map { key: "a" value: "q" } output_map { key: "b" value: '
         '"q" } }',
         "step 0 of ensemble 'm', model 'x', can never run: its input tensor 'q' is produced "
         "only by steps that depend on it"),
        ('step { model_name: "x" input_map { key: "a" value: "O" } output_map { key: "b" value: '
         '"I" } }', "ensemble input 'I' can not appear in an output map for ensemble 'm'"),
    ],
)  # fmt: skip
def test_a_cycle_outside_the_needed_steps_is_refused(steps: str, text: str) -> None:
    circle = (
        'step { model_name: "z" input_map { key: "a" value: "I" } output_map { key: "b" value: '
    )
    errors = problems(ENSEMBLE + f'ensemble_scheduling {{ {steps} {circle} "O" }} }} }}')
    assert text in errors
