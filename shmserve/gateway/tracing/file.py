"""Triton's trace file: a JSON array, in which each request, and each that was made for it, has an
entry that says what it is, and one with its timestamps (monotonic ns).

Several gateways write to one file, each under a lock: it is whole after each.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from pathlib import Path
from typing import Any

from shmserve.gateway.tracing.request_trace import RequestTrace
from shmserve.ipc.trace import Span

_ID_DIGITS = 13  # of a span's 16: what every reader of JSON knows as an integer
_OF_PROTOCOL = {"HTTP": ("HTTP_RECV", "HTTP_SEND"), "GRPC": ("GRPC_WAITREAD", "GRPC_SEND")}
_EXECUTED = (
    ("COMPUTE_START", "compute_start_ns"),
    ("COMPUTE_INPUT_END", "input_end_ns"),
    ("COMPUTE_OUTPUT_START", "output_start_ns"),
    ("COMPUTE_END", "compute_end_ns"),
)


def entries_of(trace: RequestTrace, protocol: str) -> list[dict[str, Any]]:
    """The entries of a request that has ended; its timestamps begin with its `protocol`, if it came
    by one."""
    answered_ns = trace.answered_ns or trace.ended_ns
    own: list[tuple[str, int]] = []
    ends: list[tuple[str, int]] = []
    if protocol:
        receive, send = _OF_PROTOCOL[protocol]
        own = [(f"{receive}_START", trace.arrived_ns), (f"{receive}_END", trace.submitted_ns)]
        ends = [(f"{send}_START", answered_ns), (f"{send}_END", trace.ended_ns)]
    root = trace.scheduler.span_id
    made: list[dict[str, Any]] = []
    for span in trace.spans:
        stamps = _stamps(span)
        if span.span_id == root:
            stamps = [*own, ("REQUEST_START", trace.submitted_ns), *stamps[1:], *ends]
        parent = "" if span.span_id == root else span.parent_id
        made += _entry(span.span_id, span.model, span.version, span.request_id, parent, stamps)
    if not made:  # it has failed
        stamps = [*own, ("REQUEST_START", trace.submitted_ns), ("REQUEST_END", answered_ns), *ends]
        made = _entry(root, trace.model, trace.version, trace.request_id, "", stamps)
    return made


def _stamps(span: Span) -> list[tuple[str, int]]:
    executed = [(name, getattr(span, field)) for name, field in _EXECUTED]
    return [
        ("REQUEST_START", span.arrived_ns),
        ("QUEUE_START", span.enqueued_ns),
        *(executed if span.compute_start_ns else ()),
        ("INFER_RESPONSE_COMPLETE", span.responded_ns),
        ("REQUEST_END", span.responded_ns),
    ]


def _entry(
    span_id: str,
    model: str,
    version: str,
    request_id: str,
    parent_id: str,
    stamps: list[tuple[str, int]],
) -> list[dict[str, Any]]:
    number = _number(span_id)
    about: dict[str, Any] = {"id": number, "model_name": model, "model_version": int(version)}
    if request_id:
        about["request_id"] = request_id
    if parent_id:
        about["parent_id"] = _number(parent_id)
    return [about, {"id": number, "timestamps": [{"name": n, "ns": ns} for n, ns in stamps]}]


def _number(span_id: str) -> int:
    return int(span_id[:_ID_DIGITS], 16)


def append(path: str, entries: list[dict[str, Any]]) -> None:
    """Append entries to the array in a file, which is made where there is none. Raises OSError, or
    ValueError where there is something else in it."""
    text = json.dumps(entries)[1:-1].encode()
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not file.seek(0, os.SEEK_END):
            file.write(b"[" + text + b"]")
            return
        file.seek(-1, os.SEEK_END)
        if file.read() != b"]":
            raise ValueError("it is no array of traces")
        file.seek(-1, os.SEEK_END)
        file.write(b"," + text + b"]")


def next_file(path: str) -> str:
    """The next of the files PATH.0, PATH.1, ..., which it makes."""
    for number in itertools.count():
        name = f"{path}.{number}"
        try:
            Path(name).touch(exist_ok=False)
        except FileExistsError:
            continue
        return name
    raise AssertionError  # there is always one
