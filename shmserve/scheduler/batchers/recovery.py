"""Recovery from workers that died, executed for longer than the limit, or returned a batch that
they were not given: which of their requests run again, and which fail.

A request runs again, once and alone, where it is an idempotent retry: its worker died while it ran,
no response of it has left, and its dispatcher allows it (a sequence loses its state with its
worker). One that has had a response, or was open after `execute`, fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shmserve.ipc.messages.supervision import InstanceServed, KillInstance
from shmserve.ipc.tensors.inference import runs_once
from shmserve.scheduler.instances.pool import Lost, Pool, Slot, SlotState
from shmserve.scheduler.requests.queue import RequestQueue
from shmserve.scheduler.requests.request import AT_WORK, ControlLink, ScheduledRequest, State
from shmserve.scheduler.requests.responses import Responses
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics import (
    Reason,
    Statistics,
)

_DIED_OPEN = "the model's worker died before this request's last response"


@dataclass(eq=False)
class Recovery:
    """Decides what becomes of the requests of workers that are lost, or are to be."""

    _settings: Settings
    _pool: Pool
    _control: ControlLink
    _queue: RequestQueue
    _responses: Responses
    _statistics: Statistics

    def exited(
        self, lost: Lost, reason: str, why_not: Callable[[ScheduledRequest], str], now_ns: int
    ) -> None:
        """A worker died with these: whoever was in the first execution runs once more, alone, if it
        can; those in the others, which it had not begun, go back to where they were in the queue.
        Who has had a response does not run again, and neither does who was open: what it was is
        told already, or may be. `why_not` is the dispatcher's `lost_text`.
        """
        if not (lost.executions or lost.open):
            return
        self._statistics.workers_lost += 1
        why = f" ({reason})" if reason else ""
        for request in lost.open:
            self._lost(request, _DIED_OPEN + why, now_ns)
        for execution in reversed(lost.executions[1:]):
            for request in reversed(execution.requests):
                if request.state is State.EXECUTING:
                    self._queue.put_back(request)
                else:
                    self._lost(request, _DIED_OPEN + why, now_ns)
        for execution in lost.executions[:1]:
            for request in execution.requests:
                self._died_running(request, why, why_not(request), now_ns)

    def _died_running(self, request: ScheduledRequest, why: str, lost: str, now_ns: int) -> None:
        if request.state is not State.EXECUTING:
            self._lost(request, _DIED_OPEN + why, now_ns)
            return
        if lost:
            self._lost(request, lost + why, now_ns)
            return
        request.deaths += 1
        once = runs_once(request.submit.work)
        if request.deaths == 1 and not once:
            self._statistics.retried += 1
            self._queue.retry(request)
        else:
            text = "the model's worker died while running this request" + why
            if once:
                text += "; its outputs go over its inputs, which may be changed"
            self._lost(request, text, now_ns)

    def _lost(self, request: ScheduledRequest, text: str, now_ns: int) -> None:
        """Fail a request lost with its worker, or close it if its fate was decided before."""
        if request.state in AT_WORK:
            self._responses.finish(request, "INTERNAL", text, b"", None, now_ns)
        elif request.state is not State.DONE:
            self._responses.close(request, now_ns)

    def served(self, slot: Slot) -> None:
        """An instance has executed something to its end, the first in its process."""
        slot.served = True
        self._control.post(InstanceServed(slot.pid))

    def overrun(self, slot: Slot, now_ns: int) -> None:
        """A batch passed the limit: its worker is killed, and a request that was alone in it fails.

        Members of a larger batch wait for the end of the worker, which still uses their memory, and
        run again alone.
        """
        assert slot.execution is not None
        self._statistics.overruns += 1
        limit_s = self._settings.execution_limit_ns / 1e9
        limit = f"exceeded the limit of {limit_s:g} seconds"
        requests = slot.execution.requests
        self._doom(slot, f"an execution of {len(requests)} requests {limit}")
        if len(requests) == 1 and requests[0].state in AT_WORK:
            self._fail_early(requests[0], f"execution of the request {limit}", now_ns)

    def distrusted(self, slot: Slot, now_ns: int) -> None:
        """A worker that returns what it was not given is in no state that we know."""
        if slot.state is SlotState.BUSY:
            self._doom(slot, "it returned a batch that it was not given")
            for request in slot.requests.values():
                if request.state in AT_WORK:
                    self._fail_early(request, "internal error", now_ns)

    def _doom(self, slot: Slot, reason: str) -> None:
        slot.meet("doom")
        self._control.post(KillInstance(slot.pid, reason))

    def _fail_early(self, request: ScheduledRequest, text: str, now_ns: int) -> None:
        self._responses.fail(request, "INTERNAL", text, Reason.BACKEND, now_ns, early=True)
