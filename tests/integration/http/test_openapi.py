"""The OpenAPI description: responses to requests generated from it match it; its page."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import schemathesis.openapi
from hypothesis import HealthCheck, given, settings
from schemathesis import checks

from shmserve.gateway.http.routes import ROUTES, openapi_document
from tests.support import repositories
from tests.support.servers import Server, Start, run_python

DOCUMENT = openapi_document(ROUTES)
NAMES = {"model": ["simple", "identity", "nosuch"], "version": ["1", "7"]}
for path in DOCUMENT["paths"].values():
    for operation in path.values():
        for parameter in operation["parameters"]:
            if names := NAMES.get(parameter["name"]):
                parameter["schema"] = {"type": "string", "enum": names}
# Operations that load and unload come last.
OPERATIONS = sorted(
    (response.ok() for response in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()),
    key=lambda operation: "/repository" in operation.path,
)
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
# Requests that need more than the description: matching tensors, or a text model.
REFUSED_REQUESTS = (
    r"infer$|generate|register$|region}/status|{repository}/models|"
    "/v1/(chat|completions|embeddings|models/|responses)|^/(de)?tokenize|cuda"
)


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, "simple", "identity")
    return start(models, "--model-control-mode=explicit", "--load-model=*")


def load_both(server: Server) -> None:
    server.load("simple", "identity")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_answers_are_as_described(server: Server, operation: Any) -> None:
    statuses = set()

    @settings(
        max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(operation.as_strategy())
    def check_response(case: Any) -> None:
        response = case.call(base_url=f"http://{server.url}", timeout=20)
        case.validate_response(response, checks=CHECKS)
        statuses.add(response.status_code)

    try:
        check_response()
    finally:
        if "/repository" in operation.path:
            load_both(server)
    assert 200 in statuses or re.search(REFUSED_REQUESTS, operation.path)


TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1.5, 2.5]}


@pytest.mark.parametrize(
    ("path", "body"),
    [("infer", {"id": "a", "inputs": [TENSOR]}), ("generate", {"INPUT0": [1.5, 2.5]})],
)
def test_a_real_answer_is_as_described(server: Server, path: str, body: Any) -> None:
    (operation,) = [entry for entry in OPERATIONS if entry.path == f"/v2/models/{{model}}/{path}"]
    case = operation.Case(
        path_parameters={"model": "identity"}, body=body, media_type="application/json"
    )
    response = case.call(base_url=f"http://{server.url}")
    assert response.status_code == 200, response.content
    case.validate_response(response, checks=CHECKS)


def test_a_server_serves_the_document_and_its_page(server: Server) -> None:
    with server.http() as http:
        assert http.get("/openapi.json").ok().json() == json.loads(
            json.dumps(openapi_document(ROUTES))
        )
        reply = http.get("/docs").ok()
    assert reply.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    absolute = r"https?://|src=|<link|@import|url\(|href=./|fetch\(./"
    assert not re.search(absolute, reply.body.decode())


def test_the_root_page_and_the_log_link_the_other_pages(server: Server) -> None:
    with server.http() as http:
        page = http.get("/").ok().body.decode()
    links = re.findall('href="([^"]+)"', page)
    host = f"http://127.0.0.1:{server.metrics_port}/"
    assert links == ["docs", "openapi.json", "v2", host, f"{host}metrics"]
    log = server.log()
    end = log[log.index("the server is ready after") :]
    assert f"dashboard: {host}\n" in end and f"API documentation: http://{server.url}/docs\n" in end
    (command,) = re.findall("example request: shmserve (.*)", end)
    result = run_python("-m", "shmserve", *shlex.split(command), check=True)
    assert json.loads(result.stdout)["model_name"] in ("simple", "identity")
