"""Diagnostics: a line for each problem of a configuration, with its position in the source."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from google.protobuf.message import Message

from shmserve.errors import InvalidArgument, clip
from shmserve.ipc.class_source import source_positions
from shmserve.ipc.model_spec import MODEL_SETTINGS
from shmserve.proto.model_config_pb2 import ModelConfig

# ("output", 0, "name") is output[0].name. `map_key` returns the element for a key of a map.
Key = tuple[str | int, ...]


class Problem(NamedTuple):
    """A problem with the value of a key.

    Attributes:
        key: The key.
        text: The message.
        related_keys: Further keys whose values the message refers to.
        at: The position ("12:7") of a value that could not be read; otherwise "".
    """

    key: Key
    text: str
    related_keys: tuple[Key, ...] = ()  # to which the message refers
    at: str = ""  # position of an unreadable value ("12:7")


@dataclass(frozen=True, slots=True)
class Source:
    """The text that a configuration is read from.

    Attributes:
        origin: The name of the text ("m/config.pbtxt"); "" if there is no text.
        positions: The position of every key in the text.
        problems: The problems of values that could not be read.
        python_class_source: The source of the Python class that completes the configuration.
    """

    origin: str = ""  # name of the text
    positions: Mapping[Key, str] = field(default_factory=dict)  # in the text
    problems: tuple[Problem, ...] = ()  # of values that could not be read
    python_class_source: Source | None = None

    def with_problem(self, key: Key, text: str) -> Source:
        """Return this source with one more value that could not be read.

        Args:
            key: The key of the value.
            text: The reason.
        """
        problem = Problem(key, text, at=self.positions.get(key, ""))
        return replace(self, problems=(*self.problems, problem))

    def raise_for_problems(
        self,
        config: ModelConfig,
        problems: Iterable[Problem] = (),
        error_type: type[InvalidArgument] = InvalidArgument,
    ) -> None:
        """Raise `error_type` if the text or `config` has problems, with one line per problem.

        A line has the format `ORIGIN:LINE:COLUMN: KEY: TEXT`. A missing key has the position of the
        message that lacks it, and no position if that message is the whole text. A value that the
        text does not contain has the position in the Python class if the class sets it, or else no
        origin. A problem that may result from an unread value is omitted.
        """
        origin = self.origin
        rows = [f"{position_text(origin, p.at)} {key_text(p.key)}: {p.text}" for p in self.problems]
        unread_keys = _UnreadKeys(self)
        for problem in problems:
            if not any(map(unread_keys.concerns, (problem.key, *problem.related_keys))):
                prefix = self._prefix(problem.key, config)
                rows.append(f"{prefix}{key_text(problem.key)}: {problem.text}")
        if rows:
            raise error_type("\n".join(dict.fromkeys(rows)))

    def _prefix(self, key: Key, config: ModelConfig) -> str:
        at = self._find_position(key, config)
        if at is not None:
            return f"{position_text(self.origin, at)} "
        class_positions = self.python_class_source.positions if self.python_class_source else {}
        class_keys = [key[:end] for end in range(len(key), 0, -1) if key[:end] in class_positions]
        if self.python_class_source is None or not class_keys:
            return ""
        return f"{position_text(self.python_class_source.origin, class_positions[class_keys[0]])} "

    def _find_position(self, key: Key, config: ModelConfig) -> str | None:
        """Return the position of `key` or of the message that lacks it; None if not in the text."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.positions:
                return self.positions[key[:end]]
            if _has_value(config, key[:end]):
                return None
        return "" if self.origin else None


UNWRITTEN = Source()  # the source of a configuration that was not read from a text


class _UnreadKeys:
    """The parts of a configuration that are unknown because values could not be read."""

    def __init__(self, source: Source) -> None:
        self._positions = source.positions
        self._unread = {problem.key for problem in source.problems}
        self._incomplete = {key[:end] for key in self._unread for end in range(1, len(key))}
        # An unknown name may be a misspelling of any field that its message lacks.
        self._maybe_misspelt = {key[:-1] for key in self._unread if key not in source.positions}

    def concerns(self, key: Key) -> bool:
        """Check whether the unread parts of the text may contain a value for `key`."""
        enclosing_keys = (key[:end] for end in range(1, len(key) + 1))
        is_unread = key in self._incomplete or not self._unread.isdisjoint(enclosing_keys)
        return is_unread or (key not in self._positions and key[:-1] in self._maybe_misspelt)


def position_text(origin: str, at: str) -> str:
    """Return the prefix of a line: `ORIGIN:LINE:COLUMN:`, or `ORIGIN:` without a position."""
    return f"{origin}:{at}:" if at else f"{origin}:"


def key_text(key: Key) -> str:
    """Return a key in the notation of configurations: output[0].name."""
    parts = (
        f"[{part}]" if isinstance(part, int) else part if part[:1] == "[" else f".{clip(part)}"
        for part in key
    )
    return "".join(parts).removeprefix(".")


def map_key(name: str | int) -> str | int:
    """Return the element of a `Key` for a map's entry: `["a"]` for the name "a"."""
    return name if isinstance(name, int) else f"[{json.dumps(name)}]"


def find_repeats(values: Iterable[tuple[Key, Any]]) -> Iterator[tuple[Key, Any, Key]]:
    """Yield each repeated value: its key, the value, and the first key with that value."""
    first_keys: dict[Any, Key] = {}
    for key, value in values:
        first_key = first_keys.setdefault(value, key)
        if first_key is not key:
            yield key, value, first_key


def _has_value(config: ModelConfig, key: Key) -> bool:
    """Check whether the configuration has a value at `key`. List indices in `key` must exist."""
    current: Any = config
    for part in key:
        if isinstance(current, Message):
            current = {field.name: value for field, value in current.ListFields()}.get(str(part))
            if current is None:
                return False
        elif isinstance(part, int):
            current = current[part]
    return True


# The keys of a configuration that an attribute or method of a class sets. All other attributes set
# the key of their own name.
_KEYS_OF_ATTRIBUTE: dict[str, tuple[Key, ...]] = {
    "instances": (("instance_group",),),
    "max_queue_delay_us": (("dynamic_batching", "max_queue_delay_microseconds"),),
    "predict": (("input",), ("output",)),
    **{name: (("parameters", map_key(name)),) for name in MODEL_SETTINGS},
}


def class_source(text: str | bytes, name: str, origin: str) -> Source:
    """Return the positions of the attributes of class `name` in the text of the file `origin`."""
    positions: dict[Key, str] = {}
    for attribute, position in source_positions(text, name).items():
        for key in _KEYS_OF_ATTRIBUTE.get(attribute, ((attribute,),)):
            positions[key] = position
    return Source(origin, positions)
