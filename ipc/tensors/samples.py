"""The warm-up samples of a configuration, and data files in a model's folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import ModelSpec, WarmupInput
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import TensorRef

_DATA_FOLDER = "warmup"
_MAX_TENSOR_BYTES = 1 << 34  # maximum byte size of a tensor
_EMPTY_STRING_SIZE = 4  # bytes of an empty string: its length prefix
_LARGEST_INTEGER = 127  # the largest random integer; every integer datatype can represent it


@dataclass(frozen=True, slots=True)
class Sample:
    """A warm-up sample.

    Attributes:
        name: The name of the sample.
        batch_size: The number of requests in the batch.
        count: The number of executions.
        tensors: The inputs of each request, with a batch dimension of 1 if the model batches.
    """

    name: str
    batch_size: int  # number of requests
    count: int  # number of executions
    tensors: list[TensorRef]  # inputs of each request


def warmup_samples(config: ModelSpec, model_dir: Path) -> list[Sample]:
    """Return the warm-up samples of a configuration, without samples of batch size 0.

    Raises:
        InvalidArgument: A tensor has variable dimensions or no data, or a file is missing or too
            short. The texts are Triton's.
    """
    batch_dims = (1,) if config.max_batch_size > 0 else ()
    samples = []
    for warmup in config.model_warmup:
        if warmup.batch_size:
            inputs, folder = sorted(warmup.inputs.items()), model_dir / _DATA_FOLDER
            tensors = [_sample_input(name, tensor, batch_dims, folder) for name, tensor in inputs]
            samples.append(Sample(warmup.name, warmup.batch_size, warmup.count or 1, tensors))
    return samples


def _sample_input(
    name: str, warmup: WarmupInput, batch_dims: tuple[int, ...], folder: Path
) -> TensorRef:
    datatype, dims = warmup.datatype, warmup.dims
    if any(dim < 0 for dim in dims):
        raise InvalidArgument(
            f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
        )
    byte_size = element_count(dims) * (ITEM_SIZE[datatype] or _EMPTY_STRING_SIZE)
    if byte_size > _MAX_TENSOR_BYTES:
        raise InvalidArgument(
            f"warmup setting of input '{name}' has dims {list(dims)}, which are {byte_size} bytes; "
            f"at most {_MAX_TENSOR_BYTES} bytes are allowed"
        )
    if warmup.input_data_file:
        setting_name, file = f"warmup setting of input '{name}'", warmup.input_data_file
        data = read_data(
            folder,
            file,
            byte_size if ITEM_SIZE[datatype] else None,
            setting="warmup",
            outside_error=f"{setting_name}: '{file}' is not in the model's folder '{_DATA_FOLDER}'",
            read_error=f"{setting_name}: cannot read '{file}'",
        )
    elif warmup.random_data and ITEM_SIZE[datatype]:
        data = _random_data(name, datatype, dims)
    elif warmup.zero_data is not None or warmup.random_data is not None:
        data = bytes(byte_size)  # zero bytes are empty strings for BYTES
    else:
        raise InvalidArgument(f"warmup setting expects input '{name}' to have input_data_type set")
    return TensorRef(name, datatype, (*batch_dims, *dims), data)


def _random_data(name: str, datatype: str, dims: tuple[int, ...]) -> bytes:
    """Return random data that are the same in each call.

    Floating-point numbers are in [0, 1), integers in [0, 127].
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    generator = np.random.default_rng(seed)
    if datatype == "BF16":
        float_bits = generator.random(dims, np.float32).view(np.uint32) >> 16
        return float_bits.astype(np.uint16).tobytes()
    dtype = NUMPY_DTYPES[datatype]
    if dtype.kind == "f":
        return generator.random(dims).astype(dtype).tobytes()
    maximum = 1 if dtype.kind == "b" else _LARGEST_INTEGER
    return generator.integers(0, maximum, dims, endpoint=True).astype(dtype).tobytes()


def read_data(
    folder: Path, file: str, size: int | None, *, setting: str, outside_error: str, read_error: str
) -> bytes:
    """Read a file that a model's configuration names.

    Args:
        folder: The folder of the model that must contain the file.
        file: The path of the file in the folder.
        size: The number of bytes to return; None for the whole file.
        setting: The name of the setting, for the error of a file that is too short.
        outside_error: The error text for a file outside of the folder.
        read_error: The start of the error text for a file that cannot be read.

    Raises:
        InvalidArgument: The file is outside of the folder, cannot be read or is too short.
    """
    path = folder / file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InvalidArgument(outside_error)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{read_error}: {error.strerror}") from error
    if size is not None and len(data) < size:
        raise InvalidArgument(
            f"{setting} setting expects {size} bytes, but the data provided from {file} only has "
            f"{len(data)} bytes"
        )
    return data[:size]
