"""Auto-completion: what a loaded model says about itself, merged into what its author wrote."""

from __future__ import annotations

from typing import Any

from shmserve.ipc.engine_settings import PARAMETER as ENGINE
from shmserve.ipc.model_settings import (
    MAX_INSTANCES,
    MAX_STREAMS,
    MIN_INSTANCES,
    STRATEGY,
    TARGET,
)
from shmserve.model_config.diagnostics import UNWRITTEN, Key, Problem, Source
from shmserve.model_config.parse import from_json
from shmserve.model_config.rules.padding import PADDING
from shmserve.proto.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

_COMPLETABLE = (
    "max_batch_size",
    "input",
    "output",
    "dynamic_batching",
    "sequence_batching",
    "model_transaction_policy",
    "batch_input",
    "batch_output",
    "instance_group",
)
# Of the parameters, what a class may have as an attribute.
_PARAMETERS = (STRATEGY, TARGET, MAX_STREAMS, MIN_INSTANCES, MAX_INSTANCES, PADDING, ENGINE)


def merge_autocomplete(
    config: ModelConfig, completed: dict[str, Any], source: Source = UNWRITTEN
) -> ModelConfig:
    """`config`, and of `completed` what `config` leaves open.

    `completed` is a configuration in JSON form, whole or only what the model adds; of it only
    max_batch_size, input, output, batch_input, batch_output, dynamic_batching, sequence_batching
    (where `config` has no scheduler), a class's instance_group and model_transaction_policy count,
    and of its parameters `batching_strategy`, `target_p99_ms`, `max_streams`, `min_instances`,
    `max_instances`, `padding` and `engine`. What the author wrote (in `source`) stays, but for a
    max_batch_size that the model raises.

    Raises InvalidArgument, one line a conflict as `Source.check` writes it, where the model
    contradicts it.
    """
    given = {name: completed[name] for name in _COMPLETABLE if name in completed}
    parameters = completed.get("parameters") or {}
    given["parameters"] = {name: parameters[name] for name in _PARAMETERS if name in parameters}
    model = from_json(given, "auto-completed configuration")
    merged = ModelConfig()
    merged.CopyFrom(config)
    conflicts = _merge_batching(merged, model, stated="max_batch_size" in given)
    for name in model.parameters:
        if name not in merged.parameters:
            merged.parameters[name].CopyFrom(model.parameters[name])
    unwritten = not any(key[0] == "instance_group" for key in source.places)
    if config.backend == "native" and unwritten and model.instance_group:
        # What `config` has of them was not written, but filled in.
        merged.ClearField("instance_group")
        merged.instance_group.extend(model.instance_group)
    if not merged.batch_input:
        merged.batch_input.extend(model.batch_input)
    if not merged.batch_output:
        merged.batch_output.extend(model.batch_output)
    for kind, written, derived in (
        ("input", merged.input, model.input),
        ("output", merged.output, model.output),
    ):
        places: dict[str, int] = {}
        for index, name in enumerate([known.name for known in written]):
            places.setdefault(name, index)
        for tensor in derived:
            index = places.setdefault(tensor.name, len(written))
            if index < len(written):
                conflicts += _merge_tensor(config.name, (kind, index), written[index], tensor)
            else:
                written.add().CopyFrom(tensor)  # type: ignore[arg-type]
    source.check(merged, conflicts)
    return merged


def _merge_batching(merged: ModelConfig, model: ModelConfig, *, stated: bool) -> list[Problem]:
    conflicts = []
    name = merged.name
    if stated and merged.max_batch_size > model.max_batch_size:
        text = (
            f"configuration specified max_batch_size {merged.max_batch_size}, but in "
            f"auto-complete-config function for model '{name}' specified max_batch_size "
            f"{model.max_batch_size}"
        )
        conflicts.append(Problem(("max_batch_size",), text))
    elif model.max_batch_size > merged.max_batch_size:
        merged.max_batch_size = model.max_batch_size
    chosen = merged.WhichOneof("scheduling_choice")
    if model.HasField("dynamic_batching"):
        if chosen is None:
            merged.dynamic_batching.CopyFrom(model.dynamic_batching)
        elif chosen != "dynamic_batching":
            text = (
                f"Configuration specified scheduling_choice as '{chosen}', but "
                f"auto-complete-config function for model '{name}' tries to set "
                f"scheduling_choice as 'dynamic_batching'"
            )
            conflicts.append(Problem((chosen,), text))
    if model.HasField("sequence_batching") and chosen is None:
        merged.sequence_batching.CopyFrom(model.sequence_batching)
    if model.HasField("model_transaction_policy"):
        decoupled = merged.model_transaction_policy.decoupled
        if not merged.HasField("model_transaction_policy"):
            merged.model_transaction_policy.CopyFrom(model.model_transaction_policy)
        elif decoupled != model.model_transaction_policy.decoupled:
            text = (
                f"trying to change decoupled property in auto-complete-config for model '{name}', "
                f"which is already set to '{decoupled}'."
            )
            conflicts.append(Problem(("model_transaction_policy", "decoupled"), text))
    return conflicts


def _merge_tensor(
    model_name: str, at: Key, written: ModelInput | ModelOutput, derived: ModelInput | ModelOutput
) -> list[Problem]:
    if written.data_type and derived.data_type and written.data_type != derived.data_type:
        text = (
            f"unable to load model '{model_name}', configuration expects datatype "
            f"{DataType.Name(written.data_type)} for {at[0]} '{written.name}', model provides "
            f"{DataType.Name(derived.data_type)}"
        )
        return [Problem((*at, "data_type"), text)]
    if written.dims and derived.dims and written.dims != derived.dims:
        text = (
            f"model '{model_name}', tensor '{written.name}': the model expects dims "
            f"{list(derived.dims)} but the model configuration specifies dims {list(written.dims)}"
        )
        return [Problem((*at, "dims"), text)]
    if not written.data_type:
        written.data_type = derived.data_type
    if not written.dims:
        written.dims.extend(derived.dims)
    if isinstance(written, ModelInput) and isinstance(derived, ModelInput):
        written.optional |= derived.optional
        written.allow_ragged_batch |= derived.allow_ragged_batch
    return []
