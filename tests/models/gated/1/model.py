"""OUTPUT0 = INPUT0 after the test that owns the gate has let this execution through."""

import json
import os
import socket

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model with one response per request, in order."""

    def execute(self, requests):
        """Report the requests to the gate, wait, and return the inputs as of after the wait."""
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0") for request in requests]
        arrays = [tensor.as_numpy() for tensor in inputs]
        batch = [int(array.flat[0]) if array.size else None for array in arrays]
        self.wait({"batch": batch, "rows": [len(array) for array in arrays], "pid": os.getpid()})
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]

    @staticmethod
    def wait(message):
        """Wait at the gate; an open gate has no listener."""
        with socket.socket(socket.AF_UNIX) as gate:
            try:
                gate.connect(os.environ["GATE"])
            except OSError:
                return
            gate.sendall(json.dumps(message).encode() + b"\n")
            gate.recv(1)
