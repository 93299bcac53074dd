"""Trials of the adaptive batcher, by which it learns, and their price (pure).

The target allows one request in a hundred to miss it, and a fifth of these misses may be spent on
trials: an account has what has been earned and not spent. So a trial is made where it costs nothing
even at worst, or its price has been earned; and where the target is being missed anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmserve.ipc.transport.records import record

_FIRST, _MOST = 64.0, 24.0  # misses that may be spent at first, and that are saved at most
_EARNED = 0.002  # misses for each request in time

_EVERY, _SOON = 16, 2  # batches from one size that is tried to the next
LEARNING = 48  # batches in which sizes are tried soon
_LEAST_IDLE = 0.25  # parts of the time: with less, clients wait for responses, or all is late

_EPOCH = 24  # batches
_SETTLING = 4  # of them, which still have to do with the epoch before
_ENOUGH = 12  # of them, where the other way is clearly worse
# Epochs from one of the other way to the next: at first, where it is unclear, and at most.
_OTHER_EVERY, _UNCLEAR_EVERY, _MOST_EVERY = 2, 10, 160
_PAYS = 0.8  # times as long are latencies where waiting is sure to pay
_CLEAR = 0.05  # parts by which one way is better: else it is tried often
_WEIGHT = 1 / 3  # of the newest epoch


class Account:
    """Misses that may be spent on trials."""

    def __init__(self) -> None:
        self.credit = _FIRST
        self._explained = 0.0

    def earn(self, held: int) -> None:
        """So many requests were in time."""
        if self.credit < _MOST:
            self.credit += _EARNED * held

    def settle(self) -> None:
        """The time to learn is over."""
        self.credit = min(self.credit, _MOST)

    def spend(self, misses: float) -> None:
        """A trial costs so many."""
        self.credit -= misses
        self._explained += misses

    def unexplained(self, misses: int) -> int:
        """The number of these misses that no trial has cost."""
        explained = min(misses, int(self._explained))
        self._explained -= explained
        return misses - explained


class Ways:
    """Two ways, and which of them has made for the shorter latencies: a moving average for each.

    Of clients that wait for their responses, shorter latencies are more requests, too. Because what
    pays changes with the load, an epoch goes the other way at times: at first every other one, then
    more and more rarely as long as that confirms what is known, which bounds what it costs.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self.on = True
        self.pays = False  # the first way is sure to be better
        self._better = True
        self._every, self._next = _OTHER_EVERY, 2 * _OTHER_EVERY
        self._mean_ns: dict[bool, float] = {}
        self._price = 0  # misses in the last epoch of the other way
        self._epochs = 0
        self._start()

    def _start(self) -> None:
        self._batches = self._count = self._sum_ns = self._misses = 0

    def returned(self, latencies_ns: Sequence[int], misses: int) -> None:
        """A batch has ended, whose requests took so long, and so many of them too long."""
        self._batches += 1
        self._misses += misses
        if misses and self.on is not self._better:
            self._account.spend(misses)
        if self._batches > _SETTLING:
            self._count += len(latencies_ns)
            self._sum_ns += sum(latencies_ns)
        if self._batches >= _EPOCH or (self._batches == _ENOUGH and self._clearly_worse()):
            self._end_epoch()

    def _clearly_worse(self) -> bool:
        if self.on is self._better:
            return False
        better_ns = self._mean_ns.get(self._better)
        return better_ns is not None and self._sum_ns > (1 + 2 * _CLEAR) * better_ns * self._count

    def _end_epoch(self) -> None:
        mean_ns = self._sum_ns / max(1, self._count)
        before_ns = self._mean_ns.get(self.on, mean_ns)
        self._mean_ns[self.on] = before_ns + (mean_ns - before_ns) * _WEIGHT
        if self.on is not self._better:
            self._price = self._misses
        self._start()
        self._epochs += 1
        if len(self._mean_ns) < 2:
            self.on = not self.on
            return
        with_ns, without_ns = self._mean_ns[True], self._mean_ns[False]
        better = with_ns < without_ns
        if better is not self._better:
            self._better, self._every = better, _OTHER_EVERY
            self._next = self._epochs + _OTHER_EVERY
        self.on = better
        self.pays = with_ns < _PAYS * without_ns
        if self._epochs >= self._next and self._price <= self._account.credit:
            self.on = not better
            clear = abs(with_ns - without_ns) > _CLEAR * min(with_ns, without_ns)
            self._every = min(self._every * 2, _MOST_EVERY if clear else _UNCLEAR_EVERY)
            self._next = self._epochs + self._every


@record
class Moment:
    """The stakes of a trial: how long the oldest request has left, and how much longer those that
    come now could wait; what a row takes at best, how many come in a ns, and how many there are at
    most. Of one instance. `needed`: what is known does not do what comes.
    """

    own_ns: float
    spare_ns: float
    row_ns: float
    per_ns: float
    most_here: float
    needed: bool


class Sizes:
    """The trials of sizes: when one is made, and its price.

    One that takes longer than it is worth delays all that come until the instance has caught up, so
    what is late for it are its own requests, where it takes longer than they have left, and those
    behind it. These come at a rate, and as many as come are caught up with only in what time an
    instance has left, so near its capacity a try is dear. Of clients that wait for their responses
    no more can be late than there are. The account pays what a try has cost, and no more than that.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._at = 0
        self._size = 0  # that is being tried, as of this moment
        self._moment = Moment(0.0, 0.0, 0.0, 0.0, 0.0, False)
        self._idle = 1.0
        # Of the last one: the requests that may still be late for it, and how many may be.
        self._behind = self._price = 0.0

    def due(self, batches: int) -> bool:
        """Whether a size may be tried, after so many batches."""
        return batches >= self._at

    def allowed(self, size: int, worst_ns: float, moment: Moment, batches: int) -> bool:
        """Whether a size is tried that takes so long at worst."""
        self._moment = moment
        self._idle = max(1 - moment.per_ns * moment.row_ns, _LEAST_IDLE)
        price = self._price_of(size, worst_ns, moment.most_here)
        if price > max(self._account.credit, 0) and not moment.needed:
            return False
        self._size = size
        self._at = batches + (_SOON if batches < LEARNING or moment.needed else _EVERY)
        return True

    def _price_of(self, size: int, took_ns: float, most_here: float) -> float:
        moment = self._moment
        own = size if took_ns > moment.own_ns else 0
        lost_ns = took_ns - size * moment.row_ns - max(moment.spare_ns, 0)
        return own + min(max(lost_ns, 0) * moment.per_ns / self._idle, most_here)

    def returned(self, units: int, took_ns: int, count: int, here: int, misses: int) -> None:
        """A batch has ended, and `misses` of its `count` requests were late."""
        if units == self._size:
            self._behind = count + here / self._idle
            self._price = self._price_of(units, took_ns, here)
            self._size = 0
        if self._behind > 0:
            self._behind -= count
            spent = min(misses, self._price)
            self._price -= spent
            self._account.spend(spent)
