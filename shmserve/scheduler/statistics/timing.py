"""The phases of an execution, from what a worker says of it."""

from __future__ import annotations

from typing import NamedTuple

from shmserve.ipc.messages.inference import BatchFinished


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
