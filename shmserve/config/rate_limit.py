"""--rate-limit-resource: how much there is of a resource, as Triton has it."""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.config.option import Flag
from shmserve.errors import InvalidArgument

_FLAG = "--rate-limit-resource"
_NUMBER = Flag("rate-limit-resource", kind=int, high=2**31 - 1)
_GLOBAL = -1

Resources = tuple[tuple[str, int | None, int], ...]


def parse_resources(texts: Iterable[str]) -> Resources:
    """(name, device, count) of each "NAME:COUNT[:DEVICE]"; the device None: every one, and also
    what is global; -1: only that ("global").

    Raises InvalidArgument.
    """
    return tuple(_resource(text) for text in texts)


def _resource(text: str) -> tuple[str, int | None, int]:
    name, colon, rest = text.partition(":")
    count, _, device = rest.partition(":")
    if not (name and colon and count) or rest.endswith(":"):
        raise InvalidArgument(f"{_FLAG}: '{text}' is not NAME:COUNT or NAME:COUNT:DEVICE")
    number = int(_NUMBER.parse(count))
    if not device:
        return name, None, number
    return name, _GLOBAL if device == "global" else int(_NUMBER.parse(device)), number
