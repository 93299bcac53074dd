"""What a model's configuration and the server's settings mean for scheduling, decoded once."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shmserve.common import model_settings
from shmserve.common.model_settings import MAX_STREAMS, Strategy, max_streams
from shmserve.errors import InvalidArgument
from shmserve.ipc.messages.start import SchedulingLimits
from shmserve.ipc.tensors.datatypes import FROM_CONFIG
from shmserve.ipc.tensors.padding import Padding

logger = logging.getLogger(__name__)

_NS_PER_US = 1_000
_NS_PER_S = 1_000_000_000
_IDLE_NS = _NS_PER_S
_MOST_SEQUENCES = 16384  # of a client, that wait for a slot


@dataclass(frozen=True, slots=True)
class Batching:
    """The dynamic batcher's rules. Sizes are sums of request batch sizes, at least 1. `target_ns`:
    what it adapts to, 0: it does not. `padding`: which shapes may share a batch; None: equal ones.
    """

    max_batch_size: int
    preferred: frozenset[int]
    delay_ns: int
    target_ns: int = 0
    padding: Padding | None = None

    largest_preferred: int = field(init=False)  # the size at which a batch stops waiting

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest_preferred", max(self.preferred))


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What a level of the queue refuses. 0: no limit. `override`: a request's own, shorter timeout
    counts. `delays`: a request whose timeout has passed waits on, behind the others of its level;
    else it is rejected."""

    max_size: int
    timeout_ns: int = 0
    override: bool = False
    delays: bool = False

    def own_timeout_ns(self, timeout_us: int) -> int:
        """A request's own timeout where it may and does override the policy's, else 0. To have no
        timeout is the longest one, which any other is shorter than."""
        own = timeout_us * _NS_PER_US
        return own if self.override and own > 0 and not 0 < self.timeout_ns <= own else 0


@dataclass(frozen=True, slots=True)
class QueuePolicies:
    """The queue's priority levels, 1 .. `levels` (0: there is one, and no priority counts), and the
    policy of each."""

    default: QueuePolicy
    levels: int = 0
    default_level: int = 0
    by_level: Mapping[int, QueuePolicy] = field(default_factory=dict)
    limited: bool = False  # the model's configuration asks for any of it

    def level(self, priority: int) -> int:
        """The level of a request with this priority."""
        return priority if 0 < priority <= self.levels else self.default_level

    def of(self, level: int) -> QueuePolicy:
        """The policy of a level."""
        return self.by_level.get(level, self.default)


