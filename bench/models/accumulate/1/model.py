"""A stateful model that returns the running sum of a sequence."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model whose OUTPUT is the sum of INPUT over the requests of a sequence."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            value, start, end, ready, correlation_id = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                for name in ("INPUT", "START", "END", "READY", "CORRID")
            )
            if ready.flat[0]:
                key = int(correlation_id.flat[0])
                previous_sum = 0 if start.flat[0] else self.sums[key]
                value = self.sums[key] = value + previous_sum
                if end.flat[0]:
                    del self.sums[key]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)]))
        return responses
