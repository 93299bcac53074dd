"""R18: what a client sends with a load request is run as code; who may send it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests import repositories
from tests.grpc_calls import stub
from tests.raw_http import json_input
from tests.servers import running

TOKEN, OTHER = "0123456789abcdef-models", "0123456789abcdef-inference"
CODE = (repositories.MODELS / "constant" / "1" / "model.py").read_bytes()
ASK = {"inputs": [json_input("INPUT0", np.array([1], np.int32))]}
TEXT = "a configuration or files for a model may come from another host only with a token"


def sent(config: str) -> dict[str, str]:
    changed = CODE.replace(b"ANSWER = 1", b"ANSWER = 2")
    return {"config": config, "file:1/model.py": base64.b64encode(changed).decode()}


def over_grpc(config: str) -> pb.RepositoryModelLoadRequest:
    request = pb.RepositoryModelLoadRequest(model_name="constant")
    request.parameters["config"].string_param = config
    request.parameters["file:1/model.py"].bytes_param = CODE.replace(b"= 1", b"= 2")
    return request


@pytest.mark.parametrize("guarded", [False, True], ids=["insecure", "tokens"])
def test_who_may_send_a_model(tmp_path: Path, guarded: bool) -> None:
    """Where other hosts come in without a token: nobody; with tokens: who has the scope."""
    repositories.add(tmp_path / "models", "constant")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN} model-repository,inference\n{OTHER} inference,metadata\n")
    tokens.chmod(0o600)
    flags = ["--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--model-control-mode=explicit"]
    flags += ["--load-model=constant"]
    flags += [f"--auth-token-file={tokens}"] if guarded else ["--insecure"]
    with (
        running(tmp_path / "models", *flags, grpc=True) as server,
        server.http() as http,
        stub(server) as call,
    ):
        config = json.dumps({"backend": "python", "input": [], "output": []})
        mine, wrong = ({"Authorization": f"Bearer {token}"} for token in (TOKEN, OTHER))
        path, load = "/v2/repository/models/constant/load", call.RepositoryModelLoad
        for headers in (wrong, {}):
            metadata = tuple((key.lower(), value) for key, value in headers.items())
            for parameters in (sent(config), {"config": config}):
                refused = http.post(path, {"parameters": parameters}, headers)
                assert refused.status == (403 if headers or not guarded else 401)
                assert guarded or refused.error == TEXT
            with pytest.raises(grpc.RpcError) as failed:
                load(over_grpc(config), metadata=metadata, timeout=20)
            assert failed.value.code() in (
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNAUTHENTICATED,
            )
            assert guarded or failed.value.details() == TEXT
        if not guarded:
            # What the repository has may be loaded by everybody, as --insecure says.
            http.post(path).ok()
            assert http.infer("constant", ASK).ok().tensors()["OUTPUT0"][0] == 1
            return
        assert http.infer("constant", ASK, mine).ok().tensors()["OUTPUT0"][0] == 1
        row = {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [1]}
        config = json.dumps(
            {"backend": "python", "input": [row], "output": [{**row, "name": "OUTPUT0"}]}
        )
        http.post(path, {"parameters": sent(config)}, mine).ok()
        assert http.infer("constant", ASK, mine).ok().tensors()["OUTPUT0"][0] == 2
