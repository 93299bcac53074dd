"""A model that returns, as JSON, all it can read of its request and of itself."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model with one response per request, in order."""

    def initialize(self, args):
        assert all(isinstance(value, str) for value in args.values())
        self.args = {key: value for key, value in args.items() if key != "model_config"}
        config = json.loads(args["model_config"])
        self.args["greeting"] = config["parameters"]["greeting"]["string_value"]

    def execute(self, requests):
        responses = []
        for request in requests:
            report = {
                "args": self.args,
                "id": request.request_id(),
                "correlation_id": request.correlation_id(),
                "flags": request.flags(),
                "timeout": request.timeout(),
                "parameters": json.loads(request.parameters()),
                "outputs": sorted(request.requested_output_names()),
                "cancelled": request.is_cancelled(),
            }
            y = pb_utils.Tensor("OUTPUT0", np.array([json.dumps(report).encode()], dtype=object))
            pb_utils.Logger.log_info("described a request")
            responses.append(pb_utils.InferenceResponse([y], parameters={"answered": True}))
        return responses
