"""Serialisation of messages to MessagePack frames and back, with types checked at both ends.

A frame is MessagePack: [VERSION, [tag, field, ...], [tag, field, ...], ...]. It contains several
messages, with fields in the order of the class. Field types are checked on arrival, so that
handlers may rely on them. Any other content raises MalformedMessage. Nothing here can execute code:
there is no pickle, and there are no method names.
"""

from __future__ import annotations

import gc
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from itertools import starmap
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

import msgpack

from shmserve.ipc.transport.records import Document, MalformedMessage, record

VERSION = 3
_LARGE = 64 * 1024
_PACKER = msgpack.Packer()  # reused, because creating one takes as long as packing a message

T = TypeVar("T")


class OtherVersion(MalformedMessage):
    """The error for a frame or a `Hello` of another protocol version."""

    def __init__(self, version: object) -> None:
        super().__init__(
            f"the peer has protocol version {version!r:.20}, this process has version {VERSION}"
        )


_Checks = tuple[tuple[int, Callable[[Any], bool]], ...]
# The types of a class's fields, the number of required ones, closer checks, and nested records.
_Within = tuple[tuple[int, "_Records | _Document"], ...]
_Kind = tuple[type[Any], list[type[Any]], int, _Checks, _Within]
_CLASSES: dict[str, type[Any]] = {}  # message classes by tag


class _Kinds(dict[str, _Kind]):
    """The properties of message classes by tag, each read from its class at its first use."""

    def __missing__(self, tag: str) -> _Kind:
        _read(tag, _CLASSES[tag])
        return self[tag]


class _Getters(dict[type[Any], Callable[[Any], Any]]):
    """The function of each message class that returns the tag and the values of the fields."""

    def __missing__(self, cls: type[Any]) -> Callable[[Any], Any]:
        _read(cls.TAG, cls)
        return self[cls]


_BY_TAG = _Kinds()
_GETTERS = _Getters()


def _plain(kind: Any) -> type[Any]:
    plain = dict if _is_document(kind) else typing.get_origin(kind) or kind
    if plain not in (int, str, bytes, bool, float, list, dict):
        raise TypeError(f"a message field cannot be {kind}")
    return plain


class _Records:
    """A list of records within a message, encoded as lists of their fields."""

    def __init__(self, cls: type[Any]) -> None:
        hints = typing.get_type_hints(cls)
        self._cls = cls
        self._kinds = [_plain(hints[field.name]) for field in fields(cls)]
        self._fields = attrgetter(*(field.name for field in fields(cls)))

    def packed(self, records: list[Any]) -> list[Any]:
        """Return the encoding of the records."""
        return list(map(self._fields, records))

    def typed(self, items: list[Any]) -> list[Any]:
        """Return the records; raise MalformedMessage if a field has another type."""
        cls, kinds = self._cls, self._kinds
        for item in items:
            if type(item) is not list or list(map(type, item)) != kinds:
                raise MalformedMessage(f"no {cls.__name__}")
        return list(starmap(cls, items))


class _Document:
    """A document within a message, encoded as its source."""

    packed = attrgetter("source")

    def __init__(self, cls: type[Document]) -> None:
        self._cls = cls
        cls.of({})  # reads the fields of the class now, before processes are forked

    def typed(self, source: dict[str, Any]) -> Document:
        """Return the document; raise MalformedMessage if it is invalid."""
        try:
            return self._cls.of(source)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise MalformedMessage(f"no {self._cls.__name__}: {error}") from error


def _is_document(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Document)


def _within(kind: Any) -> _Records | _Document | None:
    """Return the handler of a field that contains records or a document, or None."""
    of = (*typing.get_args(kind), None)[0]
    if typing.get_origin(kind) is list and isinstance(of, type) and is_dataclass(of):
        return _Records(of)
    return _Document(kind) if _is_document(kind) else None


def _checker(kind: Any) -> Callable[[Any], bool]:
    """Return a function that checks the types of a list's elements at every depth."""
    if typing.get_origin(kind) is not list:
        return lambda value: type(value) is kind
    (of,) = typing.get_args(kind)
    if of is Any:
        return lambda value: type(value) is list
    inner = _checker(of)
    return lambda value: type(value) is list and all(map(inner, value))


