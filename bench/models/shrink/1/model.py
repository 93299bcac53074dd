"""The last step of the benchmark's ensemble, which makes a number from 1 MiB."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model whose OUTPUT0 is the last element of INPUT0."""

    def execute(self, requests):
        """Return one response per request, in order."""
        responses = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x[-1:])]))
        return responses
