"""Bounded resources that model versions share: the rate limiter's, and the response cache's bytes.

An instance requests a ticket before each execution and releases it afterwards. The next ticket goes
to the waiting instance with the smallest product of executions and priority among those whose
resources are free. As in Triton, priority 2 therefore runs half as often. Unlike in Triton, an
instance whose resources are not free does not block the others. Bypassing is bounded: after
`PATIENCE` grants of resources that it needs, the instance is next, and its resources are reserved.

Schedulers request tickets over the control socket. When a scheduler exits, all of its tickets are
released, even if its instances are still executing. Schedulers report the exits of their workers.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from shmserve.errors import InvalidArgument
from shmserve.ipc.messages.control_requests import (
    AskTicket,
    CheckHolders,
    ResourcesHeld,
    TicketGranted,
    TicketRequest,
)
from shmserve.ipc.messages.supervision import ResizeCache
from shmserve.ipc.model_spec import RateLimit
from shmserve.supervisor.processes.control_socket import Address, pid_of

logger = logging.getLogger(__name__)


PATIENCE = 64  # grants to other instances, after which the resources of a request are reserved
# An instance's initial number of executions, as in Triton: its initialization and its warm-up.
_FIRST_EXECUTIONS = 2
GLOBAL = -1  # stands for the device of a global resource

Resource = tuple[str, int]  # the name of a resource, and its device or GLOBAL


class Needs(NamedTuple):
    """The resources that an instance needs for an execution, and its priority (1: highest)."""

    resources: Mapping[Resource, int]
    priority: int

    @classmethod
    def of(cls, limit: RateLimit, device: int) -> Needs:
        """Return the needs of an instance on a device."""
        needed_resources = (r for r in limit.resources if r.count)
        resources = {(r.name, GLOBAL if r.is_global else device): r.count for r in needed_resources}
        return cls(resources, limit.priority or 1)


@dataclass(slots=True, eq=False)
class _Instance:
    needs: Needs
    executions: int = 0  # number of executions, which lowers its rank
    pid: int = 0

    @property
    def score(self) -> int:
        """Return the product of executions and priority; the smallest is granted first."""
        return self.executions * self.needs.priority


@dataclass(slots=True, eq=False)
class _PendingRequest:
    member: Hashable  # a model version
    ticket: Hashable
    instance: _Instance
    number: int  # the order of the requests
    overtaken_count: int = 0  # number of grants of its resources to other instances

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Return the sort key of the waiting requests; the smallest is granted first."""
        return self.overtaken_count < PATIENCE, self.instance.score, self.number


@dataclass(slots=True, eq=False)
class _Member:
    instances: dict[int, _Instance] = field(default_factory=dict)
    # The instances that hold a ticket.
    instance_by_ticket: dict[Hashable, _Instance] = field(default_factory=dict)


GrantedTicket = tuple[Hashable, Hashable]  # a member, and the ticket granted to it


