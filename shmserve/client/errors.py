"""What the client itself raises; everything else is the server's error, with the server's code.

ShmserveError                  shmserve/errors.py draws the tree
 ├─ Unavailable
 │   ├─ TimedOut               the call's `timeout` is over; a TimeoutError too
 │   └─ Disconnected           no server, or it ended before it answered
 └─ InvalidArgument
     └─ Released               memory that was given back is used
"""

from __future__ import annotations

from shmserve.errors import InvalidArgument, Unavailable


class TimedOut(Unavailable, TimeoutError):
    """Nobody answered within the call's `timeout`; the request is cancelled."""


class Disconnected(Unavailable, ConnectionError):
    """There is no server, or it ended before it answered. The next call connects again."""


class Released(InvalidArgument):
    """A result or a region was used after its `release`."""
