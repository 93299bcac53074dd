"""The settings of the gRPC listener: frozen, made from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmserve.common.grpc_settings import GrpcSettings
from shmserve.common.tls import Tls, check_file

# Flag -> the setting of the same meaning.
_SETTINGS = {
    "grpc-keepalive-time": "keepalive_time_ms",
    "grpc-keepalive-timeout": "keepalive_timeout_ms",
    "grpc-keepalive-permit-without-calls": "keepalive_permit_without_calls",
    "grpc-http2-max-pings-without-data": "max_pings_without_data",
    "grpc-http2-min-recv-ping-interval-without-data": "min_ping_interval_ms",
    "grpc-http2-max-ping-strikes": "max_ping_strikes",
    "grpc-max-connection-age": "max_connection_age_ms",
    "grpc-max-connection-age-grace": "max_connection_age_grace_ms",
}
_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}  # zlib's


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The gRPC listener: `workers` processes share its sockets, a unix socket among them if there
    is a path for one."""

    address: str
    port: int
    unix_socket: Path | None
    workers: int
    settings: GrpcSettings


def from_values(value: Mapping[str, Any]) -> GrpcConfig | None:
    """The settings that the flags' values give, None for --allow-grpc=false.

    Raises InvalidArgument with one line naming the flag.
    """
    if not value["allow-grpc"]:
        return None
    level = _COMPRESSION_LEVELS[value["grpc-infer-response-compression-level"]]
    settings = {setting: value[flag] for flag, setting in _SETTINGS.items()}
    unix_socket = value["grpc-unix-socket"]
    return GrpcConfig(
        address=value["grpc-address"] or value["http-address"],
        port=value["grpc-port"],
        unix_socket=Path(unix_socket) if unix_socket else None,
        workers=value["grpc-workers"],
        settings=GrpcSettings(tls=_tls(value), compression_level=level, **settings),
    )


def _tls(value: Mapping[str, Any]) -> Tls | None:
    mutual: bool = value["grpc-use-ssl-mutual"]
    if not (value["grpc-use-ssl"] or mutual):
        return None
    tls = Tls(
        server_cert=_file(value, "grpc-server-cert"),
        server_key=_file(value, "grpc-server-key"),
        root_cert=_file(value, "grpc-root-cert") if mutual else None,
    )
    # A gateway would say it, and would be started again and again.
    tls.context()
    return tls


def _file(value: Mapping[str, Any], flag: str) -> str:
    path: str = value[flag] or ""
    check_file(flag, path)
    return str(Path(path).absolute())
