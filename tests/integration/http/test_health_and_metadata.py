"""Health, metadata and statistics of a server and its models."""

import pytest
import tritonclient.http as triton

from tests.support.servers import Server
from tests.support.wire.raw_http import Http

EXTENSIONS = [
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)",
    "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
    "binary_tensor_data", "parameters", "statistics", "trace", "logging",
]  # fmt: skip


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


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v2/systemsharedmemory/region/a/b/status", "Not Found (a / in a name is written %2F)"),
        ("/v2/systemsharedmemory/region//status", "Not Found"),
        ("/metrics", "Not Found"),
    ],
)  # fmt: skip
def test_unknown_paths_are_not_found(http: Http, path: str, error: str) -> None:
    reply = http.get(path)
    assert (reply.status, reply.error) == (404, error)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (
            "/v1/files",
            "/v1 has chat/completions, completions, responses, embeddings and models; "
            "GET /docs lists all routes",
        ),
        ("/v1/responses/resp_1", "responses are not stored"),
        ("/v1/chat/completions/chatcmpl-1/messages", "responses are not stored"),
    ],
)
def test_an_unknown_path_of_openai_has_a_hint(http: Http, path: str, hint: str) -> None:
    reply = http.get(path)
    assert (reply.status, reply.json()["error"]["message"]) == (404, f"Not Found ({hint})")


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/models", "/v1/v1/responses", "/v1/embeddings/embeddings"]
)
def test_a_wrong_base_url_of_an_openai_client_is_named(http: Http, path: str) -> None:
    reply = http.post(path, {})
    assert reply.status == 404 and reply.json()["error"]["code"] == "unknown_url"
    assert "(the base URL of an OpenAI client is http://HOST:PORT/v1)" in reply.error
