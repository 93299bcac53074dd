"""Start records, the arguments of a new process: the supervisor encodes them, the process decodes
them, once.

A gateway's is shmserve.gateway.settings.GatewayStart: its settings are the gateways' own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.transport.records import Document, from_map
from shmserve.logs import LogSettings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SchedulingLimits:
    """The server's settings for all models. `execution_timeout_s`, `request_timeout_us`,
    `max_queue_size`: 0 for none; `delay_scheduler`: requests that a batcher waits for before its
    first batch, `backlog_delay_scheduler`: those of sequences without a slot; `quantiles` of the
    last minute's times, none: they are not kept."""

    execution_timeout_s: float = 0.0
    request_timeout_us: int = 0
    max_queue_size: int = 0
    delay_scheduler: int = 0
    backlog_delay_scheduler: int = 0
    quantiles: tuple[float, ...] = ()
    rate_limited: bool = False  # instances execute only with a ticket


@dataclass(frozen=True, slots=True)
class CacheStart:
    """The response cache of a model version: its share of the server's (0: it has none), and who
    holds the memory that clients have shared."""

    byte_size: int = 0
    supervisor_pid: int = 0


@dataclass(frozen=True, slots=True)
class HostStart:
    """A process that hosts schedulers, of this `title`."""

    title: str
    run_dir: Path
    log: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True, slots=True)
class SchedulerStart:
    """A scheduler of a `kind` ("scheduler" or "ensemble"): `number` is its endpoints'.

    `snapshot` is what a predecessor that died had counted, the last `StatisticsSnapshot` (empty for
    the first), `alive` the worker processes that there were. Local clients prove who they are by
    `capability_key`; the programs of `group` are admitted, too (-1: none).
    """

    kind: str
    number: int
    version: str
    config: ModelSpec
    run_dir: Path
    capability_key: bytes
    group: int = -1
    arena_byte_size: int = 0  # of what it lends
    limits: SchedulingLimits = field(default_factory=SchedulingLimits)
    cache: CacheStart = field(default_factory=CacheStart)
    snapshot: list[Any] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A worker: instance `index` of a model version, whose scheduler has, or had, this `number`.

    `device` is "cpu" or "gpu:N", `kind` Triton's word for it, `threads` how many it computes with.
    """

    number: int
    index: int
    model_name: str
    version: str
    model_dir: Path
    repository: Path
    run_dir: Path
    device: str
    kind: str
    device_id: int
    instance_name: str
    backend_config: dict[str, str]
    arena_byte_size: int
    threads: int
    log: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True, slots=True)
class WorkspaceStart:
    """The holder of a CUDA device's workspace pool."""

    device_id: int
    byte_size: int
    run_dir: Path
    log: LogSettings = field(default_factory=LogSettings)


def encode(start: Any) -> bytes:
    """A record of records as MessagePack; paths need not be UTF-8."""
    data: bytes = msgpack.packb(start, default=_plain, unicode_errors="surrogateescape")
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Document):
        return value.source
    return {each.name: getattr(value, each.name) for each in fields(value)}


def decode(cls: type[T], data: bytes) -> T:
    """The record that `encode` was given; it is from our supervisor, and trusted."""
    return from_map(cls, msgpack.unpackb(data, unicode_errors="surrogateescape"))
