"""The transport to the server that the flags of a command line name."""

from __future__ import annotations

import argparse
import importlib.util
import re
from urllib.parse import urlsplit

from shmserve.client import discovery
from shmserve.errors import InvalidArgument, Unavailable, clip, how_to_install, read_text
from shmserve.protocols import Address, AdminTransport, Credentials, Transport
from shmserve.protocols.http import HttpTransport

_DEFAULT_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 8001}
# NAME:VALUE with the characters that both HTTP headers and gRPC metadata allow.
_HEADER = re.compile(r" *([\w.-]+) *:([ -~]*)", re.ASCII)
_URL_FORMS = "http[s]://HOST:PORT, unix:PATH (HTTP at a unix socket) or grpc[s]://HOST:PORT"


def create_transport(args: argparse.Namespace) -> Transport:
    """Return the transport for inference: shared memory unless a URL or headers are given."""
    if args.url or args.header:
        return create_admin_transport(args)
    from shmserve.protocols.native import NativeTransport

    return NativeTransport(discovery.find(args.run_dir))


def create_admin_transport(args: argparse.Namespace) -> AdminTransport:
    """Return the transport for all operations.

    Raises:
        InvalidArgument: A flag is invalid, or several servers run and the flags choose none.
        Unavailable: No server runs on this host, or it listens for neither HTTP nor gRPC.
    """
    client_credentials = read_credentials(args)
    if args.url:
        return connect_to(parse_address(args.url), client_credentials)
    run_dir = discovery.find(args.run_dir)
    for url in discovery.addresses(run_dir):
        return connect_to(parse_address(url), client_credentials)
    raise Unavailable(f"the server of {run_dir} listens for neither HTTP nor gRPC")


def read_credentials(args: argparse.Namespace) -> Credentials:
    """Return the credentials that the flags give; raise InvalidArgument if a flag is invalid."""
    headers = []
    for header in args.header:
        match = _HEADER.fullmatch(header)
        if match is None:
            allowed_text = "allowed in NAME: letters, digits, '-', '_' and '.'"
            text = f"--header: expected NAME:VALUE in ASCII, got '{clip(header)}' ({allowed_text})"
            raise InvalidArgument(text)
        headers.append((match[1], match[2].strip()))
    if args.token_file:
        headers.append(("Authorization", f"Bearer {read_token(args.token_file)}"))
    if bool(args.client_cert) != bool(args.client_key):
        raise InvalidArgument("--client-cert and --client-key must be given together")
    return Credentials(headers, args.root_cert, args.client_cert, args.client_key)


def read_token(path: str) -> str:
    """Return the first token of a file, which may be the token file of the server.

    Raises:
        InvalidArgument: The file cannot be read or has no token, or the token is not ASCII.
    """
    lines = read_text("--token-file", path).splitlines()
    words = [word for line in lines for word in line.partition("#")[0].split()]
    if not words:
        raise InvalidArgument(f"--token-file: '{path}' has no token")
    if not (words[0].isascii() and words[0].isprintable()):
        raise InvalidArgument(f"--token-file: the token in '{path}' is not printable ASCII")
    return words[0]


def parse_address(url: str) -> Address:
    """Return the address in a `--url`; raise InvalidArgument if the URL is malformed."""
    try:
        if url.startswith("unix:"):
            path = url.removeprefix("unix:").replace("///", "/", 1)
            return Address("unix:" + path, "http", unix_socket=path)
        parts = urlsplit(url if "://" in url else f"http://{url}")
        path = parts.path.removeprefix("/")
        has_rest = any(("@" in parts.netloc, path, parts.query, parts.fragment, parts.port == 0))
        if parts.scheme in _DEFAULT_PORTS and parts.hostname and not has_rest:
            parts.hostname.encode("idna")  # as when connecting; a UnicodeError is a ValueError
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            target = f"{host}:{parts.port or _DEFAULT_PORTS[parts.scheme]}"
            uses_tls = parts.scheme.endswith("s")
            return Address(f"{parts.scheme}://{target}", parts.scheme[:4], target, uses_tls)
    except ValueError:
        pass
    raise InvalidArgument(f"--url: expected {_URL_FORMS}, got '{url}'")


def connect_to(address: Address, client_credentials: Credentials) -> AdminTransport:
    """Return the transport to an address.

    Raises:
        InvalidArgument: The package grpcio is not installed, or a TLS file is invalid.
    """
    if address.protocol == "http":
        return HttpTransport(address, client_credentials)
    if importlib.util.find_spec("grpc") is None:
        instruction = how_to_install("grpcio", "grpc")
        raise InvalidArgument(f"--url grpc://... needs the package grpcio: {instruction}")
    from shmserve.protocols.grpc import GrpcTransport

    return GrpcTransport(address, client_credentials)
