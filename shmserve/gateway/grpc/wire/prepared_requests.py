"""The cache of prepared gRPC requests: by their fingerprints, and, where one came before, by their
layouts.

A layout is where the id and the raw contents lie in messages of one size:

    | model, version | id | inputs, outputs, tag | content | tag | content |
      kept             cut  kept                   cut       kept  cut

What is kept of a message is known as a whole, so that its fields are not looked at one by one. Ids
of another length have another layout, and what says a place in a sequence has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from shmserve.gateway.grpc.wire.fingerprint import ID, RAW_INPUT, Key, Split
from shmserve.gateway.grpc.wire.response import varint
from shmserve.gateway.inference.builder import BuiltRequest, Prepared
from shmserve.gateway.inference.request import ANONYMOUS, InferRequest, RequestIdentity
from shmserve.gateway.model_table import GatewayModel, ModelTable
from shmserve.ipc.tensors.schemas import BoundedCache

_MOST_KNOWN = 1024

Found = tuple[GatewayModel, BuiltRequest]


@dataclass(slots=True, eq=False)
class _Known:
    """A prepared request with its `key` and `identity`, for `version` as the request has it, which
    is `model` in this `revision` of the table of models."""

    key: Key
    identity: RequestIdentity
    model: GatewayModel
    version: str
    revision: int
    prepared: Prepared


class _Layout(NamedTuple):
    """The layout of messages of one size, kept and cut parts by turns, and those that are known, by
    what is kept of them."""

    struct: Struct
    has_id: bool
    known: dict[tuple[bytes, ...], _Known]


class PreparedRequests:
    """The cache, of all models."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._cache: BoundedCache[Key, _Known] = BoundedCache(_MOST_KNOWN)
        self._layouts: BoundedCache[int, _Layout] = BoundedCache(_MOST_KNOWN)  # by size
        self._learnt = 0  # known by layouts, at most

    def find(self, raw: bytes) -> Found | None:
        """The request that this message is; None when its layout is not known.

        Raises AlreadyExists when an output overlaps another one in flight and may not.
        """
        layout = self._layouts.find(len(raw))
        if layout is None:
            return None
        parts = layout.struct.unpack(raw)
        kept, cut = parts[::2], parts[1::2]
        known = layout.known.get(kept)
        if known is None:
            return None
        itself = ANONYMOUS
        if layout.has_id:
            try:
                itself = RequestIdentity(cut[0].decode(), 0, 0)
            except UnicodeDecodeError:
                return None
            cut = cut[1:]
        found = self._again(known, cut, itself)
        if found is None:
            del layout.known[kept]
        return found

    def repeat(self, raw: bytes, parts: Split) -> Found | None:
        """The request of this message, whose parts these are; None when its key is not known.

        Raises AlreadyExists when an output overlaps another one in flight and may not.
        """
        known = self._cache.find(parts.key)
        if known is None:
            return None
        found = self._again(known, parts.contents, parts.identity)
        if found is not None:
            self._learn(raw, parts, known)
        return found

    def _again(
        self, known: _Known, contents: Sequence[bytes], itself: RequestIdentity
    ) -> Found | None:
        model, revision = known.model, self._models.revision
        if known.revision == revision or self._models.find(model.name, known.version) is model:
            known.revision = revision
            built = known.prepared.of(contents)
            if built is not None:
                if itself != known.identity:
                    built.identify(itself)
                return model, built
        self._cache.forget(known.key)
        return None

    def remember(
        self, parts: Split, request: InferRequest, model: GatewayModel, prepared: Prepared
    ) -> None:
        """Keep what was prepared of a request."""
        if parts.identity.is_of(request):
            revision = self._models.revision
            named = (parts.key, parts.identity, model, request.version)
            self._cache.remember(parts.key, _Known(*named, revision, prepared))

    def _learn(self, raw: bytes, parts: Split, known: _Known) -> None:
        sizes = _layout(raw, parts)
        if sizes is None:
            return
        struct = Struct("<" + "".join([f"{size}s" for size in sizes]))
        if self._learnt >= _MOST_KNOWN:
            self._layouts.clear()
            self._learnt = 0
        has_id = bool(parts.identity.request_id)
        layout = self._layouts.find(len(raw))
        if layout is None:
            layout = _Layout(struct, has_id, {})
            self._layouts.remember(len(raw), layout)
        # Of two layouts of one size the first stays: messages that come by turns are not to be
        # learnt again and again.
        if layout.struct.format == struct.format and layout.has_id == has_id:
            layout.known[struct.unpack(raw)[::2]] = known
            self._learnt += 1


def _layout(raw: bytes, parts: Split) -> list[int] | None:
    """The sizes of what is kept of a message and of what is cut out, by turns; None where it is
    written in another way than clients do, which then is no layout."""
    request_id, correlation_id, flags = parts.identity
    if correlation_id or flags:
        return None
    tail = [_field(RAW_INPUT, content) for content in parts.contents]
    head, named = parts.key[0], request_id.encode()
    if request_id:
        field = _field(ID, named)
        at = raw.find(field)
        if at < 0:
            return None
        head = head[:at] + field + head[at:]
        sizes = [at + len(field) - len(named), len(named), len(head) - at - len(field)]
    else:
        sizes = [len(head)]
    if b"".join((head, *tail)) != raw:
        return None
    for field, content in zip(tail, parts.contents, strict=True):
        sizes[-1] += len(field) - len(content)
        sizes += (len(content), 0)
    return sizes


def _field(tag: int, value: bytes) -> bytes:
    return b"%c%b%b" % (tag, varint(len(value)), value)
