"""A request's times as processes tell them: a span for each model that had part in it.

    Submit.trace ──> scheduler ──Work.trace──> worker ──> what its model asks of others
    Finished.spans <── scheduler <── BatchFinished.spans <──┘

They are made only for a request whose submitter asks for them by a `trace` that is not empty. Who
passes a request on names the span of it: so what is told needs no looking into on its way back.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any, NamedTuple

import msgpack

logger = logging.getLogger(__name__)

# W3C trace context, https://www.w3.org/TR/trace-context/: later versions may have more behind it.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MESSAGE = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]-([0-9a-f]{16})?")
_ID = re.compile(r"[0-9a-f]{1,16}")
_SAMPLED = 1
_MOST_SPANS = 4096  # of one request


def is_trace(trace: str) -> bool:
    """Whether a text is what `TraceContext.of` takes."""
    return _MESSAGE.fullmatch(trace) is not None


class TraceContext(NamedTuple):
    """The place of a request in a trace: ids in hexadecimal digits; no `parent_id`: the first."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = False

    @classmethod
    def new(cls, sampled: bool = False) -> TraceContext:
        """The first span of a new trace."""
        return cls(os.urandom(16).hex(), os.urandom(8).hex(), "", sampled)

    @classmethod
    def of_header(cls, traceparent: str) -> TraceContext | None:
        """The span that a `traceparent` names; None for what is none, as W3C has it."""
        found = _TRACEPARENT.fullmatch(traceparent.strip())
        if found is None or not int(found[1], 16) or not int(found[2], 16):
            return None
        return cls(found[1], found[2], "", bool(int(found[3], 16) & _SAMPLED))

    @classmethod
    def of(cls, trace: str) -> TraceContext:
        """What a `trace` of a message says."""
        return cls(trace[3:35], trace[36:52], trace[56:72], trace[53:55] == "01")

    def child(self, sampled: bool | None = None) -> TraceContext:
        """A new span within this one."""
        sampled = self.sampled if sampled is None else sampled
        return TraceContext(self.trace_id, os.urandom(8).hex(), self.span_id, sampled)

    @property
    def traceparent(self) -> str:
        """As W3C has it, for who is called."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02d}"

    @property
    def message(self) -> str:
        """As messages have it: the `traceparent`, and the parent's id behind it."""
        return f"{self.traceparent}-{self.parent_id}"


class Span(NamedTuple):
    """A request at a model's scheduler. Times are monotonic ns: when it was made and enqueued, when
    its execution began, had its inputs, had its outputs and ended (0: it was not executed), and
    when its response left. `batch_size` is the batch's, `closed` why it took no further request;
    of an ensemble that is empty, of a cached response "cached"."""

    span_id: str
    parent_id: str
    model: str
    version: str
    request_id: str
    arrived_ns: int
    enqueued_ns: int
    compute_start_ns: int
    input_end_ns: int
    output_start_ns: int
    compute_end_ns: int
    responded_ns: int
    batch_size: int
    closed: str

    def packed(self) -> bytes:
        """As `Finished.spans` has it; several are one behind the other."""
        data: bytes = msgpack.packb(self)
        return data


_KINDS = [*(str,) * 5, *(int,) * 8, str]


def unpack_spans(spans: bytes) -> list[Span]:
    """The spans of a message; what is none ends them: the model of a worker may have written it."""
    found: list[Span] = []
    unpacker = msgpack.Unpacker(max_buffer_size=len(spans) or 1)
    unpacker.feed(spans)
    try:
        for item in unpacker:
            if list(map(type, item)) != _KINDS or len(found) == _MOST_SPANS:
                break
            span = Span(*item)
            ids = filter(None, (span.span_id, span.parent_id))
            if not (all(map(_ID.fullmatch, ids)) and span.span_id and span.version.isdecimal()):
                break
            found.append(span)
    except Exception as error:  # msgpack and what is no list raise many kinds; all mean the same
        logger.error("the spans of a response are malformed: %s", error)
    return found


def within(spans: list[Span], span_id: str) -> list[Span]:
    """Those of the spans that are this one, and within it: others were executed along with it."""
    known, left = {span_id}, spans
    while True:
        more = [span for span in left if span.span_id in known or span.parent_id in known]
        if not more:
            return [span for span in spans if span.span_id in known]
        known |= {span.span_id for span in more}
        left = [span for span in left if span.span_id not in known]


def explain(
    spans: list[Span], span_id: str, arrived_ns: int, submitted_ns: int, now_ns: int
) -> dict[str, Any]:
    """Where the time of a request went whose scheduler was to tell the span `span_id`, in us: from
    its arrival to its submission (`receive_us`), in the queue and at its model, and from there
    until now (`respond_us`). With the same of each step of an ensemble, and of each model that its
    own has called.
    """
    told = {"total_us": _us(arrived_ns, now_ns), "receive_us": _us(arrived_ns, submitted_ns)}
    within: dict[str, list[Span]] = {}
    for span in spans:
        within.setdefault(span.parent_id, []).append(span)
    own = next((span for span in spans if span.span_id == span_id), None)
    if own is not None:
        told |= _explained(own, within, submitted_ns)
        told["respond_us"] = _us(own.compute_end_ns or own.responded_ns, now_ns)
    return told


def _explained(span: Span, within: dict[str, list[Span]], since_ns: int) -> dict[str, Any]:
    told: dict[str, Any] = {"batch_size": span.batch_size}
    if span.compute_start_ns:
        told["batch_closed"] = span.closed
        told["queue_us"] = _us(since_ns, span.compute_start_ns)
        told["compute_input_us"] = _us(span.compute_start_ns, span.input_end_ns)
        told["compute_infer_us"] = _us(span.input_end_ns, span.output_start_ns)
        told["compute_output_us"] = _us(span.output_start_ns, span.compute_end_ns)
    inner = [
        {
            "model": each.model,
            "version": each.version,
            "total_us": _us(each.arrived_ns, each.responded_ns),
            **_explained(each, within, each.arrived_ns),
        }
        for each in within.pop(span.span_id, ())
    ]
    if inner:
        told["calls" if span.compute_start_ns else "steps"] = inner
    return told


def _us(start_ns: int, end_ns: int) -> int:
    return max(end_ns - start_ns, 0) // 1000
