"""A model's view of its configuration: its own inputs and outputs, and what only it sees (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shmserve.ipc.model_settings import PADDING
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors import padding
from shmserve.workers.batch import ragged
from shmserve.workers.sequences import controls


def as_model_sees(config: ModelSpec) -> ModelSpec:
    """`config` with what the server makes among its inputs and outputs: controls and states of
    sequences, `batch_input`, lengths and masks of padded inputs. Clients neither send nor get
    them."""
    sequences = config.sequence_batching
    states = sequences.state if sequences is not None else ()
    made = (
        *(TensorSpec(each.name, each.datatype, (1,)) for each in controls.read(config)),
        *(TensorSpec(each.input_name, each.datatype, each.dims) for each in states),
        *ragged.made_inputs(config),
        *_padding_inputs(config),
    )
    known = {output.name for output in config.output}
    outputs = (
        TensorSpec(each.output_name, each.datatype, each.dims)
        for each in states
        if each.output_name not in known
    )
    return replace(config, input=(*config.input, *made), output=(*config.output, *outputs))


def made_here(config: ModelSpec) -> frozenset[str]:
    """The names of all that. `config` need not be complete."""
    named = [name for each in config.batch_input for name in each.target_name]
    for entry in padding.entries(config.parameters.get(PADDING, "")).values():
        named += [entry[key] for key in ("lengths", "mask") if isinstance(entry.get(key), str)]
    if config.sequence_batching is not None:
        named += [control.name for control in controls.read(config)]
        for state in config.sequence_batching.state:
            named += [state.input_name, state.output_name]
    return frozenset(named)


def _padding_inputs(config: ModelSpec) -> Iterator[TensorSpec]:
    padded = config.padding
    for pad in padded.pads.values() if padded else ():
        if pad.lengths:
            yield TensorSpec(pad.lengths, "INT64", (len(pad.dims),))
        if pad.mask:
            yield TensorSpec(pad.mask, "BOOL", pad.dims)
