"""Responses of a decoupled model by their index within their request, as Triton counts them.

The time of a response runs from the one before it (of the first, from the request's dispatch) until
its outputs were written: computing first, then writing. The end of a request that comes without a
response, and a cancellation, have an index of their own.

    success         compute_infer, compute_output, success
    error           compute_infer, fail; compute_output if it has outputs
    the end alone   compute_infer, empty_response
    cancelled       cancel; also where its model says so, by an error with that code
"""

from __future__ import annotations

from typing import Any, Protocol

from shmserve.errors import Cancelled
from shmserve.ipc.messages.inference import ExecutionResponded, Reply
from shmserve.scheduler.statistics.table import Table

# A request may have any number of responses, and what is reported has an end: those from this index
# on are counted together.
LAST_INDEX = 1000


class Counted(Protocol):
    """The counted attributes of a model's or an ensemble's request; times are monotonic ns. It
    counts for `units` in a batch, has had so many `responses`, and since `responded_ns` the model
    has been at the next one; `untimed`: it succeeded before its execution returned."""

    arrived_ns: int
    enqueued_ns: int
    responded_ns: int
    responses: int
    units: int
    untimed: bool


_NAMES = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
_INFER, _OUTPUT, _SUCCESS, _FAIL, _EMPTY, _CANCEL = range(0, 12, 2)


class ResponseStats(Table):
    """Counts and times (ns) of responses, a row an index."""

    def __init__(self) -> None:
        self.responses: list[list[int]] = []  # count and ns of each name

    def responded(
        self, request: Counted, response: ExecutionResponded | Reply, now_ns: int
    ) -> None:
        """A request had its response number `request.responses`, or its end without one. Times
        count as far as they can be true."""
        if response.code == Cancelled.code:
            self.cancelled(request, now_ns)
            request.responded_ns = now_ns
            return
        row = self._row(request.responses)
        began_ns = request.responded_ns
        given_ns = written_ns = now_ns
        if type(response) is ExecutionResponded:
            given_ns, written_ns = response.given_ns, response.written_ns
            if not began_ns <= given_ns <= written_ns <= now_ns:
                written_ns = min(max(written_ns, began_ns), now_ns)
                given_ns = min(max(given_ns, began_ns), written_ns)
        request.responded_ns = written_ns
        if response.body:
            row[_OUTPUT] += 1
            row[_OUTPUT + 1] += written_ns - given_ns
        else:
            given_ns = written_ns
        row[_INFER] += 1
        row[_INFER + 1] += given_ns - began_ns
        kind = _FAIL if response.code else _SUCCESS if response.body else _EMPTY
        row[kind] += 1
        row[kind + 1] += written_ns - began_ns

    def cancelled(self, request: Counted, now_ns: int) -> None:
        """A request ended that nobody waited for any more."""
        row = self._row(request.responses)
        row[_CANCEL] += 1
        row[_CANCEL + 1] += max(now_ns - request.responded_ns, 0)

    def _row(self, index: int) -> list[int]:
        rows = self.responses
        if index >= len(rows):
            index = min(index, LAST_INDEX)
            while len(rows) <= index:
                rows.append([0] * 12)
        return rows[index]

    def report(self) -> dict[str, Any]:
        """By index, as `response_stats` of GET /v2/models/NAME/stats."""
        return {
            str(index): {
                name: {"count": row[2 * at], "ns": row[2 * at + 1]}
                for at, name in enumerate(_NAMES)
            }
            for index, row in enumerate(self.responses)
        }
