"""The configuration file of `shmserve serve --config FILE`: YAML, a key for each flag by its name.

    http-port: 8000
    model-repository: [/srv/models, /srv/more]     # a flag that repeats: one value, or a list

A value is read as the text that stands there, by the table of flags, as those of the command line
are: `exit-on-error: no` and `id: 12` need no quotes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from shmserve.config.options import FLAGS, Flag, Value
from shmserve.errors import InvalidArgument, Problems, clip, nearest, refused

_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True)
class FlagValues:
    """What a file, or a command line, sets: values by flag (lists where it repeats), and the flags
    without effect. `places`: where a file does, "'FILE' line N"."""

    values: dict[str, Value] = field(default_factory=dict)
    repeated: dict[str, list[str]] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)

    def add(self, flag: Flag, name: str, value: Value) -> None:
        """Take a value of `flag`, which was given by `name`."""
        if not flag.effect:
            self.without_effect.append(name)
        elif flag.repeat:
            self.repeated.setdefault(flag.name, []).append(str(value))
        else:
            self.values[flag.name] = value


def read(path: str) -> FlagValues:
    """The settings in a file.

    Raises InvalidArgument where it cannot be read, and Problems, whose lines name the file, the
    line in it, the key, what stands there and what is allowed.
    """
    with refused(f"--config: cannot read '{path}'", "it is not UTF-8 text"):
        text = Path(path).read_text(encoding="utf-8")
    return parse(text, path)


def parse(text: str, path: str) -> FlagValues:
    """The settings in the text of the file at `path` (pure). Raises Problems."""
    try:
        top = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or clip(str(error), 200)
        raise Problems([f"{_at(path, mark)}: it is not YAML: {reason}"]) from None
    if top is None:
        return FlagValues()
    if not isinstance(top, yaml.MappingNode):
        kind = "list" if isinstance(top, yaml.SequenceNode) else "text"
        raise Problems([f"{_at(path, top.start_mark)}: a {kind} is no flag's value: NAME: VALUE"])
    settings = FlagValues()
    lines: dict[str, int] = {}
    problems: list[str] = []
    for key, value in top.value:
        place = _at(path, key.start_mark)
        name = clip(key.value) if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
        try:
            if name in lines:
                raise InvalidArgument(f"it stands in line {lines[name]} already")
            lines[name] = key.start_mark.line + 1
            flag = _flag(name)
            for text in _texts(flag, value):
                settings.add(flag, name, flag.parse(text))
            settings.places[flag.name] = place
        except InvalidArgument as error:
            reason = error.message.removeprefix(f"--{name}: ")
            problems.append(f"{place}: {name}: {reason}")
    if problems:
        raise Problems(problems)
    return settings


def _at(path: str, mark: yaml.Mark | None) -> str:
    return f"--config: '{path}'" + ("" if mark is None else f" line {mark.line + 1}")


def _flag(name: str) -> Flag:
    flag = FLAGS.get(name)
    if flag is None:
        near = nearest(name, FLAGS)
        hint = f"did you mean {near}?" if near else "shmserve serve --help lists all flags"
        raise InvalidArgument(f"there is no such flag; {hint}")
    if name == "config":
        raise InvalidArgument("a file cannot name another one")
    return flag


def _texts(flag: Flag, value: yaml.Node) -> list[str]:
    """What stands there for a flag: one text, or those of a list; raises InvalidArgument."""
    is_list = isinstance(value, yaml.SequenceNode)
    if is_list and not flag.repeat:
        raise InvalidArgument("takes one value, not a list")
    texts = []
    for node in value.value if is_list else [value]:
        if not isinstance(node, yaml.ScalarNode):
            kind = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
            raise InvalidArgument(f"a {kind} is no value of a flag")
        if node.tag == _NULL:
            raise InvalidArgument("a value is missing")
        texts.append(node.value)
    return texts
