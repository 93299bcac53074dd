"""The fingerprints of gRPC requests, and the cache of request templates by fingerprint and layout.

The fingerprint of a request is its message without the bytes of its tensors, its id and its
position in a sequence. Clients often send the same request with different tensors. A serialized
ModelInferRequest has the bytes of its tensors (`raw_input_contents`, the field with the highest
number) at its end. Names, shapes and parameters before them need not be parsed again. A message
with another order of fields has no fingerprint, and is parsed.

A layout describes the positions of the id and the tensors in messages of one size:

    | model, version | id | inputs, outputs, tag | tensor | tag | tensor |
      kept             cut  kept                   cut      kept  cut

The kept parts are compared as a whole, so that the fields are not read one by one. Ids of another
length have another layout. Messages with a position in a sequence have no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from shmserve.gateway.context import GatewayModel, ModelTable
from shmserve.gateway.grpc.wire.response import encode_varint
from shmserve.gateway.inference.infer_request import ANONYMOUS, InferRequest, RequestIdentity
from shmserve.gateway.inference.prepare import BuiltRequest, RequestTemplate
from shmserve.ipc.tensors.schemas import (
    INLINE_LIMIT,
    LONGEST_CORRELATION_ID,
    SEQUENCE_END,
    SEQUENCE_START,
    BoundedCache,
)

_MAX_CACHED_TEMPLATES = 1024

# Tags of the fields of a request.
ID_TAG, PARAMETER_TAG = 0x1A, 0x22
RAW_INPUT_TAG = 0x3A  # the tag of field 7, length-delimited
HEAD_TAGS = frozenset((0x0A, 0x12, ID_TAG, PARAMETER_TAG, 0x2A, 0x32))  # the tags of fields 1 to 6
MAX_SHIFT = 28  # in bits: a length has at most five bytes of seven bits
_MAX_MESSAGE_BYTES = INLINE_LIMIT + 4096  # larger messages have no fingerprint
_MAX_HEAD_BYTES = 2048  # of a message without its tensors

# A parameter is an entry of a map: field 1 is the key, field 2 a message with the value in a field
# whose number depends on the type.
KEY_OFFSET, SEQUENCE_KEY_PREFIX = 2, b"sequence_"
_CORRELATION_ID_ENTRY = b"\x0a\x0bsequence_id\x12"
_INT64_TAG, _STRING_TAG = 0x10, 0x1A
# Maps each serialized entry of a sequence flag to the flag's bit, and to the value of this bit.
_FLAG_ENTRIES = {
    b"\x0a" + key + b"\x12\x02\x08" + value: (bit, bit * value[0])
    for key, bit in ((b"\x0esequence_start", SEQUENCE_START), (b"\x0csequence_end", SEQUENCE_END))
    for value in (b"\0", b"\1")
}

# The kept parts of a message's head, and the size of each tensor.
Key = tuple[bytes, tuple[int, ...]]


class SplitMessage(NamedTuple):
    """The fingerprint of a request (`key`), and the parts cut out of its message."""

    key: Key  # the fingerprint
    contents: list[bytes]  # the bytes of each tensor
    identity: RequestIdentity


def split_message(message: bytes) -> SplitMessage | None:
    """Return a message's fingerprint and the parts cut out; None if no fingerprint is made."""
    if len(message) > _MAX_MESSAGE_BYTES:
        return None
    contents: list[bytes] = []
    encoded_ids: list[bytes] = []
    sequence_entries: list[bytes] = []
    kept_head: list[bytes] = []  # the kept parts of the head
    kept_start = position = head_end = 0
    message_size = len(message)
    while position < message_size:
        start = position
        tag = message[position]
        position += 1
        size = shift = 0
        while position < message_size:
            byte = message[position]
            position += 1
            size |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
        else:
            return None
        if shift > MAX_SHIFT or size > message_size - position:
            return None
        if tag == RAW_INPUT_TAG:
            contents.append(message[position : position + size])
        elif tag in HEAD_TAGS and not contents:
            head_end = position + size
            cut_parts = encoded_ids if tag == ID_TAG else None
            if tag == PARAMETER_TAG and message.startswith(
                SEQUENCE_KEY_PREFIX, position + KEY_OFFSET
            ):
                cut_parts = sequence_entries
            if cut_parts is not None:
                cut_parts.append(message[position:head_end])
                kept_head.append(message[kept_start:start])
                kept_start = head_end
        else:
            return None
        position += size
    if head_end > _MAX_HEAD_BYTES:
        return None
    cut_identity = parse_identity(encoded_ids, sequence_entries) if kept_head else ANONYMOUS
    if cut_identity is None:
        return None
    kept_head.append(message[kept_start:head_end])
    return SplitMessage((b"".join(kept_head), tuple(map(len, contents))), contents, cut_identity)


