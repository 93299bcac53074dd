"""Generation where workers and schedulers die: a client sees a pause, and the tokens that it would
have had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.generation.conftest import add_model, client_of
from tests.support.servers import Server, running

ASKED: dict[str, Any] = {
    "model": "tiny",
    "prompt": "the quick brown",
    "max_tokens": 60,
    "seed": 11,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of one model, whose processes are killed."""
    repository: Path = tmp_path_factory.mktemp("survival") / "models"
    repository.mkdir()
    add_model(repository, "tiny")
    with running(repository) as started:
        yield started


def streamed(server: Server, kill: str = "", samples: int = 1) -> dict[int, str]:
    """The text of each sample; a process is killed once some of it is here."""
    texts = dict.fromkeys(range(samples), "")
    with client_of(server) as client:
        for place, event in enumerate(client.completions.create(**ASKED, n=samples, stream=True)):
            for choice in event.choices:
                texts[choice.index] += choice.text
            if kill and place == 8:
                server.one(kill).kill()
    return texts


@pytest.mark.parametrize("samples", [1, 3])
def test_a_killed_worker_costs_a_pause(server: Server, samples: int) -> None:
    wanted = streamed(server, samples=samples)
    assert all(wanted.values())
    assert streamed(server, "worker tiny", samples) == wanted
