"""Autoscaling: instances follow the load within their bounds, and no request is lost."""

import threading
import time
from pathlib import Path

import numpy as np

from shmserve.client.events import EventReader
from shmserve.ipc.messages import publications as m
from tests.support import repositories
from tests.support.servers import Server, running
from tests.support.waiting import until
from tests.support.wire.raw_http import json_request

MODEL = repositories.python_model("""
    def execute(self, requests):
        time.sleep(0.05 * len(requests))
        return [self.response(OUT=self.input(each, "IN")) for each in requests]
""")
CONFIG = """\
name: "slow" backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
parameters { key: "max_instances" value { string_value: "3" } }
parameters { key: "target_p99_ms" value { string_value: "400" } }
"""
BASE_RATE = 10.0


class Clients:
    """Open-loop load, whose responses are verified."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._threads: list[threading.Thread] = []
        self.answers: list[str] = []

    def send(self, rate: float, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            t = threading.Thread(target=self._send_request, args=(len(self._threads),), name="asks")
            self._threads.append(t)
            t.start()
            time.sleep(1 / rate)

    def _send_request(self, number: int) -> None:
        with self._server.http() as http:
            reply = http.infer("slow", json_request(IN=np.array([number], np.int32)))
        is_right = reply.status == 200 and reply.tensors()["OUT"].tolist() == [number]
        self.answers.append("" if is_right else f"{reply.status}: {reply.body!r}")

    def end(self) -> None:
        for thread in self._threads:
            thread.join()
        assert self.answers == [""] * len(self._threads)


def count(server: Server) -> int:
    """Return the number of instances that accept requests."""
    states = ("idle", "busy")
    return int(sum(server.metric("shmserve_instances", model="slow", state=s) for s in states))


def changes(reader: EventReader) -> list[tuple[int, int]]:
    """Return the changes of the number of instances until it is one again."""
    responses: list[tuple[int, int]] = []
    for received_entry in reader.follow():
        if isinstance(received_entry.event, m.InstancesChanged):
            responses.append((received_entry.event.before, received_entry.event.count))
            if received_entry.event.count == 1:
                break
    return responses


def test_instances_follow_the_load(tmp_path: Path) -> None:
    """All reports agree, and the shown configuration is the written one."""
    repositories.write(tmp_path / "models", "slow", CONFIG, MODEL)
    with running(tmp_path / "models") as server, EventReader(server.run_dir, ["models"]) as reader:
        reader.snapshot()
        clients = Clients(server)
        clients.send(BASE_RATE, 2)
        clients.send(4 * BASE_RATE, 4)
        clients.end()
        until("they are spared", lambda: count(server) == 1, 90)
        changes_seen = changes(reader)
        max_count = max(count_after for _, count_after in changes_seen)
        assert 2 <= max_count <= 3
        expected_rises = [(n, n + 1) for n in range(1, max_count)]
        assert changes_seen == expected_rises + [
            (count_after, count_before) for count_before, count_after in reversed(expected_rises)
        ]
        for change in ("more", "fewer"):
            name = "shmserve_instance_changes"
            assert server.metric(name, model="slow", change=change) == max_count - 1
        assert server.log().count(" instances (before: ") == len(changes_seen)
        assert "model 'slow' has 2 instances (before: 1): requests wait " in server.log()
        with server.http() as http:
            (group,) = http.config("slow")["instance_group"]
        assert group["count"] == 1
