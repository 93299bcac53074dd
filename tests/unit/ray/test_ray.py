"""Ray Serve applications: their deployments, and the requests that a replica forwards."""

from typing import Any

import pytest

import shmserve.ray
from shmserve.errors import InvalidArgument
from shmserve.ray import server
from shmserve.ray.server import end_to_end_headers, find_rejection_reason, path_of


@pytest.mark.parametrize(
    ("raw_path", "prefix", "query", "expected_path"),
    [
        (b"/v2/models/a%2Fb/infer", "", b"", "/v2/models/a%2Fb/infer"),
        (b"/vision/v2/models/x", "/vision", b"", "/v2/models/x"),
        (b"/v2/models/x/stats", "", b"a=%20b&c", "/v2/models/x/stats?a=%20b&c"),
    ],
)
def test_paths_stay_as_they_were_spelled(
    raw_path: bytes, prefix: str, query: bytes, expected_path: str
) -> None:
    scope = {"raw_path": raw_path, "root_path": prefix, "query_string": query}
    assert path_of(scope) == expected_path


@pytest.mark.parametrize(
    "path",
    [
        "/v2/systemsharedmemory/status",
        "/v2/systemsharedmemory/region/x/register",
        "/v2/cudasharedmemory/region/x/unregister",
        "/v2/repository/models/x/load",
        "/v2/repository/models/x/unload?y",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/x/trace/setting",
    ],
)
def test_routes_of_single_nodes_are_rejected(path: str) -> None:
    assert "send this request to the server of a node" in find_rejection_reason(path)


@pytest.mark.parametrize(
    "path",
    [
        *("/v2", "/v2/health/ready", "/v2/models/x/versions/1/infer", "/v2/repository/index"),
        *("/v2/models/load/infer", "/v2/models/x/generate_stream?load", "/v1/chat/completions"),
        "/v2/models/logging/ready",
    ],
)
def test_all_other_flags_are_passed_on(path: str) -> None:
    assert find_rejection_reason(path) == ""


def test_headers_of_a_connection_are_not_passed_on() -> None:
    headers = [
        *(("Host", "a"), ("Connection", "close"), ("Transfer-Encoding", "chunked")),
        *(("Authorization", "Bearer x"), ("traceparent", "y"), ("Content-Encoding", "gzip")),
    ]
    assert end_to_end_headers(headers) == headers[3:]


def test_flags_equal_those_of_the_command_line() -> None:
    flags = {"model-repository": "/models", "load-model": ["a", "b"], "allow-grpc": False}
    assert server.arguments({**flags, "gateways": 2}) == [
        *("--model-repository=/models", "--load-model=a", "--load-model=b"),
        *("--allow-grpc=false", "--gateways=2"),
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"model-repositry": "/models"}, "unknown flag --model-repositry, did you mean"),
        ({"gateways": "many"}, "--gateways: "),
        (
            {"server": "/run/http.sock", "gateways": 2},
            "server: flags cannot be set for a running server; found gateways",
        ),
    ],
)
def test_invalid_arguments_fail_when_the_app_is_built(args: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        shmserve.ray.app(args)


def test_the_file_of_config_is_read_on_the_node() -> None:
    server.check({"config": "/only/there.yaml", "gateways": 2})
