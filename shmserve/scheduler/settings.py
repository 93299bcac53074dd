"""Scheduling settings: a model's configuration and the server's limits, decoded once."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shmserve.errors import InvalidArgument
from shmserve.ipc import model_spec
from shmserve.ipc.engine_settings import ENGINE_PARAMETER, LLM_BACKEND, EngineSettings
from shmserve.ipc.messages.supervision import SchedulingLimits
from shmserve.ipc.model_spec import (
    MAX_STREAMS,
    DynamicBatching,
    LevelPolicy,
    ModelSpec,
    SequenceBatching,
    Strategy,
    parse_max_streams,
)
from shmserve.ipc.tensors.padding import Padding

logger = logging.getLogger(__name__)

_NS_PER_US = 1_000
_NS_PER_S = 1_000_000_000
_DEFAULT_IDLE_NS = _NS_PER_S  # idle time after which a sequence ends
_MAX_SEQUENCES = 16384  # limit per client of sequences that wait for a slot


@dataclass(frozen=True, slots=True)
class Batching:
    """The rules of the dynamic batcher.

    Sizes are sums of request batch sizes, at least 1. A batch of one of the `preferred_sizes` does
    not wait. `padding` decides which shapes may share a batch (None: only equal shapes).
    """

    max_batch_size: int
    preferred_sizes: frozenset[int]
    delay_ns: int  # the longest wait for a larger batch
    target_ns: int = 0  # the latency target of the adaptive batcher; 0: none
    padding: Padding | None = None

    largest_preferred_size: int = field(init=False)  # the size at which a batch stops waiting

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest_preferred_size", max(self.preferred_sizes))


@dataclass(frozen=True, slots=True)
class QueuePolicies:
    """The queue's priority levels, numbered from 1, and the policy of each level.

    `levels` is their number; 0: there is one level, and priorities are ignored.
    """

    default: LevelPolicy
    levels: int = 0  # number of priority levels
    default_level: int = 0
    level_policies: Mapping[int, LevelPolicy] = field(default_factory=dict)
    has_limits: bool = False  # whether the configuration has levels or limits

    def level(self, priority: int) -> int:
        """Return the number of the queue's level for requests with this priority."""
        return priority if 0 < priority <= self.levels else self.default_level

    def policy(self, level: int) -> LevelPolicy:
        """Return the limits of the queue's level with this number."""
        return self.level_policies.get(level, self.default)


@dataclass(frozen=True, slots=True)
class Sequencing:
    """The rules of the sequence batcher, from the configuration (`spec`) and the server's limits.

    Each instance has `slots` sequence slots. The strategy is "oldest" with `oldest_rules`, else
    "direct". The direct strategy waits up to `delay_ns` for the minimum slot utilization, if the
    configuration sets both values. A sequence without requests for `idle_ns` expires. At most
    `max_waiting` sequences of a client wait for a slot.
    `correlation_input` is the name and datatype of the control input for the id, if there is one.
    """

    spec: SequenceBatching
    correlation_input: tuple[str, str]  # the name and datatype of the control input
    slots: int  # number of sequence slots of an instance
    idle_ns: int  # idle time after which a sequence is ended
    oldest_rules: Batching | None = None  # the batching of the strategy Oldest; None: Direct
    delay_ns: int = 0
    max_waiting: int = _MAX_SEQUENCES  # waiting sequences per client

    def without_delay(self) -> Sequencing:
        """Return these rules without delays, for the time when no further request is expected."""
        oldest_rules = None if self.oldest_rules is None else replace(self.oldest_rules, delay_ns=0)
        return replace(self, delay_ns=0, oldest_rules=oldest_rules)

    def check_datatype(self, correlation_id: int | str, prefix: str, model: str) -> None:
        """Raise InvalidArgument if the model's control input cannot hold this id."""
        name, datatype = self.correlation_input
        is_text = isinstance(correlation_id, str)
        if datatype and is_text != (datatype == "BYTES"):
            raise InvalidArgument(
                f"{prefix}sequence batching control '{name}' data-type is "
                f"'{'BYTES' if is_text else 'UINT64'}', but model '{model}' expects '{datatype}'"
            )


@dataclass(frozen=True, slots=True)
class Settings:
    """The scheduling of a model version.

    Without `batching`, each execution has one request, in the order of the queue.
    """

    name: str
    version: str
    max_batch_size: int
    batching: Batching | None
    policies: QueuePolicies
    preserve_ordering: bool
    execution_limit_ns: int
    # A test hook: the numbers of queued requests and of backlogged sequences at which dispatch
    # starts.
    hold_thresholds: tuple[int, int] = (0, 0)
    sequences: Sequencing | None = None
    timeout_is_deadline: bool = False  # whether a request's `timeout` ends it
    decoupled: bool = False  # a request may have any number of responses
    max_open_requests: int = 0  # per instance of a decoupled model; 0: unlimited
    quantiles: tuple[float, ...] = ()  # quantiles of the last minute's times to report
    first_response_buckets_ms: tuple[float, ...] = model_spec.FIRST_RESPONSE_BUCKETS_MS
    padding: Padding | None = None
    rate_limited: bool = False  # instances execute only with a ticket
    caches_responses: bool = False  # its responses may be cached
    engine: EngineSettings | None = None  # settings of a model that generates text

    @property
    def queue_delay_ns(self) -> int:
        """Return the longest configured time that a request may wait for a larger batch."""
        batchings = (self.batching, self.sequences, self.sequences and self.sequences.oldest_rules)
        return max((batching.delay_ns for batching in batchings if batching), default=0)

    @classmethod
    def read(cls, config: ModelSpec, version: str, limits: SchedulingLimits) -> Settings:
        """Read the settings from a model's configuration and the server's limits."""
        dynamic, padding = config.dynamic_batching, config.padding
        limit_s = _execution_limit_s(config, limits.execution_timeout_s)
        preserves_order = dynamic is not None and dynamic.preserve_ordering
        is_llm = config.backend == LLM_BACKEND
        engine = config.parameters.get(ENGINE_PARAMETER, "") if is_llm else ""
        max_streams = parse_max_streams(config.parameters.get(MAX_STREAMS, "")) or 0
        return cls(
            name=config.name,
            version=version,
            max_batch_size=config.max_batch_size,
            batching=None if dynamic is None else _batch_rules(config, dynamic, padding),
            policies=_policies(dynamic or DynamicBatching(), limits.max_queue_size),
            # The responses of a decoupled model may never end, so that no order can be kept.
            preserve_ordering=preserves_order and not config.decoupled,
            execution_limit_ns=round(limit_s * _NS_PER_S),
            hold_thresholds=_hold_thresholds(config, limits),
            timeout_is_deadline=limits.request_timeout_is_deadline,
            sequences=_sequencing(config, limits),
            decoupled=config.decoupled,
            max_open_requests=max_streams if config.decoupled else 0,
            quantiles=limits.quantiles,
            first_response_buckets_ms=_first_response_buckets(config),
            padding=padding,
            rate_limited=limits.rate_limited,
            caches_responses=config.caches_responses,
            engine=EngineSettings.read(engine) if engine else None,
        )


