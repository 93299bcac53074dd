"""The settings of a gRPC gateway's connections: made from the command line, sent to gateways."""

from __future__ import annotations

from dataclasses import dataclass

from shmserve.common.tls import Tls


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
