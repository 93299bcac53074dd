"""How large the response cache is: --cache-config and --response-cache-byte-size, as Triton has
them."""

from __future__ import annotations

from collections.abc import Sequence

from shmserve.config.option import Flag
from shmserve.errors import InvalidArgument

_FLAG = "--cache-config"
_SIZE = Flag("cache-config", kind=int)


def cache_byte_size(configs: Sequence[str], byte_size: int | None) -> int:
    """The bytes of the cache that "local,size=BYTES" asks for, or of the older flag; 0: none.

    Raises InvalidArgument for anything else, for another cache than `local`, and for two of them.
    """
    if configs and byte_size is not None:
        raise InvalidArgument(
            f"Incompatible flags --response-cache-byte-size and {_FLAG} both provided. "
            "Please provide one or the other."
        )
    if len({text.partition(",")[0] for text in configs}) > 1:
        raise InvalidArgument(
            f"{_FLAG}: found multiple cache configurations, but only a single cache is currently "
            "supported"
        )
    sizes = [_size(text) for text in configs]
    return sizes[-1] if sizes else byte_size or 0


def _size(text: str) -> int:
    name, comma, setting = text.partition(",")
    key, equals, value = setting.partition("=")
    if not (name and comma and key and equals):
        raise InvalidArgument(f"{_FLAG}: '{text}' is not CACHE,SETTING=VALUE (local,size=BYTES)")
    if name != "local":
        raise InvalidArgument(f"{_FLAG}: there is no cache '{name}' (there is: local)")
    if key != "size":
        raise InvalidArgument(f"{_FLAG}: the local cache has no setting '{key}' (there is: size)")
    size = _SIZE.parse(value)
    assert isinstance(size, int)
    return size
