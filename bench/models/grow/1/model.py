"""The first step of the benchmark's ensemble, which makes 1 MiB from a number."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model whose OUTPUT0 is INPUT0 repeated 262,144 times."""

    def execute(self, requests):
        """Return one response per request, in order."""
        responses = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy()
            y = np.full(262144, x[0], np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", y)]))
        return responses
