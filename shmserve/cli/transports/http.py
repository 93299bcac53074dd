"""Requests over HTTP: every tensor travels as binary, both ways; of many responses, each is a line
of JSON."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import numpy as np

from shmserve.cli.client_tensors import ModelTensor, decode
from shmserve.cli.transports import OutgoingRequest, TransportError, response

_LINES = "application/x-ndjson"
_HEADER_LENGTH = "Inference-Header-Content-Length"


class _UnixConnection(http.client.HTTPConnection):
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
            raise TransportError("the server did not answer with a model's metadata") from error

    def infer(self, request: OutgoingRequest) -> Iterator[dict[str, Any]]:
        """POST /v2/models/NAME/infer, for lines of JSON where the model is decoupled."""
        path = _path(request.model, request.version)
        config = _json(self._exchange("GET", f"{path}/config")[0])
        lines = bool((config.get("model_transaction_policy") or {}).get("decoupled"))
        header = json.dumps(_header(request, binary=not lines)).encode()
        body = b"".join([header, *(tensor.raw for tensor in request.inputs)])
        asked = ("POST", f"{path}/infer", body, len(header))
        if not lines:
            yield _response(*self._exchange(*asked))
            return
        with self._requested(*asked, accept=_LINES) as found:
            for line in found:
                yield _response(line, None)

    def close(self) -> None:
        """Every exchange has a connection of its own."""

    def _exchange(
        self, method: str, path: str, body: bytes | None = None, header_length: int | None = None
    ) -> tuple[bytes, int | None]:
        """A response's body and its `Inference-Header-Content-Length`; raises Failed."""
        with self._requested(method, path, body, header_length) as found:
            length = found.getheader(_HEADER_LENGTH)
            return found.read(), None if length is None else int(length)

    @contextlib.contextmanager
    def _requested(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        header_length: int | None = None,
        accept: str = "",
    ) -> Iterator[http.client.HTTPResponse]:
        """A good response, to be read; raises Failed for another, or none."""
        headers = {} if header_length is None else {_HEADER_LENGTH: str(header_length)}
        if accept:
            headers["Accept"] = accept
        where = self._unix_socket or f"{self._host}:{self._port}"
        try:
            with contextlib.closing(self._connection()) as connection:
                connection.request(method, path, body, headers)
                found = connection.getresponse()
                if found.status != http.HTTPStatus.OK:
                    text = _error_text(found.read())
                    raise TransportError(text or f"{found.status} {found.reason}")
                yield found
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise TransportError(f"no answer from {where}: {reason}") from error

    def _connection(self) -> http.client.HTTPConnection:
        if self._unix_socket:
            return _UnixConnection(self._unix_socket)
        return http.client.HTTPConnection(self._host, self._port)


def _path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _header(request: OutgoingRequest, binary: bool) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    if request.timeout_us:
        parameters["timeout"] = request.timeout_us
    parameters |= request.sequence_parameters()
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
        how = {"parameters": {"binary_data": True}} if binary else {}
        header["outputs"] = [{"name": name, **how} for name in request.outputs]
    elif binary:
        parameters["binary_data_output"] = True
    return header


def _response(body: bytes, header_length: int | None) -> dict[str, Any]:
    """The response with each output's data as nested lists of its shape."""
    found = _json(body if header_length is None else body[:header_length])
    if "error" in found:
        raise TransportError(str(found["error"]))
    rest = memoryview(body)[len(body) if header_length is None else header_length :]
    try:
        for output in found["outputs"]:
            size = output.pop("parameters", {}).get("binary_data_size", 0)
            if "data" in output:
                output["data"] = np.array(output["data"], object).reshape(output["shape"]).tolist()
            else:
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
        raise TransportError("the server's response is malformed") from error


def _json(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise TransportError("the server did not answer in JSON") from error
    if not isinstance(found, dict):
        raise TransportError("the server did not answer with a JSON object")
    return found


def _error_text(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return ""
