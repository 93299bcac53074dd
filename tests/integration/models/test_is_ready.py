"""A model's `is_ready`: readiness over HTTP and gRPC."""

from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc

from tests.support import repositories
from tests.support.servers import running
from tests.support.wire.raw_http import json_request

MODEL = repositories.python_model(
    """
    def initialize(self, args):
        self.file = pathlib.Path(args["model_repository"]) / "state"

    def one(self, request):
        return self.response(OUTPUT0=np.array([pb_utils.is_model_ready("moody")], np.int32))
""",
    before="import pathlib",
)
READY_METHOD = """
    def is_ready(self):
        return {"yes": True, "no": False, "odd": 1}[self.file.read_text()]
"""


def test_a_model_reports_whether_it_is_ready(repository: Path) -> None:
    for name, code in (("moody", MODEL + READY_METHOD), ("asker", MODEL)):
        repositories.write(repository, name, repositories.identity_config(name, "INT32", [1]), code)
    state = repository / "moody" / "state"
    state.write_text("yes")
    with (
        running(repository, grpc=True) as server,
        server.http() as http,
        grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        # With "odd" the method returns no bool, and with "none" it raises: both count as not ready
        # and are logged.
        for reply_text, ready in (("yes", 1), ("no", 0), ("odd", 0), ("none", 0), ("yes", 1)):
            state.write_text(reply_text)
            assert (http.get("/v2/models/moody/ready").status == 200) == bool(ready)
            assert client.is_model_ready("moody") == bool(ready)
            body = json_request(INPUT0=np.zeros(1, np.int32))
            assert http.infer("asker", body).ok().json()["outputs"][0]["data"] == [ready]
        assert "`is_ready` must return a bool, found type '<class 'int'>'" in server.log()
        assert "KeyError: 'none'" in server.log()
        assert http.get("/v2/health/ready").status == 200
