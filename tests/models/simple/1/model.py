"""OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1; only the outputs that were asked for."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model with one response per request, in order."""

    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            outputs = {"OUTPUT0": a + b, "OUTPUT1": a - b}
            requested_names = request.requested_output_names()
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor(name, array)
                        for name, array in outputs.items()
                        if name in requested_names
                    ]
                )
            )
        return responses
