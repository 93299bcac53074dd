"""Records and messages, and their serialisation to MessagePack frames, with types checked.

A record is a dataclass that is sent between processes. `from_map` reads a record from a plain map.
A message is a record with a tag. A frame contains several messages, with fields in the order of the
class, as MessagePack: [VERSION, [tag, field, ...], [tag, field, ...], ...]. `unpack` checks the
types of fields, so that handlers may rely on them, and raises MalformedMessage for other content. A
frame cannot execute code, because it contains neither pickles nor names of methods.
"""

from __future__ import annotations

import gc
import types
import typing
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import starmap
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

import msgpack

VERSION = 3  # of the protocol; each frame begins with it
_LARGE_FRAME_SIZE = 64 * 1024
_PACKER = msgpack.Packer()  # reused, because creating one takes as long as packing a message

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
class _RecordType(type):
    """The metaclass of records: it makes each class a slotted dataclass.

    The dataclass is frozen for the type checker only. Creating an instance of a frozen dataclass
    takes five times as long, and each request creates a dozen records in each process. The methods
    for comparisons and texts are closures. `dataclass` would compile 300 such methods when a client
    imports the package.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        declared_class = super().__new__(cls, name, bases, namespace)
        if "__slots__" in namespace:  # `dataclass` creates the slotted class by a second call
            return declared_class
        record_class: Any = dataclass(slots=True, eq=False, repr=False)(declared_class)
        compared_names = [field.name for field in fields(record_class) if field.compare]
        shown_names = [field.name for field in fields(record_class) if field.repr]
        compared_values: Callable[[Any], Any] = (
            attrgetter(*compared_names) if compared_names else type
        )

        def __eq__(self: Any, other: object) -> Any:
            if type(other) is not record_class:
                return NotImplemented
            return compared_values(self) == compared_values(other)

        def __hash__(self: Any) -> int:
            return hash(compared_values(self))

        def __repr__(self: Any) -> str:
            field_texts = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown_names)
            return f"{type(self).__qualname__}({field_texts})"

        record_class.__eq__, record_class.__hash__ = __eq__, __hash__
        if "__repr__" not in namespace:
            record_class.__repr__ = __repr__
        return record_class


class Record(metaclass=_RecordType):
    """The base class of records, which are sent between processes."""

    __slots__ = ()


class Document(Record):
    """The base class of records that are decoded from a document, such as a configuration.

    A document is sent in a message as the map `source`, from which the receiver decodes the record.
    """

    @classmethod
    @abstractmethod
    def of(cls, source: Mapping[str, Any]) -> Self:
        """Return the record of a document.

        Raise TypeError, ValueError and the like if it is invalid.
        """


class MalformedMessage(Exception):
    """The error for bytes that are not a message; its text is only logged."""


@cache
def decoder(annotation: Any) -> Callable[[Any], Any]:
    """Return the function that decodes values of an annotated type from values of JSON types.

    Records are decoded from maps, tuples from lists, and paths from strings; None stays None. The
    metadata of a record's field may have a `convert` function, and the `path` of the field's value
    in the map, such as "outer.inner". The default is the field's name. Other keys of the map are
    ignored, and fields without a value have their defaults.
    """
    if isinstance(annotation, type) and issubclass(annotation, Document):
        return annotation.of
    if isinstance(annotation, type) and is_dataclass(annotation):
        _field_decoders(annotation)
        return partial(from_map, annotation)
    if annotation is Path:
        return Path
    generic_type, type_arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if generic_type in (types.UnionType, typing.Union):
        (member,) = (argument for argument in type_arguments if argument is not type(None))
        return decoder(member)
    if generic_type is tuple:
        if type_arguments[-1] is not Ellipsis:
            return tuple
        return partial(_decode_tuple, decoder(type_arguments[0]))
    if generic_type is dict:
        return partial(
            _decode_dict,
            int if type_arguments[0] is int else _unchanged,
            decoder(type_arguments[1]),
        )
    return _unchanged


def _unchanged(value: Any) -> Any:
    return value


def _decode_tuple(decode: Callable[[Any], Any], values: list[Any]) -> tuple[Any, ...]:
    return tuple(values if decode is _unchanged else map(decode, values))


def _decode_dict(
    decode_key: Callable[[Any], Any], decode: Callable[[Any], Any], values: dict[Any, Any]
) -> dict[Any, Any]:
    return {decode_key(name): decode(value) for name, value in values.items()}


def from_map(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return the record of class `cls` with the values of a map, decoded as in `decoder`."""
    decoded_values = {}
    record_class: Any = cls
    for name, path, decode in _field_decoders(record_class):
        value: Any = values
        for key in path:
            value = None if value is None else value.get(key)
        if value is not None:
            decoded_values[name] = decode(value)
    return cls(**decoded_values)


