"""The source of what a class says of its configuration: where its attributes are written."""

from __future__ import annotations

from shmserve.common.model_settings import (
    MAX_INSTANCES,
    MAX_STREAMS,
    MIN_INSTANCES,
    STRATEGY,
    TARGET,
)
from shmserve.ipc.class_places import class_places
from shmserve.model_config.diagnostics import Key, Source, member
from shmserve.model_config.rules.padding import PADDING

# Attribute or method -> the keys of a configuration that it makes; others are keys themselves.
_KEYS: dict[str, tuple[Key, ...]] = {
    "instances": (("instance_group",),),
    "max_queue_delay_us": (("dynamic_batching", "max_queue_delay_microseconds"),),
    "predict": (("input",), ("output",)),
    **{
        name: (("parameters", member(name)),)
        for name in (STRATEGY, TARGET, MAX_STREAMS, MIN_INSTANCES, MAX_INSTANCES, PADDING)
    },
}


def class_source(text: str, name: str, origin: str) -> Source:
    """The places of a class `name` in the text of its file (pure); `origin` names the file."""
    places: dict[Key, str] = {}
    for attribute, place in class_places(text, name).items():
        for key in _KEYS.get(attribute, ((attribute,),)):
            places[key] = place
    return Source(origin, places)
