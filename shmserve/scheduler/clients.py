"""Who submits: their requests on the way in, and what becomes of these when they leave.

handle      a message: a request is admitted or refused, cancelled, granted responses
exited      a process is gone, with all that it had asked for
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

from shmserve.errors import InvalidArgument, QueueFull, ShmserveError, Unavailable
from shmserve.ipc.messages import (
    Cancel,
    ClientToScheduler,
    Credit,
    Release,
    ReportStatistics,
    ReportTimes,
    Submit,
)
from shmserve.ipc.transport.peercred_router import first_number
from shmserve.scheduler.batchers.dispatcher import Dispatcher
from shmserve.scheduler.instances.executions import Executions
from shmserve.scheduler.instances.pool import Pool
from shmserve.scheduler.reports import Reports
from shmserve.scheduler.requests.client import Client, ClientTable, stopping
from shmserve.scheduler.requests.queue import RequestQueue, believable
from shmserve.scheduler.requests.request import (
    Event,
    Lookup,
    Outcome,
    Request,
    State,
)
from shmserve.scheduler.requests.responses import Responses
from shmserve.scheduler.statistics.counters import Reason, Statistics
from shmserve.scheduler.statistics.timing import Timing

_DEAD_REMEMBERED = 64


class Clients:
    """All clients of a model version, by address. While it is `draining` no new work begins."""

    def __init__(
        self,
        queue: RequestQueue,
        pool: Pool,
        dispatch: Dispatcher,
        executions: Executions,
        responses: Responses,
        statistics: Statistics,
        reports: Reports,
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._dispatch = dispatch
        self._executions = executions
        self._responses = responses
        self._statistics = statistics
        self._reports = reports
        self._clients: ClientTable[Request] = ClientTable()
        self._dead: deque[int] = deque(maxlen=_DEAD_REMEMBERED)
        self.draining = False

    def values(self) -> list[Client[Request]]:
        """Those that are known."""
        return list(self._clients.values())

    def handle(self, peer: bytes, message: ClientToScheduler, now_ns: int) -> None:
        """Handle a client's message; one of a process that is gone by now is dropped."""
        if self.is_dead(first_number(peer)):
            self._reports.misplaced += 1
            return
        client = self._clients[peer]
        match message:
            case Submit():
                self._submit(client, message, now_ns)
            case Cancel():
                request = client.requests.get(message.id)
                if request is not None:
                    self._cancel(request, now_ns)
            case Credit():
                request = client.requests.get(message.id)
                if request is not None and request.state is State.RESPONDING:
                    self._executions.grant(request, message.responses)
            case Release():
                self._release(client, message)
            case ReportStatistics():
                self._reports.tell(peer, message.id, now_ns)
            case ReportTimes():
                client.timed = True
            case _:
                assert_never(message)

    def _submit(self, client: Client[Request], message: Submit, now_ns: int) -> None:
        if message.id in client.requests:
            # Nothing is owed: a response would be taken for the other request's.
            self._reports.misplaced += 1
            return
        try:
            if self.draining and not self._dispatch.goes_on(message):
                raise Unavailable(stopping(message.request_id))
            if self._pool.failure:
                raise Unavailable(self._pool.failure)
            cache, lookup = self._responses.cache, None
            if cache is not None:
                lookup = cache.look_up(message)
                if lookup is not None and lookup.body:
                    self._hit(client, message, lookup, now_ns)
                    return
            if self._pool.free and len(self._queue) and self._queue.full(message.priority):
                self._dispatch.run(now_ns)
            identity = self._dispatch.identify(client, message)
            request = self._queue.admit(client, message, now_ns)
            request.lookup = lookup
            self._responses.admitted(request)
            self._dispatch.admitted(request, identity)
        except InvalidArgument as error:
            self._responses.refuse(client, message, error, 0)
        except ShmserveError as error:
            wait_s = 0
            if isinstance(error, QueueFull):
                waiting, instances = len(self._queue), self._pool.ready_count
                wait_s = self._executions.service_time.drain_s(waiting, instances)
            self._statistics.failed(believable(message.arrived_ns, now_ns), Reason.REJECTED, now_ns)
            self._responses.refuse(client, message, error, wait_s)

    def _hit(self, client: Client[Request], message: Submit, lookup: Lookup, now_ns: int) -> None:
        """The response to a request is known; only its turn may still have to come."""
        try:
            request = self._queue.admit(client, message, now_ns, cached=True)
        except ShmserveError:
            lookup.cancel()
            raise
        request.lookup = lookup
        self._responses.admitted(request)
        timing = Timing(now_ns, 0, 0, 0)
        self._responses.finish(request, Outcome("", "", lookup.body, timing), now_ns)

    def _release(self, client: Client[Request], message: Release) -> None:
        read = (client.pid, message.pid, message.offsets)
        cache = self._responses.cache
        if cache is None or not cache.lent.release(*read):
            self._executions.release(*read)

    def _cancel(self, request: Request, now_ns: int) -> None:
        match request.state:
            case State.QUEUED | State.HELD:
                self._withdraw(request, now_ns)
                self._responses.fail(
                    request, "CANCELLED", "request cancelled", Reason.CANCELED, now_ns
                )
            case State.EXECUTING | State.RESPONDING:
                request.meet(Event.CANCEL)
                self._executions.cancel(request)
            case _:
                pass  # decided already

    def _withdraw(self, request: Request, now_ns: int) -> None:
        """Nobody waits for what is in the queue, or held after it ran."""
        if request.state is State.QUEUED:
            self._queue.remove(request)
            self._dispatch.removed(request, now_ns)

    def _gone(self, client: Client[Request], now_ns: int) -> None:
        self._clients.pop(client.peer, None)
        for request in list(client.requests.values()):
            match request.state:
                case State.DONE:
                    continue  # it was of a sequence of which another one was cancelled
                case State.QUEUED | State.HELD:
                    self._withdraw(request, now_ns)
                case State.EXECUTING | State.RESPONDING:
                    self._executions.cancel(request)
                case _:
                    pass
            self._responses.abandon(request, now_ns)

    def exited(self, pid: int, now_ns: int) -> None:
        """A process is gone: frames that it sent may still be on their way."""
        self._dead.append(pid)
        for client in self._clients.of_process(pid):
            self._gone(client, now_ns)

    def is_dead(self, pid: int) -> bool:
        """Whether this process was seen to end, lately."""
        return pid in self._dead

    def stop(self, now_ns: int) -> None:
        """Everyone is told that nothing comes any more."""
        for client in self._clients.values():
            for request in list(client.requests.values()):
                if request.state is State.FAILED_EARLY:
                    self._responses.close(request, now_ns)
                else:
                    text = stopping(request.submit.request_id)
                    self._responses.fail(request, "UNAVAILABLE", text, Reason.OTHER, now_ns)
