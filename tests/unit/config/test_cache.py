"""--cache-config and --response-cache-byte-size."""

import pytest

from shmserve.config.flag_values import cache_byte_size
from shmserve.errors import InvalidArgument


def test_the_size_of_the_cache() -> None:
    assert cache_byte_size([], None) == 0
    assert cache_byte_size([], 5) == 5
    assert cache_byte_size(["local,size=1048576"], None) == 1 << 20
    assert cache_byte_size(["local,size=1", "local,size=2"], None) == 2


@pytest.mark.parametrize(
    ("configs", "byte_size", "says"),
    [
        (["local"], None, "is not CACHE,SETTING=VALUE"),
        (["local,size"], None, "is not CACHE,SETTING=VALUE"),
        (["local,size=x"], None, "'x' is not an integer"),
        (["local,size=-1"], None, "out of range"),
        (["local,width=1"], None, "no setting 'width'"),
        (["redis,host=x"], None, "no cache 'redis'"),
        (
            ["local,size=1", "redis,host=x"],
            None,
            "found multiple cache configurations, but only a single cache is currently supported",
        ),
        (["local,size=1"], 1, "Incompatible flags"),
    ],
)
def test_what_is_no_cache_is_refused(configs: list[str], byte_size: int | None, says: str) -> None:
    """Section 3.8."""
    with pytest.raises(InvalidArgument, match=says):
        cache_byte_size(configs, byte_size)
