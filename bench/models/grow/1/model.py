"""Makes 1 MiB of a number: the first step of the benchmark's ensemble."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 is INPUT0, 262,144 times."""

    def execute(self, requests):
        """Return one response per request, in order."""
        out = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy()
            y = np.full(262144, x[0], np.float32)
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", y)]))
        return out
