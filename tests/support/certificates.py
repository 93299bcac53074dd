"""Keys and certificates for tests of TLS, by openssl.

They pass strict verification (RFC 5280), which Python 3.13 and later apply by default.
"""

import subprocess
from pathlib import Path

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
# The sections of openssl's own configuration would add extensions to these.
_CONFIG = """
[req]
distinguished_name = subject
[subject]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[peer]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = DNS:localhost, IP:127.0.0.1
"""


def make(folder: Path) -> Path:
    """Write NAME.key and NAME.pem of ca, server, client and stranger to a folder, and return it.

    The certificates of the server and the client are signed by ca, the stranger's is not.
    """
    (folder / "openssl.cnf").write_text(_CONFIG)
    for name in ("ca", "stranger"):
        _make(folder, name, "-extensions", "authority")
    for name in ("server", "client"):
        _make(folder, name, "-extensions", "peer", "-CA", "ca.pem", "-CAkey", "ca.key")
    return folder


def _make(folder: Path, name: str, *options: str) -> None:
    files = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    openssl(folder, "req", "-x509", "-config", "openssl.cnf", *_CURVE, *files, *options)


def openssl(folder: Path, *arguments: str) -> None:
    """Run openssl in a folder."""
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
