"""When the next request is to be expected, learned online (pure).

Clients that wait for a response send their next request when they have it. So requests come in
bursts behind the end of a batch, and no more come once every client has one waiting: how many are
here says how far a burst has come. For each number of requests there are moving averages, as TCP
keeps them of round trips (RFC 6298): how often another one came soon, and how long it took.
"""

from __future__ import annotations

_MOST_LEVELS = 512
_LIKELY = 0.6
_FIRST_SEEN = 8  # observations that say something about the next one
_CAUTION = 0.5  # of what a burst is worth, what it may be expected to cost: estimates are wrong
_MARGIN_NS = 50_000  # of turns of the loop


class _Level:
    """What happened when so many requests were here."""

    __slots__ = ("chance", "deviation_ns", "gap_ns", "seen")

    def __init__(self) -> None:
        self.chance = 0.0
        self.gap_ns = 0.0
        self.deviation_ns = 0.0
        self.seen = 0

    def came(self, gap_ns: int) -> None:
        """Another one came this soon."""
        if self.chance:
            error = gap_ns - self.gap_ns
            self.gap_ns += error / 8
            self.deviation_ns += (abs(error) - self.deviation_ns) / 4
        else:
            self.gap_ns, self.deviation_ns = gap_ns, gap_ns / 2
        self._learn(1.0)

    def missed(self) -> None:
        """None came soon."""
        self._learn(0.0)

    def _learn(self, outcome: float) -> None:
        self.seen += 1
        self.chance += (outcome - self.chance) / min(self.seen, 16)

    @property
    def patience_ns(self) -> int:
        """How long after the last event the next one is worth waiting for."""
        return int(self.gap_ns + 4 * self.deviation_ns) + _MARGIN_NS


class Arrivals:
    """What comes after what. Events are arrivals and the ends of batches; `here` is how many
    requests are not done after one, `soon_ns` how soon is soon."""

    __slots__ = ("_here", "_levels", "_since_ns")

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._here = 0
        self._since_ns = 0

    def arrived(self, now_ns: int, here: int, soon_ns: float) -> None:
        """A request came."""
        gap_ns = now_ns - self._since_ns
        if gap_ns <= soon_ns:
            self._level().came(gap_ns)
        else:
            self._level().missed()
        self._since_ns, self._here = now_ns, here

    def returned(self, now_ns: int, here: int, soon_ns: float) -> None:
        """A batch ended."""
        if now_ns - self._since_ns > soon_ns:
            self._level().missed()
        self._since_ns, self._here = now_ns, here

    def _level(self) -> _Level:
        number = min(self._here, _MOST_LEVELS)
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level()
        return level

    def burst_until(self, worth_ns: float, room: int) -> int:
        """Until when the next request is to be expected of a burst that is worth waiting for; 0:
        there is none.

        A burst is over where no more are likely to come, or at `room` more requests. It is worth
        `worth_ns` where all of it comes; if the wait for one request is in vain, nothing.
        """
        first = level = self._likely(self._here)
        chance, cost_ns = 1.0, 0.0
        for more in range(1, room + 1):
            if level is None:
                break
            chance *= level.chance
            cost_ns += level.chance * level.gap_ns + (1 - level.chance) * level.patience_ns
            if cost_ns > chance * worth_ns * _CAUTION:
                return 0
            level = self._likely(self._here + more)
        return 0 if first is None else self._since_ns + first.patience_ns

    def _likely(self, here: int) -> _Level | None:
        level = self._levels.get(min(here, _MOST_LEVELS))
        if level is None or level.seen < _FIRST_SEEN or level.chance < _LIKELY:
            return None
        return level
