"""One flag of the command line: what it is, and how the text of its value is read (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shmserve.errors import InvalidArgument

_TRUE = ("true", "1", "on", "yes")
_FALSE = ("false", "0", "off", "no")
# int() and float() alone would take 1_000, spaces, and the digits of every script; and more than 19
# digits are out of every range.
_NUMBER = {
    int: re.compile(r"[+-]?[0-9]{1,19}"),
    float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
}

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `kind` is str, int, float or bool; `effect` False: accepted, named in a warning.

    Numbers lie in [`low`, `high`]; with `words`, true and false mean 1 and 0. `choices` are all the
    values allowed, if given.
    """

    name: str
    help: str = ""
    kind: type = str
    default: Value | None = None
    low: float = 0
    high: float = 2**63 - 1
    choices: tuple[str, ...] = ()
    repeat: bool = False
    effect: bool = True
    words: bool = False

    def parse(self, text: str) -> Value:
        """The value that `text` gives; raises InvalidArgument naming the flag."""
        if self.kind is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            raise InvalidArgument(f"--{self.name}: '{text}' is not a boolean (true or false)")
        if self.kind is str:
            if self.choices and text not in self.choices:
                allowed = ", ".join(self.choices)
                raise InvalidArgument(f"--{self.name}: '{text}' is not one of {allowed}")
            return text
        if self.words and text.lower() in ("true", "false"):
            return int(text.lower() == "true")
        if not _NUMBER[self.kind].fullmatch(text):
            kind = "an integer" if self.kind is int else "a number"
            raise InvalidArgument(f"--{self.name}: '{text}' is not {kind}")
        number: int | float = int(text) if self.kind is int else float(text)
        if not self.low <= number <= self.high:
            raise InvalidArgument(
                f"--{self.name}: {text} is out of range (allowed: {self.low} to {self.high})"
            )
        return number

    def following(self, rest: list[str]) -> str:
        """The text of its value where it stands in the next word, which is taken from `rest`.

        Raises InvalidArgument naming the flag when there is none.
        """
        if self.kind is bool:
            if rest and rest[0].lower() in _TRUE + _FALSE:
                return rest.pop(0)
            return "true"
        if not rest or rest[0].startswith("--"):
            raise InvalidArgument(f"--{self.name}: a value is missing")
        return rest.pop(0)
