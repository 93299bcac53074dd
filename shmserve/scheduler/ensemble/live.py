"""The requests of an ensemble that are not done: their failures and deadlines, and which of them
have changed.
"""

from __future__ import annotations

from operator import attrgetter

from shmserve.errors import Unavailable
from shmserve.ipc.messages.inference import Failed
from shmserve.scheduler.ensemble.requests import EnsembleRequest
from shmserve.scheduler.ensemble.responses import EnsembleResponses
from shmserve.scheduler.requests.queue import EXPIRED, Timers
from shmserve.scheduler.statistics import (
    Reason,
    Statistics,
)


class LiveRequests:
    """Requests from their admission to their end. `now_ns` is the time of what is being handled;
    those that are `touched` have changed."""

    def __init__(self, name: str, statistics: Statistics, responses: EnsembleResponses) -> None:
        self._name = name
        self._statistics = statistics
        self._responses = responses
        self.touched: dict[EnsembleRequest, None] = {}
        self.timers: Timers[EnsembleRequest] = Timers(attrgetter("done"))
        self.now_ns = 0
        self.count = 0

    def add(self, request: EnsembleRequest) -> None:
        """Add a request that is admitted."""
        request.client.requests[request.id] = request
        self.count += 1
        self.touched[request] = None
        if request.deadline_ns:
            self.timers.add(request.deadline_ns, request)

    def end(self, request: EnsembleRequest) -> bool:
        """Remove a request that is done; False: it was before."""
        if request.done:
            return False
        request.done = True
        del request.client.requests[request.id]
        self.count -= 1
        return True

    def touch(self, request: EnsembleRequest) -> None:
        """Something of a request has changed."""
        self.touched[request] = None

    def changed(self) -> list[EnsembleRequest]:
        """The requests that have changed since the last time."""
        touched, self.touched = self.touched, {}
        return [request for request in touched if not request.done or request.gone]

    def fail(self, request: EnsembleRequest, code: str, text: str, retry_after_s: int = 0) -> None:
        """No further step of a request runs; the first failure counts."""
        self.touched[request] = None
        if request.over:
            return
        request.failed(Failed(request.id, code, self.told(text), retry_after_s, False))
        reason = Reason.CANCELED if code == "CANCELLED" else Reason.OTHER
        self._statistics.failed(request.arrived_ns, reason, self.now_ns)

    def tell_early(self, request: EnsembleRequest) -> None:
        """Its time is over: its failure is told, though steps are still running."""
        if not request.gone and not request.told and request.running:
            request.told = True
            self._responses.failed(request, early=True)

    def told(self, text: str) -> str:
        """An error as clients are told it."""
        return f"in ensemble '{self._name}', {text}"

    def expired(self) -> list[EnsembleRequest]:
        """Fail those whose deadlines are over."""
        found = self.timers.over(self.now_ns)
        for request in found:
            self.fail(request, Unavailable.code, EXPIRED)
            self.tell_early(request)
        return found
