"""A model whose OUTPUT0 is 1; tests write other numbers to see which code runs."""

import numpy as np
import triton_python_backend_utils as pb_utils

ANSWER = 1


class TritonPythonModel:
    """A model with one response per request, in order."""

    def execute(self, requests):
        tensor = np.array([ANSWER], dtype=np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor)]) for _ in requests]
