"""The parser of the command line of `shmserve serve`, by the table of flags.

`--flag=value` and `--flag value` mean the same, a boolean may stand alone for true, as for Triton.
What the command line says of a flag stands in the place of what the file of `--config` says of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shmserve.config import config_file
from shmserve.config.options import ACTED_ON, FLAGS, Flag, Value
from shmserve.errors import Collected, InvalidArgument, nearest


@dataclass(frozen=True, slots=True)
class Parsed:
    """A command line and its file: values by flag (lists where it repeats), the rest, and what has
    no effect.

    `behind` are words of the rest that stand behind a boolean flag, which may be meant for it.
    `places`: where the file sets a flag that holds."""

    values: dict[str, Value | None]
    repeated: dict[str, list[str]]
    positional: list[str]
    without_effect: list[str]
    behind: dict[str, str]
    places: dict[str, str] = field(default_factory=dict)

    def located(self, problem: str) -> str:
        """A problem that begins with a flag, and with its place in the file where that set it."""
        flag = problem.partition(":")[0]
        place = self.places.get(flag.removeprefix("--"))
        return f"{place}: {problem}" if place else problem


def parse(arguments: Sequence[str]) -> Parsed:
    """Read `arguments`, and the file that they may name, by the table.

    Raises Problems, whose lines name the flag, what was found and what is allowed.
    """
    given = config_file.FlagValues()
    positional: list[str] = []
    behind: dict[str, str] = {}
    rest = list(arguments)
    alone = ""  # the boolean flag before, without a value
    wrong = Collected()
    for word in rest:
        wrong(_check_text, word)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            positional.append(word)
            if alone:
                behind[word] = alone
            alone = ""
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        flag = FLAGS.get(name) if word.startswith("--") else None
        if flag is None:
            wrong.problems.append(_unknown(word.partition("=")[0]))
            continue
        count = len(rest)
        value = wrong(_value, flag, text if equals else None, rest)
        alone = flag.name if not equals and len(rest) == count else ""
        if value is not None:
            given.add(flag, name, value)
    file = given.values.get("config")
    written = config_file.FlagValues() if file is None else wrong(config_file.read, str(file))
    wrong.check()
    said = {*given.values, *given.repeated}
    defaults = {flag.name: flag.default for flag in ACTED_ON if not flag.repeat}
    return Parsed(
        values={**defaults, **written.values, **given.values},
        repeated={f.name: [] for f in ACTED_ON if f.repeat} | written.repeated | given.repeated,
        positional=positional,
        without_effect=written.without_effect + given.without_effect,
        behind=behind,
        places={k: v for k, v in written.places.items() if k not in said},
    )


def _value(flag: Flag, text: str | None, rest: list[str]) -> Value:
    return flag.parse(flag.following(rest) if text is None else text)


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
