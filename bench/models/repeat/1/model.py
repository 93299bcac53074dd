"""Sends as many responses of 16 bytes as it is asked for: the decoupled model of the benchmark."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUT of response n is four times n, for n below COUNT; a thread for each request."""

    def execute(self, requests):
        """Begin to respond to each request."""
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            sender = request.get_response_sender()
            threading.Thread(target=repeat, args=(sender, count), daemon=True).start()


def repeat(sender, count):
    """Send `count` responses, the last with the end."""
    for n in range(count):
        out = pb_utils.Tensor("OUT", np.full(4, n, np.int32))
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if n + 1 == count else 0
        sender.send(pb_utils.InferenceResponse([out]), final)
