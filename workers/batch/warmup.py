"""Warm-up: requests that an instance runs before it is ready, as `model_warmup` describes them.

A sample of batch size N is N requests of batch size 1 in one execution, `count` times. They are
nobody's: no scheduler has seen them, nothing is counted, and what they give is dropped.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shmserve.errors import Internal, InvalidArgument, ShmserveError
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.model_spec import ModelSpec, WarmupInput
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, NUMPY, element_count
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.inference import Inference, pack_inference
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.batch.execute import Executor
from shmserve.workers.batch.request import Input, Request
from shmserve.workers.batch.unpack import Unpacker
from shmserve.workers.context import ModelContext
from shmserve.workers.user_code import read_data

logger = logging.getLogger(__name__)

_FOLDER = "warmup"
_MOST_BYTES = 1 << 34  # of a tensor
_STRING_HEAD = 4  # the bytes of an empty text
_LARGEST_INTEGER = 127  # of random data: in the range of every type


@dataclass(frozen=True, slots=True)
class Sample:
    """A warm-up sample, run `count` times: `batch_size` requests of these tensors, whose shapes
    have a batch dimension of 1 where the model batches."""

    name: str
    batch_size: int
    count: int
    tensors: list[TensorRef]


def read(config: ModelSpec, model_dir: Path) -> list[Sample]:
    """The samples of a configuration; none for those of batch size 0.

    Raises InvalidArgument, with Triton's texts, for a tensor without fixed dimensions or data, and
    for a file that is missing or too short.
    """
    batch = (1,) if config.max_batch_size > 0 else ()
    return [
        Sample(
            given.name,
            given.batch_size,
            given.count or 1,
            [
                _tensor(name, tensor, batch, model_dir / _FOLDER)
                for name, tensor in sorted(given.inputs.items())
            ],
        )
        for given in config.model_warmup
        if given.batch_size
    ]


def _tensor(name: str, given: WarmupInput, batch: tuple[int, ...], folder: Path) -> TensorRef:
    datatype, dims = given.datatype, given.dims
    if any(dim < 0 for dim in dims):
        raise InvalidArgument(
            f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
        )
    size = element_count(dims) * (ITEM_SIZE[datatype] or _STRING_HEAD)
    if size > _MOST_BYTES:
        raise InvalidArgument(
            f"warmup setting of input '{name}' has dims {list(dims)}, which are {size} bytes: at "
            f"most {_MOST_BYTES} may be"
        )
    if given.input_data_file:
        which, file = f"warmup setting of input '{name}'", given.input_data_file
        data = read_data(
            folder,
            file,
            size if ITEM_SIZE[datatype] else None,
            setting="warmup",
            outside=f"{which}: '{file}' is not in the model's folder '{_FOLDER}'",
            unreadable=f"{which}: cannot read '{file}'",
        )
    elif given.random_data and ITEM_SIZE[datatype]:
        data = _random(name, datatype, dims)
    elif given.zero_data is not None or given.random_data is not None:
        data = bytes(size)  # of texts: empty ones
    else:
        raise InvalidArgument(f"warmup setting expects input '{name}' to have input_data_type set")
    return TensorRef(name, datatype, (*batch, *dims), data)


def _random(name: str, datatype: str, dims: tuple[int, ...]) -> bytes:
    """The same each time, and finite: numbers from 0 on, below 1 of the floating types."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    random = np.random.default_rng(seed)
    if datatype == "BF16":
        bits = random.random(dims, np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).tobytes()
    kind = NUMPY[datatype]
    if kind.kind == "f":
        return random.random(dims).astype(kind).tobytes()
    most = 1 if kind.kind == "b" else _LARGEST_INTEGER
    return random.integers(0, most, dims, endpoint=True).astype(kind).tobytes()


def warm_up(
    samples: list[Sample],
    signature: Signature,
    unpacker: Unpacker,
    executor: Executor,
    context: ModelContext,
) -> None:
    """Run all samples in order. Raises Internal, with Triton's text, when a request fails."""
    where = f"model '{context.model_name}' instance {context.instance_name}"
    for sample in samples:
        for n in range(1, sample.count + 1):
            logger.debug("%s is running warmup sample '%s' for iteration %d", where, sample.name, n)
            try:
                requests = list(_requests(sample, signature, unpacker))
                errors = executor.rehearse(requests)
            except ShmserveError as error:
                errors = [error]
            if errors:
                logger.debug("%s failed to run warmup sample '%s'", where, sample.name)
                told = (
                    f"failed to run warmup sample '{sample.name}': {error.message}; "
                    for error in errors
                )
                raise Internal("".join(told))


def _requests(sample: Sample, signature: Signature, unpacker: Unpacker) -> Iterator[Request]:
    """Raises InvalidArgument for a sample that the model would not be asked."""
    sent = [tensor for tensor in sample.tensors if tensor.name in signature.inputs]
    # Controls of sequences, which no client sends, are as the sample has them.
    controls = [tensor for tensor in sample.tensors if tensor.name not in signature.inputs]
    signature.check("", sent, ())
    packed = pack_inference(Inference(tuple(sent)))
    for key in range(1, sample.batch_size + 1):
        request = unpacker.request(Work(key, 0, packed))
        for tensor in controls:
            assert isinstance(tensor.data, bytes)
            raw = memoryview(bytearray(tensor.data))
            request.inputs[tensor.name] = Input(tensor.name, tensor.datatype, tensor.shape, raw)
        yield request
