"""How long a model's executions take as a function of the batch's size, learned online (pure)."""

from __future__ import annotations

_KEPT = 1 - 1 / 64  # of an observation's weight at each one after it
_KNOWN = 8  # observations after which there is something to say
_WIDEST = 4  # spreads: what lies further out counts as if it were there
_LEAST_VARIATION = 0.05  # of the sizes, to their mean: with less, they tell nothing of the slope


class BatchTime:
    """time = setup + each * units: least squares with exponential forgetting, by their sufficient
    statistics, and made robust as Huber's M-estimator (1964) is: an outlier is moved to the edge of
    what is believable before it counts. The spread is a moving average of the absolute residuals.

    The first execution does not count: models do at it what they do once. Where all batches have
    one size, the slope is the last one that there was, at first 0: the optimistic guess, which
    leads to larger batches and to knowing better.
    """

    __slots__ = ("_mean_x", "_mean_y", "_seen", "_spread", "_weight", "_xx", "_xy", "each_ns")

    def __init__(self) -> None:
        self._seen = -1
        self._weight = self._mean_x = self._mean_y = 0.0
        self._xx = self._xy = 0.0  # weighted sums of products of deviations from the means
        self._spread = 0.0
        self.each_ns = 0.0  # what one more unit takes

    @property
    def known(self) -> bool:
        """Whether there have been enough executions to say anything."""
        return self._seen >= _KNOWN

    @property
    def setup_ns(self) -> float:
        """What an execution takes however small it is."""
        return self._mean_y - self.each_ns * self._mean_x

    def expected_ns(self, units: int) -> float:
        """How long a batch of this size takes."""
        return self._mean_y + self.each_ns * (units - self._mean_x)

    def most_ns(self, units: int) -> float:
        """How long it takes, but for one in a hundred or so."""
        return self.expected_ns(units) + 3 * self._spread

    def observe(self, units: int, took_ns: float) -> None:
        """An execution of a batch of this size took this long."""
        self._seen += 1
        if not self._seen:
            return
        if self._seen > 1:
            took_ns = self._believable(units, took_ns)
        else:
            self._spread = took_ns / 4
        self._weight = self._weight * _KEPT + 1
        share = 1 / self._weight
        off_x, off_y = units - self._mean_x, took_ns - self._mean_y
        self._mean_x += share * off_x
        self._mean_y += share * off_y
        self._xx = self._xx * _KEPT + off_x * (units - self._mean_x)
        self._xy = self._xy * _KEPT + off_x * (took_ns - self._mean_y)
        slope = self.each_ns
        if self._xx > self._weight * (_LEAST_VARIATION * self._mean_x) ** 2:
            slope = self._xy / self._xx
        self.each_ns = min(max(slope, 0.0), self._mean_y / self._mean_x)

    def _believable(self, units: int, took_ns: float) -> float:
        """The time as far as it counts; and the spread learns of it."""
        expected = self.expected_ns(units)
        widest = _WIDEST * max(self._spread, expected / 50)
        residual = took_ns - expected
        # The spread may grow faster than the line moves: a change that lasts is soon believed.
        self._spread += (min(abs(residual), 2 * widest) - self._spread) / 16
        return expected + min(max(residual, -widest), widest) if self.known else took_ns
