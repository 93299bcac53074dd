"""Log probabilities over every protocol: of generated tokens, and of prompts for evaluations."""

import json
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc as grpc

from tests.integration.generation.conftest import Oracle
from tests.support.hf_folders import tokenizer_text
from tests.support.servers import Server
from tests.support.wire.triton import infer_inputs

PROMPT = "the naïve 😀 fox"
Scores = Callable[[list[int]], Any]


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_str(tokenizer_text()).encode(PROMPT).ids
    return ids


@pytest.fixture(scope="session")
def scores(oracle: Oracle) -> Scores:
    """Return a function for transformers' log probabilities after each token."""
    import torch

    model = oracle.model  # type: ignore[attr-defined]

    def reference_logprobs(ids: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return reference_logprobs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("top", [0, 3])
def test_a_completion_with_its_prompt(
    client: openai.OpenAI,
    tokens: list[int],
    scores: Scores,
    stream: bool,
    by_tokens: bool,
    max_tokens: int,
    top: int,
) -> None:
    request: Any = {"model": "tiny", "prompt": tokens if by_tokens else PROMPT, "temperature": 0}
    request |= {"echo": True, "logprobs": top, "max_tokens": max_tokens, "n": 2}
    request["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    response: Any = client.completions.create(**request, stream=stream)
    events: Any = response if stream else [response]
    choices = [choice for event in events for choice in event.choices]
    for index in (0, 1):
        parts = [choice for choice in choices if choice.index == index]
        text = "".join(part.text for part in parts)
        ids = [*tokens, *(token for part in parts for token in part.token_ids)]
        logprobs = {
            name: [value for part in parts for value in getattr(part.logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        assert parts[0].prompt_token_ids == tokens and len(ids) == len(tokens) + max_tokens
        assert text.startswith(PROMPT) and (max_tokens or text == PROMPT)
        assert parts[-1].finish_reason == "length"
        assert {len(values) for values in logprobs.values()} == {len(ids)}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        expected = scores(ids)
        for position, token in enumerate(ids[1:], 1):
            logprob, row = logprobs["token_logprobs"][position], expected[position - 1]
            likeliest = logprobs["top_logprobs"][position]
            assert logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert logprob in likeliest.values() and top <= len(likeliest) <= top + 1
            if top:
                assert max(likeliest.values()) == pytest.approx(row.max().item(), abs=1e-4)
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        assert logprobs["text_offset"][len(tokens) :][:1] == [len(PROMPT)][:max_tokens]


def test_an_evaluation_equals_that_of_transformers(
    client: openai.OpenAI, scores: Scores, tokens: list[int]
) -> None:
    """Sends the requests of lm-eval's `local-completions`, and evaluates the responses like it."""
    continuations = [tokens[:4], tokens[2:7], tokens[:1]]
    prompts = [[*tokens, *continuation] for continuation in continuations]
    completion = client.completions.create(
        model="tiny", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    for choice, prompt in zip(completion.choices, prompts, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        part = slice(len(tokens), -1)
        rows = scores(prompt)[len(tokens) - 1 : -1]
        row = rows[range(len(rows)), prompt[len(tokens) :]]
        assert sum(logprobs.token_logprobs[part]) == pytest.approx(row.sum().item(), abs=1e-4)
        likeliest = [max(continuation.values()) for continuation in logprobs.top_logprobs[part]]
        greedy = [
            token_logprob == likeliest_logprob
            for token_logprob, likeliest_logprob in zip(
                logprobs.token_logprobs[part], likeliest, strict=True
            )
        ]
        assert greedy == (rows.argmax(-1) == rows.new_tensor(prompt[len(tokens) :])).tolist()


def test_a_chat_with_the_scores_of_its_prompt(client: openai.OpenAI) -> None:
    request: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "é"}],
        "max_tokens": 4,
    }
    vllm_fields: Any = {"prompt_logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    unary = client.chat.completions.create(**request, seed=1, extra_body=vllm_fields).model_dump()
    assert unary["choices"][0]["logprobs"] is None
    prompt, scored = unary["prompt_token_ids"], unary["prompt_logprobs"]
    assert len(scored) == len(prompt) == unary["usage"]["prompt_tokens"] and scored[0] is None
    for token, scores in zip(prompt[1:], scored[1:], strict=True):
        assert {"logprob", "rank", "decoded_token"} == scores[str(token)].keys()
    assert len(unary["choices"][0]["token_ids"]) == 4
    events = client.chat.completions.create(**request, seed=1, stream=True, extra_body=vllm_fields)
    chunks = [scores.model_dump() for scores in events]
    assert chunks[0]["prompt_token_ids"] == prompt and chunks[0]["prompt_logprobs"] == scored
    streamed_ids = [token for scores in chunks for token in scores["choices"][0]["token_ids"]]
    assert streamed_ids == unary["choices"][0]["token_ids"]


def test_the_bytes_of_a_chat_equal_its_text(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=40, seed=2,
        logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True},
    ).choices[0]  # fmt: skip
    assert choice.logprobs is not None and choice.logprobs.content is not None
    logprobs = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    specials = "<|end|>", "<|user|>", "<|model|>"
    text = logprobs.decode(errors="replace")
    for special in specials:
        text = text.replace(special, "")
    assert text.rstrip("\ufffd") == (choice.message.content or "").rstrip("\ufffd")


def test_options_that_contradict_each_other(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "a"}]
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(model="tiny", messages=messages, top_logprobs=2)
    with pytest.raises(openai.BadRequestError, match="max_tokens: 0 generates nothing"):
        client.completions.create(model="tiny", prompt="a", max_tokens=0)
    with pytest.raises(
        openai.BadRequestError, match="logprobs: a beam search does not return them"
    ):
        client.completions.create(
            model="tiny", prompt="a", n=2, logprobs=1, extra_body={"use_beam_search": True}
        )


def test_generate_and_grpc_score_a_prompt_that_they_repeat(
    generative: Server, tokens: list[int], scores: Scores
) -> None:
    parameters: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
    with generative.http() as http:
        body = {"text_input": PROMPT, **parameters}
        unary = http.post("/v2/models/tiny/generate", body).ok().json()
    inputs = infer_inputs(
        grpc,
        text_input=np.array([PROMPT.encode()], np.object_),
        sampling_parameters=np.array([json.dumps(parameters).encode()], np.object_),
    )
    outputs = [grpc.InferRequestedOutput(name) for name in ("logprobs", "prompt_token_ids")]
    simple_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc.InferenceServerClient(generative.grpc_url) as client:
        client.start_stream(lambda result, error: simple_queue.put(error or result))
        client.async_stream_infer("tiny", inputs, outputs=outputs)
        result = simple_queue.get(timeout=30)
        client.stop_stream()
    assert result.as_numpy("prompt_token_ids").tolist() == tokens
    assert unary["text_output"].startswith(PROMPT)
    expected = scores(tokens)
    for logprobs_text in (unary.get("logprobs"), result.as_numpy("logprobs")[0]):
        if logprobs_text is None:
            continue
        content = json.loads(logprobs_text)["content"]
        assert [entry["token_id"] for entry in content[: len(tokens)]] == tokens
        for index, entry in enumerate(content[1 : len(tokens)], 1):
            logprob = expected[index - 1, tokens[index]].item()
            assert entry["logprob"] == pytest.approx(logprob, abs=1e-4)
