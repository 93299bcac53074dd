"""Health, metadata and statistics of a server and its models."""

import http.client

import pytest
import tritonclient.http as triton

from tests.support.servers import Server
from tests.support.wire.raw_http import Http

EXTENSIONS = [
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)",
    "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
    "binary_tensor_data", "parameters", "statistics", "trace", "logging",
]  # fmt: skip


def test_health(http: Http) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/simple/ready"):
        reply = http.get(path)
        assert (reply.status, reply.body) == (200, b"")


def test_tritonclient_sees_health_and_metadata(server: Server) -> None:
    with triton.InferenceServerClient(server.url) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("simple") and client.is_model_ready("simple", "2")
        assert not client.is_model_ready("simple", "1")
        assert not client.is_model_ready("nothing")
        metadata = client.get_server_metadata()
        assert metadata["name"] == "shared" and metadata["extensions"] == EXTENSIONS
        assert client.get_model_config("simple")["max_batch_size"] == 8
        assert client.get_inference_statistics("simple")["model_stats"]


def test_model_metadata(http: Http) -> None:
    assert http.get("/v2/models/simple").ok().json() == {
        "name": "simple",
        "versions": ["2", "3"],
        "platform": "python",
        "inputs": [
            {"name": "INPUT0", "datatype": "INT32", "shape": [-1, 16]},
            {"name": "INPUT1", "datatype": "INT32", "shape": [-1, 16]},
        ],
        "outputs": [
            {"name": "OUTPUT0", "datatype": "INT32", "shape": [-1, 16]},
            {"name": "OUTPUT1", "datatype": "INT32", "shape": [-1, 16]},
        ],
    }
    assert http.get("/v2/models/simple/versions/2").ok().json()["versions"] == ["2"]
    identity = http.get("/v2/models/identity").ok().json()
    assert identity["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": [-1]}]


def test_model_config_is_normalised(http: Http) -> None:
    config = http.get("/v2/models/simple/config").ok().json()
    assert config["name"] == "simple" and config["backend"] == "python"
    assert config["version_policy"] == {"latest": {"num_versions": 2}}
    assert config["dynamic_batching"]["preferred_batch_size"] == [8]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    (group,) = config["instance_group"]
    assert (group["name"], group["kind"], group["count"]) == ("simple_0", "KIND_CPU", 1)
    assert config["input"][0]["dims"] == [16]
    assert config["input"][0]["data_type"] == "TYPE_INT32"


def test_a_model_describes_itself(http: Http) -> None:
    config = http.get("/v2/models/completed/config").ok().json()
    assert config["max_batch_size"] == 4 and "dynamic_batching" in config
    assert [tensor["name"] for tensor in config["input"]] == ["INPUT0"]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v2/models/nothing", "Request for unknown model: 'nothing' is not found"),
        ("/v2/models/nothing/config", "Request for unknown model: 'nothing' is not found"),
        ("/v2/models/simple/versions/9",
         "Request for unknown model: 'simple' version 9 is not found"),
        ("/v2/models/simple/versions/9/config",
         "Request for unknown model: 'simple' version 9 is not found"),
        ("/v2/models/simple/versions/x", "Not Found (a version is an integer)"),
        ("/v2/systemsharedmemory/region/a/b/status", "Not Found (a / in a name is written %2F)"),
        ("/v2/systemsharedmemory/region//status", "Not Found"),
        ("/v2/nothing", "Not Found"),
        ("/metrics", "Not Found"),
    ],
)  # fmt: skip
def test_unknown_paths_are_not_found(http: Http, path: str, error: str) -> None:
    reply = http.get(path)
    assert (reply.status, reply.error) == (404, error)


def test_an_unknown_path_of_openai_names_the_list_of_routes(http: Http) -> None:
    reply = http.get("/v1/nothing")
    assert reply.status == 404
    assert "Not Found (GET /docs lists the routes)" in reply.error


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/models", "/v1/v1/responses", "/v1/embeddings/embeddings"]
)
def test_a_wrong_base_url_of_an_openai_client_is_named(http: Http, path: str) -> None:
    reply = http.post(path, {})
    assert reply.status == 404 and reply.json()["error"]["code"] == "unknown_url"
    assert "(the base URL of an OpenAI client is http://HOST:PORT/v1)" in reply.error


def test_unready_model_is_400(http: Http) -> None:
    assert http.get("/v2/models/nothing/ready").status in (400, 404)
    assert http.get("/v2/models/simple/versions/1/ready").status in (400, 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/health/live"),
        ("POST", "/v2"),
        ("GET", "/v2/models/simple/infer"),
        ("DELETE", "/v2/models/simple"),
        ("GET", "/v2/systemsharedmemory/region/x/register"),
        ("PUT", "/v2/models/simple/infer"),
    ],
)
def test_wrong_method(http: Http, method: str, path: str) -> None:
    reply = http.call(method, path)
    assert (reply.status, reply.error) == (405, "Method Not Allowed")


def test_head_and_percent_encoding(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=10)
    connection.request("GET", "/v2/models/s%69mple/ready")
    assert connection.getresponse().status == 200
    connection.close()
