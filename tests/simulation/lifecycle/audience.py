"""Simulated gateways and ensemble processes, which receive the publication of models late."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shmserve.ipc.messages.publications import ModelPublished, ReadinessChanged
from shmserve.supervisor.models.manager import Publication
from shmserve.supervisor.processes.control_socket import Acknowledgements
from tests.simulation.world import SECOND, World

if TYPE_CHECKING:
    from tests.simulation.lifecycle.executor import SimulatedExecutor
    from tests.simulation.lifecycle.versions import ObservedVersion


@dataclass(slots=True, eq=False)
class SimulatedPeer:
    """A process that receives publications in order.

    `known` is the current endpoint of each version, and `latest` that of each model.
    """

    ensemble: ObservedVersion | None = None
    known: dict[tuple[str, str], ModelPublished] = field(default_factory=dict)
    latest: dict[str, ModelPublished] = field(default_factory=dict)
    # Endpoints of all scheduler processes so far.
    known_endpoints: set[str] = field(default_factory=set)
    came: int = 0  # the value of `said` when the peer connected
    busy_until_ns: int = 0

    def hears(self, news: Publication) -> bool:
        """Return whether the peer receives a publication.

        Ensembles finish their requests at a withdrawn model.
        """
        if self.ensemble is None:
            return True
        return isinstance(news, ModelPublished) and self.ensemble.uses(news.name)

    def receive(self, news: Publication | ReadinessChanged) -> None:
        key = news.name, news.version
        if isinstance(news, ModelPublished):
            self.known[key] = news
            self.known_endpoints.add(news.endpoint)
            if news.latest:
                self.latest[news.name] = news
        elif isinstance(news, ReadinessChanged):
            self.known[key] = replace(self.known[key], ready=news.ready)
        else:
            self.known.pop(key, None)


class SimulatedAudience:
    """A fake `SupervisorContext` for `Publications`, with all gateways and ensembles as receivers.

    `last` is the last publication of each version.
    """

    def __init__(self, world: World, executor: SimulatedExecutor) -> None:
        self._world = world
        self._executor = executor
        self._complain = executor.oracles.broke
        self.acknowledgements = Acknowledgements()
        self._peers: dict[Hashable, SimulatedPeer] = {}
        self.last: dict[tuple[str, str], Publication] = {}
        self.by_endpoint: dict[str, ObservedVersion] = {}
        # The value of `said` at the first publication of each version.
        self.first: dict[ObservedVersion, int] = {}
        self.said = 0

    @property
    def gateways(self) -> list[SimulatedPeer]:
        return [peer for peer in self._peers.values() if peer.ensemble is None]

    @property
    def ensembles(self) -> list[SimulatedPeer]:
        return [peer for peer in self._peers.values() if peer.ensemble is not None]

    # --- the interface of SupervisorContext

    def announce(self, news: Publication) -> int:
        """Send a publication to all peers that it concerns; they acknowledge it later."""
        key = news.name, news.version
        last_news = self.last.get(key)
        if last_news == news or _same(last_news, news):
            self._complain(f"9: {news.name} {news.version} is published as it was")
        self.said += 1
        if isinstance(news, ModelPublished):
            self.by_endpoint.update({version.endpoint: version for version in self._executor.alive})
            self.first.setdefault(self.by_endpoint[news.endpoint], self.said)
        else:
            self._executor.oracles.withdrawn(*key)
        self.last[key] = news
        peers = {
            version: peer
            for version, peer in self._peers.items()
            if peer.ensemble is None
            or (isinstance(news, ModelPublished) and peer.ensemble.uses(news.name))
        }
        number = self.acknowledgements.begin(peers)
        self._world.note(
            "announced", number, type(news).__name__, *key, getattr(news, "endpoint", "")
        )
        for version, peer in peers.items():
            self._send(version, peer, news, number)
        return number

    def is_acknowledged(self, number: int) -> bool:
        return self.acknowledgements.is_acknowledged(number)

    def publish_readiness(self, news: ReadinessChanged) -> None:
        """Send a change of readiness to the gateways, without acknowledgement."""
        last_news = self.last.get((news.name, news.version))
        if not isinstance(last_news, ModelPublished) or last_news.ready == news.ready:
            self._complain(f"9: the readiness of {news.name} {news.version} is what it was")
            return
        self.last[news.name, news.version] = replace(last_news, ready=news.ready)
        self.said += 1
        for key, peer in self._peers.items():
            if peer.ensemble is None:
                self._send(key, peer, news)

    # --- peers that connect and disconnect

    def enter_gateway(self) -> None:
        """Add a gateway, which first receives all current publications."""
        key, peer = object(), SimulatedPeer(came=self.said)
        self._peers[key] = peer
        for news in self._executor.publications.snapshot():
            self._send(key, peer, news)

    def enter_ensemble(self, address: Hashable, version: ObservedVersion) -> None:
        """Add the process of an ensemble, which receives publications from now on."""
        self._peers[address] = SimulatedPeer(version)

    def deliver(self, address: Hashable, news: Publication) -> None:
        """Send the endpoint of a step's model to an ensemble."""
        peer = self._peers.get(address)
        if peer is not None:
            self._send(address, peer, news)

    def left(self, key: Hashable) -> None:
        if self._peers.pop(key, None) is not None:
            self.acknowledgements.exited(key)

    def gateway_leaves(self) -> None:
        keys = [key for key, peer in self._peers.items() if peer.ensemble is None]
        if keys:
            self._world.fault("gateway leaves")
            self.left(self._world.random.choice(keys))

    def _send(
        self,
        key: Hashable,
        peer: SimulatedPeer,
        news: Publication | ReadinessChanged,
        number: int = 0,
    ) -> None:
        world = self._world
        late = 2 * SECOND if world.chance(0.02) else draw_lag(world)
        peer.busy_until_ns = max(peer.busy_until_ns, world.now_ns + late)
        world.after(peer.busy_until_ns - world.now_ns, self._arrive, key, peer, news, number)

    def _arrive(
        self, key: Hashable, peer: SimulatedPeer, news: Publication | ReadinessChanged, number: int
    ) -> None:
        if self._peers.get(key) is peer:
            peer.receive(news)
            if number:
                late = draw_lag(self._world)
                self._world.after(late, self.acknowledgements.acknowledged, key, number)


def draw_lag(world: World) -> int:
    """Draw a delay of up to 300 ms, often 0."""
    return 0 if world.chance(0.3) else world.between(100_000, 300_000_000)


def _same(last: Publication | None, news: Publication) -> bool:
    if not (isinstance(last, ModelPublished) and isinstance(news, ModelPublished)):
        return False
    return replace(last, ready=news.ready) == news
