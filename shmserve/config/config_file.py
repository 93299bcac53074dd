"""The configuration file of `shmserve serve --config FILE`: TOML, a key for each flag by its name.

    http-port = 8000
    model-repository = ["/srv/models", "/srv/more"]     # a flag that repeats: one text, or a list

Values are checked by the table of flags, as those of the command line are.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmserve.config.options import FLAGS, Flag, Value
from shmserve.errors import InvalidArgument, nearest, refused


@dataclass(frozen=True, slots=True)
class Settings:
    """What a file, or a command line, sets: values by flag (lists where it repeats), and the flags
    without effect."""

    values: dict[str, Value] = field(default_factory=dict)
    repeated: dict[str, list[str]] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)

    def add(self, flag: Flag, name: str, value: Value) -> None:
        """Take a value of `flag`, which was given by `name`."""
        if not flag.effect:
            self.without_effect.append(name)
        elif flag.repeat:
            self.repeated.setdefault(flag.name, []).append(str(value))
        else:
            self.values[flag.name] = value


def read(path: str) -> Settings:
    """The settings in a file.

    Raises InvalidArgument with one line that names the file, the key and what is allowed.
    """
    with refused(f"--config: cannot read '{path}'", "it is not UTF-8 text"):
        text = Path(path).read_text(encoding="utf-8")
    try:
        return parse(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"--config: '{path}' is not TOML: {error}") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"--config: '{path}': {error.message}") from None


def parse(text: str) -> Settings:
    """The settings in the text of a file (pure).

    Raises TOMLDecodeError, and InvalidArgument with one line that begins with the key.
    """
    settings = Settings()
    for key, given in tomllib.loads(text).items():
        flag = FLAGS.get(key)
        if flag is None:
            near = nearest(key, FLAGS)
            hint = f"did you mean {near}?" if near else "shmserve serve --help lists all flags"
            raise InvalidArgument(f"{key[:80]}: there is no such flag; {hint}")
        if key == "config":
            raise InvalidArgument("config: a file cannot name another one")
        if isinstance(given, list) and not flag.repeat:
            raise InvalidArgument(f"{key}: takes one value, not a list")
        for value in given if isinstance(given, list) else [given]:
            settings.add(flag, key, _value(flag, key, value))
    return settings


def _value(flag: Flag, key: str, value: Any) -> Value:
    if not isinstance(value, str | int | float):
        kind = "table" if isinstance(value, dict) else type(value).__name__
        raise InvalidArgument(f"{key}: a {kind} is no value of a flag")
    if flag.kind is str and not isinstance(value, str):
        raise InvalidArgument(f'{key}: takes a text ("...")')
    try:
        return flag.parse(str(value).lower() if isinstance(value, bool) else str(value))
    except InvalidArgument as error:
        reason = error.message.removeprefix(f"--{flag.name}: ")
        raise InvalidArgument(f"{key}: {reason}") from None