def _batch_rules(config: ModelSpec, dynamic: DynamicBatching, padding: Padding | None) -> Batching:
    rules = replace(_batching(dynamic, config.max_batch_size), padding=padding)
    match config.parameters.get(model_spec.STRATEGY_PARAMETER):
        case Strategy.PREFER_LATENCY:
            return replace(rules, delay_ns=0)
        case Strategy.ADAPTIVE:
            text = config.parameters.get(model_spec.TARGET_PARAMETER, "")
            return replace(rules, target_ns=round((model_spec.parse_target_ms(text) or 0) * 1e6))
        case _:
            return rules


def _batching(dynamic: DynamicBatching, max_batch_size: int) -> Batching:
    largest_size = max(1, max_batch_size)
    preferred_sizes = frozenset(size for size in dynamic.preferred_batch_size if size > 0)
    delay_ns = dynamic.max_queue_delay_microseconds * _NS_PER_US
    return Batching(largest_size, preferred_sizes or frozenset({largest_size}), delay_ns)


def _sequencing(config: ModelSpec, limits: SchedulingLimits) -> Sequencing | None:
    batching = config.sequence_batching
    if batching is None:
        return None
    oldest = batching.oldest
    max_candidates = 0 if oldest is None else oldest.max_candidate_sequences
    return Sequencing(
        spec=batching,
        correlation_input=batching.correlation_input,
        slots=max_candidates or max(1, config.max_batch_size),
        idle_ns=batching.max_sequence_idle_microseconds * _NS_PER_US or _DEFAULT_IDLE_NS,
        oldest_rules=None if oldest is None else _batching(oldest, config.max_batch_size),
        delay_ns=batching.direct_delay_microseconds * _NS_PER_US,
        # At most half of the queue, so that the sequences of one client cannot fill the queue.
        max_waiting=min(_MAX_SEQUENCES, -(-limits.max_queue_size // 2) or _MAX_SEQUENCES),
    )


def _hold_thresholds(config: ModelSpec, limits: SchedulingLimits) -> tuple[int, int]:
    """Return the numbers of queued and of backlogged requests at which dispatch starts.

    As in Triton, a model without a batcher has no thresholds.
    """
    if config.sequence_batching is not None:
        return limits.delay_scheduler, limits.backlog_delay_scheduler
    return (0 if config.dynamic_batching is None else limits.delay_scheduler), 0


def _first_response_buckets(config: ModelSpec) -> tuple[float, ...]:
    for control in config.metric_control:
        if control.family == model_spec.FIRST_RESPONSE_FAMILY and control.buckets:
            return control.buckets
    return model_spec.FIRST_RESPONSE_BUCKETS_MS


def _policies(dynamic: DynamicBatching, default_max_queue_size: int) -> QueuePolicies:
    levels, preserves_order = dynamic.priority_levels, dynamic.preserve_ordering
    default = dynamic.default_queue_policy
    level_policies = dynamic.priority_queue_policy if levels else {}
    return QueuePolicies(
        default=_policy(default, default_max_queue_size, preserves_order),
        levels=levels,
        default_level=dynamic.default_priority_level if levels else 0,
        level_policies={
            level: _policy(policy, default_max_queue_size, preserves_order)
            for level, policy in level_policies.items()
        },
        has_limits=levels > 1 or any(p.has_limits for p in (default, *level_policies.values())),
    )


def _policy(policy: LevelPolicy, default_max_queue_size: int, preserves_order: bool) -> LevelPolicy:
    max_queue_size = policy.max_queue_size or default_max_queue_size
    # A delayed request would hold up the responses of all other requests.
    may_override = policy.allow_timeout_override and not (preserves_order and policy.delays_expired)
    return replace(policy, max_queue_size=max_queue_size, allow_timeout_override=may_override)


def _execution_limit_s(config: ModelSpec, default: float) -> float:
    text = config.parameters.get(model_spec.EXECUTION_TIMEOUT)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isfinite(seconds) and seconds >= 0:
        return seconds
    logger.warning(
        "model '%s': parameter '%s' is ignored: expected a number of seconds >= 0, got '%s'",
        config.name,
        model_spec.EXECUTION_TIMEOUT,
        text,
    )
    return default
