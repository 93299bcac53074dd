"""The client's own errors. All other errors are the server's, with its error code.

ShmserveError                  shmserve/errors.py draws the tree
 ├─ Unavailable
 │   ├─ TimedOut               the call's `timeout` has expired; also a TimeoutError
 │   └─ Disconnected           no server, or it exited before it responded
 └─ InvalidArgument
     └─ Released               released memory is used
"""

from __future__ import annotations

from shmserve.errors import InvalidArgument, Unavailable


class TimedOut(Unavailable, TimeoutError):
    """The call's `timeout` expired without a response; the request is cancelled."""


class Disconnected(Unavailable, ConnectionError):
    """There is no server, or it exited before it responded. The next call reconnects."""


class Released(InvalidArgument):
    """A result or a region was used after its `release`."""
