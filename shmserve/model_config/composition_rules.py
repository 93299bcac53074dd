"""Rules about models whose scheduler keeps state or calls other models: sequences and ensembles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shmserve.proto.model_config_pb2 import DataType, ModelConfig, ModelSequenceBatching

_Control = ModelSequenceBatching.Control
_FALSE_TRUE = ("int32_false_true", "fp32_false_true", "bool_false_true")
_ONE_OF_THEM = "'int32_false_true', 'fp32_false_true' {} 'bool_false_true'"
_CORRELATION_TYPES = (
    DataType.TYPE_UINT64,
    DataType.TYPE_INT64,
    DataType.TYPE_UINT32,
    DataType.TYPE_INT32,
    DataType.TYPE_STRING,
)


def sequence_problems(config: ModelConfig) -> Iterator[str]:
    """What is wrong with sequence_batching."""
    name, batching = config.name, config.sequence_batching
    kinds = Counter(control.kind for given in batching.control_input for control in given.control)
    for kind, count in kinds.items():
        if count > 1:
            title = _Control.Kind.Name(kind)
            yield f"sequence batching specifies multiple {title} tensors for {name}"
    for given in batching.control_input:
        if not given.name:
            yield f"sequence batching control tensor must have a name for {name}"
        for control in given.control:
            yield from _control(control, name)
    for size in batching.oldest.preferred_batch_size:
        if size <= 0:
            yield f"sequence batching preferred batch size must be positive for {name}"
        if size > config.max_batch_size:
            yield f"sequence batching preferred batch size must be <= max batch size for {name}"
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        yield f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}"
    for state in batching.state:
        yield from _state(state)


def _control(control: ModelSequenceBatching.Control, name: str) -> Iterator[str]:
    kind = _Control.Kind.Name(control.kind)
    given = [field for field in _FALSE_TRUE if len(getattr(control, field))]
    if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
        if control.data_type not in _CORRELATION_TYPES:
            yield (
                f"unexpected data type for control {kind} for {name}. Allowed data types are "
                "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        if given:
            choices = _ONE_OF_THEM.format("or")
            yield f"sequence batching must not specify either {choices} for {kind} for {name}"
        return
    if not given:
        choices = _ONE_OF_THEM.format("or")
        yield f"sequence batching must specify either {choices} for {kind} for {name}"
    if len(given) > 1:
        choices = _ONE_OF_THEM.format("and")
        yield f"sequence batching specifies more than one from {choices} for {kind} for {name}"
    for field in given:
        if len(getattr(control, field)) != 2:
            yield (
                f"sequence batching control '{field}' must have exactly 2 entries for {kind} "
                f"for {name}"
            )


def _state(state: ModelSequenceBatching.State) -> Iterator[str]:
    tensor = state.input_name
    if len(state.initial_state) > 1:
        yield (
            f"initial_state field for state input '{tensor}' must contain exactly one or zero "
            f"element. Found '{len(state.initial_state)}' elements."
        )
    for initial in state.initial_state:
        if not initial.name:
            yield f"Field 'name' must be set when using initial_state for state input '{tensor}'."
        if initial.data_type != state.data_type:
            yield (
                f"The data type used for 'initial_state' field of state '{tensor}' does not match "
                "the state data type."
            )
        if initial.WhichOneof("state_data") is None:
            yield f"initial_state setting expects state'{tensor}' to have state_data set"
        if len(initial.dims) != len(state.dims):
            yield (
                "Number of dimensions in 'initial_state' doesn't match the size of 'state' "
                f"dimensions for state input '{tensor}'. {len(initial.dims)} != {len(state.dims)}"
            )
            continue
        if any(dim < 1 for dim in initial.dims):
            yield (
                f"'initial_state' field for state input name '{tensor}' contains variable "
                "dimensions."
            )
        for mine, its in zip(initial.dims, state.dims, strict=True):
            if its != -1 and mine != its:
                yield (
                    f"'initial_state' dim for input name '{tensor}' doesn't match 'state' dim "
                    f"description. {mine} != {its}"
                )


def ensemble_problems(config: ModelConfig) -> Iterator[str]:
    """What is wrong with an ensemble, as far as it shows without the models it calls."""
    name = config.name
    if not config.platform:
        yield f"unexpected platform type '' for {name}"
    if not config.HasField("ensemble_scheduling"):
        yield (
            f"ensemble scheduling must be set for ensemble {name} whose platform is "
            f"{config.platform}"
        )
        return
    if config.instance_group:
        yield f"instance group should not be specified for ensemble '{name}'"
    if config.HasField("optimization"):
        yield f"optimization should not be specified for ensemble '{name}'"
    if config.model_warmup:
        yield f"model_warmup can not be specified for ensemble '{name}'"
    steps = config.ensemble_scheduling.step
    if not steps:
        yield f"must specify 'step' for ensemble '{name}'"
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                yield f"must specify '{field}' in step {index} of ensemble '{name}'"
    yield from _links(config)


def _links(config: ModelConfig) -> Iterator[str]:
    """Every tensor of the graph is written once, and both ends of the ensemble are connected."""
    name = config.name
    written: set[str] = set()
    read: set[str] = set()
    for index, step in enumerate(config.ensemble_scheduling.step):
        read.update(step.input_map.values())
        for tensor in step.output_map.values():
            if tensor in written:
                yield (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for "
                    f"ensemble '{name}' step {index}"
                )
            written.add(tensor)
    for io in config.input:
        if io.name not in read:
            yield f"ensemble input '{io.name}' for ensemble {name}' is not used"
    for out in config.output:
        if out.name not in written:
            yield f"ensemble output '{out.name}' for ensemble {name}' is not used"
