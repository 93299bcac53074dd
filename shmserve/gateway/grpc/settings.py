"""What the gRPC gateway is started with."""

from __future__ import annotations

from dataclasses import dataclass

from shmserve.common.tls import Tls


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """Where it listens and how.

    `options` are (name, value) pairs for gRPC itself.
    """

    addresses: tuple[tuple[str, int], ...]
    tls: Tls | None = None
    options: tuple[tuple[str, int], ...] = ()
