"""The description of the HTTP API has every route, once, and is sound."""

import json
import re
from typing import Any

import pytest

from shmserve.gateway.http import routes
from shmserve.gateway.http.routes import ROUTES, openapi_document
from shmserve.gateway.http.routing import Route
from shmserve.logs import FORMATS, MAX_LOG_LEVEL

DOCUMENT = openapi_document(ROUTES)
OPERATIONS = [
    (path, method, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]


def find_route(path: str, method: str) -> Route:
    sample = path.replace("{version}", "12").replace("{model}", "m")
    route = ROUTES.find(re.sub(r"{\w+}", "x", sample), method.upper())
    assert route is not None, path
    return route[0]


def test_the_document_has_exactly_the_routes() -> None:
    described_routes = json.loads((routes._PAGES / "operations.json").read_bytes())["operations"]
    assert set(described_routes) == {f"{route.method} {route.path}" for route in ROUTES.routes}
    assert {find_route(path, method) for path, method, _ in OPERATIONS} == set(ROUTES.routes)
    for path, method, operation in OPERATIONS:
        assert find_route(path, method).method == method.upper()
        assert operation["summary"].endswith(("200.", "501.", ".")) and operation["tags"]


def test_an_optional_part_makes_two_paths() -> None:
    paths = DOCUMENT["paths"]
    assert {"/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"} <= set(paths)
    (model, version) = paths["/v2/models/{model}/versions/{version}"]["get"]["parameters"]
    assert (model["name"], version["name"]) == ("model", "version")
    assert version["schema"]["pattern"] == "^[1-9][0-9]{0,8}$"


def test_names_are_unique_and_references_resolve() -> None:
    names = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(names)) == len(names)
    used_schemas = set(_references(DOCUMENT))
    assert used_schemas == {
        f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]
    }


def test_the_documented_log_settings_equal_the_servers() -> None:
    settings = DOCUMENT["components"]["schemas"]["Logging"]["properties"]
    assert settings["log_format"]["enum"] == list(FORMATS)
    assert settings["log_verbose_level"]["maximum"] == MAX_LOG_LEVEL


def _references(node: Any) -> Any:
    if isinstance(node, dict):
        yield from ([node["$ref"]] if "$ref" in node else [])
        node = list(node.values())
    if isinstance(node, list | tuple):
        for child in node:
            yield from _references(child)


@pytest.mark.parametrize(
    ("path", "error_schema"), [("/v1/models", "OpenAIError"), ("/v2", "Error")]
)
def test_errors_have_the_form_of_their_api(path: str, error_schema: str) -> None:
    replies = DOCUMENT["paths"][path]["get"]["responses"]
    for status in ("4XX", "5XX"):
        schema = replies[status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{error_schema}"}
