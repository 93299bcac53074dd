"""Which latencies GET /metrics shows: --metrics-config, as Triton has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from shmserve.config.option import Flag
from shmserve.errors import InvalidArgument

_FLAG = "--metrics-config"
_SWITCH = Flag("metrics-config", kind=bool)


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Counters of time, histograms and summaries; `summary_quantiles` are those of the last, each
    in [0, 1]."""

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)

    @property
    def kept_quantiles(self) -> tuple[float, ...]:
        """The quantiles that schedulers keep: none where nobody sees them."""
        return self.summary_quantiles if self.summary_latencies else ()


def parse_metrics_config(texts: Iterable[str]) -> MetricsConfig:
    """The settings of all --metrics-config, the last of a name; raises InvalidArgument."""
    config = MetricsConfig()
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise InvalidArgument(f"{_FLAG}: '{text}' is not SETTING=VALUE")
        parse = _SETTINGS.get(name)
        if parse is None:
            known = ", ".join(_SETTINGS)
            raise InvalidArgument(f"{_FLAG}: there is no setting '{name}' (there are: {known})")
        try:
            config = replace(config, **{name: parse(value)})
        except InvalidArgument:
            wants = "QUANTILE:ERROR,..." if parse is _quantiles else "true or false"
            raise InvalidArgument(f"{_FLAG}: {name}='{value}' is not {wants}") from None
    return config


def _quantiles(text: str) -> tuple[float, ...]:
    """Of "QUANTILE:ERROR,...", the quantiles. The error is what Triton's estimate may be off by in
    rank: no quantile here is."""
    quantiles = []
    for pair in text.split(","):
        quantile, colon, error = pair.partition(":")
        try:
            values = float(quantile), float(error)
        except ValueError:
            raise InvalidArgument(pair) from None
        if not colon or not all(0 <= value <= 1 for value in values):
            raise InvalidArgument(pair)
        quantiles.append(values[0])
    return tuple(dict.fromkeys(quantiles))


_SETTINGS: dict[str, Callable[[str], Any]] = {
    "counter_latencies": _SWITCH.parse,
    "histogram_latencies": _SWITCH.parse,
    "summary_latencies": _SWITCH.parse,
    "summary_quantiles": _quantiles,
}
