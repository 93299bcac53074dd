"""Keys and certificates for TLS tests, created with openssl."""

import subprocess
from pathlib import Path

# The extensions that RFC 5280 requires. Python 3.13 and later verify them.
_CONFIGURATION = """
[req]
distinguished_name = names
[names]
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[signed]
basicConstraints = CA:FALSE
keyUsage = critical, digitalSignature
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = DNS:localhost, IP:127.0.0.1
"""
_NEW_KEY_ARGUMENTS = (
    "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
)  # fmt: skip


def make(folder: Path) -> Path:
    """Create keys and certificates of ca, server, client and stranger (not signed by ca)."""
    (folder / "openssl.cnf").write_text(_CONFIGURATION)
    for name in ("ca", "stranger"):
        _make(folder, name, "-extensions", "ca")
    for name in ("server", "client"):
        _make(folder, name, "-extensions", "signed", "-CA", "ca.pem", "-CAkey", "ca.key")
    return folder


def _make(folder: Path, name: str, *arguments: str) -> None:
    files = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    openssl(folder, *_NEW_KEY_ARGUMENTS, "-config", "openssl.cnf", *files, *arguments)


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
