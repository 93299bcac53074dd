"""The start message of a gateway, with its settings, those of gRPC among them: frozen, decoded
once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmserve.common.tls import Tls
from shmserve.logs import LogSettings


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """The settings of a gRPC gateway's connections.

    Times are in milliseconds. A client that is silent for `keepalive_time_ms` is asked for a sign
    of life, at most `max_pings_without_data` times in a row (0: any number), and must give it
    within `keepalive_timeout_ms`. One that asks for such signs itself more often than once in
    `min_ping_interval_ms` may do so `max_ping_strikes` times (0: any number).
    `max_connection_age_ms`, and a grace for its calls after that: 0 for any. `compression_level` is
    zlib's, 0: responses are not compressed.
    """

    tls: Tls | None = None
    compression_level: int = 0
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    max_pings_without_data: int = 2
    min_ping_interval_ms: int = 300_000
    max_ping_strikes: int = 0
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of the server that matter to a gateway.

    `max_input_size` bounds JSON, raw input and decompressed bodies, in bytes
    (--http-max-input-size). `request_timeout_us` is the server's end-to-end limit for requests, 0
    for none. `arena_byte_size` bounds the memory for request bodies. `body_timeout_s` is how long a
    client may stall while it sends a body or reads a response. `tokens` and `..._restricted` are as
    auth_tokens.py in common has them, `allow_client_shm` as peers.py, `shm_overlap` as
    gateway/region_table.py.
    Headers, or metadata over gRPC, whose names match `..._header_forward_pattern` become parameters
    of the request. `cuda_devices` is how many CUDA devices the server has; without one there is no
    CUDA shared memory. The `..._latencies` are which of them metrics show. Requests that take
    longer than `slow_request_ms` are logged, 0: none.
    """

    id: str = "triton"
    max_input_size: int = 64 * 1024 * 1024
    request_timeout_us: int = 0
    arena_byte_size: int = 1024 * 1024 * 1024
    body_timeout_s: float = 30.0
    header_timeout_s: float = 30.0
    max_connections: int = 16384
    http_address: str = "127.0.0.1"
    tokens: dict[str, tuple[str, ...]] = field(default_factory=dict)
    http_restricted: dict[str, Any] = field(default_factory=dict)
    grpc_restricted: dict[str, Any] = field(default_factory=dict)
    allow_client_shm: bool | None = None
    shm_overlap: str = "warn"
    cuda_devices: int = 0
    http_header_forward_pattern: str = ""
    grpc_header_forward_pattern: str = ""
    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    slow_request_ms: int = 0


@dataclass(frozen=True, slots=True)
class GatewayStart:
    """A gateway, which the supervisor knows as `name`. It is given descriptors of sockets that
    listen: one for HTTP the first `http_sockets` for HTTP, the others for metrics; one for gRPC,
    which has `grpc`, only those for gRPC. Where it is `held`, clients wait for `Accept`."""

    name: str
    run_dir: Path
    settings: GatewaySettings
    http_sockets: int = 0
    grpc: GrpcSettings | None = None
    held: bool = False
    log: LogSettings = field(default_factory=LogSettings)
