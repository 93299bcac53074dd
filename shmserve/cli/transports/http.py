"""Requests over HTTP: every tensor travels as binary, both ways; of many responses, each is a line
of JSON."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
from collections.abc import Container, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import numpy as np

from shmserve.cli.client_tensors import ModelTensor, decode
from shmserve.cli.transports import (
    NOT_READY,
    Address,
    Credentials,
    OutgoingRequest,
    TransportError,
    response,
)

_LINES = "application/x-ndjson"
HEADER_LENGTH = "Inference-Header-Content-Length"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


class HttpTransport:
    """A server at an address of HTTP."""

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self.where = address.where
        self._headers = dict(credentials.headers)
        self._target = address.target
        self._tls = credentials.tls() if address.tls else None
        self._unix_socket = address.unix_socket

    def inputs(self, model: str, version: str) -> dict[str, ModelTensor]:
        """GET /v2/models/NAME."""
        metadata = self._json(model_path(model, version))
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
        path = model_path(request.model, request.version)
        config = self._json(f"{path}/config")
        lines = bool((config.get("model_transaction_policy") or {}).get("decoupled"))
        header = json.dumps(inference_header(request, binary=not lines)).encode()
        body = b"".join([header, *(tensor.raw for tensor in request.inputs)])
        asked = ("POST", f"{path}/infer", body, len(header))
        if not lines:
            yield _response(*self._exchange(*asked))
            return
        with self._requested(*asked, accept=_LINES) as found:
            for line in found:
                yield _response(line, None)

    def ready(self, model: str, version: str) -> None:
        """GET /v2/health/ready, or of a model."""
        if model:
            self._exchange("GET", f"{model_path(model, version)}/ready")
            return
        known = (http.HTTPStatus.OK, http.HTTPStatus.BAD_REQUEST)
        with self._requested("GET", "/v2/health/ready", known=known) as found:
            if found.status != http.HTTPStatus.OK:
                raise TransportError(NOT_READY)

    def models(self) -> list[dict[str, Any]]:
        """POST /v2/repository/index."""
        return self._rows("POST", "/v2/repository/index")

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """POST /v2/repository/models/NAME/load."""
        body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
        path = f"/v2/repository/models/{quote(model, safe='')}/load"
        self._exchange("POST", path, body if config else None)

    def unload(self, model: str) -> None:
        """POST /v2/repository/models/NAME/unload."""
        self._exchange("POST", f"/v2/repository/models/{quote(model, safe='')}/unload")

    def stats(self, model: str, version: str) -> list[dict[str, Any]]:
        """GET /v2/models[/NAME]/stats."""
        path = model_path(model, version) if model else "/v2/models"
        return list(self._json(f"{path}/stats")["model_stats"])

    def config(self, model: str, version: str) -> dict[str, Any]:
        """GET /v2/models/NAME/config."""
        return self._json(f"{model_path(model, version)}/config")

    def regions(self) -> list[dict[str, Any]]:
        """GET /v2/systemsharedmemory/status and /v2/cudasharedmemory/status."""
        return [
            row
            for kind in ("system", "cuda")
            for row in self._rows("GET", f"/v2/{kind}sharedmemory/status")
        ]

    def register(self, kind: str, name: str, fields: Mapping[str, Any]) -> None:
        """POST /v2/systemsharedmemory/region/NAME/register, or of cuda."""
        raw = fields.get("raw_handle")
        coded = {} if raw is None else {"raw_handle": {"b64": base64.b64encode(raw).decode()}}
        body = json.dumps({**fields, **coded}).encode()
        self._exchange("POST", f"{_region_path(kind, name)}/register", body)

    def unregister(self, kind: str, name: str) -> None:
        """POST /v2/systemsharedmemory/region/NAME/unregister, or of cuda."""
        self._exchange("POST", f"{_region_path(kind, name)}/unregister")

    def close(self) -> None:
        """Every exchange has a connection of its own."""

    def _json(self, path: str) -> dict[str, Any]:
        return _object(self._exchange("GET", path)[0])

    def _rows(self, method: str, path: str) -> list[dict[str, Any]]:
        found = _parsed(self._exchange(method, path)[0])
        if not isinstance(found, list):
            raise TransportError("the server did not answer with a JSON list")
        return found

    def _exchange(
        self, method: str, path: str, body: bytes | None = None, header_length: int | None = None
    ) -> tuple[bytes, int | None]:
        """A response's body and its `Inference-Header-Content-Length`; raises TransportError."""
        with self._requested(method, path, body, header_length) as found:
            length = found.getheader(HEADER_LENGTH)
            return found.read(), None if length is None else int(length)

    @contextlib.contextmanager
    def _requested(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        header_length: int | None = None,
        accept: str = "",
        known: Container[int] = (http.HTTPStatus.OK,),
    ) -> Iterator[http.client.HTTPResponse]:
        """A response of a `known` status, to be read; raises TransportError for another, or
        none."""
        headers = dict(self._headers)
        if header_length is not None:
            headers[HEADER_LENGTH] = str(header_length)
        if accept:
            headers["Accept"] = accept
        try:
            with contextlib.closing(self._connection()) as connection:
                connection.request(method, path, body, headers)
                found = connection.getresponse()
                if found.status not in known:
                    text = _error_text(found.read())
                    raise TransportError(text or f"{found.status} {found.reason}")
                yield found
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise TransportError(f"no answer: {reason}") from error

    def _connection(self) -> http.client.HTTPConnection:
        if self._unix_socket:
            return _UnixConnection(self._unix_socket)
        if self._tls is not None:
            return http.client.HTTPSConnection(self._target, context=self._tls)
        return http.client.HTTPConnection(self._target)


def _region_path(kind: str, name: str) -> str:
    return f"/v2/{kind}sharedmemory/region/{quote(name, safe='')}"


def model_path(model: str, version: str) -> str:
    """Of a model, or of one version of it."""
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def inference_header(request: OutgoingRequest, binary: bool) -> dict[str, Any]:
    """The JSON that a request begins with; behind it come its inputs' bytes. `binary`: outputs are
    asked for as bytes, too."""
    parameters: dict[str, Any] = {}
    if request.timeout_us:
        parameters["timeout"] = request.timeout_us
    parameters |= request.sequence_parameters()
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": tensor.part.parameters()
            if tensor.part
            else {"binary_data_size": len(tensor.raw)},
        }
        for tensor in request.inputs
    ]
    header: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    if request.id:
        header["id"] = request.id
    if request.outputs:
        how = {"binary_data": True} if binary else {}
        parts = {name: part.parameters() for name, part in request.parts.items()}
        header["outputs"] = [
            {"name": name, "parameters": parts.get(name, how)} for name in request.outputs
        ]
    elif binary:
        parameters["binary_data_output"] = True
    return header


def _response(body: bytes, header_length: int | None) -> dict[str, Any]:
    """The response with each output's data as nested lists of its shape."""
    found = _object(body if header_length is None else body[:header_length])
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


def _object(content: bytes) -> dict[str, Any]:
    found = _parsed(content)
    if not isinstance(found, dict):
        raise TransportError("the server did not answer with a JSON object")
    return found


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise TransportError("the server did not answer in JSON") from error


def _error_text(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return ""
