"""Returns its input: the large-tensor model of the benchmark."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 = INPUT0, request by request."""

    def execute(self, requests):
        """Return one response per request, in order."""
        out = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "INPUT0")
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x.as_numpy())]))
        return out
