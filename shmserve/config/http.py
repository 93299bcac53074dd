"""The settings of the HTTP listener: frozen, made from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Where HTTP is served (over TCP: `allow`), and what a request's body may be."""

    allow: bool
    address: str
    port: int
    unix_socket: Path | None
    max_input_size: int
    body_timeout_s: float


def from_values(value: Mapping[str, Any]) -> HttpConfig:
    """The settings that the flags' values give."""
    unix_socket = value["http-unix-socket"]
    return HttpConfig(
        allow=value["allow-http"],
        address=value["http-address"],
        port=value["http-port"],
        unix_socket=Path(unix_socket) if unix_socket else None,
        max_input_size=value["http-max-input-size"],
        body_timeout_s=value["http-body-timeout-secs"],
    )