@dataclass(frozen=True, slots=True)
class Sequencing:
    """The sequence batcher's rules. `slots` an instance; no `oldest`: the direct strategy, which
    waits for `minimum_utilization` of its slots up to `delay_ns` where both are set.

    A sequence is idle after `idle_ns`, and `most` of a client may wait for a slot. `id_datatype` is
    that of the control input `id_name`, "" without one. `iterative`: a model may ask for a request
    again. `hold`, `hold_backlog`: requests in slots, and in the backlog, before the first batch.
    """

    slots: int
    idle_ns: int
    oldest: Batching | None = None
    delay_ns: int = 0
    minimum_utilization: float = 0.0
    iterative: bool = False
    id_name: str = ""
    id_datatype: str = ""
    most: int = _MOST_SEQUENCES
    hold: int = 0
    hold_backlog: int = 0

    def check_datatype(self, correlation_id: int | str, prefix: str, model: str) -> None:
        """Raises InvalidArgument for an id that the model's control input cannot hold."""
        is_text = isinstance(correlation_id, str)
        if self.id_datatype and is_text != (self.id_datatype == "BYTES"):
            raise InvalidArgument(
                f"{prefix}sequence batching control '{self.id_name}' data-type is "
                f"'{'BYTES' if is_text else 'UINT64'}', but model '{model}' expects "
                f"'{self.id_datatype}'"
            )


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model version is scheduled. No `batching`: one request an execution, in order."""

    name: str
    version: str
    max_batch_size: int
    batching: Batching | None
    policies: QueuePolicies
    preserve_ordering: bool
    execution_limit_ns: int
    hold_until: int
    sequences: Sequencing | None = None
    request_limit_ns: int = 0  # from a request's arrival to its last response; 0: none
    decoupled: bool = False  # any number of responses to a request
    most_open: int = 0  # requests that an instance of a decoupled model has at a time; 0: any
    quantiles: tuple[float, ...] = ()  # of the last minute's times; none: not kept
    first_response_buckets_ms: tuple[float, ...] = model_settings.FIRST_RESPONSE_BUCKETS_MS
    padding: Padding | None = None
    rate_limited: bool = False  # instances execute only with a ticket
    cached: bool = False  # its responses may be kept and given again

    @classmethod
    def read(cls, config: dict[str, Any], version: str, limits: SchedulingLimits) -> Settings:
        """From a normalised configuration and what the server sets for all models."""
        dynamic = config.get("dynamic_batching")
        max_batch_size: int = config["max_batch_size"]
        limit_s = _execution_limit_s(config, limits.execution_timeout_s)
        decoupled = bool((config.get("model_transaction_policy") or {}).get("decoupled", False))
        ordered = bool((dynamic or {}).get("preserve_ordering", False))
        return cls(
            name=config["name"],
            version=version,
            max_batch_size=max_batch_size,
            batching=None if dynamic is None else _strategy(config, dynamic),
            policies=_policies(dynamic or {}, limits.max_queue_size, ordered),
            # What may never end cannot be waited for.
            preserve_ordering=ordered and not decoupled,
            execution_limit_ns=round(limit_s * _NS_PER_S),
            # The hook belongs to the dynamic batcher: the default scheduler has no thread to hold.
            hold_until=0 if dynamic is None else limits.delay_scheduler,
            request_limit_ns=limits.request_timeout_us * _NS_PER_US,
            sequences=_sequencing(config, limits),
            decoupled=decoupled,
            most_open=_most_open(config) if decoupled else 0,
            quantiles=limits.quantiles,
            first_response_buckets_ms=_buckets(config),
            padding=Padding.of(config),
            rate_limited=limits.rate_limited,
            cached=bool((config.get("response_cache") or {}).get("enable", False)),
        )


def _strategy(config: dict[str, Any], dynamic: dict[str, Any]) -> Batching:
    rules = replace(_batching(dynamic, config["max_batch_size"]), padding=Padding.of(config))
    match _parameter(config, model_settings.STRATEGY):
        case Strategy.PREFER_LATENCY:
            return replace(rules, delay_ns=0)
        case Strategy.ADAPTIVE:
            target_ms = model_settings.target_ms(_parameter(config, model_settings.TARGET))
            return replace(rules, target_ns=round((target_ms or 0) * 1e6))
        case _:
            return rules


def _batching(dynamic: dict[str, Any], max_batch_size: int) -> Batching:
    largest = max(1, max_batch_size)
    preferred = frozenset(size for size in dynamic.get("preferred_batch_size") or () if size > 0)
    return Batching(
        max_batch_size=largest,
        preferred=preferred or frozenset({largest}),
        delay_ns=int(dynamic.get("max_queue_delay_microseconds") or 0) * _NS_PER_US,
    )


def _parameter(config: dict[str, Any], name: str) -> str:
    parameter = (config.get("parameters") or {}).get(name) or {}
    return str(parameter.get("string_value") or "")


def _sequencing(config: dict[str, Any], limits: SchedulingLimits) -> Sequencing | None:
    given = config.get("sequence_batching")
    if given is None:
        return None
    direct, oldest = given.get("direct") or {}, given.get("oldest")
    rows = max(1, config["max_batch_size"])
    candidates = int((oldest or {}).get("max_candidate_sequences") or 0)
    name, datatype = _id_control(given)
    return Sequencing(
        slots=candidates or rows,
        idle_ns=int(given.get("max_sequence_idle_microseconds") or 0) * _NS_PER_US or _IDLE_NS,
        oldest=None if oldest is None else _batching(oldest, config["max_batch_size"]),
        delay_ns=int(direct.get("max_queue_delay_microseconds") or 0) * _NS_PER_US,
        minimum_utilization=float(direct.get("minimum_slot_utilization") or 0.0),
        iterative=bool(given.get("iterative_sequence")),
        id_name=name,
        id_datatype=datatype,
        # Not so many that one client's fill the queue.
        most=min(_MOST_SEQUENCES, -(-limits.max_queue_size // 2) or _MOST_SEQUENCES),
        hold=limits.delay_scheduler,
        hold_backlog=limits.backlog_delay_scheduler,
    )


def _id_control(sequences: dict[str, Any]) -> tuple[str, str]:
    for tensor in sequences.get("control_input") or ():
        for control in tensor.get("control") or ():
            if control.get("kind") == "CONTROL_SEQUENCE_CORRID":
                return tensor["name"], FROM_CONFIG[control["data_type"]]
    return "", ""


def _most_open(config: dict[str, Any]) -> int:
    parameter = (config.get("parameters") or {}).get(MAX_STREAMS) or {}
    return max_streams(parameter.get("string_value", "")) or 0


def _buckets(config: dict[str, Any]) -> tuple[float, ...]:
    for control in (config.get("model_metrics") or {}).get("metric_control") or ():
        identifier = control.get("metric_identifier") or {}
        buckets = (control.get("histogram_options") or {}).get("buckets")
        if identifier.get("family") == model_settings.FIRST_RESPONSE_FAMILY and buckets:
            return tuple(map(float, buckets))
    return model_settings.FIRST_RESPONSE_BUCKETS_MS


def _policies(dynamic: dict[str, Any], default_bound: int, ordered: bool) -> QueuePolicies:
    default = dynamic.get("default_queue_policy") or {}
    levels = int(dynamic.get("priority_levels") or 0)
    by_level = (dynamic.get("priority_queue_policy") or {}) if levels else {}
    return QueuePolicies(
        default=_policy(default, default_bound, ordered),
        levels=levels,
        default_level=int(dynamic.get("default_priority_level") or 0) if levels else 0,
        by_level={
            int(level): _policy(each, default_bound, ordered) for level, each in by_level.items()
        },
        limited=levels > 1 or any(map(_limits, (default, *by_level.values()))),
    )


def _policy(policy: dict[str, Any], default_bound: int, ordered: bool) -> QueuePolicy:
    delays = policy.get("timeout_action") == "DELAY"
    return QueuePolicy(
        max_size=int(policy.get("max_queue_size") or 0) or default_bound,
        timeout_ns=int(policy.get("default_timeout_microseconds") or 0) * _NS_PER_US,
        # A request that is put behind the others would hold up the responses of all of them.
        override=bool(policy.get("allow_timeout_override", False)) and not (ordered and delays),
        delays=delays,
    )


def _limits(policy: dict[str, Any]) -> bool:
    bounds = ("max_queue_size", "default_timeout_microseconds", "allow_timeout_override")
    return any(policy.get(name) not in (None, 0, "0", False) for name in bounds)


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