class RateLimiter:
    """The state of the rate limiter, whose members are model versions (no I/O).

    Args:
        configured_capacities: The capacities by name and device; None stands for every device. The
            capacity of any other resource is the largest count that an instance needs.
    """

    def __init__(self, configured_capacities: Mapping[tuple[str, int | None], int]) -> None:
        self._configured_capacities = dict(configured_capacities)
        self._members: dict[Hashable, _Member] = {}
        self._pending: list[_PendingRequest] = []
        self._used_resources: Counter[Resource] = Counter()
        self._capacity: dict[Resource, int] = {}
        self._request_numbers = itertools.count()

    def capacity(self) -> dict[Resource, int]:
        """Return the capacity of each resource that an instance of a member needs."""
        return dict(self._capacity)

    # --- members

    def join(self, member: Hashable, instances: Mapping[int, Needs]) -> None:
        """Register instances of a model version by index.

        They start with the smallest score of all instances, so that they do not take precedence
        over the other instances for long.

        Raises:
            InvalidArgument: A resource is both global and device-specific, or exceeds its capacity.
                The messages are Triton's.
        """
        needed_items = [item for needs in instances.values() for item in needs.resources.items()]
        resources = {*self._capacity, *(resource for resource, _ in needed_items)}
        for resource, count in needed_items:
            self._check_resource(resource, count, resources)
        members = self._members.values()
        scores = [instance.score for record in members for instance in record.instances.values()]
        lowest_score = min(scores, default=0)
        member_record = self._members.setdefault(member, _Member())
        for index, needs in instances.items():
            executions = max(_FIRST_EXECUTIONS, -(-lowest_score // needs.priority))
            member_record.instances[index] = _Instance(needs, executions)
        self._compute_capacities()

    def _check_resource(self, resource: Resource, count: int, resources: set[Resource]) -> None:
        name, device = resource
        for other_name, other_device in resources:
            if other_name == name and (other_device == GLOBAL) != (device == GLOBAL):
                raise InvalidArgument(
                    f'Resource "{name}" is present as both global and device-specific resource in '
                    "the model configuration."
                )
        limit = self._configured_capacity(resource)
        if limit is not None and limit < count:
            raise InvalidArgument(
                f'Resource count for "{name}" is limited to {limit} which will prevent scheduling '
                f"of one or more model instances, the minimum required count is {count}"
            )

    def _configured_capacity(self, resource: Resource) -> int | None:
        capacities = self._configured_capacities
        return capacities.get(resource, capacities.get((resource[0], None)))

    def _compute_capacities(self) -> None:
        largest_counts: dict[Resource, int] = {}
        for member in self._members.values():
            for instance in member.instances.values():
                for resource, count in instance.needs.resources.items():
                    largest_counts[resource] = max(count, largest_counts.get(resource, 0))
        self._capacity = {}
        for resource, count in largest_counts.items():
            configured_count = self._configured_capacity(resource)
            self._capacity[resource] = count if configured_count is None else configured_count

    def disconnect(self, member: Hashable) -> list[GrantedTicket]:
        """Release a member's tickets and ticket requests, because its scheduler has exited.

        Returns:
            The tickets that are granted now.
        """
        record = self._members.get(member)
        if record is None:
            return []
        self._pending = [request for request in self._pending if request.member != member]
        for instance in record.instance_by_ticket.values():
            self._used_resources.subtract(instance.needs.resources)
        record.instance_by_ticket.clear()
        return self._grant()

    def remove_instance(self, member: Hashable, instance_index: int) -> list[GrantedTicket]:
        """Remove an instance. Its granted ticket is released later by its scheduler.

        Returns:
            The tickets that are granted now.
        """
        record = self._members.get(member)
        if (
            record is None
            or (removed_instance := record.instances.pop(instance_index, None)) is None
        ):
            return []
        self._pending = [r for r in self._pending if r.instance is not removed_instance]
        self._compute_capacities()
        return self._grant()

    def remove(self, member: Hashable) -> list[GrantedTicket]:
        """Remove a model version; return the tickets that are granted now."""
        if member not in self._members:
            return []
        granted_tickets = self.disconnect(member)
        del self._members[member]
        self._compute_capacities()
        return granted_tickets + self._grant()

    # --- tickets

    def ask(
        self, member: Hashable, instance_index: int, ticket: Hashable, pid: int = 0
    ) -> list[GrantedTicket]:
        """Request a ticket for the instance with `instance_index`, whose process is `pid`.

        A request is ignored if the instance is unknown or already holds the ticket.

        Returns:
            The tickets that are granted now.
        """
        record = self._members.get(member)
        instance = None if record is None else record.instances.get(instance_index)
        if record is None or instance is None or ticket in record.instance_by_ticket:
            return []
        instance.pid = pid
        self._pending.append(_PendingRequest(member, ticket, instance, next(self._request_numbers)))
        return self._grant()

    def release(self, member: Hashable, ticket: Hashable, was_used: bool) -> list[GrantedTicket]:
        """Release a ticket, or withdraw the request for it.

        Args:
            member: The model version.
            ticket: The ticket.
            was_used: Whether the ticket was used for an execution.

        Returns:
            The tickets that are granted now.
        """
        record = self._members.get(member)
        if record is None:
            return []
        instance = record.instance_by_ticket.pop(ticket, None)
        if instance is None:
            self._pending = [r for r in self._pending if (r.member, r.ticket) != (member, ticket)]
        else:
            self._used_resources.subtract(instance.needs.resources)
            if not was_used:
                instance.executions -= 1
        return self._grant()

    def find_holders(self, member: Hashable, pids: Container[int]) -> set[int]:
        """Return which of these processes hold resources that instances of a member need.

        Returns:
            The processes; empty if an instance could run while they hold their tickets.
        """
        records = self._members.values()
        holders = [i for r in records for i in r.instance_by_ticket.values() if i.pid in pids]
        used_counts: Counter[Resource] = Counter()
        for instance in holders:
            used_counts.update(instance.needs.resources)
        record = self._members.get(member)
        instances = [] if record is None else record.instances.values()
        if any(self._fits(instance.needs.resources, used_counts) for instance in instances):
            return set()
        resources = {resource for instance in instances for resource in instance.needs.resources}
        return {h.pid for h in holders if not resources.isdisjoint(h.needs.resources)}

    def _grant(self) -> list[GrantedTicket]:
        granted_tickets: list[GrantedTicket] = []
        reserved_resources: set[Resource] = set()
        for request in sorted(self._pending, key=attrgetter("rank")):
            needs = request.instance.needs.resources
            if reserved_resources.isdisjoint(needs) and self._fits(needs, self._used_resources):
                self._grant_request(request)
                granted_tickets.append((request.member, request.ticket))
            elif request.overtaken_count >= PATIENCE:
                reserved_resources.update(needs)
        return granted_tickets

    def _fits(self, needs: Mapping[Resource, int], used_counts: Mapping[Resource, int]) -> bool:
        return all(used_counts[r] + count <= self._capacity[r] for r, count in needs.items())

    def _grant_request(self, request: _PendingRequest) -> None:
        self._pending.remove(request)
        needs = request.instance.needs.resources
        self._used_resources.update(needs)
        request.instance.executions += 1
        self._members[request.member].instance_by_ticket[request.ticket] = request.instance
        for rival in self._pending:
            if rival.number < request.number or rival.rank < request.rank:
                rival.overtaken_count += not needs.keys().isdisjoint(rival.instance.needs.resources)


class Tickets:
    """The rate limiter of the server. Each member (model version) is bound to its scheduler.

    Args:
        is_enabled: Whether the server was started with the rate limiter.
        configured_capacities: The configured capacities (see `RateLimiter`).
        send: Queues a message for a scheduler.
    """

    def __init__(
        self,
        is_enabled: bool,
        configured_capacities: Mapping[tuple[str, int | None], int],
        send: Callable[[Address, TicketGranted | ResourcesHeld], None],
    ) -> None:
        self.is_enabled = is_enabled
        self._send = send
        self._limiter = RateLimiter(configured_capacities)
        self._logged_capacity: dict[Resource, int] = {}
        self._members: dict[Address, int] = {}
        self._schedulers: dict[int, Address] = {}

    def join(self, member: int, needs: Mapping[int, Needs]) -> None:
        """Register instances of a model version by index.

        Raises:
            InvalidArgument: An instance needs more resources than are configured.
        """
        self._limiter.join(member, needs)
        self._log()

    def remove_instance(self, member: int, instance_index: int) -> None:
        """Remove an instance that has ended from its member, the model version."""
        self._send_granted(self._limiter.remove_instance(member, instance_index))
        self._log()

    def bind(self, scheduler: Address, member: int) -> None:
        """Bind a member, a model version, to its new scheduler.

        The tickets of the previous scheduler are released.
        """
        predecessor = self._schedulers.get(member)
        if predecessor is not None:
            self._release(predecessor)
        self._members[scheduler] = member
        self._schedulers[member] = scheduler

    def remove(self, member: int) -> None:
        """Remove a member: a model version that has ended."""
        self._members.pop(self._schedulers.pop(member, 0), None)
        self._send_granted(self._limiter.remove(member))
        self._log()

    def _log(self) -> None:
        """Log the capacities if they have changed, in the format of Triton."""
        capacity = self._limiter.capacity()
        if capacity != self._logged_capacity:
            self._logged_capacity = capacity
            for (name, device), count in sorted(capacity.items()):
                shown_device = "GLOBAL" if device == GLOBAL else device
                logger.info("Device: %s Resource: %s\t Count: %d", shown_device, name, count)

    def process_exited(self, pid: int) -> None:
        """Release the tickets of the schedulers in a process that has exited."""
        for scheduler in [address for address in self._members if pid_of(address) == pid]:
            self._release(scheduler)

    def _release(self, scheduler: Address) -> None:
        member = self._members.pop(scheduler, None)
        if member is not None and self._schedulers.get(member) == scheduler:
            self._send_granted(self._limiter.disconnect(member))

    def handle(self, scheduler: Address, message: TicketRequest) -> None:
        """Handle a request for a ticket, its release, or a request for the holders of resources."""
        member = self._members.get(scheduler)
        if member is None:
            return
        if isinstance(message, AskTicket):
            new_grants = self._limiter.ask(member, message.index, message.ticket, message.pid)
            self._send_granted(new_grants)
        elif isinstance(message, CheckHolders):
            if self._limiter.find_holders(member, message.pids):
                self._send(scheduler, ResourcesHeld(message.key))
        else:
            self._send_granted(self._limiter.release(member, message.ticket, message.was_used))

    def find_holders(self, scheduler: Address, pids: set[int]) -> set[int]:
        """Return which processes hold resources that a scheduler's instances need.

        Returns:
            The processes; empty if an instance could run while they hold their tickets.
        """
        return self._limiter.find_holders(self._members.get(scheduler), pids)

    def _send_granted(self, granted_tickets: Sequence[GrantedTicket]) -> None:
        for member, ticket in granted_tickets:
            assert isinstance(member, int) and isinstance(ticket, int)
            self._send(self._schedulers[member], TicketGranted(ticket))


class CacheShares:
    """The equal shares of model versions in the response cache's `byte_size` (0: no cache).

    Each scheduler keeps its own entries, so that no process can access another model's memory. Only
    the bound is shared, and it changes whenever a version with a cache joins or is removed.
    """

    def __init__(self, byte_size: int) -> None:
        self.byte_size = byte_size
        self._members: dict[int, Callable[[ResizeCache], None]] = {}

    @property
    def share(self) -> int:
        """Return the current share of each member in bytes."""
        return self.byte_size // max(1, len(self._members))

    def join(self, member: int, send: Callable[[ResizeCache], None]) -> int:
        """Register a member and return its share; send the other members their new shares."""
        if member not in self._members:
            self._members[member] = send
            self._send_all(member)
        return self.share

    def send(self, member: int) -> None:
        """Send a member its share, if it has joined."""
        if member in self._members:
            self._members[member](ResizeCache(self.share))

    def remove(self, member: int) -> None:
        """Remove a member, if it has joined, and send the remaining members their shares."""
        if self._members.pop(member, None) is not None:
            self._send_all()

    def _send_all(self, skipped_member: int = 0) -> None:
        for member, send in self._members.items():
            if member != skipped_member:
                send(ResizeCache(self.share))