@cache
def _field_decoders(cls: type[Any]) -> list[tuple[str, list[str], Callable[[Any], Any]]]:
    hints = typing.get_type_hints(cls)
    return [
        (
            field.name,
            field.metadata.get("path", field.name).split("."),
            field.metadata.get("convert") or decoder(hints[field.name]),
        )
        for field in fields(cls)
        if field.init
    ]


# --- frames


class VersionMismatch(MalformedMessage):
    """The error for a frame or a `Hello` of another protocol version."""

    def __init__(self, version: object) -> None:
        text = f"this process has version {VERSION}"
        super().__init__(f"the peer has protocol version {version!r:.20}, {text}")


# Pairs of the index of a message's field, and a check or the codec of its value.
_Checks = tuple[tuple[int, Callable[[Any], bool]], ...]
_NestedFields = tuple[tuple[int, "_Records | _Document"], ...]
_CLASSES_BY_TAG: dict[str, Any] = {}  # message classes by tag


def _wire_type(annotation: Any) -> type[Any]:
    wire_type = dict if _is_document(annotation) else typing.get_origin(annotation) or annotation
    if wire_type not in (int, str, bytes, bool, float, list, dict):
        raise TypeError(f"a message field cannot have the type {annotation}")
    return wire_type


class _Records:
    """The codec of a message field with a list of records, each encoded as a list of its fields."""

    def __init__(self, cls: type[Any]) -> None:
        hints = typing.get_type_hints(cls)
        self._cls = cls
        self._field_types = [_wire_type(hints[field.name]) for field in fields(cls)]
        self._fields = attrgetter(*(field.name for field in fields(cls)))

    def encode(self, records: list[Any]) -> list[Any]:
        """Return the encoding of the records."""
        return list(map(self._fields, records))

    def decode(self, items: list[Any]) -> list[Any]:
        """Return the records; raise MalformedMessage if a field has another type."""
        cls, field_types = self._cls, self._field_types
        for item in items:
            if type(item) is not list or list(map(type, item)) != field_types:
                raise MalformedMessage(f"a {cls.__name__} has fields of the wrong number or types")
        return list(starmap(cls, items))


class _Document:
    """The codec of a message field with a `Document`, which is encoded as its `source`."""

    encode = attrgetter("source")

    def __init__(self, cls: type[Document]) -> None:
        self._cls = cls
        cls.of({})  # reads the fields of the class now, before processes are forked

    def decode(self, source: dict[str, Any]) -> Document:
        """Return the document; raise MalformedMessage if it is invalid."""
        try:
            return self._cls.of(source)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise MalformedMessage(f"invalid {self._cls.__name__}: {error}") from error


def _is_document(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Document)


def _nested_codec(annotation: Any) -> _Records | _Document | None:
    """Return the codec of a field with records or a document; None for any other field."""
    element_type = (*typing.get_args(annotation), None)[0]
    if (
        typing.get_origin(annotation) is list
        and isinstance(element_type, type)
        and is_dataclass(element_type)
    ):
        return _Records(element_type)
    return _Document(annotation) if _is_document(annotation) else None


def _checker(annotation: Any) -> Callable[[Any], bool]:
    """Return a function that checks the types of a list's elements at every depth."""
    if typing.get_origin(annotation) is not list:
        return lambda value: type(value) is annotation
    (element_type,) = typing.get_args(annotation)
    if element_type is Any:
        return lambda value: type(value) is list
    check_element = _checker(element_type)
    return lambda value: type(value) is list and all(map(check_element, value))


class Message(Record):
    """The base class of messages.

    Fields are int, str, bytes, bool, float, dict, documents, or lists. A list may contain records
    that have neither lists, dicts nor documents. Fields with a default may be omitted at the end.
    The tag is the class's name, or `TAG` if the wire name differs.
    """

    TAG: ClassVar[str]  # the name on the wire

    def __init_subclass__(cls) -> None:
        cls.TAG = cls.__dict__.get("TAG", cls.__name__)
        _CLASSES_BY_TAG[cls.TAG] = cls


