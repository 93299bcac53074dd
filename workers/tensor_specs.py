"""Inputs and outputs of a model: described by its file, and as the model receives them."""

from __future__ import annotations

import codecs
import contextlib
import math
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shmserve.ipc.model_spec import PADDING, ModelSpec, TensorSpec
from shmserve.ipc.tensors import padding
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.batch import ragged
from shmserve.workers.sequences import read_controls


def with_generated_tensors(config: ModelSpec) -> ModelSpec:
    """Return the configuration including inputs and outputs that clients neither send nor receive.

    These tensors are controls and states of sequences, `batch_input`, and lengths and masks of
    padded inputs.
    """
    batching = config.sequence_batching
    states = batching.state if batching is not None else ()
    added_inputs = (
        *(TensorSpec(control.name, control.datatype, (1,)) for control in read_controls(config)),
        *(TensorSpec(state.input_name, state.datatype, state.dims) for state in states),
        *ragged.generated_inputs(config),
        *_padding_inputs(config),
    )
    configured_names = {output.name for output in config.output}
    outputs = (
        TensorSpec(state.output_name, state.datatype, state.dims)
        for state in states
        if state.output_name not in configured_names
    )
    return replace(config, input=(*config.input, *added_inputs), output=(*config.output, *outputs))


def generated_names(config: ModelSpec) -> frozenset[str]:
    """Return the names of the tensors that the worker generates and clients do not send.

    `config` may be incomplete.
    """
    names = [name for rule in config.batch_input for name in rule.target_name]
    for entry in padding.parse_entries(config.parameters.get(PADDING, "")).values():
        names += [entry[key] for key in ("lengths", "mask") if isinstance(entry.get(key), str)]
    if config.sequence_batching is not None:
        names += [control.name for control in read_controls(config)]
        for state in config.sequence_batching.state:
            names += [state.input_name, state.output_name]
    return frozenset(names)


def _padding_inputs(config: ModelSpec) -> Iterator[TensorSpec]:
    model_padding = config.padding
    for pad in model_padding.pads.values() if model_padding else ():
        if pad.lengths_input:
            yield TensorSpec(pad.lengths_input, "INT64", (len(pad.dims),))
        if pad.mask_input:
            yield TensorSpec(pad.mask_input, "BOOL", pad.dims)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor as a model's file describes it.

    Attributes:
        dims: The dimensions, including the batch dimension; -1 is a variable size.
        symbols: The names of the variable dimensions, "" for a fixed or unnamed one. Dimensions of
            one name have the same size in a call.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    symbols: tuple[str, ...] = ()

    @property
    def leading_symbol(self) -> str:
        """Return the symbol of a variable first dimension; "" if it is fixed or unnamed."""
        return self.symbols[0] if self.symbols and self.dims[0] == -1 else ""


@dataclass(frozen=True, slots=True)
class FileDescription:
    """The inputs of a model in order, its outputs, and its largest batch (0: no batching)."""

    inputs: tuple[FileTensor, ...]
    outputs: tuple[FileTensor, ...]
    largest_batch: int  # 0: no batching


def complete(
    config: dict[str, Any], description: FileDescription, backend_config: Mapping[str, str]
) -> dict[str, Any]:
    """Return `config` with the inputs, outputs, batch size and batching that it lacks."""
    result = dict(config)
    default_max_batch_size = int(backend_config.get("default-max-batch-size", "4"))
    if not config.get("input") and not config.get("output") and not config.get("max_batch_size"):
        result["max_batch_size"] = min(description.largest_batch, default_max_batch_size)
        if result["max_batch_size"] > 1 and not ModelSpec.of(config).has_scheduler:
            result["dynamic_batching"] = {}
    is_batched = result.get("max_batch_size", 0) > 0
    if not config.get("input"):
        result["input"] = [tensor_config(tensor, is_batched) for tensor in description.inputs]
    if not config.get("output"):
        result["output"] = [tensor_config(tensor, is_batched) for tensor in description.outputs]
    return result


def tensor_config(tensor: FileTensor, is_batched: bool) -> dict[str, Any]:
    """Return the entry of `input` or `output` of a configuration for a tensor of the file."""
    dims = list(tensor.dims[1:] if is_batched else tensor.dims)
    # A configuration has no scalars: a client sends and receives one element.
    settings: dict[str, Any] = {"name": tensor.name, "data_type": TO_CONFIG[tensor.datatype]}
    settings["dims"] = dims or [1]
    if is_batched and not dims:
        settings["reshape"] = {"shape": []}
    return settings


def fits_scalar(spec: TensorSpec, tensor: FileTensor) -> bool:
    """Check whether an input or output of one element is a tensor of rank 0 in the model's file."""
    return not tensor.dims and math.prod(spec.model_dims) == 1


def as_scalars(inputs: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the inputs, with the inputs in `names` reshaped to tensors of rank 0."""
    if not names:
        return inputs
    return {name: array.reshape(()) if name in names else array for name, array in inputs.items()}


def as_configured(outputs: dict[str, Any], signature: Signature) -> dict[str, Any]:
    """Return the outputs, with outputs of rank 0 reshaped to their configured dimensions."""
    specs = signature.outputs
    for name, value in outputs.items():
        if getattr(value, "ndim", 1) == 0 and name in specs and not signature.max_batch_size:
            dims = specs[name].model_dims
            outputs[name] = value.reshape([1] * len(dims) if math.prod(dims) in (1, -1) else ())
    return outputs


@contextlib.contextmanager
def escaping_surrogates() -> Iterator[None]:
    """Return a context in which this thread's strict conversions of text escape invalid bytes.

    C++ libraries convert strings by the error handler "strict", and have no option for
    "surrogateescape". The handler is the interpreter's, so only one thread at a time may be in such
    a context; a thread may enter it again.
    """
    thread, escape = threading.get_ident(), codecs.lookup_error("surrogateescape")
    previous_handler = codecs.lookup_error("strict")

    def convert(error: UnicodeError) -> tuple[str | bytes, int]:
        return escape(error) if threading.get_ident() == thread else previous_handler(error)

    codecs.register_error("strict", convert)
    try:
        yield
    finally:
        codecs.register_error("strict", previous_handler)
