"""Ensembles as their users call them: tritonclient, curl's HTTP, a local client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from tests.rigs.pipelines import add_ensemble, add_model, step, tensor
from tests.support.servers import Server, running

LARGE = 300_000  # elements: 1.2 MB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("ensembles") / "models"
    write(repository)
    with running(repository) as started:
        yield started


def write(repository: Path) -> None:
    """Models that compute, and ensembles of them."""
    for name, what in (("add", "+ 1"), ("double", "* 2")):
        one = f'return self.response(Y=self.input(request, "X") {what})'
        add_model(repository, name, one, max_batch_size=4)
    fixed = [tensor("X", dims=[LARGE])], [tensor("Y", dims=[LARGE])]
    one = 'return self.response(Y=self.input(request, "X") + 1)'
    add_model(repository, "fixed", one, *fixed, max_batch_size=2)
    two = [step("add", {"X": "IN"}, {"Y": "mid"}), step("double", {"X": "mid"}, {"Y": "OUT"})]
    add_ensemble(repository, "two", two, max_batch_size=4)
    three = [
        step("fixed", {"X": "IN"}, {"Y": "a"}),
        step("fixed", {"X": "a"}, {"Y": "b"}),
        step("fixed", {"X": "b"}, {"Y": "OUT"}),
    ]
    ends = [tensor("IN", dims=[LARGE])], [tensor("OUT", dims=[LARGE])]
    add_ensemble(repository, "three", three, *ends, max_batch_size=2)


def infer(server: Server, model: str, **inputs: np.ndarray) -> triton.InferResult:
    """What tritonclient gets."""
    client = triton.InferenceServerClient(server.url)
    made = []
    for name, array in inputs.items():
        datatype = triton.np_to_triton_dtype(array.dtype)
        made.append(triton.InferInput(name, array.shape, datatype).set_data_from_numpy(array))
    try:
        return client.infer(model, made)
    finally:
        client.close()


@pytest.mark.parametrize("size", [4, 5000, LARGE])
def test_two_steps_one_after_the_other(server: Server, size: int) -> None:
    """Section 3.7: small tensors travel inside messages, large ones lie where they were written."""
    given = np.arange(2 * size, dtype=np.float32).reshape(2, size)
    assert (infer(server, "two", IN=given).as_numpy("OUT") == (given + 1) * 2).all()


def test_fixed_shapes_lie_in_the_ensembles_own_memory(server: Server) -> None:
    given = np.arange(LARGE, dtype=np.float32)[None]
    for _ in range(100):  # a leak of 3.6 MB each would fill the arena
        assert (infer(server, "three", IN=given).as_numpy("OUT") == given + 3).all()
