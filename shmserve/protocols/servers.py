"""The transport to the server that the flags of a command line name."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from urllib.parse import urlsplit

from shmserve.client import discovery
from shmserve.errors import InvalidArgument, Unavailable, how_to_install, refused
from shmserve.protocols import Address, AdminTransport, Credentials, Transport
from shmserve.protocols.http import HttpTransport

_USUAL_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 8001}
_FORMS = "http[s]://HOST:PORT, unix:PATH (HTTP at a unix socket) or grpc[s]://HOST:PORT"


def transport(args: argparse.Namespace) -> Transport:
    """Return the transport for inference: shared memory unless a URL or headers are given."""
    if args.url or args.header:
        return admin_transport(args)
    from shmserve.protocols.native import NativeTransport

    return NativeTransport(discovery.find(args.run_dir))


def admin_transport(args: argparse.Namespace) -> AdminTransport:
    """Return the transport for all operations; raise InvalidArgument, or Disconnected."""
    client_credentials = credentials(args)
    return (
        transport_at(address(args.url), client_credentials)
        if args.url
        else _discovered(args, client_credentials)
    )


def _discovered(args: argparse.Namespace, client_credentials: Credentials) -> AdminTransport:
    run_dir = discovery.find(args.run_dir)
    for url in discovery.addresses(run_dir):
        return transport_at(address(url), client_credentials)
    raise Unavailable(f"the server of {run_dir} listens for neither HTTP nor gRPC")


def credentials(args: argparse.Namespace) -> Credentials:
    """Return the credentials that the flags give. Raises InvalidArgument."""
    headers = []
    for text in args.header:
        name, colon, value = text.partition(":")
        if not (name.strip() and colon):
            raise InvalidArgument(f"--header: expected NAME:VALUE, got '{text}'")
        headers.append((name.strip(), value.strip()))
    if args.token_file:
        headers.append(("Authorization", f"Bearer {token(args.token_file)}"))
    if bool(args.client_cert) != bool(args.client_key):
        raise InvalidArgument("--client-cert and --client-key must be given together")
    return Credentials(headers, args.root_cert, args.client_cert, args.client_key)


def token(path: str) -> str:
    """Return the first token of a file, which may be the token file of the server."""
    with refused(f"--token-file: cannot read '{path}'", "not text"):
        lines = Path(path).read_text().splitlines()
    for words in (line.partition("#")[0].split() for line in lines):
        if words:
            return words[0]
    raise InvalidArgument(f"--token-file: '{path}' has no token")


def address(url: str) -> Address:
    """Return the address of a `--url`. Raises InvalidArgument."""
    try:
        if url.startswith("unix:"):
            path = url.removeprefix("unix:").replace("///", "/", 1)
            return Address("unix:" + path, "http", unix_socket=path)
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme in _USUAL_PORTS and parts.hostname and parts.path in ("", "/"):
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            target = f"{host}:{parts.port or _USUAL_PORTS[parts.scheme]}"
            tls = parts.scheme.endswith("s")
            return Address(f"{parts.scheme}://{target}", parts.scheme[:4], target, tls)
    except ValueError:
        pass
    raise InvalidArgument(f"--url: expected {_FORMS}, got '{url}'")


def transport_at(address: Address, client_credentials: Credentials) -> AdminTransport:
    """Return the transport to an address. Raises InvalidArgument."""
    if address.protocol == "http":
        return HttpTransport(address, client_credentials)
    if importlib.util.find_spec("grpc") is None:
        needed = how_to_install("grpcio", "grpc")
        raise InvalidArgument(f"--url grpc://... needs the package grpcio: {needed}")
    from shmserve.protocols.grpc import GrpcTransport

    return GrpcTransport(address, client_credentials)
