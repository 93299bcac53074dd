"""Records: dataclasses that are sent between processes, and their decoding from plain values."""

from __future__ import annotations

import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Declare a slotted dataclass that is frozen for the type checker only.

    A frozen dataclass takes five times as long to create, and each request creates a dozen records
    in each process. The methods that `dataclass` would compile for comparisons and texts are
    closures here, because a client would compile 300 methods when it is imported.
    """
    record_class: Any = dataclass(slots=True, eq=False, repr=False)(cls)
    compared_names = [field.name for field in fields(record_class) if field.compare]
    shown_names = [field.name for field in fields(record_class) if field.repr]
    compared_values: Callable[[Any], Any] = attrgetter(*compared_names) if compared_names else type

    def __eq__(self: Any, other: object) -> Any:
        return (
            compared_values(self) == compared_values(other)
            if type(other) is record_class
            else NotImplemented
        )

    def __hash__(self: Any) -> int:
        return hash(compared_values(self))

    def __repr__(self: Any) -> str:
        field_texts = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown_names)
        return f"{type(self).__qualname__}({field_texts})"

    record_class.__eq__, record_class.__hash__ = __eq__, __hash__
    if "__repr__" not in cls.__dict__:
        record_class.__repr__ = __repr__
    typed: type[T] = record_class
    return typed


class Document(ABC):
    """The base class of records that are sent as the document they were decoded from: `source`."""

    __slots__ = ()
    source: dict[str, Any]

    @classmethod
    @abstractmethod
    def of(cls, source: Mapping[str, Any]) -> Self:
        """Return the record of a document.

        Raise TypeError, ValueError and the like if it is invalid.
        """


class MalformedMessage(Exception):
    """The error for bytes that are not a message; its text is only logged."""


@cache
def decoder(kind: Any) -> Callable[[Any], Any]:
    """Return the function that decodes values of an annotated type from plain values.

    Records are decoded from maps, tuples from lists, and paths from strings; None stays None. A
    field's metadata may name the `path` of its value in the map, as "outer.inner" (by default its
    name), and a `convert` function. Other keys are ignored, and fields without a value have their
    defaults.
    """
    if isinstance(kind, type) and issubclass(kind, Document):
        return kind.of
    if isinstance(kind, type) and is_dataclass(kind):
        _field_decoders(kind)
        return partial(from_map, kind)
    if kind is Path:
        return Path
    generic_type, type_arguments = typing.get_origin(kind), typing.get_args(kind)
    if generic_type in (types.UnionType, typing.Union):
        (member,) = (argument for argument in type_arguments if argument is not type(None))
        return decoder(member)
    if generic_type is tuple:
        return (
            partial(_decode_tuple, decoder(type_arguments[0]))
            if type_arguments[-1] is Ellipsis
            else tuple
        )
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
    """Return the record of a map; see `decoder`."""
    decoded = {}
    record_class: Any = cls
    for name, path, decode in _field_decoders(record_class):
        value: Any = values
        for key in path:
            value = None if value is None else value.get(key)
        if value is not None:
            decoded[name] = decode(value)
    return cls(**decoded)


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
