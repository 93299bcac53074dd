"""The progress of a request: its steps are run as their inputs come, it responds, and ends."""

from __future__ import annotations

from shmserve.ipc.tensors.signature import id_prefix
from shmserve.scheduler.ensemble.live import LiveRequests
from shmserve.scheduler.ensemble.requests import EnsembleRequest
from shmserve.scheduler.ensemble.responses import Responses
from shmserve.scheduler.ensemble.steps.runner import StepRunner, let_go

_DEADLOCK = (
    "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
)


class Progress:
    """Takes requests as far as they can go now. `decoupled`: they have any number of responses."""

    def __init__(
        self, decoupled: bool, live: LiveRequests, steps: StepRunner, responses: Responses
    ) -> None:
        self._decoupled = decoupled
        self._live = live
        self._steps = steps
        self._responses = responses

    def advance(self, request: EnsembleRequest) -> None:
        """Run the steps of a request that can run, and respond; end it when nothing is left."""
        flow = request.flow
        while flow.firings and not request.over:
            firings, flow.firings = flow.firings, []
            for firing in firings:
                self._steps.run(request, firing)
        for value in flow.unused:
            value.release()
        flow.unused.clear()
        if request.over:
            self._drop(request)
        elif self._decoupled:
            self._responses.relay(request, self._live.now_ns)
        if request.running or request.waiting:
            return
        if not request.over and self._decoupled and flow.responses:
            return  # until its client has read some
        if not request.over and not self._decoupled and not flow.responded:
            text = id_prefix(request.submit.request_id) + _DEADLOCK
            self._live.fail(request, "INVALID_ARG", text)
        self._end(request)

    def _drop(self, request: EnsembleRequest) -> None:
        """What was still to come of a request that is over."""
        flow = request.flow
        for firing in flow.firings:
            let_go(firing)
        flow.firings.clear()
        for response in flow.responses:
            for value in response.values():
                value.release()
        flow.responses.clear()
        self._steps.forget(request)

    def _end(self, request: EnsembleRequest) -> None:
        if not self._live.end(request):
            return
        if request.over:
            self._drop(request)
        self._responses.end(request, self._live.now_ns)
        request.flow.close()
        for value in request.flow.unused:
            value.release()
        request.flow.unused.clear()
