"""What a model's configuration and the server's settings mean for scheduling, decoded once."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from shmserve.common import first_response
from shmserve.ipc.messages.start import SchedulingLimits

logger = logging.getLogger(__name__)

_NS_PER_US = 1_000
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Batching:
    """The dynamic batcher's rules. Sizes are sums of request batch sizes, at least 1."""

    max_batch_size: int
    preferred: frozenset[int]
    delay_ns: int

    @property
    def largest_preferred(self) -> int:
        """The size at which a batch stops waiting."""
        return max(self.preferred)


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What the queue refuses. 0: no limit. `override`: a request's own, shorter timeout counts."""

    max_size: int
    timeout_ns: int = 0
    override: bool = False

    def own_timeout_ns(self, timeout_us: int) -> int:
        """A request's own timeout where it may and does override the policy's, else 0."""
        own = timeout_us * _NS_PER_US
        return own if self.override and 0 < own < self.timeout_ns else 0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model version is scheduled. No `batching`: one request an execution, in order."""

    name: str
    version: str
    max_batch_size: int
    batching: Batching | None
    policy: QueuePolicy
    preserve_ordering: bool
    execution_limit_ns: int
    hold_until: int
    decoupled: bool = False  # any number of responses to a request
    quantiles: tuple[float, ...] = ()  # of the last minute's times; none: not kept
    first_response_buckets_ms: tuple[float, ...] = first_response.BUCKETS_MS

    @classmethod
    def read(cls, config: dict[str, Any], version: str, limits: SchedulingLimits) -> Settings:
        """From a normalised configuration and what the server sets for all models.

        Priority levels and the DELAY action are not acted on here.
        """
        dynamic = config.get("dynamic_batching")
        max_batch_size: int = config["max_batch_size"]
        limit_s = _execution_limit_s(config, limits.execution_timeout_s)
        default_bound = limits.max_queue_size
        decoupled = bool((config.get("model_transaction_policy") or {}).get("decoupled", False))
        ordered = bool((dynamic or {}).get("preserve_ordering", False))
        return cls(
            name=config["name"],
            version=version,
            max_batch_size=max_batch_size,
            batching=None if dynamic is None else _batching(dynamic, max_batch_size),
            policy=_policy((dynamic or {}).get("default_queue_policy") or {}, default_bound),
            # What may never end cannot be waited for.
            preserve_ordering=ordered and not decoupled,
            execution_limit_ns=round(limit_s * _NS_PER_S),
            # The hook belongs to the dynamic batcher: the default scheduler has no thread to hold.
            hold_until=0 if dynamic is None else limits.delay_scheduler,
            decoupled=decoupled,
            quantiles=limits.quantiles,
            first_response_buckets_ms=_buckets(config),
        )


def _batching(dynamic: dict[str, Any], max_batch_size: int) -> Batching:
    largest = max(1, max_batch_size)
    preferred = frozenset(size for size in dynamic.get("preferred_batch_size") or () if size > 0)
    return Batching(
        max_batch_size=largest,
        preferred=preferred or frozenset({largest}),
        delay_ns=int(dynamic.get("max_queue_delay_microseconds") or 0) * _NS_PER_US,
    )


def _buckets(config: dict[str, Any]) -> tuple[float, ...]:
    for control in (config.get("model_metrics") or {}).get("metric_control") or ():
        identifier = control.get("metric_identifier") or {}
        buckets = (control.get("histogram_options") or {}).get("buckets")
        if identifier.get("family") == first_response.FAMILY and buckets:
            return tuple(map(float, buckets))
    return first_response.BUCKETS_MS


def _policy(policy: dict[str, Any], default_bound: int) -> QueuePolicy:
    return QueuePolicy(
        max_size=int(policy.get("max_queue_size") or 0) or default_bound,
        timeout_ns=int(policy.get("default_timeout_microseconds") or 0) * _NS_PER_US,
        override=bool(policy.get("allow_timeout_override", False)),
    )


def _execution_limit_s(config: dict[str, Any], default: float) -> float:
    parameter = (config.get("parameters") or {}).get("execution_timeout_seconds")
    if parameter is None:
        return default
    try:
        seconds = float(parameter["string_value"])
    except (KeyError, TypeError, ValueError):
        seconds = math.nan
    if math.isfinite(seconds) and seconds >= 0:
        return seconds
    logger.warning(
        "parameter 'execution_timeout_seconds' is not a number of seconds; it is ignored"
    )
    return default
