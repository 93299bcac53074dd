"""Shared resources of models: misuse, and the death of a process that holds one."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support import repositories
from tests.support.servers import Server, running
from tests.support.wire.raw_http import json_request

_LIMITED_GROUP = """
instance_group [ { kind: KIND_CPU count: 1
  rate_limiter { resources [ { name: "R" count: 1 } ] } } ]
"""


@pytest.mark.parametrize("victim", ["worker holder.0", "scheduler holder"])
def test_the_holder_of_grants_dies(tmp_path: Path, victim: str) -> None:
    """Its resources are granted to another model at once, and its execution is retried."""
    repository = tmp_path / "models"
    for name in ("holder", "other"):
        config = repositories.add_as(repository, name, "gated") / "config.pbtxt"
        lines = [line for line in config.read_text().splitlines() if "instance_group" not in line]
        config.write_text("\n".join([*lines, _LIMITED_GROUP]))

    def send_request(server: Server, model: str, value: int) -> int:
        with server.http() as http:
            return http.infer(model, json_request(INPUT0=np.full((1, 16), value, np.int32))).status

    with running(repository, "--rate-limit=execution_count") as server:
        gate = server.gate
        with ThreadPoolExecutor(2) as pool:
            holder = pool.submit(send_request, server, "holder", 1)
            holder_visit = gate.next()
            assert holder_visit.message["batch"] == [1]
            other_request = pool.submit(send_request, server, "other", 2)
            server.wait_pending("other", 1)
            server.find_one(victim).kill()
            first_visit = gate.next()
            first_visit.release()
            holder_visit.release()  # after the death of the scheduler alone, the worker still runs
            second_visit = gate.next()
            second_visit.release()
            assert sorted([*first_visit.batch, *second_visit.batch]) == [1, 2]
            assert (holder.result(), other_request.result()) == (200, 200)
        gate.close()
        server.wait_ready()
        for model in ("holder", "other"):
            assert send_request(server, model, 3) == 200
