"""The publications of models, which gateways, ensembles and programs on this host are sent: the
difference between what is to be known and what they were sent (pure).

Each change has a number, which all acknowledge that were there; who comes later is sent all of it
before it serves. Readiness, which changes often, is a second and smaller message: for it no gateway
forgets the requests that it has prepared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from shmserve.ipc.messages.publications import (
    ModelNews,
    ModelPublished,
    ModelWithdrawn,
    ReadinessChanged,
)

News = ModelNews | ModelWithdrawn


class Audience(Protocol):
    """Everybody who submits requests."""

    def announce(self, news: News) -> int:
        """Send it to all whom it concerns; its number, which they are to acknowledge."""

    def know(self, number: int) -> bool:
        """Whether each of those has acknowledged the number, or is gone."""

    def tell_readiness(self, news: ReadinessChanged) -> None:
        """Send it to all who show it."""


class _Sent(NamedTuple):
    news: News
    number: int


class Publications:
    """The publications of all models, as they were sent last."""

    def __init__(self) -> None:
        self._sent: dict[str, dict[str, _Sent]] = {}

    def update(
        self,
        audience: Audience,
        name: str,
        published: Mapping[str, ModelNews],
        absent: Iterable[str],
    ) -> None:
        """Have everybody know these versions of a model, and that those which are `absent`, or were
        published before, do not serve. Version "" is that it is on demand."""
        sent = self._sent.setdefault(name, {})
        for version, news in published.items():
            last = sent.get(version)
            if last is None or last.news != news:
                sent[version] = _publish(audience, last, news)
        # After those: whoever asks for the latest version always finds one.
        for version in sorted({*sent, *absent} - published.keys()):
            if version not in sent or not isinstance(sent[version].news, ModelWithdrawn):
                withdrawn = ModelWithdrawn(name, version, 0)
                sent[version] = _Sent(withdrawn, audience.announce(withdrawn))
        if not sent:
            del self._sent[name]

    def known(self, audience: Audience, name: str) -> bool:
        """Whether everybody knows of a model what was sent last."""
        sent = self._sent.get(name, {})
        return all(audience.know(number) for _, number in sent.values())

    def snapshot(self) -> Iterator[Any]:
        """What everybody was sent, for who comes now."""
        for sent in self._sent.values():
            for news, _ in sent.values():
                yield news


def _publish(audience: Audience, last: _Sent | None, news: ModelNews) -> _Sent:
    if (
        last is not None
        and isinstance(news, ModelPublished)
        and isinstance(last.news, ModelPublished)
        and (news == replace(last.news, ready=news.ready))
    ):
        audience.tell_readiness(ReadinessChanged(news.name, news.version, news.ready))
        return last._replace(news=news)
    return _Sent(news, audience.announce(news))