class _MessageCodec(NamedTuple):
    """The properties of a message class for encoding and decoding.

    Attributes:
        get_values: Returns the tag and the encoded field values of a message.
        required_count: The number of fields without a default.
        element_checks: The checks of the elements of lists.
        nested_fields: The fields that contain records or a document.
    """

    get_values: Callable[[Any], Any]
    field_types: list[type[Any]]
    required_count: int
    element_checks: _Checks
    nested_fields: _NestedFields


@cache
def _codec_of(cls: Any) -> _MessageCodec:
    """Return the codec of a message class, which is created at the first use of the class."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    annotations = [hints[name] for name in names]
    codecs = ((i, _nested_codec(annotation)) for i, annotation in enumerate(annotations))
    nested_fields = tuple((i, codec) for i, codec in codecs if codec)
    nested_indices = {index for index, _ in nested_fields}
    element_checks = tuple(
        (index, _checker(annotation))
        for index, annotation in enumerate(annotations)
        if typing.get_origin(annotation) is list
        and index not in nested_indices
        and typing.get_args(annotation) != (Any,)
    )
    required_count = sum(field.default is MISSING for field in fields(cls))
    get_values: Callable[[Any], Any] = attrgetter("TAG", *names) if names else lambda _: (cls.TAG,)
    if nested_fields:
        get_values = _with_nested_packed(get_values, nested_fields)
    wire_types = list(map(_wire_type, annotations))
    return _MessageCodec(get_values, wire_types, required_count, element_checks, nested_fields)


def _with_nested_packed(
    get_fields: Callable[[Any], Any], nested_fields: _NestedFields
) -> Callable[[Any], Any]:
    def get_values(message: Any) -> list[Any]:
        items = list(get_fields(message))
        for index, codec in nested_fields:
            if items[index + 1]:
                items[index + 1] = codec.encode(items[index + 1])
        return items

    return get_values


def pack(messages: Iterable[Any]) -> bytes:
    """Return a frame of `messages`, in order; unencodable text is escaped."""
    items = [VERSION, *[_codec_of(message.__class__).get_values(message) for message in messages]]
    frame: bytes
    try:
        frame = _PACKER.pack(items)
    except UnicodeEncodeError:  # the text may be a model's file name that is not UTF-8
        frame = msgpack.packb(items, unicode_errors="backslashreplace")
    return frame


def unpack(frame: bytes, max_array_len: int = -1) -> list[Any]:
    """Return the typed messages of a frame.

    Args:
        frame: The frame.
        max_array_len: The maximum number of elements of an array; -1: unlimited, for trusted
            processes.

    Raises:
        MalformedMessage: The frame is invalid; none of its messages is returned.
    """
    # The garbage collector is disabled for large frames, because it would scan the new objects
    # repeatedly, and a local client can send a million of them.
    pauses_gc = max_array_len >= 0 and len(frame) > _LARGE_FRAME_SIZE and gc.isenabled()
    if pauses_gc:
        gc.disable()
    try:
        items = msgpack.unpackb(frame, max_array_len=max_array_len)
    except Exception as error:  # msgpack raises many exception types
        raise MalformedMessage(f"a frame is not MessagePack: {error}") from error
    finally:
        if pauses_gc:
            gc.enable()
    if type(items) is not list or not items:
        raise MalformedMessage("a frame must be a list that begins with the version")
    if items[0] != VERSION:
        raise VersionMismatch(items[0])
    del items[0]
    return _decode_messages(items)


def _decode_messages(items: list[Any]) -> list[Any]:
    """Return the messages that were packed as these items."""
    messages: list[Any] = []
    for item in items:
        if type(item) is not list or not item or type(tag := item[0]) is not str:
            raise MalformedMessage("a message must be a list that begins with its tag")
        if tag not in _CLASSES_BY_TAG:
            raise MalformedMessage(f"unknown message {tag[:40]!r}")
        cls = _CLASSES_BY_TAG[tag]
        _, field_types, required_count, element_checks, nested_fields = _codec_of(cls)
        del item[0]
        item_types = list(map(type, item))
        is_complete = item_types == field_types
        if not is_complete and (
            len(item_types) < required_count or item_types != field_types[: len(item_types)]
        ):
            raise MalformedMessage(f"{tag} has fields of the wrong number or types")
        for index, check in element_checks:
            if (is_complete or index < len(item)) and not check(item[index]):
                raise MalformedMessage(f"{tag} has a list with elements of the wrong type")
        for index, codec in nested_fields:
            if (is_complete or index < len(item)) and item[index] != []:
                item[index] = codec.decode(item[index])
        messages += [cls(*item)]
    return messages
