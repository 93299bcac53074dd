"""Waiting for messages at a socket."""

import time
from typing import Any

from shmserve.ipc.transport.router import Router
from shmserve.ipc.transport.zmtp import Dealer


def receive_arrived(link: Dealer | Router, patience_s: float = 10.0) -> list[Any]:
    """Return what `link` receives, as soon as there is any; [] after a timeout."""
    end = time.monotonic() + patience_s
    while link.wait(max(0.0, end - time.monotonic())):
        messages = list(link.receive())
        if messages:
            return messages
    return []


def send_raw(link: Dealer | Router, peer: bytes, data: bytes) -> None:
    """Send bytes without packing them: a router to one of its peers, a dealer to its only peer."""
    connection = link._peers[peer] if isinstance(link, Router) else link._connection
    assert connection is not None
    connection.unsent += data
    connection.push()


def encode_zmtp(body: bytes) -> bytes:
    is_short = len(body) < 256
    size = len(body).to_bytes(1 if is_short else 8, "big")
    return (b"\0" if is_short else b"\2") + size + body
