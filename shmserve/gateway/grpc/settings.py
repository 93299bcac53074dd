"""What the gRPC gateway is told when it starts: frozen, decoded once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shmserve.common.tls import Tls


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """Where it listens and how.

    `options` are (name, value) pairs for gRPC itself.
    """

    addresses: tuple[tuple[str, int], ...]
    tls: Tls | None = None
    options: tuple[tuple[str, int], ...] = ()

    @classmethod
    def decode(cls, addresses: list[list[Any]], raw: dict[str, Any]) -> GrpcSettings:
        """From the entry point's arguments."""
        return cls(
            addresses=tuple((host, port) for host, port in addresses),
            tls=raw["tls"] and Tls(*raw["tls"]),
            options=tuple((name, value) for name, value in raw["options"]),
        )
