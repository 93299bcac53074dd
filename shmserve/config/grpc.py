"""The settings of the gRPC listener: frozen, made from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmserve.common.tls import Tls, check_file

# flag -> gRPC's own name of the setting
_CHANNEL_OPTIONS = {
    "grpc-keepalive-time": "grpc.keepalive_time_ms",
    "grpc-keepalive-timeout": "grpc.keepalive_timeout_ms",
    "grpc-keepalive-permit-without-calls": "grpc.keepalive_permit_without_calls",
    "grpc-http2-max-pings-without-data": "grpc.http2.max_pings_without_data",
    "grpc-http2-min-recv-ping-interval-without-data": (
        "grpc.http2.min_ping_interval_without_data_ms"
    ),
    "grpc-http2-max-ping-strikes": "grpc.http2.max_ping_strikes",
}
# These mean "no limit" when they are 0, which gRPC says by leaving them out.
_AGES = {
    "grpc-max-connection-age": "grpc.max_connection_age_ms",
    "grpc-max-connection-age-grace": "grpc.max_connection_age_grace_ms",
}

# A level, not an algorithm: gRPC then picks one that the client says it takes, or none.
_COMPRESSION_LEVEL = "grpc.default_compression_level"
_COMPRESSION_LEVELS = {"low": 1, "medium": 2, "high": 3}

_EXPERIMENTS = "GRPC_EXPERIMENTS"
_OWN_THREADS = "event_engine_listener"


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """`given`, in which gRPC's core has no threads of its own that read connections.

    It reads this setting when it is loaded. Who reads instead: gateway/grpc/core/readers.py.
    """
    named = [name for name in given.get(_EXPERIMENTS, "").split(",") if name]
    if not any(name.removeprefix("-") == _OWN_THREADS for name in named):
        named.append(f"-{_OWN_THREADS}")
    return {**given, _EXPERIMENTS: ",".join(named)}


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The gRPC listener; `options` are (name, value) pairs for gRPC itself."""

    address: str
    port: int
    tls: Tls | None
    options: tuple[tuple[str, int], ...]


def from_values(value: Mapping[str, Any]) -> GrpcConfig | None:
    """The settings that the flags' values give, None for --allow-grpc=false.

    Raises InvalidArgument with one line naming the flag.
    """
    if not value["allow-grpc"]:
        return None
    options = [(name, int(value[flag])) for flag, name in _CHANNEL_OPTIONS.items()]
    options += [(name, value[flag]) for flag, name in _AGES.items() if value[flag]]
    level = _COMPRESSION_LEVELS.get(value["grpc-infer-response-compression-level"])
    if level is not None:
        options.append((_COMPRESSION_LEVEL, level))
    return GrpcConfig(
        address=value["grpc-address"] or value["http-address"],
        port=value["grpc-port"],
        tls=_tls(value),
        options=tuple(options),
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
    # gRPC would say it in the gateway, which would be started again and again.
    tls.check()
    tls.ask_grpc()
    return tls


def _file(value: Mapping[str, Any], flag: str) -> str:
    path: str = value[flag] or ""
    check_file(flag, path)
    return str(Path(path).absolute())
