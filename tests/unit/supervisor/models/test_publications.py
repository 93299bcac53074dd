"""Publications of models: only what differs is sent, and all of it is known at some time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmserve.ipc.messages.publications import (
    ModelNews,
    ModelOnDemand,
    ModelPublished,
    ModelWithdrawn,
    ReadinessChanged,
)
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.publications import News, Publications

ONE = ModelPublished("m", "1", ModelSpec.of({}), {}, "a", True, True, 0.0, 0)
TWO = replace(ONE, version="2", endpoint="b")
GONE = ModelWithdrawn("m", "1", 0)


class Gateway:
    """Keeps what it is told; knows the numbers up to `known`."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.number = self.known = 0

    def announce(self, news: News) -> int:
        """It hears it."""
        self.number += 1
        self.told.append(news)
        return self.number

    def know(self, number: int) -> bool:
        """Whether it has said so."""
        return number <= self.known

    def tell_readiness(self, news: ReadinessChanged) -> None:
        """It hears it."""
        self.told.append(news)


def test_only_what_differs_is_sent() -> None:
    gateway, publications = Gateway(), Publications()

    def told(published: list[ModelPublished], absent: list[str]) -> list[Any]:
        gateway.told.clear()
        publications.update(gateway, "m", {each.version: each for each in published}, absent)
        return gateway.told[:]

    assert told([], ["1"]) == [GONE]
    assert told([], ["1"]) == []
    assert told([ONE], []) == [ONE]
    assert told([ONE], []) == []
    assert told([replace(ONE, ready=False)], []) == [ReadinessChanged("m", "1", False)]
    assert told([ONE], []) == [ReadinessChanged("m", "1", True)]
    old = replace(ONE, latest=False)
    assert told([TWO, old], []) == [TWO, old]
    assert told([TWO], []) == [GONE]
    assert list(publications.snapshot()) == [GONE, TWO]


def test_a_model_on_demand_is_told_of_until_it_is_not() -> None:
    """Whatever its versions do."""
    gateway, publications = Gateway(), Publications()
    asleep = ModelOnDemand("m", 0)
    told: list[dict[str, ModelNews]] = [{"": asleep}, {"": asleep, "1": ONE}, {"": asleep}, {}]
    for published in told:
        publications.update(gateway, "m", published, [])
    assert gateway.told == [asleep, ONE, GONE, ModelWithdrawn("m", "", 0)]


def test_it_is_known_when_the_last_of_it_is() -> None:
    """Readiness is not waited for."""
    gateway, publications = Gateway(), Publications()
    publications.update(gateway, "m", {"1": ONE, "2": TWO}, [])
    gateway.known = 1
    assert not publications.known(gateway, "m")
    gateway.known = 2
    publications.update(gateway, "m", {"1": ONE, "2": replace(TWO, ready=False)}, [])
    assert publications.known(gateway, "m")
    publications.update(gateway, "m", {"2": TWO}, [])
    assert not publications.known(gateway, "m")
    assert publications.known(gateway, "other")
