"""A model that keeps state (shmserve serve examples/native_sequence.py:Mean)."""

from typing import NamedTuple

from numpy import concatenate, ndarray

from shmserve.model import FP32


class Outputs(NamedTuple):
    mean: FP32[ndarray, 1]
    seen_out: FP32[ndarray, 2]


class Mean:
    sequence_batching = {
        "oldest": {"max_candidate_sequences": 64},
        "max_sequence_idle_microseconds": 10_000_000,
        "state": [
            {"input_name": "seen", "output_name": "seen_out", "data_type": "TYPE_FP32", "dims": [2]}
        ],
    }

    def predict(self, value: FP32[ndarray, 1], seen: FP32[ndarray, 2]) -> Outputs:
        total, count = seen[:, :1] + value, seen[:, 1:] + 1
        return Outputs(total / count, concatenate([total, count], axis=1))
