"""The parser of the command line of `shmserve serve`, by the table of flags.

`--flag=value` and `--flag value` mean the same, a boolean may stand alone for true, as for Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shmserve.config.options import ACTED_ON, FLAGS, Value
from shmserve.errors import InvalidArgument, nearest


@dataclass(frozen=True, slots=True)
class Parsed:
    """A command line: values by flag (lists where it repeats), the rest, and what has no effect.

    `behind` are words of the rest that stand behind a boolean flag, which may be meant for it."""

    values: dict[str, Value | None]
    repeated: dict[str, list[str]]
    positional: list[str]
    without_effect: list[str]
    behind: dict[str, str]


def parse(arguments: Sequence[str]) -> Parsed:
    """Read `arguments` by the table.

    Raises InvalidArgument with one line that names the flag, what was found and what is allowed.
    """
    values: dict[str, Value | None] = {f.name: f.default for f in ACTED_ON if not f.repeat}
    repeated: dict[str, list[str]] = {f.name: [] for f in ACTED_ON if f.repeat}
    parsed = Parsed(values, repeated, [], [], {})
    rest = list(arguments)
    alone = ""  # the boolean flag before, without a value
    for word in rest:
        _check_text(word)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            parsed.positional.append(word)
            if alone:
                parsed.behind[word] = alone
            alone = ""
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        flag = FLAGS.get(name) if word.startswith("--") else None
        if flag is None:
            raise InvalidArgument(_unknown(word.partition("=")[0]))
        count = len(rest)
        value = flag.parse(text if equals else flag.following(rest))
        alone = flag.name if not equals and len(rest) == count else ""
        if not flag.effect:
            parsed.without_effect.append(name)
        elif flag.repeat:
            repeated[flag.name].append(str(value))
        else:
            values[flag.name] = value
    return parsed


def _check_text(word: str) -> None:
    # What is no text cannot be logged, shown to clients or sent to the server's other processes.
    try:
        word.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{word.partition('=')[0]}: '{word}' is not UTF-8 text") from None


def _unknown(word: str) -> str:
    near = nearest(word.lstrip("-"), FLAGS)
    hint = f", did you mean --{near}?" if near else "; see shmserve serve --help"
    return f"unknown flag {word[:80]}{hint}"