def parse_identity(ids: Sequence[bytes], entries: Sequence[bytes]) -> RequestIdentity | None:
    """Return the request id and sequence position in serialised fields.

    If a field is repeated, its last value is used, as in protobuf.

    Args:
        ids: The values of the field `id`.
        entries: The entries of the field `parameters`.

    Returns:
        None if an entry is not a sequence parameter, or a value is invalid.
    """
    correlation_id: int | str | None = 0
    flags = 0
    for entry in entries:
        if (flag_bits := _FLAG_ENTRIES.get(entry)) is not None:
            flags = flags & ~flag_bits[0] | flag_bits[1]
        elif entry.startswith(_CORRELATION_ID_ENTRY):
            correlation_id = _decode_correlation_id(entry[len(_CORRELATION_ID_ENTRY) :])
            if correlation_id is None:
                return None
        else:
            return None
    try:
        request_id = ids[-1].decode() if ids else ""
    except UnicodeDecodeError:
        return None
    assert correlation_id is not None
    return RequestIdentity(request_id, correlation_id, flags)


def _decode_correlation_id(value: bytes) -> int | str | None:
    """Return the integer or string in a serialised InferParameter; None for other values."""
    if len(value) < 3 or value[0] != len(value) - 1:
        return None
    if value[1] == _INT64_TAG:
        number = shift = 0
        for byte in value[2:]:
            number |= (byte & 127) << shift
            shift += 7
        is_terminated = value[-1] < 128 and all(byte > 127 for byte in value[2:-1])
        return number if is_terminated and number < 1 << 64 else None
    text = value[3:]
    if value[1] != _STRING_TAG or value[2] != len(text) or len(text) > LONGEST_CORRELATION_ID:
        return None
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


@dataclass(slots=True, eq=False)
class _CachedTemplate:
    """A cached template of requests with one fingerprint.

    Attributes:
        identity: The id and the sequence position of the request that the template was made from.
        version: The version of the model in the request.
        revision: The revision of the model table when `version` was resolved to `model`.
    """

    identity: RequestIdentity
    model: GatewayModel
    version: str  # as in the request
    revision: int  # of the model table
    template: RequestTemplate


class _Layout(NamedTuple):
    """A layout of messages of one size.

    `templates` has the request templates by the kept parts of a message.
    """

    struct: Struct
    has_id: bool  # whether the messages contain a request id
    templates: dict[tuple[bytes, ...], _CachedTemplate]


