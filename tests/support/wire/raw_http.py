"""A keep-alive HTTP connection that shows details which tritonclient hides."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_NUMPY = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}
_INTERNALS = re.compile(
    # A client that loads a model may see the name of the model's own file.
    rb"Traceback|memfd|/dev/shm|/proc/|/run/|/tmp/|ipc://|site-packages|(?<!\bmodel)\.py\b"
    rb"| object at 0x|\bpid "
)
_DATATYPE = {dtype: name for name, dtype in _NUMPY.items()} | {np.dtype(object): "BYTES"}


@dataclass(frozen=True)
class Reply:
    """A complete response. Its error must not contain internal details of the server."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def __post_init__(self) -> None:
        if self.status != 200:
            assert _INTERNALS.search(self.body) is None, self.body

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert self.status != 200, self.body
        answer = self.json()
        assert list(answer) == ["error"], answer
        return str(answer["error"])

    def ok(self) -> Reply:
        """Return the response after checking that its status is 200."""
        assert self.status == 200, (self.status, self.body)
        return self

    def tensors(self) -> dict[str, Any]:
        """Return outputs by name: arrays, lists of bytes for BYTES, None for those in regions."""
        assert self.status == 200, (self.status, self.body)
        size = self.headers.get("Inference-Header-Content-Length")
        json_size = len(self.body) if size is None else int(size)
        binary_rows = self.body[json_size:]
        arrays = {}
        for output in json.loads(self.body[:json_size])["outputs"]:
            parameters = output.get("parameters", {})
            if "binary_data_size" in parameters:
                raw, binary_rows = (
                    binary_rows[: parameters["binary_data_size"]],
                    binary_rows[parameters["binary_data_size"] :],
                )
                arrays[output["name"]] = _from_binary(output, raw)
            elif "data" in output:
                arrays[output["name"]] = _from_json(output)
            else:
                arrays[output["name"]] = None
        assert not binary_rows
        return arrays


def _from_binary(output: Mapping[str, Any], raw: bytes) -> Any:
    if output["datatype"] == "BYTES":
        return split_bytes(raw)
    if output["datatype"] == "BF16":
        return np.frombuffer(raw, np.uint16).reshape(output["shape"])
    return np.frombuffer(raw, _NUMPY[output["datatype"]]).reshape(output["shape"])


def _from_json(output: Mapping[str, Any]) -> Any:
    if output["datatype"] == "BYTES":
        return [element.encode() for element in output["data"]]
    return np.array(output["data"], _NUMPY[output["datatype"]]).reshape(output["shape"])


def join_bytes(elements: Sequence[bytes]) -> bytes:
    """Return serialised BYTES: each element after its length in four bytes, little-endian."""
    return b"".join(len(element).to_bytes(4, "little") + element for element in elements)


def split_bytes(raw: bytes) -> list[bytes]:
    chunks = []
    while raw:
        size = int.from_bytes(raw[:4], "little")
        chunks.append(raw[4 : 4 + size])
        raw = raw[4 + size :]
    return chunks


def json_input(name: str, array: np.ndarray) -> dict[str, Any]:
    return {
        "name": name,
        "datatype": _DATATYPE[array.dtype],
        "shape": [*array.shape],
        "data": array.tolist(),
    }


def json_request(**arrays: np.ndarray) -> dict[str, Any]:
    """Return an inference request with these inputs; strings are arrays of `object`."""
    return {"inputs": [json_input(name, array) for name, array in arrays.items()]}


def shm_input(
    name: str, datatype: str, shape: Sequence[int], region: str, byte_size: int, offset: int = 0
) -> dict[str, Any]:
    return {
        "name": name,
        "datatype": datatype,
        "shape": [*shape],
        "parameters": in_region(region, byte_size, offset),
    }


def in_region(region: str, byte_size: int, offset: int = 0) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "shared_memory_region": region,
        "shared_memory_byte_size": byte_size,
    }
    if offset:
        parameters["shared_memory_offset"] = offset
    return parameters


