"""Concurrent loads and unloads of one model: each receives its own result."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support import repositories
from tests.support.servers import Server
from tests.support.waiting import until

Explicit = tuple[Server, Path]

THREADS = 16
ROUND_COUNT = int(os.environ.get("ORDER_ROUNDS", "4"))  # number of loads and unloads by each thread
# The errors of a load that an unload has interrupted, in Triton's words.
TEXTS = re.compile(
    "failed to load 'constant', no version is available"
    "|failed to poll from model repository"
    "|unexpected miss in global map"
)


def test_load_against_unload(empty_server: Explicit) -> None:
    """Unloads return no error, and the last order determines the final state."""
    server, repository = empty_server
    repositories.add(repository, "constant")

    def orders(number: int) -> list[tuple[str, int, str]]:
        outcomes = []
        with server.http() as http:
            for turn in range(ROUND_COUNT):
                for verb in ("load", "unload")[:: 1 if (number + turn) % 2 else -1]:
                    reply = http.post(f"/v2/repository/models/constant/{verb}")
                    text = "" if reply.status == 200 else reply.error
                    outcomes.append((verb, reply.status, text))
        return outcomes

    with ThreadPoolExecutor(THREADS) as threads:
        outcomes = [o for found in threads.map(orders, range(THREADS)) for o in found]
    assert len(outcomes) == 2 * THREADS * ROUND_COUNT
    failed_orders = [(verb, text) for verb, status, text in outcomes if status != 200]
    assert {verb for verb, _ in failed_orders} <= {"load"}
    assert not [text for _, text in failed_orders if not TEXTS.fullmatch(text)]
    with server.http() as http:
        http.load("constant").ok()
        until("one is left", lambda: len(server.find("worker constant")) == 1)
        assert http.get("/v2/models/constant/ready").status == 200
