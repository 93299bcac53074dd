"""File descriptor limits: a process's own (RLIMIT_NOFILE), the shares of clients, and the standard
streams."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

_PLENTY = 1 << 20
_OWN = 128  # of a gateway: for everything but connections
FEWEST = 2 * _OWN  # that a server starts with
_SHARE = 0.75
_SCRAPES = 256


def fill_standard_streams() -> None:
    """Put /dev/null where descriptors 0, 1 or 2 are closed.

    The next sockets would get their numbers, and what a model prints would be written to them.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:  # the lowest that is free
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def raise_limit() -> None:
    """Let this process and what it starts have as many as they may.

    Each region, connection and model takes some; the soft limit of 1024 is for programs that use
    select on all of them.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """The number of descriptors that this process may have."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def attainable() -> int:
    """The number that it may have once the limit is raised."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _number(limit: int) -> int:
    return _PLENTY if limit == resource.RLIM_INFINITY else limit


def for_local_clients() -> int:
    """For how many programs at its listener the supervisor can spare descriptors: each takes
    two."""
    return limit() // 8


def for_regions(most: int) -> int:
    """The number of descriptors, of `most`, that it can spare for registered memory."""
    return most // 2


def for_scrapes() -> int:
    """The descriptors a gateway can spare for connections through a listener of metrics, of which a
    few are open at once."""
    return min(_SCRAPES, (limit() - _OWN) // 4)


def for_connections(listeners: int, scraped: int = 0) -> int:
    """The descriptors it can spare for those through each of its `listeners`, beside `scraped` of
    metrics."""
    return max(1, (limit() - _OWN - scraped * for_scrapes()) // max(1, listeners))


def share_of(most: int) -> int:
    """The share of `most` connections that one user, or one other host, may have; at least 1."""
    return max(1, int(most * _SHARE))
