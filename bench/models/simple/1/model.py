"""The small-tensor model of the benchmark, which adds and subtracts two int32 vectors."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model with OUTPUT0 = INPUT0 + INPUT1 and OUTPUT1 = INPUT0 - INPUT1 for each request."""

    def execute(self, requests):
        """Return one response per request, in order."""
        responses = []
        for r in requests:
            a = pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(r, "INPUT1").as_numpy()
            total = pb_utils.Tensor("OUTPUT0", a + b)
            difference = pb_utils.Tensor("OUTPUT1", a - b)
            responses.append(pb_utils.InferenceResponse([total, difference]))
        return responses
