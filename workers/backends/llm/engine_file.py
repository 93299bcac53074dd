"""`engine.yaml`: the settings of a generative model's engine, and where each of them stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from shmserve.errors import InvalidArgument, refused
from shmserve.ipc.engine_settings import EngineSettings

NAME = "engine.yaml"


def read(folder: Path) -> EngineSettings:
    """The settings of the file in a model's folder; the defaults where it has none.

    Raises InvalidArgument with a line for each mistake: `engine.yaml:LINE:COLUMN: KEY: ...`.
    """
    path = folder / NAME
    if not path.exists():
        return EngineSettings.of({})
    with refused(NAME, "it is not UTF-8 text"):
        text = path.read_text(encoding="utf-8")
    return parse(text)


def parse(text: str) -> EngineSettings:
    """The settings that the text of such a file says (pure); raises as `read`."""
    try:
        top = yaml.compose(text, Loader=yaml.SafeLoader)
        given: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{NAME}:{_at(mark)}" if mark else NAME
        reason = getattr(error, "problem", None) or str(error)
        raise InvalidArgument(f"{place}: it is not YAML: {reason}") from None
    if top is None:
        return EngineSettings.of({})
    if not isinstance(given, dict):
        kind = type(given).__name__
        raise InvalidArgument(f"{NAME}: found a {kind}, allowed is a mapping, NAME: VALUE")
    return EngineSettings.of(given, NAME, _places(top))


def _places(top: yaml.Node) -> dict[str, str]:
    """The place of each key. Raises InvalidArgument for keys that stand twice."""
    places: dict[str, str] = {}
    twice = []
    for key, mark in _keys(top, ""):
        if key in places:
            line = places[key].partition(":")[0]
            twice.append(f"{NAME}:{_at(mark)}: {key}: it stands in line {line} already")
        places.setdefault(key, _at(mark))
    if twice:
        raise InvalidArgument("\n".join(twice))
    return places


def _keys(node: yaml.Node, prefix: str) -> Iterator[tuple[str, yaml.Mark]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{prefix}{key.value}"
        yield name, key.start_mark
        yield from _keys(value, f"{name}.")


def _at(mark: yaml.Mark) -> str:
    return f"{mark.line + 1}:{mark.column + 1}"
