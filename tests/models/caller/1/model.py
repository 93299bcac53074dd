"""OUTPUT0 = ((INPUT0 + INPUT1) - INPUT1), each step computed by another model."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model with one response per request, in order."""

    def execute(self, requests):
        """Call the model that the request names, twice."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Return the response to one request; errors of the called model are passed on."""
        target = pb_utils.get_input_tensor_by_name(request, "TARGET").as_numpy().flat[0].decode()
        first_input = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        second_input = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        reply = self.call(target, first_input, second_input, "OUTPUT0")
        if reply.has_error():
            return pb_utils.InferenceResponse([], error=reply.error())
        total = pb_utils.get_output_tensor_by_name(reply, "OUTPUT0").as_numpy()
        reply = self.call(target, total, second_input, "OUTPUT1")
        result = pb_utils.get_output_tensor_by_name(reply, "OUTPUT1").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", result)])

    @staticmethod
    def call(target, first_input, second_input, output):
        return pb_utils.InferenceRequest(
            model_name=target,
            requested_output_names=[output],
            inputs=[
                pb_utils.Tensor("INPUT0", first_input),
                pb_utils.Tensor("INPUT1", second_input),
            ],
        ).exec()
