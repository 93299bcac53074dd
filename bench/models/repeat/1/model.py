"""The decoupled model of the benchmark, which sends the requested number of 16-byte responses."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model that sends COUNT responses: OUT of response n repeats n four times.

    Each request has a thread.
    """

    def execute(self, requests):
        """Begin to respond to each request."""
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            sender = request.get_response_sender()
            threading.Thread(target=repeat, args=(sender, count), daemon=True).start()


def repeat(sender, count):
    """Send `count` responses, the last one with the final flag."""
    for n in range(count):
        tensor = pb_utils.Tensor("OUT", np.full(4, n, np.int32))
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if n + 1 == count else 0
        sender.send(pb_utils.InferenceResponse([tensor]), final)
