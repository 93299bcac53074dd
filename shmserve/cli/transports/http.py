"""Requests over HTTP: every tensor travels as binary, both ways."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any
from urllib.parse import quote

from shmserve.cli.client_tensors import ModelTensor, decode
from shmserve.cli.transports import Failed, Request, response

_HEADER_LENGTH = "Inference-Header-Content-Length"


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


class HttpTransport:
    """A server at `host`:`port`, or at a unix socket."""

    def __init__(self, host: str, port: int = 0, *, unix_socket: str = "") -> None:
        self._host = host
        self._port = port
        self._unix_socket = unix_socket

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """GET /v2/models/NAME."""
        metadata = _json(self._exchange("GET", _path(model, version))[0])
        try:
            return {
                tensor["name"]: ModelTensor(
                    tensor["name"], tensor["datatype"], tuple(tensor["shape"])
                )
                for tensor in metadata["inputs"]
            }
        except (KeyError, TypeError) as error:
            raise Failed("the server did not answer with a model's metadata") from error

    def infer(self, request: Request) -> dict[str, Any]:
        """POST /v2/models/NAME/infer."""
        header = json.dumps(_header(request)).encode()
        body = b"".join([header, *(tensor.raw for tensor in request.inputs)])
        path = f"{_path(request.model, request.version)}/infer"
        return _response(*self._exchange("POST", path, body, len(header)))

    def close(self) -> None:
        """Every exchange has a connection of its own."""

    def _exchange(
        self, method: str, path: str, body: bytes | None = None, header_length: int | None = None
    ) -> tuple[bytes, int | None]:
        """A response's body and its `Inference-Header-Content-Length`; raises Failed."""
        headers = {} if header_length is None else {_HEADER_LENGTH: str(header_length)}
        where = self._unix_socket or f"{self._host}:{self._port}"
        try:
            with contextlib.closing(self._connection()) as connection:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Failed(f"no answer from {where}: {reason}") from error
        if response.status != http.HTTPStatus.OK:
            raise Failed(_error_text(content) or f"{response.status} {response.reason}")
        length = response.getheader(_HEADER_LENGTH)
        return content, None if length is None else int(length)

    def _connection(self) -> http.client.HTTPConnection:
        if self._unix_socket:
            return _UnixConnection(self._unix_socket)
        return http.client.HTTPConnection(self._host, self._port)


def _path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _header(request: Request) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    if request.timeout_us:
        parameters["timeout"] = request.timeout_us
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.raw)},
        }
        for tensor in request.inputs
    ]
    header: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    if request.id:
        header["id"] = request.id
    if request.outputs:
        binary = {"binary_data": True}
        header["outputs"] = [{"name": name, "parameters": binary} for name in request.outputs]
    else:
        parameters["binary_data_output"] = True
    return header


def _response(body: bytes, header_length: int | None) -> dict[str, Any]:
    """The response with each output's data as nested lists of its shape."""
    found = _json(body if header_length is None else body[:header_length])
    rest = memoryview(body)[len(body) if header_length is None else header_length :]
    try:
        for output in found["outputs"]:
            size = output.pop("parameters", {}).get("binary_data_size", 0)
            if "data" not in output:
                output["data"] = decode(output["datatype"], output["shape"], rest[:size])
                rest = rest[size:]
        return response(
            found["model_name"],
            found["model_version"],
            found.get("id", ""),
            found.get("parameters"),
            found["outputs"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Failed("the server's answer is malformed") from error


def _json(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise Failed("the server did not answer in JSON") from error
    if not isinstance(found, dict):
        raise Failed("the server did not answer with a JSON object")
    return found


def _error_text(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return ""
