"""Text generation while workers and schedulers die: clients see a pause, but the same tokens."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.generation.conftest import add_model, client_of
from tests.support.servers import Server, Start
from tests.support.waiting import until

COMPLETION_REQUEST: dict[str, Any] = {
    "model": "tiny",
    "prompt": "the quick brown",
    "max_tokens": 300,
    "seed": 11,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    add_model(models, "tiny")
    return start(models)


def stream_texts(server: Server, kill: str = "", samples: int = 1) -> dict[int, str]:
    """Return the text of each sample; a process is killed once a part has arrived."""
    texts = dict.fromkeys(range(samples), "")
    with client_of(server) as client:
        for n, e in enumerate(
            client.completions.create(**COMPLETION_REQUEST, n=samples, stream=True)
        ):
            for choice in e.choices:
                texts[choice.index] += choice.text
            if kill and n == 8:
                server.find_one(kill).kill()
    return texts


def complete_texts(server: Server, samples: int = 1, **more: Any) -> list[str]:
    with client_of(server) as client:
        choices = client.completions.create(**{**COMPLETION_REQUEST, "n": samples, **more}).choices
    return [choice.text for choice in choices]


def count_begun(server: Server) -> float:
    """Return the number of sequences that have had a first token, ended ones included."""
    return server.metric("shmserve_llm_time_to_first_token_seconds_count", model="tiny")


@pytest.mark.parametrize("samples", [1, 3])
def test_a_killed_worker_costs_a_pause(server: Server, samples: int) -> None:
    """Includes clients without a response yet, and clients that connect meanwhile."""
    expected = stream_texts(server, samples=samples)
    assert all(expected.values())
    begun_before = count_begun(server)
    with ThreadPoolExecutor(3) as pool:
        other_futures = [pool.submit(complete_texts, server, samples) for _ in range(3)]
        until("they run", lambda: count_begun(server) >= begun_before + 3)
        assert stream_texts(server, "worker tiny", samples) == expected
        for future in other_futures:
            assert future.result() == [*expected.values()]


def stream_logprobs(server: Server, kill: bool = False, **more: Any) -> dict[int, list[Any]]:
    """Return the log probabilities of each sample; the worker is killed once a part has arrived."""
    logprobs: dict[int, list[Any]] = {0: [], 1: []}
    request = {**COMPLETION_REQUEST, "max_tokens": 120, "n": 2, "logprobs": 2, "echo": True, **more}
    with client_of(server) as client:
        answer = client.completions.create(**request)
        for index, chunk in enumerate(answer if more.get("stream") else [answer]):
            for choice in chunk.choices:
                s = choice.logprobs
                columns = (s.tokens, s.token_logprobs, s.top_logprobs, s.text_offset)
                logprobs[choice.index] += zip(*columns, strict=True)
            if kill and index == 8:
                server.find_one("worker tiny").kill()
    return logprobs


def test_a_killed_worker_loses_no_token_and_no_logprob(server: Server) -> None:
    expected = stream_logprobs(server)
    assert [len(entry) for entry in expected.values()] == [127, 127]
    begun_before = count_begun(server)
    with ThreadPoolExecutor(1) as pool:
        other_call = pool.submit(stream_logprobs, server)
        until("it runs", lambda: count_begun(server) > begun_before)
        answers = [stream_logprobs(server, kill=True, stream=True), other_call.result()]
    for samples in answers:
        for index, tokens in samples.items():
            assert [entry[0] for entry in tokens] == [entry[0] for entry in expected[index]]
            assert [entry[3] for entry in tokens] == [entry[3] for entry in expected[index]]
            for (_, score, top, _), (_, value, best, _) in zip(
                tokens[1:], expected[index][1:], strict=True
            ):
                assert score == pytest.approx(value, abs=1e-4)
                assert top.keys() == best.keys()


def test_a_killed_scheduler_costs_a_pause_where_nothing_has_left(server: Server) -> None:
    (text,) = complete_texts(server, max_tokens=300)
    begun_before = count_begun(server)
    with ThreadPoolExecutor(1) as pool:
        other_call = pool.submit(complete_texts, server, max_tokens=300)
        until("it runs", lambda: count_begun(server) > begun_before)
        server.find_one("scheduler tiny").kill()
        assert other_call.result() == [text]


def test_a_killed_scheduler_ends_a_stream_that_has_begun(server: Server) -> None:
    expected = stream_texts(server)
    with pytest.raises(openai.APIError, match="was lost after the request's first response"):
        stream_texts(server, "scheduler tiny")
    assert stream_texts(server) == expected
