"""The client for the benchmark's own HTTP requests: readiness, loading, single inferences."""

from __future__ import annotations

import http.client
import json
from typing import Any, Self

REGIONS_PATH = "/v2/systemsharedmemory/region"
_SIMPLE = {
    "inputs": [
        {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))},
        {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": [1] * 16},
    ]
}
_SIMPLE_ANSWER = {"OUTPUT0": list(range(1, 17)), "OUTPUT1": list(range(-1, 15))}
_TORCH = {
    "inputs": [{"name": "INPUT__0", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0.5] * 64}]
}
BODIES = {"simple": _SIMPLE, "torch": _TORCH}


class RequestFailed(Exception):
    """The server's status is not 200, or the response is wrong."""


class Client:
    """One kept-alive connection to a server."""

    def __init__(self, port: int, timeout_s: float = 30.0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the decoded JSON response, or None if it is empty."""
        encoded_body = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, path, encoded_body)
            response = self._connection.getresponse()
            text = response.read()
        except http.client.HTTPException as error:
            self._connection.close()
            raise RequestFailed(f"{method} {path}: {error!r}") from error
        if response.status != 200:
            raise RequestFailed(f"{method} {path}: {response.status} {text[:300]!r}")
        return json.loads(text) if text else None

    def is_ready(self) -> bool:
        """Return whether /v2/health/ready returns 200; False if the server does not listen yet."""
        try:
            self.call("GET", "/v2/health/ready")
        except (OSError, RequestFailed):
            self._connection.close()
            return False
        return True

    def infer(self, model: str) -> None:
        """Send a request of batch size 1 to `simple` or `torch`; check the sums of `simple`."""
        response = self.call("POST", f"/v2/models/{model}/infer", BODIES[model])
        if model == "simple":
            outputs = {o["name"]: o["data"] for o in response["outputs"]}
            if outputs != _SIMPLE_ANSWER:
                raise RequestFailed(f"wrong response from simple: {outputs}")

    def register_region(self, name: str, key: str, byte_size: int) -> None:
        """Register a system shared memory region that begins at offset 0."""
        region = {"key": key, "offset": 0, "byte_size": byte_size}
        self.call("POST", f"{REGIONS_PATH}/{name}/register", region)

    def queue_time(self, model: str) -> tuple[int, int]:
        """Return (requests, nanoseconds in the queue) since the model was loaded."""
        stats = self.call("GET", f"/v2/models/{model}/stats")["model_stats"][0]
        queue = stats["inference_stats"]["queue"]
        return int(queue.get("count", 0)), int(queue.get("ns", 0))
