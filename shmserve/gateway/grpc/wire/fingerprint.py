"""The cache of prepared gRPC requests, by a fingerprint: the message without the tensors' bytes.

Programs send the same request again and again with other numbers in it. A serialized
ModelInferRequest has its tensors' bytes (`raw_input_contents`, the field with the highest number)
at its end, so what stands before them is a key: names, shapes and parameters need not be parsed and
checked twice. One whose tensors are all in regions is a key as a whole. A request that is not
written like this takes the long way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shmserve.gateway.inference.prepared import BuiltRequest, PreparedRequest
from shmserve.gateway.model_table import Model, ModelTable
from shmserve.ipc.tensors.inference import INLINE_LIMIT
from shmserve.ipc.tensors.template_cache import BoundedCache

_RAW_INPUT = 0x3A  # the tag of field 7, length-delimited
_EARLIER = frozenset((0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x32))  # those of fields 1 to 6
_MOST_BYTES = INLINE_LIMIT + 4096
_LONGEST_HEAD = 2048
_MOST_KNOWN = 1024
_MOST_SHIFT = 28  # protobuf takes no length of more than five bytes

Key = tuple[bytes, tuple[int, ...]]


def split(raw: bytes) -> tuple[Key, list[bytes]] | None:
    """The fingerprint of a small request, and its raw contents; None if it has none."""
    if len(raw) > _MOST_BYTES:
        return None
    contents: list[bytes] = []
    head_end = at = 0
    end = len(raw)
    while at < end:
        tag = raw[at]
        at += 1
        size = shift = 0
        while at < end:
            byte = raw[at]
            at += 1
            size |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
        else:
            return None
        if shift > _MOST_SHIFT or size > end - at:
            return None
        if tag == _RAW_INPUT:
            contents.append(raw[at : at + size])
        elif tag in _EARLIER and not contents:
            head_end = at + size
        else:
            return None
        at += size
    if head_end > _LONGEST_HEAD:
        return None
    return (raw[:head_end], tuple(map(len, contents))), contents


class _Known(NamedTuple):
    model: Model
    version: str  # as the request has it
    prepared: PreparedRequest


class PreparedRequests:
    """The cache, of all models."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._cache: BoundedCache[Key, _Known] = BoundedCache(_MOST_KNOWN)

    def repeat(self, key: Key, contents: Sequence[bytes]) -> tuple[Model, BuiltRequest] | None:
        """The request that is known by `key`, with these contents; None when it is not known.

        Raises AlreadyExists when an output overlaps another one in flight and may not.
        """
        known = self._cache.find(key)
        if known is None:
            return None
        model = known.model
        if self._models.find(model.name, known.version) is model:
            built = known.prepared.fill(b"".join(contents), 0)
            if built is not None:
                return model, built
        self._cache.forget(key)
        return None

    def remember(self, key: Key, version: str, model: Model, prepared: PreparedRequest) -> None:
        """Keep what was prepared of a request."""
        self._cache.remember(key, _Known(model, version, prepared))
