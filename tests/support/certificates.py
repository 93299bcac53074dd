"""Keys and certificates for tests of TLS, by openssl."""

import subprocess
from pathlib import Path

_NEW = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_NAMES = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")


def make(folder: Path) -> Path:
    """Put ca, server, client and stranger into a folder: NAME.key and NAME.pem each; ca has not
    signed the stranger's. Returns the folder."""
    for who in ("ca", "stranger"):
        _make(folder, who)
    for who in ("server", "client"):
        _make(folder, who, "-CA", "ca.pem", "-CAkey", "ca.key", *_NAMES)
    return folder


def _make(folder: Path, who: str, *more: str) -> None:
    files = ("-subj", f"/CN={who}", "-keyout", f"{who}.key", "-out", f"{who}.pem")
    openssl(folder, *_NEW, *files, *more)


def openssl(folder: Path, *arguments: str) -> None:
    """Run it in a folder."""
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
