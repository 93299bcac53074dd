"""--rate-limit-resource."""

import pytest

from shmserve.config.flag_values import parse_resources
from shmserve.errors import InvalidArgument


def test_a_resource_is_every_devices_one_devices_or_global() -> None:
    assert parse_resources(["R1:10", "R2:5:0", "R2:8:1", "R3:2:global"]) == (
        ("R1", None, 10),
        ("R2", 0, 5),
        ("R2", 1, 8),
        ("R3", -1, 2),
    )


@pytest.mark.parametrize("text", ["", "R", "R:", ":3", "R:x", "R:1:", "R:1:x", "R:-1", "R:1:2:3"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--rate-limit-resource: "):
        parse_resources([text])
