"""Triton's example of a decoupled model: sends each element of IN as a response of its own.

DELAY: milliseconds before each response; WAIT: milliseconds until `execute` returns, while a thread
sends.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """As many responses as IN has elements, from a thread for each request."""

    def initialize(self, args):
        """Keep the threads that send, for `finalize`."""
        self.threads = set()

    def execute(self, requests):
        for request in requests:
            wait = pb_utils.get_input_tensor_by_name(request, "WAIT").as_numpy()
            thread = threading.Thread(target=self.repeat, args=(request,), daemon=True)
            self.threads.add(thread)
            thread.start()
            if wait[0]:
                time.sleep(wait[0] / 1000)

    def repeat(self, request):
        """Send the elements of IN until the client disconnects."""
        sender = request.get_response_sender()
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        delays = pb_utils.get_input_tensor_by_name(request, "DELAY").as_numpy()
        for index, (value, delay) in enumerate(zip(values, delays, strict=True)):
            if sender.is_cancelled():
                break
            if delay:
                time.sleep(delay / 1000)
            tensor = pb_utils.Tensor("OUT", np.array([value], np.int32))
            idx = pb_utils.Tensor("IDX", np.array([index], np.uint32))
            sender.send(pb_utils.InferenceResponse([tensor, idx]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self.threads.discard(threading.current_thread())

    def finalize(self):
        """Wait for the running responses."""
        for thread in list(self.threads):
            thread.join(5)
