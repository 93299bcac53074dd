"""Tickets of the rate limiter, as a scheduler has them: an instance executes only with one.

An instance is asked for once a batch could run on it, so none holds resources while requests are
still awaited; what is granted and not used within a turn is given back. What has been used is given
back at the end of the turn: an instance that goes on has asked again by then, and is not passed
over for one that has had more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from shmserve.ipc.messages.control_requests import AskTicket, TicketReturned
from shmserve.scheduler.instances.pool import Slot
from shmserve.scheduler.outboxes import ControlLink


class InstanceTickets:
    """The tickets of this model version's instances, by index."""

    def __init__(self, control: ControlLink) -> None:
        self._control = control
        self._numbers = itertools.count(1)
        self._asked: dict[int, int] = {}
        self._granted: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._done: list[int] = []

    def granted(self, ticket: int) -> None:
        """The supervisor grants what was asked for; what is not wanted any more was given back."""
        for index, asked in self._asked.items():
            if asked == ticket:
                del self._asked[index]
                self._granted[index] = ticket
                return

    def find(self, slots: Iterable[Slot]) -> Slot | None:
        """The first of these instances that may execute now."""
        return next((slot for slot in slots if slot.index in self._granted), None)

    def ask(self, slots: Iterable[Slot], most: int) -> None:
        """Ask for these instances, of which `most` could be used now."""
        for slot in itertools.islice(slots, most):
            if slot.index not in self._asked and slot.index not in self._granted:
                ticket = self._asked[slot.index] = next(self._numbers)
                self._control.post(AskTicket(ticket, slot.index))

    def use(self, slot: Slot) -> None:
        """The instance executes."""
        self._used[slot.index] = self._granted.pop(slot.index)

    def done(self, slot: Slot) -> None:
        """The instance has executed."""
        ticket = self._used.pop(slot.index, 0)
        if ticket:
            self._done.append(ticket)

    def end_turn(self) -> None:
        """Return the tickets that have been used."""
        for ticket in self._done:
            self._control.post(TicketReturned(ticket, True))
        self._done.clear()

    def gone(self, index: int) -> None:
        """Return what the instance had, which is gone."""
        for tickets in (self._asked, self._granted, self._used):
            ticket = tickets.pop(index, 0)
            if ticket:
                self._control.post(TicketReturned(ticket, tickets is self._used))

    def give_back(self) -> None:
        """Return the tickets that are granted and were not used."""
        for ticket in self._granted.values():
            self._control.post(TicketReturned(ticket, False))
        self._granted.clear()
