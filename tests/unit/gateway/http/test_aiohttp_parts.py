"""An aiohttp that is not like those that were tested is refused before anybody connects."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.errors import Unavailable
from shmserve.gateway.http.connection import aiohttp_parts


def test_what_is_installed_fits() -> None:
    aiohttp_parts.check()


class Renamed:
    """A parser that has another word for one of its methods."""

    feed_data = pause_reading = None


class Changed:
    """One that is made in another way."""

    feed_data = pause_reading = message_consumed = None

    def __init__(self, protocol: Any) -> None:
        pass


class Lenient(Changed):
    """One that reads something else."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def feed_data(self, data: bytes) -> Any:  # type: ignore[override]
        return (), False, b""


@pytest.mark.parametrize(
    ("parser", "said"),
    [
        (Renamed, r"it has no Renamed\.message_consumed"),
        (Changed, "it raises TypeError"),
        (Lenient, "it reads requests in another way"),
    ],
)
def test_another_one_is_refused(parser: type, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiohttp_parts, "HttpRequestParser", parser)
    with pytest.raises(Unavailable, match=f"aiohttp [0-9.]+ does not fit the HTTP gateway: {said}"):
        aiohttp_parts.check()
