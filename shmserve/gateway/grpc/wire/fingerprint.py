"""The cache of prepared gRPC requests, by a fingerprint: the message without the tensors' bytes.

Programs send the same request again and again with other numbers in it. A serialized
ModelInferRequest has its tensors' bytes (`raw_input_contents`, the field with the highest number)
at its end, so what stands before them is a key: names, shapes and parameters need not be parsed and
checked twice. One whose tensors are all in regions is a key as a whole. The request's id and its
place in a sequence, which differ from one to the next, are cut out of the key. A request that is
not written like this takes the long way.
"""

from __future__ import annotations

from typing import NamedTuple

from shmserve.gateway.grpc.wire.identity import ID, KEY_AT, OF_SEQUENCE, PARAMETER, identity
from shmserve.gateway.inference.prepared import BuiltRequest, PreparedRequest
from shmserve.gateway.inference.request import ANONYMOUS, InferRequest, RequestIdentity
from shmserve.gateway.model_table import GatewayModel, ModelTable
from shmserve.ipc.tensors.inference import INLINE_LIMIT
from shmserve.ipc.tensors.template_cache import BoundedCache

_RAW_INPUT = 0x3A  # the tag of field 7, length-delimited
_EARLIER = frozenset((0x0A, 0x12, ID, PARAMETER, 0x2A, 0x32))  # those of fields 1 to 6
_MOST_BYTES = INLINE_LIMIT + 4096
_LONGEST_HEAD = 2048
_MOST_KNOWN = 1024
_MOST_SHIFT = 28  # protobuf takes no length of more than five bytes

Key = tuple[bytes, tuple[int, ...]]


class Split(NamedTuple):
    """The fingerprint of a request, its raw contents, and what its fingerprint does not say."""

    key: Key
    contents: list[bytes]
    identity: RequestIdentity


def split(raw: bytes) -> Split | None:
    """A small request without parsing it; None if it has no fingerprint."""
    if len(raw) > _MOST_BYTES:
        return None
    contents: list[bytes] = []
    ids: list[bytes] = []
    places: list[bytes] = []
    head: list[bytes] = []  # what is kept of it before the first cut, and between others
    kept = at = head_end = 0
    end = len(raw)
    while at < end:
        start = at
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
            cut = ids if tag == ID else None
            if tag == PARAMETER and raw.startswith(OF_SEQUENCE, at + KEY_AT):
                cut = places
            if cut is not None:
                cut.append(raw[at:head_end])
                head.append(raw[kept:start])
                kept = head_end
        else:
            return None
        at += size
    if head_end > _LONGEST_HEAD:
        return None
    itself = identity(ids, places) if head else ANONYMOUS
    if itself is None:
        return None
    head.append(raw[kept:head_end])
    return Split((b"".join(head), tuple(map(len, contents))), contents, itself)


class _Known(NamedTuple):
    model: GatewayModel
    version: str  # as the request has it
    prepared: PreparedRequest


class PreparedRequests:
    """The cache, of all models."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._cache: BoundedCache[Key, _Known] = BoundedCache(_MOST_KNOWN)

    def repeat(self, parts: Split) -> tuple[GatewayModel, BuiltRequest] | None:
        """The request of which these are the parts; None when its key is not known.

        Raises AlreadyExists when an output overlaps another one in flight and may not.
        """
        known = self._cache.find(parts.key)
        if known is None:
            return None
        model = known.model
        if self._models.find(model.name, known.version) is model:
            built = known.prepared.fill(b"".join(parts.contents), 0)
            if built is not None:
                built.identify(parts.identity)
                return model, built
        self._cache.forget(parts.key)
        return None

    def remember(
        self, parts: Split, request: InferRequest, model: GatewayModel, prepared: PreparedRequest
    ) -> None:
        """Keep what was prepared of a request."""
        if parts.identity.is_of(request):
            self._cache.remember(parts.key, _Known(model, request.version, prepared))
