"""File descriptors: the process's limit (RLIMIT_NOFILE), shares of clients, standard streams."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

_UNLIMITED = 1 << 20  # the count that represents RLIM_INFINITY
_RESERVED = 128  # a gateway's descriptors that are not connections
MIN_FDS = 2 * _RESERVED  # the minimum for a server to start
_MAX_SHARE_OF_PEER = 0.75
_MAX_SCRAPE_CONNECTIONS = 256  # maximum connections of a metrics listener


def fill_standard_streams() -> None:
    """Open /dev/null for those of the descriptors 0, 1 and 2 that are closed.

    Otherwise new sockets would get these numbers, and output of a model would be written to them.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:  # open() returns the lowest free descriptor
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def raise_limit() -> None:
    """Raise the soft limit of this process and its children to the hard limit.

    Regions, connections and models need descriptors. The usual soft limit of 1024 exists for
    programs that use select().
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def limit() -> int:
    """Return the current limit of descriptors."""
    return _limit_as_count(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def hard_limit() -> int:
    """Return the hard limit of descriptors, to which `raise_limit` raises the soft limit."""
    return _limit_as_count(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _limit_as_count(limit: int) -> int:
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit


def local_clients_share() -> int:
    """Return how many local clients the supervisor can serve, at two descriptors per client."""
    return limit() // 8


def regions_share(max_fds: int) -> int:
    """Return how many of `max_fds` descriptors registered memory may use."""
    return max_fds // 2


def scrapes_share() -> int:
    """Return how many descriptors a gateway may use for the connections of one metrics listener."""
    return min(_MAX_SCRAPE_CONNECTIONS, (limit() - _RESERVED) // 4)


def connections_share(listeners: int, metrics_listeners: int = 0) -> int:
    """Return how many descriptors a gateway may use for connections to each of its `listeners`.

    The share of its metrics listeners is subtracted first.
    """
    return max(1, (limit() - _RESERVED - metrics_listeners * scrapes_share()) // max(1, listeners))


def max_connections_per_peer(max_connections: int) -> int:
    """Return how many of `max_connections` one user or one remote host may have; at least 1."""
    return max(1, int(max_connections * _MAX_SHARE_OF_PEER))
