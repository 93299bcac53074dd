"""The start message of a gateway, with its settings and the TLS files of gRPC."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shmserve.common.auth_tokens import Restrictions
from shmserve.errors import InvalidArgument
from shmserve.logs import LogSettings

if TYPE_CHECKING:
    import ssl

_ALPN_PROTOCOL = "h2"


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files; with `root_cert`, clients must present a certificate signed by it."""

    server_cert: str
    server_key: str
    root_cert: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return the SSL context for server connections.

        Raises:
            InvalidArgument: A file cannot be read or is invalid; the message names the flag.
        """
        import ssl  # imported late, because only TLS needs it

        check_file("grpc-server-cert", self.server_cert)
        check_file("grpc-server-key", self.server_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([_ALPN_PROTOCOL])
        flags_and_files = (
            f"--grpc-server-cert, --grpc-server-key: '{self.server_cert}' and '{self.server_key}'"
        )
        try:
            context.load_cert_chain(self.server_cert, self.server_key, password=str)
        except OSError:
            text = f"{flags_and_files} are not a certificate and its private key in PEM"
            raise InvalidArgument(text) from None
        if not _can_handshake(context):
            raise InvalidArgument(
                f"{flags_and_files} have a type of key that clients reject "
                "(allowed: RSA, P-256, P-384)"
            )
        if self.root_cert is not None:
            check_file("grpc-root-cert", self.root_cert)
            try:
                context.load_verify_locations(self.root_cert)
            except OSError:
                text = f"--grpc-root-cert: '{self.root_cert}' contains no PEM certificate"
                raise InvalidArgument(text) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _can_handshake(context: ssl.SSLContext) -> bool:
    """Check whether the context completes a handshake with a client that has default settings."""
    import ssl

    client_context = ssl.create_default_context()
    client_context.check_hostname = False
    client_context.verify_mode = ssl.CERT_NONE
    client_context.set_alpn_protocols([_ALPN_PROTOCOL])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server)
    completed_ends: set[ssl.SSLObject] = set()
    for _ in range(4):
        for peer in (client, server):
            try:
                peer.do_handshake()
                completed_ends.add(peer)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
    return len(completed_ends) == 2


def check_file(flag: str, path: str) -> None:
    """Raise InvalidArgument, naming the flag, if `path` is no file or cannot be read."""
    if not path:
        raise InvalidArgument(f"--{flag}: not set, but TLS requires this file")
    if not os.access(path, os.R_OK) or not os.path.isfile(path):
        raise InvalidArgument(f"--{flag}: '{path}' is not a file that can be read")


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """The settings of a gRPC gateway's connections.

    Attributes:
        tls: The certificates of TLS connections.
        compression_level: The level of zlib; 0 disables the compression of responses.
        keepalive_time_ms: The time of silence after which a client receives a PING.
        keepalive_timeout_ms: The time within which a client must acknowledge a PING.
        keepalive_permit_without_calls: Whether clients without calls receive PINGs.
        max_pings_without_data: The limit of the server's PINGs between two frames of data; 0 is
            unlimited.
        min_ping_interval_ms: The shortest interval at which a client may send PINGs.
        max_ping_strikes: The limit of PINGs that arrive after a shorter interval; 0 is unlimited.
        max_connection_age_ms: The age at which connections are drained; 0 is unlimited.
        max_connection_age_grace_ms: The time for calls after that age; 0 is unlimited.
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
    """The server's settings that a gateway uses.

    common/auth_tokens.py describes `tokens`, `http_restricted` and `grpc_restricted`, and
    listener.py `allow_client_shm`.

    Attributes:
        id: The name of the server in its metadata.
        max_input_size: The limit of JSON, raw input and decompressed bodies, in bytes
            (--http-max-input-size).
        request_timeout_us: The server's end-to-end limit for requests; 0 is unlimited.
        request_timeout_is_deadline: Whether a request's `timeout` is its deadline.
        arena_byte_size: The size of the memory for request bodies.
        body_timeout_s: The time for which a client may send a body, or read a response, at less
            than 64 KiB/s.
        header_timeout_s: The time limit of a request's head, or of a gRPC connection's set-up.
        max_connections: The limit of open connections of a listener.
        http_address: The address of the HTTP listeners, which is also allowed as a Host header.
        metrics_port: The TCP port of metrics and of the dashboard; 0 if there is none.
        grpc_port: The TCP port of gRPC; 0 if there is none.
        shm_overlap: The policy for overlapping outputs (region_table.py).
        http_header_forward_pattern: The pattern of headers that become parameters of requests.
        grpc_header_forward_pattern: The same pattern for gRPC metadata.
        cuda_devices: The number of CUDA devices; with 0, CUDA shared memory is not available.
        allow_cpu_metrics: Whether metrics contain the use of the host's CPUs and memory.
        counter_latencies: Whether metrics contain counters of latencies.
        histogram_latencies: Whether metrics contain histograms of latencies.
        summary_latencies: Whether metrics contain summaries of latencies.
        slow_request_ms: The duration from which requests are logged; 0 logs none.
        refuse_unknown_fields: Whether unknown fields of OpenAI's API are refused.
        cors_origins: The origins whose pages may use HTTP listeners (routing.py).
        allowed_hosts: Further names of the server in Host headers (listener.py).
        served_names: Names of models in OpenAI's API, as (model or "", name).
    """

    id: str = "triton"
    max_input_size: int = 64 * 1024 * 1024  # in bytes
    request_timeout_us: int = 0
    request_timeout_is_deadline: bool = False  # for the parameter `timeout`
    arena_byte_size: int = 1024 * 1024 * 1024
    body_timeout_s: float = 30.0  # for a body that arrives at less than 64 KiB/s
    header_timeout_s: float = 30.0
    max_connections: int = 16384
    http_address: str = "127.0.0.1"
    metrics_port: int = 0
    grpc_port: int = 0
    tokens: dict[str, tuple[str, ...]] = field(default_factory=dict)  # hash -> scopes
    http_restricted: Restrictions = field(default_factory=dict)
    grpc_restricted: Restrictions = field(default_factory=dict)
    allow_client_shm: bool | None = None
    shm_overlap: str = "warn"  # the policy for overlapping outputs
    cuda_devices: int = 0  # the number of devices
    http_header_forward_pattern: str = ""
    grpc_header_forward_pattern: str = ""
    allow_cpu_metrics: bool = True
    counter_latencies: bool = True  # whether /metrics has counters of latencies
    histogram_latencies: bool = False
    summary_latencies: bool = False
    slow_request_ms: int = 0
    refuse_unknown_fields: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    served_names: tuple[tuple[str, str], ...] = ()  # (model or "", name in OpenAI's API)


@dataclass(frozen=True, slots=True)
class GatewayStart:
    """The start message of a gateway.

    An HTTP gateway receives descriptors of listening sockets for HTTP and then for metrics. A gRPC
    gateway receives descriptors for gRPC only.

    Attributes:
        gateway_name: The name of the gateway in the supervisor.
        http_sockets: The number of sockets for HTTP.
        grpc: The settings of a gRPC gateway.
        waits_for_accept: Whether connections are accepted only after `Accept`.
    """

    gateway_name: str
    run_dir: Path
    settings: GatewaySettings
    http_sockets: int = 0  # the number of sockets
    grpc: GrpcSettings | None = None
    waits_for_accept: bool = False  # whether connections wait for the message `Accept`
    log: LogSettings = field(default_factory=LogSettings)
