"""The parsers of the command line of `shmserve serve` and of its configuration file.

`--flag=value` and `--flag value` are equivalent. A boolean flag without a value means true, as in
Triton. On the command line, a prefix that only one flag has stands for that flag. A flag on the
command line overrides the same flag in the file. The file is YAML, with the names of flags as keys:

    http-port: 8000
    model-repository: [/srv/models, /srv/more]     # a repeatable flag: one value, or a list

Values in the file are read as their literal text, so that `exit-on-error: no` and `id: 12` need no
quotes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from shmserve.config.flags import FLAGS, SUPPORTED_FLAGS, Flag, Value, find_flags
from shmserve.errors import Collector, InvalidArgument, Problems, clip, nearest, read_text

_YAML_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True)
class FlagValues:
    """The flags that a file or a command line sets.

    Attributes:
        values: The value of each flag; None: a flag without a default is not set.
        repeated: The values of each repeatable flag.
        without_effect: Accepted flags that have no effect.
        positions: The position of each flag that a file sets: "'FILE' line N".
    """

    values: dict[str, Value | None] = field(default_factory=dict)
    repeated: dict[str, list[str]] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)
    positions: dict[str, str] = field(default_factory=dict)

    def add(self, flag: Flag, value: Value) -> None:
        """Store a value of `flag`; the values of a repeatable flag are collected in order."""
        if not flag.has_effect:
            self.without_effect.append(flag.name)
        elif flag.is_repeatable:
            self.repeated.setdefault(flag.name, []).append(f"{flag.prefix}{value}")
        else:
            self.values[flag.name] = value


@dataclass(frozen=True, slots=True)
class Parsed(FlagValues):
    """A parsed command line together with its configuration file.

    Attributes:
        positional: The arguments that are not flags.
        boolean_flag_before: For each positional argument that follows a boolean flag without a
            value, the name of this flag.
    """

    positional: list[str] = field(default_factory=list)
    boolean_flag_before: dict[str, str] = field(default_factory=dict)

    def with_position(self, problem: str) -> str:
        """Return `problem` prefixed with the flag's position in the file, if the file sets it."""
        position = self.positions.get(problem.partition(":")[0].removeprefix("--"))
        return f"{position}: {problem}" if position else problem


def parse(arguments: Sequence[str], verb: str = "serve", verb_flags: Sequence[str] = ()) -> Parsed:
    """Parse `arguments`, and the configuration file that they may name.

    Args:
        arguments: The words after the verb, without the verb's own flags.
        verb: The verb that errors refer to.
        verb_flags: The names of the verb's own flags, which errors may suggest.

    Raises:
        Problems: Each line names the flag, the value found and the values allowed.
    """
    flag_values = FlagValues()
    positional: list[str] = []
    boolean_flag_before: dict[str, str] = {}
    remaining_words = list(arguments)
    bare_flag = ""  # the preceding boolean flag, if it has no value
    collector = Collector()
    for word in remaining_words:
        collector(_check_text, word)
    while remaining_words:
        word = remaining_words.pop(0)
        if not word.startswith("-") or word == "-":
            if word.rpartition("/")[2] == "tritonserver" and not Path(word).is_dir():
                continue  # the first argument in Triton's Helm chart repeats the program's name
            positional.append(word)
            if bare_flag:
                boolean_flag_before[word] = bare_flag
            bare_flag = ""
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        flags = find_flags(name) if word.startswith("--") and name else []
        if len(flags) != 1:
            problem = _unknown_flag_error(word.partition("=")[0], flags, verb, verb_flags)
            collector.problems.append(problem)
            continue
        flag = flags[0]
        count_before = len(remaining_words)
        value = collector(_parse_value, flag, text if equals else None, remaining_words)
        bare_flag = flag.name if not equals and len(remaining_words) == count_before else ""
        if value is not None:
            flag_values.add(flag, value)
    file_path = flag_values.values.get("config")
    file_values = FlagValues() if file_path is None else collector(read, str(file_path))
    collector.check()
    command_line_flags = {*flag_values.values, *flag_values.repeated}
    defaults = {flag.name: flag.default for flag in SUPPORTED_FLAGS if not flag.is_repeatable}
    values = {**defaults, **file_values.values, **flag_values.values}
    repeated: dict[str, list[str]] = {
        flag.name: [] for flag in SUPPORTED_FLAGS if flag.is_repeatable
    }
    repeated |= file_values.repeated | flag_values.repeated
    without_effect = file_values.without_effect + flag_values.without_effect
    positions = {k: v for k, v in file_values.positions.items() if k not in command_line_flags}
    return Parsed(values, repeated, without_effect, positions, positional, boolean_flag_before)


