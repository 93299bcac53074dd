"""TLS files of gRPC: validated before gRPC takes them, so that what is wrong is said in one
line that names the flag."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass

from shmserve.errors import InvalidArgument

# gRPC in a process of its own: the supervisor stays without its library and its threads.
_ASK_GRPC = """
import sys
from pathlib import Path
import grpc
certificate, key, *root = (Path(path).read_bytes() for path in sys.argv[1:])
pairs, asked = [(key, certificate)], bool(root)
credentials = grpc.ssl_server_credentials(pairs, root[0] if root else None, asked)
try:
    grpc.server(None).add_secure_port("unix-abstract:shmserve-tls-check-%d", credentials)
except RuntimeError:
    sys.exit(9)
"""
_REFUSED = 9


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM; with `root_cert` clients must show a certificate that it has signed."""

    server_cert: str
    server_key: str
    root_cert: str | None = None

    def check(self) -> None:
        """Raises InvalidArgument naming the flag when a file cannot be read, or is not what it must
        be."""
        import ssl  # only who uses TLS pays for it

        check_file("grpc-server-cert", self.server_cert)
        check_file("grpc-server-key", self.server_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_ciphers("ALL:@SECLEVEL=0")  # how strong they must be is gRPC's to say
        try:
            context.load_cert_chain(self.server_cert, self.server_key, password=str)
        except OSError:
            raise InvalidArgument(
                f"--grpc-server-cert, --grpc-server-key: '{self.server_cert}' and "
                f"'{self.server_key}' are not a certificate and its private key in PEM"
            ) from None
        if self.root_cert is None:
            return
        check_file("grpc-root-cert", self.root_cert)
        try:
            context.load_verify_locations(self.root_cert)
        except OSError:
            raise InvalidArgument(
                f"--grpc-root-cert: '{self.root_cert}' holds no certificate in PEM"
            ) from None

    def ask_grpc(self) -> None:
        """Raises InvalidArgument naming the flags when gRPC, if it is installed, refuses files that
        OpenSSL would take. It takes a fraction of a second."""
        if importlib.util.find_spec("grpc") is None:
            return
        program = _ASK_GRPC.replace("%d", str(os.getpid()))
        asked = subprocess.run(
            [sys.executable, "-P", "-c", program, *self._files.values()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if asked.returncode == _REFUSED:
            raise self.refused()

    def refused(self) -> InvalidArgument:
        """The refusal of files that gRPC does not take."""
        named, files = ", ".join(self._files), ", ".join(self._files.values())
        return InvalidArgument(
            f"{named}: gRPC refuses {files}: it knows fewer kinds of keys (RSA, P-256, P-384) and "
            "of files than OpenSSL"
        )

    @property
    def _files(self) -> dict[str, str]:
        """By flag, those that there are."""
        given = {"--grpc-server-cert": self.server_cert, "--grpc-server-key": self.server_key}
        return given if self.root_cert is None else {**given, "--grpc-root-cert": self.root_cert}


def check_file(flag: str, path: str) -> None:
    """Raises InvalidArgument naming the flag when it is no file, or cannot be read."""
    if not path:
        raise InvalidArgument(f"--{flag}: a file is needed for TLS")
    if not os.access(path, os.R_OK) or not os.path.isfile(path):
        raise InvalidArgument(f"--{flag}: '{path}' is not a file that can be read")
