"""Validation of warm-up samples."""

from __future__ import annotations

from collections.abc import Iterator

from shmserve.model_config.diagnostics import Key, Problem, member
from shmserve.proto.model_config_pb2 import DataType, ModelConfig


def warmup_problems(config: ModelConfig) -> Iterator[Problem]:
    """What is wrong with model_warmup; files are read when an instance is loaded."""
    for index, sample in enumerate(config.model_warmup):
        for name, tensor in sorted(sample.inputs.items()):
            at: Key = ("model_warmup", index, "inputs", member(name))
            if tensor.data_type == DataType.TYPE_INVALID:
                text = f"warmup setting of input '{name}' must specify 'data_type'"
                yield Problem(at, text)
            if any(dim < 0 for dim in tensor.dims):
                text = (
                    "warmup setting expects all variable-size dimensions are specified for input "
                    f"'{name}'"
                )
                yield Problem(at, text)
            if tensor.WhichOneof("input_data_type") is None:
                text = f"warmup setting expects input '{name}' to have input_data_type set"
                yield Problem(at, text)
