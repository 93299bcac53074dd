"""The phases of an execution, from what a worker says of it; and times as they are reported: counts
with nanoseconds, buckets in seconds."""

from __future__ import annotations

from typing import NamedTuple

from shmserve.ipc.messages.inference import BatchFinished

NS_PER_S = 1_000_000_000

# Upper bounds of a histogram of times, in seconds.
SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


def duration(count: int, ns: int) -> dict[str, int]:
    """A count and the time of all that it counts together, as Triton reports them."""
    return {"count": count, "ns": ns}


class Timing(NamedTuple):
    """The phases of an execution: when it began (monotonic ns) and how long each took (ns)."""

    compute_start_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int

    @classmethod
    def of(cls, message: BatchFinished, sent_ns: int, now_ns: int) -> Timing:
        """From what a worker says of a batch sent at `sent_ns`, as far as it can be true."""
        start, input_end = message.compute_start_ns, message.input_end_ns
        output_start, end = message.output_start_ns, message.compute_end_ns
        if sent_ns <= start <= input_end <= output_start <= end <= now_ns:
            return cls(start, input_end - start, output_start - input_end, end - output_start)
        start = min(max(message.compute_start_ns, sent_ns), now_ns)
        input_end = min(max(message.input_end_ns, start), now_ns)
        output_start = min(max(message.output_start_ns, input_end), now_ns)
        end = min(max(message.compute_end_ns, output_start), now_ns)
        return cls(start, input_end - start, output_start - input_end, end - output_start)

    @property
    def total_ns(self) -> int:
        """All phases together."""
        return self.input_ns + self.infer_ns + self.output_ns
