"""Reloads that change only `instance_group`: instances are added and removed under load."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import repositories
from tests.support.load import Load
from tests.support.sequence_models import CONTROL_INPUTS, IDLE_TIME, instances
from tests.support.servers import Server
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, json_request

Explicit = tuple[Server, Path]

# A model that returns the sum of a sequence's values and its own pid.
SUMS_MODEL = repositories.python_model("""
    def initialize(self, args):
        self.sums = {}

    def one(self, request):
        names = ("IN", "START", "CORRID")
        value, start, who = (self.input(request, name).flat[0] for name in names)
        self.sums[who] = value + (0 if start else self.sums.get(who, 0))
        return self.response(OUT=np.array([[self.sums[who], os.getpid()]], np.int32))
""")
SUMS_CONFIG = f"""\
name: "sums" backend: "python" max_batch_size: 2
input [ {{ name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_INT32 dims: [ 2 ] }} ]
sequence_batching {{ {CONTROL_INPUTS} {IDLE_TIME} STRATEGY {{}} }}
"""


def workers(server: Server, name: str) -> set[int]:
    return {process.pid for process in server.find(f"worker {name}.")}


def wait_workers(server: Server, name: str, count: int) -> None:
    until(f"{name} has {count} processes", lambda: len(workers(server, name)) == count)


def count_of(http: Http, name: str) -> int:
    return sum(group["count"] for group in http.config(name)["instance_group"])


def successes(http: Http, name: str) -> int:
    return int(http.statistics(name)["inference_stats"]["success"]["count"])


def set_count(folder: Path, count: int) -> None:
    """Write this number of instances into config.pbtxt."""
    path = folder / "config.pbtxt"
    other_lines = [line for line in path.read_text().splitlines() if "instance_group" not in line]
    new_path = path.with_suffix(".new")
    new_path.write_text("\n".join([*other_lines, instances(count), ""]))
    new_path.rename(path)


def add_simple(repository: Path) -> Path:
    folder = repositories.add_as(repository, "simple", "simple")
    set_count(folder, 1)
    return folder


def test_a_removal_of_instances_is_answered_after_their_finalize(
    empty_server: Explicit, tmp_path: Path
) -> None:
    """Holds for a reload in place and for an unload."""
    server, repository = empty_server
    finalized = tmp_path / "finalized"
    code = f"""\
import time
class TritonPythonModel:
    def execute(self, requests):
        return []
    def finalize(self):
        time.sleep(0.3)
        open({str(finalized)!r}, "a").write("x")
"""
    folder = repositories.write(repository, "counted", 'backend: "python"', code)
    with server.http() as http:
        for count, finalize_count in ((4, 0), (1, 3), (2, 3), (1, 4)):
            set_count(folder, count)
            http.load("counted").ok()
            assert len(finalized.read_text() if finalize_count else "") == finalize_count
        set_count(folder, 3)
        http.load("counted").ok()
        http.unload("counted").ok()
        assert len(finalized.read_text()) == 7
        assert workers(server, "counted") == set()


def test_no_request_of_a_stream_fails_during_changes(empty_server: Explicit) -> None:
    """The scheduler and the remaining instance keep their processes and statistics."""
    server, repository = empty_server
    folder = add_simple(repository)
    with server.http() as http:
        http.load("simple").ok()
        scheduler = server.find_one("scheduler simple").pid
        (first_worker,) = workers(server, "simple")
        with Load(server, simple=4, memory=0) as stream:
            success_count = 0
            for count in (3, 1, 2):
                set_count(folder, count)
                http.load("simple").ok()
                assert http.get("/v2/models/simple/ready").status == 200
                assert count_of(http, "simple") == count
                wait_workers(server, "simple", count)
                assert first_worker in workers(server, "simple")
                counted_before, success_count = success_count, successes(http, "simple")
                assert success_count >= counted_before
            config = http.config("simple")
            (group,) = config["instance_group"]
            two_groups = [group | {"name": "a"}, group | {"name": "b", "count": 1}]
            http.load("simple", config=json.dumps(config | {"instance_group": two_groups})).ok()
            wait_workers(server, "simple", 3)
            http.load("simple").ok()
            wait_workers(server, "simple", 2)
            assert server.find_one("scheduler simple").pid == scheduler
        assert not stream.troubles()
        until("all are counted", lambda: successes(http, "simple") == len(stream.answers))


@contextlib.contextmanager
def run_sums_server(
    explicit: Explicit, strategy: str, count: int
) -> Iterator[tuple[Server, Http, Path]]:
    server, repository = explicit
    config = SUMS_CONFIG.replace("STRATEGY", strategy)
    folder = repositories.write(repository, "sums", config, SUMS_MODEL)
    set_count(folder, count)
    with server.http() as http:
        http.load("sums").ok()
        yield server, http, folder


def step(http: Http, s: int, value: int, *, start: bool = False, end: bool = False) -> list[int]:
    """Return the sum of a sequence, and the pid of the worker that computed it."""
    parameters = {"sequence_id": s, "sequence_start": start, "sequence_end": end}
    body = json_request(IN=np.array([[value]], np.int32)) | {"parameters": parameters}
    reply = http.infer("sums", body)
    return [int(number) for number in reply.tensors()["OUT"].flat]


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_an_instance_ends_with_its_last_sequence(empty_server: Explicit, strategy: str) -> None:
    """Its sequences continue there with their state. New sequences begin at other instances."""
    with run_sums_server(empty_server, strategy, 2) as (server, http, folder):
        worker_by_sequence = {s: step(http, s, s, start=True)[1] for s in (1, 2, 3, 4)}
        both_workers = workers(server, "sums")
        assert set(worker_by_sequence.values()) == both_workers
        set_count(folder, 1)
        http.load("sums").ok()
        assert count_of(http, "sums") == 1
        assert workers(server, "sums") == both_workers
        for s, process in worker_by_sequence.items():
            assert step(http, s, 10) == [s + 10, process]
        (remaining_worker,) = both_workers - {server.find_one("worker sums.1").pid}
        for s, process in worker_by_sequence.items():
            assert step(http, s, 10, end=True) == [s + 20, process]
        until("one has ended", lambda: workers(server, "sums") == {remaining_worker})
        assert [step(http, 9, 1, start=True), step(http, 9, 1, end=True)] == [
            [1, remaining_worker],
            [2, remaining_worker],
        ]


def test_a_sequence_that_waits_for_a_slot_gets_one_that_is_added(empty_server: Explicit) -> None:
    with run_sums_server(empty_server, "direct", 1) as (server, http, folder):
        for sequence in (1, 2):
            step(http, sequence, 1, start=True)
        (first_worker,) = workers(server, "sums")
        set_count(folder, 2)
        http.load("sums").ok()
        total, process = step(http, 3, 5, start=True, end=True)
        assert total == 5
        assert process != first_worker
        assert [step(http, sequence, 1, end=True) for sequence in (1, 2)] == [[2, first_worker]] * 2
