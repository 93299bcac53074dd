"""The text of every script's Python model."""

import textwrap

from tests.differential.script import Model
from tests.support.repositories import python_model

_TEXT = python_model(
    """
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.name = args["model_name"]
        self.warmed = []  # executions of requests without an id: nobody's
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.outputs = [each["name"] for each in config["output"]]
        batching = config.get("sequence_batching", {})
        self.inputs = [each["name"] for each in config["input"]]
        self.inputs += [each["name"] for each in batching.get("control_input", [])]
        batch_inputs = config.get("batch_input", [])
        self.inputs += [name for each in batch_inputs for name in each["target_name"]]

    def execute(self, requests):
        described = [self.describe(request) for request in requests]
        if any(each["id"] for each in described):
            batch = {"model": self.name, "batch": described, "rows": [], "pid": os.getpid()}
            self.wait(batch | ({"warmed": self.warmed} if self.warmed else {}))
        else:
            self.warmed.append(described)
        responses = [self.one(request) for request in requests]
        return None if self.decoupled else responses

    def describe(self, request):
        found = {"id": request.request_id(), "tensors": {}}
        for name in self.inputs:
            tensor = self.input(request, name)
            if tensor is not None:
                values = [each.decode() if isinstance(each, bytes) else each
                          for each in tensor.reshape(-1).tolist()]
                found["tensors"][name] = [str(tensor.dtype), list(tensor.shape), values]
        found["correlation_id"] = request.correlation_id()
        found["flags"] = request.flags()
        return found

    @staticmethod
    def wait(message):
        with socket.socket(socket.AF_UNIX) as gate:
            try:
                gate.connect(os.environ["GATE"])
            except OSError:
                return
            gate.sendall(json.dumps(message).encode() + b"\\n")
            gate.recv(1)

    def one(self, request):
{one}
""",
    before="import socket",
)
_COPY_INPUT = 'return self.response(OUTPUT0=self.input(request, "INPUT0"))'


def text(model: Model) -> str:
    body = textwrap.dedent(model.method_body or _COPY_INPUT).strip("\n")
    return _TEXT.replace("{one}", textwrap.indent(body, " " * 8))
