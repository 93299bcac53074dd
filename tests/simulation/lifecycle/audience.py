"""Simulated gateways and ensemble processes, which receive the publication of models late."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shmserve.ipc.messages.publications import ModelPublished, ModelWithdrawn, ReadinessChanged
from shmserve.supervisor.models.manager import Audience, Publication
from shmserve.supervisor.processes.control_socket import Acknowledgements
from tests.simulation.world import SECOND, World

if TYPE_CHECKING:
    from tests.simulation.lifecycle.executor import SimulatedExecutor
    from tests.simulation.lifecycle.versions import ObservedVersion


@dataclass(slots=True, eq=False)
class SimulatedPeer:
    """A receiver of publications, with the current endpoint of each version and model."""

    ensemble: ObservedVersion | None = None
    publications: dict[tuple[str, str], ModelPublished] = field(default_factory=dict)
    latest_publications: dict[str, ModelPublished] = field(default_factory=dict)
    # Endpoints of all scheduler processes so far.
    known_endpoints: set[str] = field(default_factory=set)
    first_update: int = 0  # the value of `update_count` when the peer connected
    busy_until_ns: int = 0

    def receives(self, update: Publication) -> bool:
        """Return whether the peer receives a publication; ensembles keep withdrawn models."""
        if self.ensemble is None:
            return True
        return isinstance(update, ModelPublished) and self.ensemble.uses(update.name)

    def receive(self, update: Publication | ReadinessChanged) -> None:
        key = update.name, update.version
        if isinstance(update, ModelPublished):
            self.publications[key] = update
            self.known_endpoints.add(update.endpoint)
            if update.latest:
                self.latest_publications[update.name] = update
        elif isinstance(update, ReadinessChanged):
            self.publications[key] = replace(self.publications[key], ready=update.ready)
        else:
            self.publications.pop(key, None)


class SimulatedAudience(Audience):
    """The simulated receivers of publications: all gateways and ensembles."""

    def __init__(self, world: World, executor: SimulatedExecutor) -> None:
        self._world = world
        self._executor = executor
        self._report_violation = executor.oracles.report_violation
        self.acknowledgements = Acknowledgements()
        self._peers: dict[Hashable, SimulatedPeer] = {}
        self.last_publications: dict[tuple[str, str], Publication] = {}
        self.versions_by_endpoint: dict[str, ObservedVersion] = {}
        # The value of `update_count` at the first publication of each version.
        self.first_publications: dict[ObservedVersion, int] = {}
        self.update_count = 0

    @property
    def gateways(self) -> list[SimulatedPeer]:
        return [peer for peer in self._peers.values() if peer.ensemble is None]

    @property
    def ensembles(self) -> list[SimulatedPeer]:
        return [peer for peer in self._peers.values() if peer.ensemble is not None]

    # --- the interface of Audience

    def announce(self, update: Publication) -> int:
        """Send a publication to all peers that it concerns; they acknowledge it later."""
        key = update.name, update.version
        last = self.last_publications.get(key)
        if last == update or _differ_in_readiness_only(last, update):
            self._report_violation(f"9: {update.name} {update.version} is published unchanged")
        self.update_count += 1
        if isinstance(update, ModelPublished):
            self.versions_by_endpoint.update(
                {version.endpoint: version for version in self._executor.live_versions}
            )
            self.first_publications.setdefault(
                self.versions_by_endpoint[update.endpoint], self.update_count
            )
        else:
            self._executor.oracles.version_withdrawn(*key)
        self.last_publications[key] = update
        peers = {
            version: peer
            for version, peer in self._peers.items()
            if peer.ensemble is None
            or (isinstance(update, ModelPublished) and peer.ensemble.uses(update.name))
        }
        number = self.acknowledgements.begin(peers)
        self._world.note(
            "announced", number, type(update).__name__, *key, getattr(update, "endpoint", "")
        )
        for version, peer in peers.items():
            self._send(version, peer, update, number)
        return number

    def model_removed(self, name: str) -> None:
        """Forget a model that the registry has removed; its versions must be withdrawn."""
        for key in [key for key in self.last_publications if key[0] == name]:
            if not isinstance(self.last_publications.pop(key), ModelWithdrawn):
                self._report_violation(f"9: {name} {key[1]} is published, but was removed")

    def is_acknowledged(self, number: int) -> bool:
        return self.acknowledgements.is_acknowledged(number)

    def publish_readiness(self, update: ReadinessChanged) -> None:
        """Send a change of readiness to the gateways, without acknowledgement."""
        last = self.last_publications.get((update.name, update.version))
        if not isinstance(last, ModelPublished) or last.ready == update.ready:
            self._report_violation(
                f"9: the readiness of {update.name} {update.version} is published unchanged"
            )
            return
        self.last_publications[update.name, update.version] = replace(last, ready=update.ready)
        self.update_count += 1
        for key, peer in self._peers.items():
            if peer.ensemble is None:
                self._send(key, peer, update)

    # --- peers that connect and disconnect

    def connect_gateway(self) -> None:
        """Add a gateway, which first receives all current publications."""
        key, peer = object(), SimulatedPeer(first_update=self.update_count)
        self._peers[key] = peer
        for update in self._executor.publisher.snapshot():
            self._send(key, peer, update)

    def connect_ensemble(self, address: Hashable, version: ObservedVersion) -> None:
        """Add the process of an ensemble, which receives publications from now on."""
        self._peers[address] = SimulatedPeer(version)

    def deliver(self, address: Hashable, update: Publication) -> None:
        peer = self._peers.get(address)
        if peer is not None:
            self._send(address, peer, update)

    def remove_peer(self, key: Hashable) -> None:
        if self._peers.pop(key, None) is not None:
            self.acknowledgements.remove_peer(key)

    def disconnect_gateway(self) -> None:
        keys = [key for key, peer in self._peers.items() if peer.ensemble is None]
        if keys:
            self._world.fault("gateway leaves")
            self.remove_peer(self._world.random.choice(keys))

    def _send(
        self,
        key: Hashable,
        peer: SimulatedPeer,
        update: Publication | ReadinessChanged,
        number: int = 0,
    ) -> None:
        world = self._world
        delay_ns = 2 * SECOND if world.chance(0.02) else draw_delay_ns(world)
        peer.busy_until_ns = max(peer.busy_until_ns, world.now_ns + delay_ns)
        world.after(peer.busy_until_ns - world.now_ns, self._receive, key, peer, update, number)

    def _receive(
        self,
        key: Hashable,
        peer: SimulatedPeer,
        update: Publication | ReadinessChanged,
        number: int,
    ) -> None:
        if self._peers.get(key) is peer:
            peer.receive(update)
            if number:
                delay_ns = draw_delay_ns(self._world)
                self._world.after(delay_ns, self.acknowledgements.record_acknowledged, key, number)


def draw_delay_ns(world: World) -> int:
    return 0 if world.chance(0.3) else world.between(100_000, 300_000_000)


def _differ_in_readiness_only(last: Publication | None, update: Publication) -> bool:
    if not (isinstance(last, ModelPublished) and isinstance(update, ModelPublished)):
        return False
    return replace(last, ready=update.ready) == update
