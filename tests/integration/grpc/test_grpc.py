"""All operations of Triton's own gRPC clients."""

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

import shmserve
from shmserve.gateway.api.management import EXTENSIONS
from tests.support import repositories
from tests.support.regions import SharedObject
from tests.support.servers import Server, Start
from tests.support.waiting import until
from tests.support.wire.grpc_calls import A, B, is_right, set_region_range, simple_request, stub
from tests.support.wire.triton import infer_inputs

MODELS = ("simple", "identity", "types", "text", "echo_request", "gated")


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, *MODELS)
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    return start(models, "--id=both", *explicit, grpc=True)


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc_url) as triton_client:
        yield triton_client


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("simple") and client.is_model_ready("simple", "1")
    assert not client.is_model_ready("simple", "7") and not client.is_model_ready("nobody")
    server = client.get_server_metadata()
    assert (server.name, server.version) == ("both", shmserve.__version__)
    assert tuple(server.extensions) == EXTENSIONS
    model = client.get_model_metadata("simple")
    assert (model.name, list(model.versions), model.platform) == ("simple", ["1"], "python")
    assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [
        ("INPUT0", "INT32", [-1, 16]),
        ("INPUT1", "INT32", [-1, 16]),
    ]
    assert [t.name for t in model.outputs] == ["OUTPUT0", "OUTPUT1"]


def test_configurations_are_equal(client: triton.InferenceServerClient, server: Server) -> None:
    with server.http() as http:
        reply = http.config("simple")
    config = client.get_model_config("simple", as_json=True)["config"]
    assert config["name"] == reply["name"] == "simple"
    assert config["max_batch_size"] == reply["max_batch_size"]
    assert config["input"] == [
        {"name": t["name"], "data_type": t["data_type"], "dims": list(map(str, t["dims"]))}
        for t in reply["input"]
    ]


DATA: dict[str, np.ndarray] = {
    "BOOL": np.array([True, False]),
    "FP16": np.array([1.5, -2], np.float16),
    "BYTES": np.array([b"", "ü".encode()], np.object_),
    **{f"UINT{8 * n}": np.array([0, 2 ** (8 * n) - 1], f"u{n}") for n in (1, 2, 4, 8)},
    **{f"INT{8 * n}": np.array([-(2 ** (8 * n - 1)), 5], f"i{n}") for n in (1, 2, 4, 8)},
    "FP32": np.array([1.5, np.inf], np.float32),
    "FP64": np.array([1e300, -0.0]),
}


FIELDS = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents",
    "UINT32": "uint_contents", "UINT64": "uint64_contents", "INT8": "int_contents",
    "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def test_typed_contents_of_every_datatype(server: Server) -> None:
    with stub(server) as call:
        request = pb.ModelInferRequest(model_name="types")
        for datatype, field in FIELDS.items():
            tensor = request.inputs.add(name=f"INPUT_{datatype}", datatype=datatype, shape=[2])
            getattr(tensor.contents, field).extend(DATA[datatype].tolist())
        # These two have no typed form, and the two forms do not go together.
        request.inputs.add(name="INPUT_FP16", datatype="FP16", shape=[2])
        request.inputs.add(name="INPUT_BF16", datatype="BF16", shape=[2])
        with pytest.raises(
            grpc.RpcError, match="unable to find data for input tensor 'INPUT_FP16'"
        ):
            call.ModelInfer(request)
        with SharedObject(16) as shared_object, server.http() as http:
            http.register("halves", shared_object.key, 16).ok()
            for tensor in request.inputs[-2:]:
                set_region_range(tensor, "halves", 4)
            response = call.ModelInfer(request)
            http.unregister("halves").ok()
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        array = DATA.get(output.datatype)
        if output.datatype == "BYTES":
            assert raw == b"\0\0\0\0\2\0\0\0" + "ü".encode()
        elif output.datatype in FIELDS:
            assert array is not None and raw == array.tobytes(), output.datatype


def test_the_model_receives_all_parts_of_a_request(client: triton.InferenceServerClient) -> None:
    result = client.infer(
        "echo_request",
        infer_inputs(triton, INPUT0=np.zeros(1, np.int32)),
        request_id="me",
        sequence_id="seven",
        sequence_start=True,
        priority=2,
        timeout=5_000_000,
        parameters={"text": "a", "whole": -3, "truth": True, "real": 0.5},
    )
    seen = json.loads(result.as_numpy("OUTPUT0")[0])
    assert seen["id"] == "me" and seen["correlation_id"] == "seven" and seen["flags"] == 1
    assert seen["timeout"] == 5_000_000
    assert seen["parameters"] == {"text": "a", "whole": -3, "truth": True, "real": 0.5}
    assert result.get_response().parameters["answered"].bool_param


def test_statistics(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics("simple").model_stats[0]
    client.infer("simple", infer_inputs(triton, INPUT0=A, INPUT1=B))
    after = client.get_inference_statistics("simple", "1").model_stats[0]
    assert (after.name, after.version) == ("simple", "1")
    assert after.inference_count == before.inference_count + 1
    assert after.inference_stats.success.count == before.inference_stats.success.count + 1
    assert after.inference_stats.success.ns > before.inference_stats.success.ns
    assert after.batch_stats[0].batch_size == 1
    all_statistics = client.get_inference_statistics()
    assert {model.name for model in all_statistics.model_stats} == set(MODELS)


def test_the_repository(client: triton.InferenceServerClient) -> None:
    index = client.get_model_repository_index()
    assert {(m.name, m.version, m.state) for m in index.models} == {
        (n, "1", "READY") for n in MODELS
    }
    client.unload_model("text", unload_dependents=True)
    assert not client.is_model_ready("text")

    def reasons() -> dict[str, str]:
        return {m.name: m.reason for m in client.get_model_repository_index().models}

    until("it is unloaded", lambda: reasons()["text"] == "unloaded")
    with pytest.raises(InferenceServerException, match="failed to load 'text'"):
        client.load_model("text", config="{")
    client.load_model("text")
    assert client.is_model_ready("text")


def test_files_with_a_load(client: triton.InferenceServerClient) -> None:
    source = (repositories.MODELS / "constant" / "1" / "model.py").read_bytes()
    with pytest.raises(InferenceServerException, match="files are given without a 'config'"):
        client.load_model("simple", files={"file:1/model.py": source})
    assert client.is_model_ready("simple")


def test_regions_and_raw_contents_in_one_request(server: Server) -> None:
    """`raw_input_contents` has entries for the inputs that are in no region only."""
    with SharedObject(4096) as shared_object, stub(server) as call, server.http() as http:
        shared_object.write(A)
        http.register("mixed", shared_object.key, 4096).ok()
        request = simple_request()
        set_region_range(request.inputs[0], "mixed", 64)
        del request.raw_input_contents[0]
        assert is_right(call.ModelInfer(request))
        set_region_range(request.outputs.add(name="OUTPUT0"), "mixed", 64, 64)
        request.outputs.add(name="OUTPUT1")
        reply = call.ModelInfer(request)
        by_name = dict(zip((o.name for o in reply.outputs), reply.raw_output_contents, strict=True))
        assert by_name == {"OUTPUT0": b"", "OUTPUT1": (A - B).tobytes()}
        assert (shared_object.read(np.int32, 16, 64) == (A + B)[0]).all()
        http.unregister("mixed").ok()


def test_the_health_service(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_url) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"") == check(b"\n\x03any") == b"\x08\x01"
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert next(watch) == b"\x08\x01"
        watch.cancel()