def _parse_value(flag: Flag, text: str | None, remaining_words: list[str]) -> Value:
    return flag.parse(flag.take_value(remaining_words) if text is None else text)


def _check_text(word: str) -> None:
    # Undecodable bytes cannot be logged, returned to clients or sent to other processes.
    try:
        word.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{word.partition('=')[0]}: '{word}' is not UTF-8 text") from None


def _unknown_flag_error(word: str, flags: list[Flag], verb: str, verb_flags: Sequence[str]) -> str:
    if flags:
        return f"{word[:80]} is ambiguous: --{', --'.join(flag.name for flag in flags)}"
    similar_flag = nearest(word.lstrip("-"), [*FLAGS, *verb_flags])
    hint = f", did you mean --{similar_flag}?" if similar_flag else f"; see shmserve {verb} --help"
    return f"unknown flag {word[:80]}{hint}"


def read(path: str) -> FlagValues:
    """Return the settings in a file.

    Raises:
        InvalidArgument: The file cannot be read.
        Problems: Each line names file, line and key, the value found and the values allowed.
    """
    return parse_file(read_text("--config", path), path)


def parse_file(text: str, path: str) -> FlagValues:
    """Return the settings in the text of the file at `path` (pure).

    Raises:
        Problems: The text has invalid lines (see `read`).
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise Problems([f"{_position(path, None)}: invalid YAML: nested too deeply"]) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or clip(str(error), 200)
        raise Problems([f"{_position(path, mark)}: invalid YAML: {reason}"]) from None
    if root is None:
        return FlagValues()
    if not isinstance(root, yaml.MappingNode):
        root_kind = "list" if isinstance(root, yaml.SequenceNode) else "string"
        problem = f"expected a mapping (FLAG: VALUE), found a {root_kind}"
        raise Problems([f"{_position(path, root.start_mark)}: {problem}"])
    settings = FlagValues()
    line_numbers: dict[str, int] = {}
    problems: list[str] = []
    for key, value in root.value:
        position = _position(path, key.start_mark)
        name = clip(key.value) if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
        try:
            if name in line_numbers:
                raise InvalidArgument(f"already set in line {line_numbers[name]}")
            line_numbers[name] = key.start_mark.line + 1
            flag = _find_file_flag(name)
            for text in _value_texts(flag, value):
                settings.add(flag, flag.parse(text))
            settings.positions[flag.name] = position
        except InvalidArgument as error:
            reason = error.message.removeprefix(f"--{name}: ")
            problems.append(f"{position}: {name}: {reason}")
    if problems:
        raise Problems(problems)
    return settings


def _position(path: str, yaml_mark: yaml.Mark | None) -> str:
    return f"--config: '{path}'" + ("" if yaml_mark is None else f" line {yaml_mark.line + 1}")


def _find_file_flag(name: str) -> Flag:
    flag = FLAGS.get(name)
    if flag is None:
        similar_flag = nearest(name, FLAGS)
        hint = (
            f"did you mean {similar_flag}?"
            if similar_flag
            else "shmserve serve --help lists all flags"
        )
        raise InvalidArgument(f"there is no such flag; {hint}")
    if name == "config":
        raise InvalidArgument("a configuration file cannot include another file")
    return flag


def _value_texts(flag: Flag, value: yaml.Node) -> list[str]:
    """Return the text of a YAML scalar, or of each item of a repeatable flag's list.

    Raises:
        InvalidArgument: A value is missing, or is a mapping or a list that the flag forbids.
    """
    is_list = isinstance(value, yaml.SequenceNode)
    if is_list and not flag.is_repeatable:
        raise InvalidArgument("takes one value, not a list")
    texts = []
    for node in value.value if is_list else [value]:
        if not isinstance(node, yaml.ScalarNode):
            kind = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
            raise InvalidArgument(f"expected a value, found a {kind}")
        if node.tag == _YAML_NULL:
            raise InvalidArgument("a value is missing")
        if "\0" in node.value:
            raise InvalidArgument("the value contains a NUL character")
        texts.append(node.value)
    return texts
