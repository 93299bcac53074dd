"""Diagnostics: a line for each problem of a configuration, with its position in the source."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from google.protobuf.message import Message

from shmserve.errors import InvalidArgument, clip
from shmserve.proto.model_config_pb2 import ModelConfig

# ("output", 0, "name") is output[0].name; a map's member is named by `member`.
Key = tuple[str | int, ...]


class Problem(NamedTuple):
    """A problem with the value of a key.

    `needs` are further keys whose values the text is true of. `at` is a position ("12:7"); only
    what could not be read has one of its own.
    """

    key: Key
    text: str
    needs: tuple[Key, ...] = ()
    at: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """The text that a configuration comes from.

    `origin` names it ("m/config.pbtxt"; "" where nothing was written), `places` has the position
    of every key in it, `problems` what of it could not be read. `beside` has what is not written
    here: the class that completes a configuration.
    """

    origin: str = ""
    places: Mapping[Key, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    beside: Source | None = None

    def refusing(self, key: Key, text: str) -> Source:
        """This source, with one more value in it that is not used, for the reason `text`."""
        problem = Problem(key, text, at=self.places.get(key, ""))
        return replace(self, problems=(*self.problems, problem))

    def check(
        self,
        config: ModelConfig,
        problems: Iterable[Problem] = (),
        kind: type[InvalidArgument] = InvalidArgument,
    ) -> None:
        """Raise `kind` with a line for each problem of the text and of `config`, if there are any.

        The line is `ORIGIN:LINE:COLUMN: KEY: TEXT`. What is missing has the position of what it is
        missing in, and none when that is the whole text. What was not written in the text, but
        completed, has neither origin nor position. A problem that may only follow from something
        that could not be read is left out.
        """
        lines = [f"{located(self.origin, p.at)} {shown(p.key)}: {p.text}" for p in self.problems]
        gaps = _Gaps(self)
        for problem in problems:
            if not any(map(gaps.concern, (problem.key, *problem.needs))):
                where = self._where(problem.key, config)
                lines.append(f"{where}{shown(problem.key)}: {problem.text}")
        if lines:
            raise kind("\n".join(dict.fromkeys(lines)))

    def _where(self, key: Key, config: ModelConfig) -> str:
        at = self._place(key, config)
        if at is not None:
            return f"{located(self.origin, at)} "
        of_class = self.beside.places if self.beside else {}
        written = [key[:end] for end in range(len(key), 0, -1) if key[:end] in of_class]
        if self.beside is None or not written:
            return ""
        return f"{located(self.beside.origin, of_class[written[0]])} "

    def _place(self, key: Key, config: ModelConfig) -> str | None:
        """Where `key`, or what it is missing in, is written; None when it is not of the text."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.places:
                return self.places[key[:end]]
            if _holds(config, key[:end]):
                return None
        return "" if self.origin else None


UNWRITTEN = Source()


class _Gaps:
    """The keys of a configuration that are not known, because they could not be read."""

    def __init__(self, source: Source) -> None:
        self._places = source.places
        self._unread = {problem.key for problem in source.problems}
        self._incomplete = {key[:end] for key in self._unread for end in range(1, len(key))}
        # Any field that is missing beside an unknown name may be what was meant by it.
        self._misspelt_in = {key[:-1] for key in self._unread if key not in source.places}

    def concern(self, key: Key) -> bool:
        """Whether the value of `key` may have been another in the text."""
        enclosing = (key[:end] for end in range(1, len(key) + 1))
        return (
            key in self._incomplete
            or not self._unread.isdisjoint(enclosing)
            or (key not in self._places and key[:-1] in self._misspelt_in)
        )


def located(origin: str, at: str) -> str:
    """The prefix of a line on a place: `ORIGIN:LINE:COLUMN:`, or `ORIGIN:` without a position."""
    return f"{origin}:{at}:" if at else f"{origin}:"


def shown(key: Key) -> str:
    """A key as its author writes it: output[0].name."""
    parts = (
        f"[{part}]" if isinstance(part, int) else part if part[:1] == "[" else f".{clip(part)}"
        for part in key
    )
    return "".join(parts).removeprefix(".")


def member(name: str | int) -> str | int:
    """A map's member as a part of a key: step[0].input_map["a"]."""
    return name if isinstance(name, int) else f"[{json.dumps(name)}]"


def repeats(values: Iterable[tuple[Key, Any]]) -> Iterator[tuple[Key, Any, Key]]:
    """Of keys with their values those whose value an earlier one has, and the first that has it."""
    first: dict[Any, Key] = {}
    for key, value in values:
        earlier = first.setdefault(value, key)
        if earlier is not key:
            yield key, value, earlier


def _holds(config: ModelConfig, key: Key) -> bool:
    """Whether there is a value at `key`; elements are named only where there are such."""
    found: Any = config
    for part in key:
        if isinstance(found, Message):
            found = {target.name: value for target, value in found.ListFields()}.get(str(part))
            if found is None:
                return False
        elif isinstance(part, int):
            found = found[part]
    return True
