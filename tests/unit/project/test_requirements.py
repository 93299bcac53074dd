"""Requirements for a server with untrusted clients that no other test covers."""

import ast
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy

from shmserve.common.names import check_model_name
from shmserve.errors import InvalidArgument
from shmserve.gateway.http.json.codec import parse_request
from shmserve.gateway.http.json.parser import JsonFault
from shmserve.gateway.http.routes import ROUTES
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.signature import Signature
from tests.rigs.gateway_rig import SIMPLE_CONFIG

ROOT = Path(__file__).resolve().parents[3]


def find_calls(folder: str) -> list[tuple[Path, ast.Call]]:
    return [
        (Path(path, name), node)
        for path, _, names in os.walk(ROOT / folder)
        for name in names
        if name.endswith(".py")
        for node in ast.walk(ast.parse(Path(path, name).read_text()))
        if isinstance(node, ast.Call)
    ]


@pytest.mark.parametrize("folder", ["shmserve", "workers", "ipc"])
def test_weights_are_loaded_as_weights_only(folder: str) -> None:
    """`torch.load` is called only in workers, and reads only tensors."""
    for path, call in find_calls(folder):
        if ast.unparse(call.func) == "torch.load":
            assert folder == "workers", path
            keyword_values = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert keyword_values.get("weights_only") == "True", path


def test_the_server_fetches_nothing() -> None:
    """Only the command, its protocol clients, and Ray's replica send HTTP requests."""
    for folder in ("shmserve", "workers", "ipc"):
        for path, _, names in os.walk(ROOT / folder):
            if any(f"/shmserve/{package}" in path for package in ("cli", "protocols", "ray")):
                continue
            for name in (name for name in names if name.endswith(".py")):
                for node in ast.walk(ast.parse(Path(path, name).read_text())):
                    if isinstance(node, ast.Import):
                        imported_names = {alias.name for alias in node.names}
                    elif isinstance(node, ast.ImportFrom):
                        imported_names = {f"{node.module}.{alias.name}" for alias in node.names}
                        imported_names.add(str(node.module))
                    else:
                        continue
                    clients = {"urllib.request", "http.client", "requests", "aiohttp.ClientSession"}
                    assert not imported_names & clients, (name, imported_names)


def test_requests_are_parsed_by_the_strict_parser() -> None:
    """Requests are parsed by aiohttp's C parser; its Python fallback allows smuggling."""
    assert HttpRequestParser is not HttpRequestParserPy


def read_request(header: Any, tail_size: int = 0) -> None:
    wire = parse_request(header, tail_size, "simple", 1 << 20)
    tensors = [TensorRef(t.name, t.datatype, t.shape, bytes(64)) for t in wire.inputs]
    Signature(ModelSpec.of(SIMPLE_CONFIG), "1").check(wire.id, tensors, [])


def tensor(name: str, **members: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "INT32", "shape": [1, 16], "data": [0] * 16, **members}


@pytest.mark.parametrize(
    "inputs",
    [
        [tensor("INPUT0"), tensor("INPUT0")],
        [tensor("INPUT0"), tensor("INPUT1"), tensor("INPUT0")],
        *([tensor("INPUT0", shape=shape), tensor("INPUT1")] for shape in ([True, 16], [1.0, 16])),
        *([tensor("INPUT0", shape=shape), tensor("INPUT1")] for shape in ([-1, 16], [2**64, 16])),
        [tensor("INPUT0", shape=[2**40, 2**40]), tensor("INPUT1")],
        [tensor("INPUT0", shape=[2**62]), tensor("INPUT1")],
        [tensor("INPUT0", shape=[1 << 30, 16]), tensor("INPUT1")],
        [tensor("INPUT0", parameters={"binary_data_size": 64}), tensor("INPUT1")],
        [tensor("INPUT0", data="x", parameters=[]), {**tensor("INPUT1"), "name": 1}],
        [tensor("INPUT0", datatype="FP99"), tensor("INPUT1")],
    ],
)
def test_numbers_and_names_are_checked_before_memory_is_allocated(inputs: list[Any]) -> None:
    """Repeated names, booleans or floats as integers, and huge integers are refused."""
    with pytest.raises((InvalidArgument, JsonFault)):
        read_request({"inputs": inputs})


@pytest.mark.parametrize(
    "spelled_name", ["..", "%2e%2e", "%2E.", "a%2Fb", "..%2Fetc", "%5c..%5c", "a%00b", "."]
)
def test_model_names_cannot_escape_their_folder(spelled_name: str) -> None:
    """No spelling of a path leads out of the repository."""
    route = ROUTES.find(f"/v2/repository/models/{spelled_name}/load")
    if route is not None:
        name = route[1][1]
        assert name is not None
        with pytest.raises(InvalidArgument, match="must not contain path traversal characters"):
            check_model_name(name)
