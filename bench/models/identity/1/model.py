"""The large-tensor model of the benchmark, which returns its input."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model with OUTPUT0 = INPUT0 for each request."""

    def execute(self, requests):
        """Return one response per request, in order."""
        responses = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "INPUT0")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x.as_numpy())]))
        return responses
