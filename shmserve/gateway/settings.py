"""What a gateway is told when it starts: frozen, decoded once from the entry point's arguments."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the server that matter to a gateway.

    `max_input_size` bounds JSON, raw input and decompressed bodies, in bytes
    (--http-max-input-size). `request_timeout_us` is the server's end-to-end limit for requests, 0
    for none. `arena_byte_size` bounds the memory for request bodies. `body_timeout_s` is how long a
    client may stall while it sends a body or reads a response. `cuda_devices` is how many CUDA
    devices the server has; without one there is no CUDA shared memory.
    """

    id: str = "triton"
    max_input_size: int = 64 * 1024 * 1024
    request_timeout_us: int = 0
    arena_byte_size: int = 1024 * 1024 * 1024
    body_timeout_s: float = 30.0
    header_timeout_s: float = 30.0
    max_connections: int = 8192
    verbose: int = 0
    cuda_devices: int = 0

    @classmethod
    def decode(cls, raw: dict[str, Any]) -> Settings:
        """From the supervisor's dict; keys that are for others are left alone."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in raw.items() if key in known})
