"""A server with a model of every kind under load, and its feed of figures."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.rigs import pipelines
from tests.support import repositories
from tests.support.hf_folders import write_folder
from tests.support.load import infer_simple
from tests.support.sequence_models import controls, instances
from tests.support.servers import Server
from tests.support.wire.raw_http import Http, json_request

IDLE_TIME = "max_sequence_idle_microseconds: 60000000"
FEW_MODELS = ("simple", "cached", "pipeline", "half", "crimes", "sums")


def add_models(repository: Path, *, generative: bool = False) -> None:
    """Add FEW, the broken model "broken", and with `generative` the text model "tiny"."""
    repositories.add(repository, "simple", "crimes")
    cached = "response_cache { enable: true }"
    repositories.add_as(repository, "cached", "simple", cached)
    sequences = f"sequence_batching {{ direct {{ }} {IDLE_TIME} {controls()} }} {instances(1)}"
    repositories.add_as(repository, "sums", "sequencer", sequences)
    pipelines.add_model(repository, "half", "return self.response(Y=self.input(request, 'X') / 2)")
    steps = [
        pipelines.step("half", {"X": "IN"}, {"Y": "BETWEEN"}),
        pipelines.step("half", {"X": "BETWEEN"}, {"Y": "OUT"}),
    ]
    pipelines.add_ensemble(repository, "pipeline", steps)
    repositories.write(repository, "broken", "", "raise RuntimeError('there is no such weight')")
    if generative:
        write_folder(repository / "tiny" / "1")


def _simple(http: Http, number: int) -> None:
    infer_simple(http, number)


def _infer_cached(http: Http, number: int) -> None:
    values = np.full((1, 16), number % 4, np.int32)
    http.infer("cached", json_request(INPUT0=values, INPUT1=values)).ok()


def _pipeline(http: Http, number: int) -> None:
    http.infer("pipeline", json_request(IN=np.ones(3, np.float32))).ok()


def _crimes(http: Http, number: int) -> None:
    command(http, "error" if number % 4 == 0 else "ok")


def command(http: Http, name: str) -> None:
    zeros = np.zeros((1, 4), np.int32)
    http.infer("crimes", json_request(COMMAND=np.array([[name]], object), INPUT0=zeros))


def _infer_sums(http: Http, number: int) -> None:
    parameters = {"sequence_id": 1 + number // 8, "sequence_start": number % 8 == 0}
    parameters["sequence_end"] = number % 8 == 7
    body = json_request(INPUT0=np.ones((1, 1), np.int32)) | {"parameters": parameters}
    http.infer("sums", body).ok()


def _complete_tiny(http: Http, number: int) -> None:
    body = {"model": "tiny", "prompt": "the quick brown", "max_tokens": 12}
    http.post("/v1/completions", body).ok()


@contextlib.contextmanager
def send_under_load(server: Server, *, generative: bool = False) -> Iterator[None]:
    """Send requests to all models on one or two connections each until the end of the block."""
    stop, answered_count = threading.Event(), threading.Semaphore(0)
    server.gate.close()  # no execution waits at the gate

    def send_requests(send_one: Callable[[Http, int], None]) -> None:
        number = 0
        while not stop.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException), server.http() as client:
                while not (stop.wait(0.04) and number % 8 == 0):  # no sequence is left open
                    send_one(client, number)
                    number += 1
                    if number == 1:
                        answered_count.release()
            stop.wait(0.2)

    kinds = [
        _simple, _simple, _infer_cached, _pipeline, _crimes, _infer_sums,
        *([_complete_tiny] if generative else []),
    ]  # fmt: skip
    threads = [threading.Thread(target=send_requests, args=[kind]) for kind in kinds]
    for thread in threads:
        thread.start()
    try:
        assert all(answered_count.acquire(timeout=30) for _ in threads), "not all are answered"
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Feed:
    """A viewer: each call of `next` waits for an event."""

    def __init__(self, port: int, headers: Mapping[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._connection.request("GET", "/live", headers=dict(headers or {}))
        self.response = self._connection.getresponse()

    def next(self) -> dict[str, Any]:
        """Return the data of the next event; raise EOFError at the end."""
        line = self.response.readline()
        if not line:
            raise EOFError
        assert line.startswith(b"data: "), line
        assert self.response.readline() == b"\n"
        return dict(json.loads(line[6:]))

    def close(self) -> None:
        self.response.close()
        self._connection.close()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
