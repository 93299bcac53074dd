"""The times of a request: a span for each model that processed it.

    Submit.trace ──> scheduler ──Work.trace──> worker ──> the model's calls of other models
    Finished.spans <── scheduler <── BatchFinished.spans <──┘

The tensors of the requests follow the spans if `TraceContext.with_tensors` is set. Spans are
created only if the submitter sets a non-empty `trace`. A process that forwards a request assigns
the id of that request's span, so that it need not parse the spans in the response.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any, NamedTuple

import msgpack

logger = logging.getLogger(__name__)

# W3C trace context, https://www.w3.org/TR/trace-context/: later versions may append fields.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_ENCODED_TRACE = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[01][01]-([0-9a-f]{16})?")
_SPAN_ID = re.compile(r"[0-9a-f]{1,16}")
_SAMPLED_FLAG = 1
_MAX_SPANS = 4096  # maximum number of spans per request


def is_encoded_trace(trace: str) -> bool:
    """Check whether `TraceContext.of` accepts a text."""
    return _ENCODED_TRACE.fullmatch(trace) is not None


class TraceContext(NamedTuple):
    """The position of a request in a trace, with hexadecimal ids.

    A root span has no `parent_id`. With `with_tensors`, workers append the tensors to the spans.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    is_sampled: bool = False
    with_tensors: bool = False  # whether the trace includes the tensors

    @classmethod
    def new(cls, is_sampled: bool = False, with_tensors: bool = False) -> TraceContext:
        """Return the root span of a new trace."""
        return cls(os.urandom(16).hex(), os.urandom(8).hex(), "", is_sampled, with_tensors)

    @classmethod
    def of_header(cls, traceparent: str) -> TraceContext | None:
        """Return the span in a `traceparent` header, or None if W3C's rules do not allow it."""
        match = _TRACEPARENT.fullmatch(traceparent.strip())
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            return None
        return cls(match[1], match[2], "", bool(int(match[3], 16) & _SAMPLED_FLAG))

    @classmethod
    def of(cls, text: str) -> TraceContext:
        """Return the span in `text`, the `trace` field of a message."""
        return cls(text[3:35], text[36:52], text[56:72], text[54:55] == "1", text[53:54] == "1")

    def child(self, is_sampled: bool | None = None) -> TraceContext:
        """Return a new child span."""
        flags = (self.is_sampled if is_sampled is None else is_sampled, self.with_tensors)
        return TraceContext(self.trace_id, os.urandom(8).hex(), self.span_id, *flags)

    @property
    def traceparent(self) -> str:
        """Return the W3C header for a callee."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02d}"

    @property
    def encoded(self) -> str:
        """Return the `trace` field of messages.

        The field is the `traceparent` with the flag `with_tensors` added, followed by `parent_id`.
        """
        flags = f"{self.with_tensors:d}{self.is_sampled:d}"
        return f"00-{self.trace_id}-{self.span_id}-{flags}-{self.parent_id}"


class Span(NamedTuple):
    """The times of a request at a model's scheduler, in monotonic ns.

    Attributes:
        arrived_ns: The creation of the request.
        enqueued_ns: The time when it was queued.
        compute_start_ns: The start of its execution; 0: it was not executed.
        input_end_ns: The time when its inputs were ready.
        output_start_ns: The time when the model had returned.
        compute_end_ns: The end of its execution.
        responded_ns: The time when its response was sent.
        batch_size: The size of its batch.
        close_reason: Why the batch was closed; "" for an ensemble, "cached" for a cached response.
    """

    span_id: str
    parent_id: str
    model: str
    version: str
    request_id: str
    arrived_ns: int  # creation of the request
    enqueued_ns: int
    compute_start_ns: int
    input_end_ns: int
    output_start_ns: int
    compute_end_ns: int
    responded_ns: int
    batch_size: int  # of the request's batch
    close_reason: str  # why the batch was closed

    def packed(self) -> bytes:
        """Return the encoding for `Finished.spans`, in which spans are concatenated."""
        return bytes(msgpack.packb(self))


class TracedTensor(NamedTuple):
    """An input or an output of a request at a model, with the shape and the elements as texts."""

    span_id: str
    is_output: bool
    name: str
    datatype: str
    shape: str  # as text
    data: str  # the elements as text

    def packed(self) -> bytes:
        """Return the encoding for `BatchFinished.spans`."""
        return bytes(msgpack.packb(self))


_SPAN_FIELD_TYPES = [*(str,) * 5, *(int,) * 8, str]
_TENSOR_FIELD_TYPES = [str, bool, *(str,) * 4]


def unpack_spans(spans: bytes, tensors: list[TracedTensor] | None = None) -> list[Span]:
    """Return the spans of a message up to the first span that is invalid.

    The spans are not trusted, because code of a model may have written them.

    Args:
        spans: The message's spans and tensors.
        tensors: A list to which the tensors are appended, if given.
    """
    unpacked_spans: list[Span] = []
    unpacker = msgpack.Unpacker(max_buffer_size=len(spans) or 1)
    unpacker.feed(spans)
    try:
        for item in unpacker:
            field_types = list(map(type, item))
            if field_types == _TENSOR_FIELD_TYPES:
                if tensors is not None:
                    tensors.append(TracedTensor(*item))
                continue
            if field_types != _SPAN_FIELD_TYPES or len(unpacked_spans) == _MAX_SPANS:
                break
            span = Span(*item)
            span_ids = filter(None, (span.span_id, span.parent_id))
            are_ids = all(map(_SPAN_ID.fullmatch, span_ids))
            if not (are_ids and span.span_id and span.version.isdecimal()):
                break
            unpacked_spans.append(span)
    except Exception as error:  # msgpack and values that are not lists raise many types
        logger.error("the trace spans of a response are malformed, so some are missing: %s", error)
    return unpacked_spans


def span_subtree(spans: list[Span], span_id: str) -> list[Span]:
    """Return the span with this id and its descendants, without the other spans of the batch."""
    included_ids, remaining_spans = {span_id}, spans
    while True:
        ids = included_ids
        children = [s for s in remaining_spans if s.span_id in ids or s.parent_id in ids]
        if not children:
            return [span for span in spans if span.span_id in included_ids]
        included_ids |= {span.span_id for span in children}
        remaining_spans = [span for span in remaining_spans if span.span_id not in included_ids]


def phase_durations(
    spans: list[Span], span_id: str, arrived_ns: int, submitted_ns: int, now_ns: int
) -> dict[str, Any]:
    """Return the durations of a request's phases in us.

    The phases are: from arrival to submission (`receive_us`), in the queue and at its model, and
    from the end of the execution until now (`respond_us`). The result also contains the durations
    of each step of an ensemble, and of each call that the model has made.

    Args:
        spans: The spans of the response.
        span_id: The span of the request's scheduler.
        arrived_ns: The arrival time.
        submitted_ns: The submission time.
        now_ns: The current time.
    """
    durations = {
        "total_us": _microseconds(arrived_ns, now_ns),
        "receive_us": _microseconds(arrived_ns, submitted_ns),
    }
    spans_by_parent: dict[str, list[Span]] = {}
    for span in spans:
        spans_by_parent.setdefault(span.parent_id, []).append(span)
    request_span = next((span for span in spans if span.span_id == span_id), None)
    if request_span is not None:
        durations |= _inner_durations(request_span, spans_by_parent, submitted_ns)
        finished_ns = request_span.compute_end_ns or request_span.responded_ns
        durations["respond_us"] = _microseconds(finished_ns, now_ns)
    return durations


def _inner_durations(span: Span, children: dict[str, list[Span]], start_ns: int) -> dict[str, Any]:
    durations: dict[str, Any] = {"batch_size": span.batch_size}
    if span.compute_start_ns:
        durations["batch_closed"] = span.close_reason
        durations["queue_us"] = _microseconds(start_ns, span.compute_start_ns)
        durations["compute_input_us"] = _microseconds(span.compute_start_ns, span.input_end_ns)
        durations["compute_infer_us"] = _microseconds(span.input_end_ns, span.output_start_ns)
        durations["compute_output_us"] = _microseconds(span.output_start_ns, span.compute_end_ns)
    child_durations = [
        {
            "model": child.model,
            "version": child.version,
            "total_us": _microseconds(child.arrived_ns, child.responded_ns),
            **_inner_durations(child, children, child.arrived_ns),
        }
        for child in children.pop(span.span_id, ())
    ]
    if child_durations:
        durations["calls" if span.compute_start_ns else "steps"] = child_durations
    return durations


def _microseconds(start_ns: int, end_ns: int) -> int:
    return max(end_ns - start_ns, 0) // 1000
