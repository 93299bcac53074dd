"""Triton's two worked examples of sequences, step by step, with the controls that the model saw."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import repositories
from tests.support.request_pool import RequestPool, request_pool
from tests.support.sequence_models import CONTROL_INPUTS, IDLE_TIME, instances
from tests.support.servers import Server, Start
from tests.support.wire.raw_http import json_request


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    config = f"{instances(1)} sequence_batching {{ direct {{ }} {IDLE_TIME} {CONTROL_INPUTS} }}"
    repositories.add_as(models, "single", "sequencer", config)
    return start(models, "--exit-timeout-secs=2")


@pytest.fixture
def pool(server: Server) -> Iterator[RequestPool]:
    with request_pool(server) as requests:
        yield requests
        server.gate.release_all()


def test_direct_strategy_with_requests_beside_an_idle_sequence(
    server: Server, pool: RequestPool
) -> None:
    """A lone request in slot 0 is one row; one in slot 1 is preceded by a null row."""

    def controls_of(
        sequence: int, start: bool = False, end: bool = False
    ) -> tuple[list[int], list[int], list[int]]:
        parameters = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
        body = json_request(INPUT0=np.ones((1, 1), np.int32)) | {"parameters": parameters}
        response = pool.infer("single", body)
        visit = server.gate.next()
        visit.release()
        response.result().ok()
        message = visit.message
        return message["START"], message["READY"], message["CORRID"]

    for sequence in (1, 2):  # another test may have begun these sequences
        controls_of(sequence, start=True, end=True)
    assert controls_of(11, start=True) == ([1], [1], [11])
    assert controls_of(12, start=True) == ([0, 1], [0, 1], [0, 12])
    assert controls_of(11) == ([0], [1], [11])
    assert controls_of(12) == ([0, 0], [0, 1], [0, 12])
    controls_of(11, end=True)
    assert controls_of(13, start=True) == ([1], [1], [13])
    controls_of(12, end=True)
    assert controls_of(14, start=True) == ([0, 1], [0, 1], [0, 14])
    for sequence in (13, 14):
        controls_of(sequence, end=True)