def region_request(
    region: str, size: int, input_offset: int = 0, output_offset: int | None = None
) -> dict[str, Any]:
    """Return a request of the model "identity" from `size` bytes of a region to the next ones."""
    output_range = in_region(region, size, size if output_offset is None else output_offset)
    return {
        "inputs": [shm_input("INPUT0", "FP32", [size // 4], region, size, input_offset)],
        "outputs": [{"name": "OUTPUT0", "parameters": output_range}],
    }


def gated_request(value: int, region: str, offset: int = 0) -> dict[str, Any]:
    """Return a request of the model "gated" that writes 64 bytes of `value` into a region."""
    outputs = [{"name": "OUTPUT0", "parameters": in_region(region, 64, offset)}]
    return {"inputs": [json_input("INPUT0", np.full((1, 16), value, np.int32))], "outputs": outputs}


def binary_request(
    inputs: Sequence[tuple[str, str, Sequence[int], bytes]], **members: Any
) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request with tensors (name, datatype, shape, data)."""
    tensor_members = [
        {
            "name": name,
            "datatype": datatype,
            "shape": [*shape],
            "parameters": {"binary_data_size": len(data)},
        }
        for name, datatype, shape, data in inputs
    ]
    header = json.dumps({"inputs": tensor_members, **members}).encode()
    body = header + b"".join(data for _, _, _, data in inputs)
    return body, {"Inference-Header-Content-Length": str(len(header))}


class Http:
    """A connection to a server, opened at the first use and again after it was closed."""

    def __init__(self, port: int, timeout_s: float = 30.0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)

    @property
    def local_port(self) -> int:
        return int(self._connection.sock.getsockname()[1])

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a request and return the response; a dict or list body is sent as JSON."""
        if isinstance(body, dict | list):
            body = json.dumps(body).encode()
        try:
            self._connection.request(method, path, body, dict(headers or {}))
            response = self._connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        except BaseException:
            self._connection.close()
            raise

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        return self.call("GET", path, None, headers)

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        return self.call("POST", path, body, headers)

    def infer(self, model: str, request: Any, headers: Mapping[str, str] | None = None) -> Reply:
        """Send an inference request; `model` may contain a version as NAME/versions/V."""
        return self.post(f"/v2/models/{model}/infer", request, headers)

    def infer_binary(
        self, model: str, inputs: Sequence[tuple[str, str, Sequence[int], bytes]], **members: Any
    ) -> Reply:
        """Send an inference request with binary inputs (name, datatype, shape, data)."""
        return self.infer(model, *binary_request(inputs, **members))

    def config(self, model: str) -> dict[str, Any]:
        return dict(self.get(f"/v2/models/{model}/config").ok().json())

    def statistics(self, model: str) -> dict[str, Any]:
        (statistics,) = self.get(f"/v2/models/{model}/stats").ok().json()["model_stats"]
        return dict(statistics)

    def load(self, model: str, **parameters: Any) -> Reply:
        return self._repository(model, "load", parameters)

    def unload(self, model: str, **parameters: Any) -> Reply:
        return self._repository(model, "unload", parameters)

    def _repository(self, model: str, verb: str, parameters: Mapping[str, Any]) -> Reply:
        body = {"parameters": parameters} if parameters else None
        return self.post(f"/v2/repository/models/{model}/{verb}", body)

    def register(self, name: str, key: str, byte_size: Any, offset: Any = 0) -> Reply:
        """Register a system shared memory region."""
        body = {"key": key, "offset": offset, "byte_size": byte_size}
        return self.post(f"/v2/systemsharedmemory/region/{name}/register", body)

    def unregister(self, name: str = "") -> Reply:
        return self.post(f"/v2/systemsharedmemory{'/region/' + name if name else ''}/unregister")

    def regions(self, name: str = "") -> Reply:
        return self.get(f"/v2/systemsharedmemory{'/region/' + name if name else ''}/status")

    def close(self) -> None:
        self._connection.close()


class UnixHttp(Http):
    """A connection over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float = 30.0) -> None:
        self._connection = _UnixConnection(path, timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(self._path))
        except BaseException:
            self.close()
            raise


@contextlib.contextmanager
def raw_connection(port: int, timeout_s: float = 30.0) -> Iterator[socket.socket]:
    """Yield a plain TCP connection for requests that no client library would send."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        yield connection


def read_reply(connection: socket.socket) -> Reply:
    with contextlib.closing(http.client.HTTPResponse(connection)) as response:
        response.begin()
        return Reply(response.status, response.headers, response.read())
