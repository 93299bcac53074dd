"""The rate limiter between models of a real server."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support import repositories
from tests.support.load import Load
from tests.support.servers import Server, running, unload_all
from tests.support.waiting import until
from tests.support.wire.raw_http import json_request


def limited(count: int, name: str = "R", extra_fields: str = "") -> str:
    """Return an instance group that needs this amount of the resource."""
    resource = f'{{ name: "{name}" count: {count} {extra_fields} }}'
    return (
        "instance_group [ { kind: KIND_CPU count: 2 "
        f"rate_limiter {{ resources [ {resource} ] priority: 1 }} }} ]"
    )


def add(repository: Path, name: str, group: str) -> None:
    """Add the model that waits at the gate, with a rate limit."""
    config = repositories.add_as(repository, name, "gated") / "config.pbtxt"
    lines = [line for line in config.read_text().splitlines() if "instance_group" not in line]
    config.write_text("\n".join([*lines, group]))


def send_request(server: Server, model: str, value: int) -> int:
    with server.http() as http:
        return http.infer(model, json_request(INPUT0=np.full((1, 16), value, np.int32))).status


def wait_workers(server: Server, count: int) -> None:
    until(f"there are {count}", lambda: len(server.find("worker simple.")) == count)


@pytest.fixture(scope="module")
def limiting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """See `empty_server`."""
    folder = tmp_path_factory.mktemp("limiting") / "models"
    folder.mkdir()
    flags = ("--rate-limit=execution_count", "--rate-limit-resource=R:3")
    with running(folder, *flags, "--model-control-mode=explicit") as running_server:
        yield running_server, folder


@pytest.fixture
def empty_server(limiting_server: tuple[Server, Path]) -> Iterator[tuple[Server, Path]]:
    """Start a server in explicit mode with a rate limit of three for the resource R."""
    yield limiting_server
    unload_all(*limiting_server)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def test_models_that_need_the_same_take_turns(
    empty_server: tuple[Server, Path], pool: ThreadPoolExecutor
) -> None:
    """Two models of two instances share resources for one; a third is not limited."""
    server, repository = empty_server
    for name in ("one", "two"):
        add(repository, name, limited(2))
    add(repository, "small", limited(1, "S"))
    server.load("one", "two", "small")
    gate = server.gate
    waiting = [pool.submit(send_request, server, ("one", "two")[n % 2], n) for n in range(4)]
    first_visit = gate.next()
    unlimited_request = pool.submit(send_request, server, "small", 9)
    second_visit = gate.next()
    assert second_visit.batch == [9]
    second_visit.release()
    assert unlimited_request.result() == 200
    first_batch = first_visit.batch
    for _ in range(3):
        assert server.metric("shmserve_executing_requests") == 1
        first_visit.release()
        first_visit = gate.next()
        first_batch += first_visit.batch
    first_visit.release()
    assert sorted(first_batch) == [0, 1, 2, 3]
    assert [future.result() for future in waiting] == [200] * 4


def test_other_instances_in_place(empty_server: tuple[Server, Path]) -> None:
    """The scheduler stays, and new instances take part in the rate limit."""
    server, repository = empty_server
    config = repositories.add_as(repository, "simple", "simple") / "config.pbtxt"
    kept_lines = [line for line in config.read_text().splitlines() if "instance_group" not in line]
    config.write_text("\n".join([*kept_lines, limited(1, "Q")]))
    server.load("simple")
    with server.http() as http:
        scheduler = server.find_one("scheduler simple").pid
        with Load(server, simple=4, memory=0) as stream:
            more_resources = limited(1, "Q").replace("count: 2", "count: 3", 1)
            for group, count in ((more_resources, 3), (limited(2, "Q"), 2)):
                config.write_text("\n".join([*kept_lines, group]))
                http.load("simple").ok()
                wait_workers(server, count)
        assert server.find_one("scheduler simple").pid == scheduler
        assert not stream.troubles()
    counts = re.findall(r"Device: 0 Resource: Q\\t Count: (\d+)", server.log())
    assert counts == ["1", "2"], "how much there is, whenever that changes"
