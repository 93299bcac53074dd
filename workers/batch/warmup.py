"""Warm-up: requests that an instance runs before it is ready, as `model_warmup` describes them.

A sample of batch size N is N requests of batch size 1 in one execution, `count` times. They are
nobody's: no scheduler has seen them, nothing is counted, and what they give is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from shmserve.errors import Internal, ShmserveError
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.tensors.inference import Inference, pack_inference
from shmserve.ipc.tensors.samples import Sample
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.batch.execute import Executor
from shmserve.workers.batch.request import Input, Request
from shmserve.workers.batch.unpack import Unpacker
from shmserve.workers.context import ModelContext

logger = logging.getLogger(__name__)


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
