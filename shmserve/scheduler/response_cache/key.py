"""The key of the response cache: a digest over everything that a response can depend on.

Triton's is 64 bits of names and bytes alone, so that other shapes with the same bytes, or other
outputs, meet in one entry. This one covers the model and its version; of each input, whatever the
order they come in, name, datatype, shape and bytes; the request's parameters and its correlation
id; and the outputs in the order they are asked for. It does not cover the request's id, priority,
timeout and deadline, which are about this request and not about what it asks.

BLAKE2b (RFC 7693) with 256 bits: nobody can make two requests that meet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgpack

from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import Inference

_DIGEST_SIZE = 32


def cache_key(
    model: str,
    version: str,
    inference: Inference,
    sequence: tuple[int, str, int],
    read: Callable[[Place], Any],
) -> bytes:
    """The digest of a request. `sequence` is its correlation id, as a number and as a text, and its
    flags; `read` gives the bytes at a place, or raises what it likes."""
    inputs = sorted(inference.inputs, key=lambda tensor: tensor.name)
    datas = [
        read(tensor.data) if isinstance(tensor.data, Place) else tensor.data for tensor in inputs
    ]
    head = (
        model,
        version,
        # With the sizes the bytes that follow can be cut in one way only.
        [(t.name, t.datatype, t.shape, len(d)) for t, d in zip(inputs, datas, strict=True)],
        sorted(inference.parameters.items()),
        sequence,
        [output.name for output in inference.outputs],
    )
    digest = hashlib.blake2b(msgpack.packb(head), digest_size=_DIGEST_SIZE)
    for data in datas:
        digest.update(data)
    return digest.digest()
