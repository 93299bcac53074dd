"""OUTPUTx = INPUTx, for any number of inputs of any datatype."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model with one response per request, in order."""

    def initialize(self, args):
        """Note the inputs that have no numpy type and go through DLPack."""
        config = json.loads(args["model_config"])
        self.by_dlpack = {t["name"] for t in config["input"] if t["data_type"] == "TYPE_BF16"}

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([self.renamed(tensor) for tensor in request.inputs()])
            for request in requests
        ]

    def renamed(self, tensor):
        name = tensor.name().replace("INPUT", "OUTPUT")
        if tensor.name() in self.by_dlpack:
            return pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())
        return pb_utils.Tensor(name, tensor.as_numpy())
