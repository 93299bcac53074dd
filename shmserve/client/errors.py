"""The client's own errors; every other one is the server's, with the server's code.

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
    """The call's `timeout` passed without an answer; the request is cancelled."""


class Disconnected(Unavailable, ConnectionError):
    """There is no server, or it ended before it answered. The next call connects again."""


class Released(InvalidArgument):
    """A result or a region was used after its `release`."""