@dataclass_transform(frozen_default=True)
def message(cls: type[T]) -> type[T]:
    """Declare a record as a message.

    Fields are int, str, bytes, bool, float, dict, documents, or lists, also of records without
    lists, dicts or documents. Fields with a default may be omitted at the end. The tag is the
    class's name, or `TAG` if the wire name differs.
    """
    record_class: Any = record(cls)
    record_class.TAG = cls.__dict__.get("TAG", cls.__name__)
    _CLASSES[record_class.TAG] = record_class
    typed: type[T] = record_class
    return typed


def _read(tag: str, record_class: type[Any]) -> None:
    """Read the fields of a message class into the tables."""
    hints = typing.get_type_hints(record_class)
    names = [f.name for f in fields(record_class)]
    kinds = [hints[name] for name in names]
    records = tuple((i, within) for i, kind in enumerate(kinds) if (within := _within(kind)))
    nested = {index for index, _ in records}
    closer = tuple(
        (index, _checker(kind))
        for index, kind in enumerate(kinds)
        if typing.get_origin(kind) is list
        and index not in nested
        and typing.get_args(kind) != (Any,)
    )
    needed = sum(f.default is MISSING for f in fields(record_class))
    _BY_TAG[tag] = (record_class, list(map(_plain, kinds)), needed, closer, records)
    getter: Callable[[Any], Any] = attrgetter("TAG", *names) if names else lambda _: (tag,)
    _GETTERS[record_class] = _with_records(getter, records) if records else getter


def _with_records(getter: Callable[[Any], Any], within: _Within) -> Callable[[Any], Any]:
    def values(message: Any) -> list[Any]:
        items = list(getter(message))
        for index, kind in within:
            if items[index + 1]:
                items[index + 1] = kind.packed(items[index + 1])
        return items

    return values


def tags() -> dict[type[Any], str]:
    """Return the tag of each message class, in order of declaration."""
    return {cls: tag for tag, cls in _CLASSES.items()}


def pack(messages: Iterable[Any]) -> bytes:
    """Return a frame of `messages`, in order; unencodable text is escaped."""
    items = [VERSION, *[_GETTERS[type(each)](each) for each in messages]]
    frame: bytes
    try:
        frame = _PACKER.pack(items)
    except UnicodeEncodeError:  # the text may be a model's file name that is not UTF-8
        frame = msgpack.packb(items, unicode_errors="backslashreplace")
    return frame


def unpack(frame: bytes, most: int = -1) -> list[Any]:
    """Return the typed messages of a frame.

    Args:
        frame: The frame.
        most: The maximum number of elements of an array; -1: unlimited, for trusted processes.

    Raises:
        MalformedMessage: The frame is invalid; none of its messages is returned.
    """
    # With a million small objects, the garbage collector would scan them repeatedly.
    collects = most >= 0 and len(frame) > _LARGE and gc.isenabled()
    if collects:
        gc.disable()
    try:
        raw = msgpack.unpackb(frame, max_array_len=most)
    except Exception as error:  # msgpack raises many exception types
        raise MalformedMessage(f"not MessagePack: {error}") from error
    finally:
        if collects:
            gc.enable()
    if type(raw) is not list or not raw:
        raise MalformedMessage("not a frame of messages")
    if raw[0] != VERSION:
        raise OtherVersion(raw[0])
    del raw[0]
    return _typed(raw)


def _typed(items: list[Any]) -> list[Any]:
    """Return the messages that were packed as these items."""
    messages: list[Any] = []
    for item in items:
        if type(item) is not list or not item or type(tag := item[0]) is not str:
            raise MalformedMessage("not a message")
        if tag not in _CLASSES:
            raise MalformedMessage("unknown message")
        cls, kinds, needed, closer, records = _BY_TAG[tag]
        del item[0]
        types = list(map(type, item))
        complete = types == kinds
        if not complete and (len(types) < needed or types != kinds[: len(types)]):
            raise MalformedMessage(f"{tag} has fields of the wrong number or types")
        for index, check in closer:
            if (complete or index < len(item)) and not check(item[index]):
                raise MalformedMessage(f"{tag} has a list with elements of the wrong type")
        for index, within in records:
            if (complete or index < len(item)) and item[index] != []:
                item[index] = within.typed(item[index])
        messages += [cls(*item)]
    return messages