class TemplateCache:
    """The cache of the templates of all models."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._cache: BoundedCache[Key, _CachedTemplate] = BoundedCache(_MAX_CACHED_TEMPLATES)
        # Layouts by the size of the message.
        self._layouts: BoundedCache[int, _Layout] = BoundedCache(_MAX_CACHED_TEMPLATES)
        self._layout_template_count = 0  # an upper bound of the number of templates in all layouts

    def find_by_layout(self, message: bytes) -> BuiltRequest | None:
        """Return the request in a message with a known layout, or None.

        Raises:
            AlreadyExists: The range of an output is in use, and `shm_overlap` is "error".
        """
        layout = self._layouts.find(len(message))
        if layout is None:
            return None
        parts = layout.struct.unpack(message)
        kept_parts, cut_parts = parts[::2], parts[1::2]
        cached_template = layout.templates.get(kept_parts)
        if cached_template is None:
            return None
        identity = ANONYMOUS
        if layout.has_id:
            try:
                identity = RequestIdentity(cut_parts[0].decode(), 0, 0)
            except UnicodeDecodeError:
                return None
            cut_parts = cut_parts[1:]
        built_request = None
        if cached_template.revision == self._models.revision:
            built_request = cached_template.template.fill(cut_parts)
        if built_request is None:
            # If the template is still valid, `find_by_fingerprint` finds it.
            del layout.templates[kept_parts]
        elif identity != cached_template.identity:
            built_request.identify(identity)
        return built_request

    def find_by_fingerprint(self, message: bytes, split: SplitMessage) -> BuiltRequest | None:
        """Return the request in a message with a known fingerprint, or None.

        Raises:
            AlreadyExists: The range of an output is in use, and `shm_overlap` is "error".
        """
        cached_template = self._cache.find(split.key)
        if cached_template is None:
            return None
        model, revision = cached_template.model, self._models.revision
        if (
            cached_template.revision == revision
            or self._models.find(model.name, cached_template.version) is model
        ):
            cached_template.revision = revision
            built_request = cached_template.template.fill(split.contents)
            if built_request is not None:
                if split.identity != cached_template.identity:
                    built_request.identify(split.identity)
                self._add_layout(message, split, cached_template)
                return built_request
        self._cache.remove(split.key)
        return None

    def store(
        self,
        split: SplitMessage,
        request: InferRequest,
        model: GatewayModel,
        template: RequestTemplate,
    ) -> None:
        """Store a template if `split` has the id and the sequence position of the request."""
        if split.identity.is_identity_of(request):
            fields = (split.identity, model, request.version, self._models.revision, template)
            self._cache.store(split.key, _CachedTemplate(*fields))

    def _add_layout(
        self, message: bytes, split: SplitMessage, cached_template: _CachedTemplate
    ) -> None:
        sizes = _part_sizes(message, split)
        if sizes is None:
            return
        struct = Struct("<" + "".join([f"{size}s" for size in sizes]))
        if self._layout_template_count >= _MAX_CACHED_TEMPLATES:
            self._layouts.clear()
            self._layout_template_count = 0
        has_id = bool(split.identity.request_id)
        layout = self._layouts.find(len(message))
        if layout is None:
            layout = _Layout(struct, has_id, {})
            self._layouts.store(len(message), layout)
        # The cache keeps the first layout of a size. If messages of two layouts alternate,
        # replacing it would cost more than it saves.
        if layout.struct.format == struct.format and layout.has_id == has_id:
            layout.templates[struct.unpack(message)[::2]] = cached_template
            self._layout_template_count += 1


def _part_sizes(message: bytes, split: SplitMessage) -> list[int] | None:
    """Return the sizes of the kept and cut parts of a message, alternately.

    Returns:
        None for a message with a position in a sequence, or not in protobuf's usual encoding.
    """
    request_id, correlation_id, flags = split.identity
    if correlation_id or flags:
        return None
    tensor_fields = [_encode_field(RAW_INPUT_TAG, content) for content in split.contents]
    head, encoded_id = split.key[0], request_id.encode()
    if request_id:
        encoded_field = _encode_field(ID_TAG, encoded_id)
        id_position = message.find(encoded_field)
        if id_position < 0:
            return None
        head = head[:id_position] + encoded_field + head[id_position:]
        sizes = [
            id_position + len(encoded_field) - len(encoded_id),
            len(encoded_id),
            len(head) - id_position - len(encoded_field),
        ]
    else:
        sizes = [len(head)]
    if b"".join((head, *tensor_fields)) != message:
        return None
    for encoded_field, content in zip(tensor_fields, split.contents, strict=True):
        sizes[-1] += len(encoded_field) - len(content)
        sizes += (len(content), 0)
    return sizes


def _encode_field(tag: int, value: bytes) -> bytes:
    return b"%c%b%b" % (tag, encode_varint(len(value)), value)
