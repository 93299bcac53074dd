"""The phases of an execution, from what a worker says of it; and times as they are reported: counts
with nanoseconds, buckets in seconds."""

from __future__ import annotations

from typing import NamedTuple

from shmserve.ipc.messages.inference import BatchFinished

NS_PER_S = 1_000_000_000
CACHED = "cached"  # what "closed" a batch that was none

# Upper bounds of a histogram of times, in seconds.
SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


def duration(count: int, ns: int) -> dict[str, int]:
    """A count and the time of all that it counts together, as Triton reports them."""
    return {"count": count, "ns": ns}


class Timing(NamedTuple):
    """The phases of an execution: when it began (monotonic ns) and how long each took (ns); of how
    many rows it was, why it took no more, and the spans of what its model has asked others."""

    compute_start_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int
    rows: int = 0
    closed: str = ""
    spans: bytes = b""

    @classmethod
    def of(
        cls, message: BatchFinished, sent_ns: int, now_ns: int, rows: int = 0, closed: str = ""
    ) -> Timing:
        """From what a worker says of a batch sent at `sent_ns`, as far as it can be true."""
        start, input_end = message.compute_start_ns, message.input_end_ns
        output_start, end = message.output_start_ns, message.compute_end_ns
        if not sent_ns <= start <= input_end <= output_start <= end <= now_ns:
            start = min(max(start, sent_ns), now_ns)
            input_end = min(max(input_end, start), now_ns)
            output_start = min(max(output_start, input_end), now_ns)
            end = min(max(end, output_start), now_ns)
        phases = (input_end - start, output_start - input_end, end - output_start)
        return cls(start, *phases, rows, closed, message.spans)
