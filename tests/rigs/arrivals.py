"""Waiting for messages at a socket."""

import time
from typing import Any

from shmserve.ipc.transport.dealer import Dealer
from shmserve.ipc.transport.router import Router


def arrived(link: Dealer | Router, patience_s: float = 10.0) -> list[Any]:
    """What `link` receives, once that is something; [] when nothing comes in time.

    A socket also wakes up for handshakes. What is here is taken, however late it is.
    """
    end = time.monotonic() + patience_s
    while link.wait(max(0.0, end - time.monotonic())):
        messages = list(link.receive())
        if messages:
            return messages
    return []


def send_raw(link: Dealer | Router, peer: bytes, data: bytes) -> None:
    """Send bytes as they are: a router to one of its peers, a dealer to its only one."""
    connection = link._peers[peer] if isinstance(link, Router) else link._connection
    assert connection is not None
    connection.unsent += data
    connection.push()


def framed(body: bytes) -> bytes:
    """ZMTP's message of one part."""
    short = len(body) < 256
    size = len(body).to_bytes(1 if short else 8, "big")
    return (b"\0" if short else b"\2") + size + body
