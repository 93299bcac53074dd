"""The processes that schedule the steps of ensembles, from load to unload."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import shmserve.client
from tests.rigs.pipelines import add_ensemble, add_model, xy_step
from tests.support.servers import Server, running
from tests.support.waiting import until

ADD_ONE = 'return self.response(Y=self.input(request, "X") + 1)'


def fill(folder: Path) -> None:
    """Write the ensembles "first" (a -> b), "second" (b -> c) and "third" (c -> d), and "alone"."""
    for name in ("a", "b", "c", "d", "alone"):
        add_model(folder, name, ADD_ONE)
    for name, a, b in (("first", "a", "b"), ("second", "b", "c"), ("third", "c", "d")):
        add_ensemble(folder, name, [xy_step(a, "IN", "m"), xy_step(b, "m", "OUT")])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    fill(tmp_path / "models")
    return tmp_path / "models"


def schedulers(server: Server) -> list[str]:
    titles = server.titles().elements()
    return sorted(title for title in titles if title.startswith(("scheduler ", "ensemble ")))


class Asking:
    """Clients that send requests continuously over HTTP and shared memory, and their errors."""

    def __init__(self, server: Server, *models: str) -> None:
        self._server = server
        self._stopped = threading.Event()
        self.wrong_responses: list[str] = []
        self.right_count = 0
        self._threads = [
            threading.Thread(target=send_requests, args=(model,))
            for model in models
            for send_requests in (self._by_http, self._by_memory)
        ]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _by_http(self, model: str) -> None:
        values = np.arange(20_000, dtype=np.float32)
        tensors = [("X", "FP32", [values.size], values.tobytes())]
        requested_outputs = [{"name": "Y", "parameters": {"binary_data": True}}]
        with self._server.http() as http:
            while not self._stopped.is_set():
                reply = http.infer_binary(model, tensors, outputs=requested_outputs)
                if reply.status != 200:
                    self.wrong_responses.append(f"{model}: {reply.status} {reply.error}")
                elif (reply.tensors()["Y"] != values + 1).any():
                    self.wrong_responses.append(f"{model}: wrong values")
                else:
                    self.right_count += 1

    def _by_memory(self, model: str) -> None:
        values = np.arange(20_000, dtype=np.float32)
        with shmserve.client.connect(self._server.run_dir) as client:
            while not self._stopped.is_set():
                try:
                    if (client.infer(model, {"X": values})["Y"] != values + 1).any():
                        self.wrong_responses.append(f"{model}: wrong values")
                except shmserve.client.ShmserveError as error:
                    self.wrong_responses.append(f"{model}: {error}")


@pytest.fixture
def server(empty_server: tuple[Server, Path]) -> Server:
    fill(empty_server[1])
    return empty_server[0]


def test_the_steps_of_ensembles_that_share_some_are_in_one_process(repository: Path) -> None:
    with running(repository) as server:
        assert schedulers(server) == ["ensemble first", "scheduler alone"]
        with Asking(server, "a", "c") as asking_clients, server.http() as http:
            for name in ("first", "second", "third"):
                tensors = [("IN", "FP32", [1], np.float32(1).tobytes())]
                requested_outputs = [{"name": "OUT", "parameters": {"binary_data": True}}]
                reply = http.infer_binary(name, tensors, outputs=requested_outputs)
                assert reply.tensors()["OUT"].tolist() == [3.0]
            until("steps are asked directly", lambda: asking_clients.right_count > 20)
        assert asking_clients.wrong_responses == []


def test_each_model_has_its_own_process_if_configured(repository: Path) -> None:
    with running(repository, "--ensemble-scheduling=separate") as server:
        pipes = [f"ensemble {n}" for n in ("first", "second", "third")]
        assert schedulers(server) == [
            *pipes,
            *(f"scheduler {n}" for n in ["a", "alone", "b", "c", "d"]),
        ]


def test_models_move_to_an_ensemble_that_is_loaded_and_back(server: Server) -> None:
    for name in ("a", "b", "c", "alone"):
        server.load(name)
    separate = [f"scheduler {name}" for name in ("a", "alone", "b", "c")]
    assert schedulers(server) == separate
    with Asking(server, "a", "b", "c", "alone") as asking_clients:
        for _ in range(2):
            server.load("first")
            shared = ["ensemble first", "scheduler alone", "scheduler c"]
            until("a and b move", lambda: schedulers(server) == shared)  # noqa: B023
            server.load("second")
            all_shared = ["ensemble first", "scheduler alone"]
            until("c moves", lambda: schedulers(server) == all_shared)  # noqa: B023
            right_before = asking_clients.right_count
            until("all are asked", lambda: asking_clients.right_count > right_before + 50)  # noqa: B023
            server.unload("second")
            until("c moves", lambda: len(schedulers(server)) == 3)
            server.unload("first")
            until("all are alone", lambda: len(schedulers(server)) == 4)
    assert asking_clients.wrong_responses == []


def test_models_that_an_ensemble_connects_share_a_process(server: Server) -> None:
    server.load("first")
    server.load("third")
    assert schedulers(server) == ["ensemble first", "ensemble third"]
    with Asking(server, "a", "c", "d") as asking_clients:
        server.load("second")
        until("all are in one", lambda: len(schedulers(server)) == 1)
        right_before = asking_clients.right_count
        until("all are asked", lambda: asking_clients.right_count > right_before + 50)
    assert asking_clients.wrong_responses == []


def test_a_step_is_reloaded_separately(server: Server, empty_server: tuple[Server, Path]) -> None:
    server.load("first")
    code = empty_server[1] / "a" / "1" / "model.py"
    with Asking(server, "a", "b") as asking_clients:
        for number in range(3):
            code.write_text(code.read_text() + f"\n# {number}\n")
            server.load("a")
            assert schedulers(server) == ["ensemble first"]
        right_before = asking_clients.right_count
        until("all are asked", lambda: asking_clients.right_count > right_before + 50)
    assert asking_clients.wrong_responses == []
