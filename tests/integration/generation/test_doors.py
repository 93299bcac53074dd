"""Text generation over every protocol: OpenAI, generate, gRPC streams, the native client."""

import json
import math
import queue
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc as grpc

from shmserve import client as native
from tests.integration.generation.conftest import (
    EMBEDDER_CONFIG,
    EMBEDDER_MODEL,
    MODELS,
    Beams,
    Greedy,
    add_model,
    client_of,
)
from tests.support import repositories
from tests.support.hf_folders import write_folder
from tests.support.servers import Server, run_command, running
from tests.support.waiting import until
from tests.support.wire.triton import infer_inputs

PROMPTS = ("the quick brown", "it was", "naïve café", "{'a': 1", "東京", "x")
COUNT = 12


def token_ids(server: Server, model: str, prompt: str, **parameters: Any) -> list[int]:
    """Return the tokens that a model generates, by the native client's iterator."""
    settings = {"max_tokens": COUNT, "temperature": 0, "stream": True, **parameters}
    fields = {
        "text_input": np.array([prompt.encode()], np.object_),
        "sampling_parameters": np.array([json.dumps(settings).encode()], np.object_),
    }
    with native.connect(run_dir=server.run_dir) as client:
        responses = list(client.stream(model, fields, outputs=["token_ids"]))
    return [int(token) for response in responses for token in response["token_ids"]]


@pytest.mark.parametrize(
    ("model", "modes"), [("tiny", []), ("tight", ["swap"]), ("crowded", ["swap", "recompute"])]
)
def test_concurrent_tokens_equal_those_of_transformers(
    generative: Server, greedy: Greedy, model: str, modes: list[str]
) -> None:
    # All prompts together need more blocks than the model "crowded" has, even with those on the
    # host. Their times of arrival determine the modes of a round.
    count = 4 * COUNT

    def has_each_mode() -> bool:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            made = pool.map(lambda p: token_ids(generative, model, p, max_tokens=count), PROMPTS)
        for p, tokens in zip(PROMPTS, made, strict=True):
            assert tokens == greedy(p, count), p
        return all(generative.metric("shmserve_llm_preemption", model=model, mode=m) for m in modes)

    until(f"requests are preempted by {modes}", has_each_mode)


def too_long(server: Server) -> None:
    """Send a request that can never run; it is rejected."""
    with client_of(server) as client, pytest.raises(openai.BadRequestError, match="is 80 tokens"):
        client.completions.create(model="tight", prompt=[5] * 80)


def close_client(server: Server) -> None:
    with client_of(server) as client:
        stream = client.completions.create(**ENDLESS, stream=True)
        next(iter(stream))
        stream.close()


def disconnect_client(server: Server) -> None:
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with socket.create_connection(("127.0.0.1", server.http_port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")


def kill_client(server: Server) -> None:
    code = (
        "import numpy as np, sys; from shmserve import client\n"
        "given = {'text_input': np.array([b'a'], object), 'stream': np.array([True])}\n"
        "with client.connect(run_dir=sys.argv[1]) as connection:\n"
        "    stream = connection.stream('tight', given, parameters={'max_tokens': 60})\n"
        "    for _ in stream: print('.', flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(server.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b".\n"
        program.kill()


ENDLESS: dict[str, Any] = {"model": "tight", "prompt": "a", "max_tokens": 70, "seed": 1}


@pytest.mark.parametrize("crime", [too_long, close_client, disconnect_client, kill_client])
def test_other_clients_faults_change_no_tokens(
    generative: Server, greedy: Greedy, crime: Callable[[Server], None]
) -> None:
    count = 4 * COUNT
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        made = pool.map(lambda p: token_ids(generative, "tight", p, max_tokens=count), PROMPTS)
        crime(generative)
        for p, tokens in zip(PROMPTS, made, strict=True):
            assert tokens == greedy(p, count), p
    until(
        "nothing is left",
        lambda: (
            not generative.metric("shmserve_llm_requests_running", model="tight")
            and not generative.metric("shmserve_llm_kv_blocks", model="tight", state="used")
        ),
    )


def test_a_stream_contains_the_whole_text(client: openai.OpenAI) -> None:
    request: Any = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    unary = client.completions.create(**request)
    events = list(
        client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(event.choices[0].text for event in events[:-1]) == unary.choices[0].text
    assert events[-2].choices[0].finish_reason == unary.choices[0].finish_reason == "length"
    assert events[-1].choices == [] and events[-1].usage == unary.usage
    assert unary.usage is not None and unary.usage.completion_tokens == 24


def test_a_chat_has_roles_and_ends(client: openai.OpenAI) -> None:
    request: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "seed": 5,
    }
    unary = client.chat.completions.create(**request)
    assert unary.choices[0].message.role == "assistant"
    events = list(client.chat.completions.create(**request, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == unary.choices[0].message.content
    assert events[-1].choices[0].finish_reason == unary.choices[0].finish_reason


def test_several_prompts_are_streamed_concurrently(client: openai.OpenAI) -> None:
    request: Any = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 60, "temperature": 0}
    unary = client.completions.create(**request, extra_body={"ignore_eos": True})
    texts = {0: "", 1: ""}
    records: list[int] = []
    for event in client.completions.create(**request, stream=True, extra_body={"ignore_eos": True}):
        texts[event.choices[0].index] += event.choices[0].text
        records.append(event.choices[0].index)
    assert [*texts.values()] == [choice.text for choice in unary.choices]
    assert records != sorted(records)


def test_generate_and_its_stream(generative: Server, greedy: Greedy) -> None:
    body = {"text_input": PROMPTS[1], "max_tokens": COUNT, "temperature": 0}
    with generative.http() as http:
        unary = http.post("/v2/models/tiny/generate", body).ok().json()
        bare = http.post("/v2/models/tiny/generate", {**body, "exclude_input_in_output": True}).ok()
        events = http.post("/v2/models/tiny/generate_stream", {**body, "stream": True}).ok()
    assert unary["text_output"] == PROMPTS[1] + bare.json()["text_output"]
    lines = events.body.decode().split("\n\n")
    pieces = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines if line]
    assert "".join(pieces) == bare.json()["text_output"]
    assert len(pieces) > 1


def test_a_stream_of_grpc(generative: Server, greedy: Greedy) -> None:
    text = np.array([PROMPTS[0].encode()], np.object_)
    inputs = infer_inputs(grpc, text_input=text, stream=np.array([True]))
    simple_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    tokens: list[int] = []
    with grpc.InferenceServerClient(generative.grpc_url) as client:
        client.start_stream(lambda result, error: simple_queue.put(error or result))
        client.async_stream_infer(
            "tiny",
            inputs,
            outputs=[
                grpc.InferRequestedOutput("token_ids"),
                grpc.InferRequestedOutput("finish_reason"),
            ],
            parameters={"max_tokens": COUNT, "temperature": "0"},
        )
        while True:
            result = simple_queue.get(timeout=30)
            tokens += result.as_numpy("token_ids").tolist()
            if result.as_numpy("finish_reason")[0]:
                break
        client.stop_stream()
    assert tokens == greedy(PROMPTS[0], COUNT)


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["a", "bcd", "e", "fg", "h", "ijklm"]
    embeddings = client.embeddings.create(model="embedder", input=texts)
    assert [row.embedding for row in embeddings.data] == [[len(t), ord(t[0])] for t in texts]
    float_answer = client.embeddings.create(model="embedder", input="xyz", encoding_format="float")
    assert float_answer.data[0].embedding == [3, ord("x")]
    client.embeddings.create(model="embedder", input="xyz", dimensions=2)
    with pytest.raises(openai.BadRequestError, match="dimensions: 1 is not 2, the size of the vec"):
        client.embeddings.create(model="embedder", input="xyz", dimensions=1)


def test_the_models_that_can_be_asked(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="GET /v1/models lists the models"):
        client.completions.create(model="gpt-4o", prompt="x")
    listed = {model.id: model for model in client.models.list()}
    assert listed.keys() == {*MODELS, "embedder", "gpt-tiny", "org/tiny"}
    extra_fields = [listed[name].model_extra or {} for name in ("tiny", "org/tiny", "embedder")]
    assert [card["root"] for card in extra_fields] == ["tiny", "tiny", "embedder"]
    assert [bool(card["max_model_len"]) for card in extra_fields] == [True, True, False]
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    completion = client.completions.create(model="gpt-tiny", prompt="a", max_tokens=1)
    assert completion.model == "tiny"
    assert client.models.retrieve("tiny").owned_by == "shmserve"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("prompt", [*PROMPTS, "", "  two spaces"])
def test_tokenize_and_detokenize_equal_transformers(
    generative: Server, tokenizer: Any, prompt: str, special: bool
) -> None:
    body = {"model": "gpt-tiny", "prompt": prompt, "add_special_tokens": special}
    ids = tokenizer(prompt, add_special_tokens=special).input_ids
    with generative.http() as http:
        tokenized = http.post("/tokenize", {**body, "return_token_strs": True}).ok().json()
        text = http.post("/detokenize", {"model": "tiny", "tokens": ids}).ok().json()
        large_body = {"model": "tiny", "tokens": ids, "user": "x" * 600_000}  # parsed in a process
        assert http.post("/detokenize", large_body).ok().json() == text
    assert (tokenized["tokens"], tokenized["count"]) == (ids, len(ids))
    assert tokenized["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert tokenized["max_model_len"] > 1
    assert text == {"prompt": tokenizer.decode(ids)}


def test_the_tokens_of_a_chat(generative: Server, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for generation in (True, False):
        body = {"model": "tiny", "messages": messages, "add_generation_prompt": generation}
        with generative.http() as http:
            tokenized = http.post("/tokenize", body).ok().json()
            counted_body = {"model": "tiny", "input": "Hi"}
            counted = http.post("/v1/responses/input_tokens", counted_body).ok().json()
        if generation:
            count = len(tokenized["tokens"])
            assert counted == {"object": "response.input_tokens", "input_tokens": count}
        kind = {"tokenize": True, "return_dict": False, "add_generation_prompt": generation}
        assert tokenized["tokens"] == tokenizer.apply_chat_template(messages, **kind)
        assert tokenized["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": "a"}, 400, "model"),  # required, because several models are loaded
        ("/tokenize", {"model": "nobody", "prompt": "a"}, 404, None),
        ("/tokenize", {"model": "embedder", "prompt": "a"}, 404, None),
        ("/tokenize", {"model": "tiny"}, 400, "prompt"),
        ("/tokenize", {"model": "tiny", "prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"model": "tiny", "prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"model": "tiny", "messages": []}, 400, "messages"),
        ("/tokenize", {"model": "tiny", "prompt": "a", "add_special_tokens": 1}, 400,
         "add_special_tokens"),
        ("/v1/responses/input_tokens", {"model": "tiny"}, 400, "input"),
        ("/detokenize", {"model": "tiny"}, 400, "tokens"),
        ("/detokenize", {"model": "tiny", "tokens": ["a"]}, 400, "tokens"),
        ("/detokenize", {"model": "tiny", "tokens": [5, 9999]}, 400, "tokens"),
        ("/detokenize", {"model": "tiny", "tokens": [1 << 40]}, 400, "tokens[0]"),
        ("/detokenize", {"model": "tiny", "tokens": [-1]}, 400, "tokens"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_converted_are_refused(
    generative: Server, path: str, body: Any, status: int, param: str | None
) -> None:
    with generative.http() as http:
        reply = http.post(path, body)
    assert (reply.status, reply.json()["error"]["param"]) == (status, param)
    assert reply.headers["x-request-id"].startswith("req_")


def test_models_on_demand_have_their_names_before_they_are_loaded(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "asleep", "aliases: [night]\n")
    repositories.write(tmp_path / "models", "embedder", EMBEDDER_CONFIG, EMBEDDER_MODEL)
    flags = ("--load-on-demand", "--served-model-name=first")
    with running(tmp_path / "models", *flags) as server, client_of(server) as client:

        def list_models() -> dict[str, Any]:
            models = client.models.list()
            return {model.id: (model.model_extra or {})["max_model_len"] for model in models}

        assert list_models() == dict.fromkeys(("first", "asleep", "night"))
        assert client.models.retrieve("night").id == "night"
        # Retrieving a model does not load it.
        assert list_models() == dict.fromkeys(("first", "asleep", "night"))
        completion = client.completions.create(model="night", prompt="a", max_tokens=1)
        assert completion.model == "first"
        assert all(list_models().values())
        with server.http() as http:
            assert http.post("/tokenize", {"prompt": "ab"}).ok().json()["count"]


BAD_FIELDS = {
    "no body": ([], 400, None, "a JSON object"),
    "no JSON": (b"{", 400, None, "failed to parse"),
    "no text": (b'{"model": "tiny", "prompt": "\\ud800"}', 400, None, "no low surrogate"),
    "a schema": ({"model": "tiny", "prompt": "a", "json_schema": {"type": 3}},
        *(400, "json_schema", "cannot be compiled")),
    "a schema by vLLM's name": ({"model": "tiny", "prompt": "a", "guided_json": {"type": 3}},
        *(400, "guided_json", "cannot be compiled")),
    "no number": (b'{"model": "tiny", "prompt": "a", "top_p": NaN}', 400, "top_p", "nan"),
    "no model": ({"prompt": "a"}, 400, "model", "required"),
    "another model": ({"model": "nobody", "prompt": "a"}, 404, None, "nobody"),
    "no generator": ({"model": "embedder", "prompt": "a"}, 404, None, "does not generate"),
    "no prompt": ({"model": "tiny"}, 400, "prompt", "is not a string"),
    "a number": ({"model": "tiny", "prompt": 5}, 400, "prompt", "5 is not a string"),
    "an empty prompt": ({"model": "tiny", "prompt": ""}, 400, "prompt", "empty"),
    "a long prompt": ({"model": "tiny", "prompt": [5] * 600}, 400, "prompt", "600 tokens"),
    "a wrong token": ({"model": "tiny", "prompt": [5, 9999]}, 400, "prompt", "9999"),
    "temperature": ({"model": "tiny", "prompt": "a", "temperature": -1}, 400, "temperature", "-1"),
    "top_p": ({"model": "tiny", "prompt": "a", "top_p": "x"}, 400, "top_p", "'x'"),
    "n": ({"model": "tiny", "prompt": "a", "n": 1000}, 400, "n", "1000"),
    "stream": ({"model": "tiny", "prompt": "a", "stream": 1}, 400, "stream", "true or false"),
    "stop": ({"model": "tiny", "prompt": "a", "stop": [1]}, 400, "stop", "a string or a list"),
    "a stream's option": ({"model": "tiny", "prompt": "a", "stream": True,
        "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage", "true or"),
    "options of no stream": ({"model": "tiny", "prompt": "a",
        "stream_options": {"include_usage": True}}, 400, "stream_options", "if stream is true"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FIELDS, ids=str)
def test_errors_name_the_field(generative: Server, case: str) -> None:
    body, status, param, text = BAD_FIELDS[case]
    with generative.http() as http:
        reply = http.post("/v1/completions", body)
    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (status, param), error
    assert text in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_the_best_samples_are_the_likeliest(client: openai.OpenAI) -> None:
    request: Any = {"model": "tiny", "prompt": "a", "max_tokens": 6, "seed": 3, "logprobs": 0}

    def likelihood(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return sum(values) / len(values)

    full_answer = client.completions.create(**request, n=9)
    best_answer = client.completions.create(**request, n=2, best_of=9)
    ranked = sorted(full_answer.choices, key=likelihood, reverse=True)
    assert [entry.text for entry in best_answer.choices] == [entry.text for entry in ranked[:2]]
    assert [entry.index for entry in best_answer.choices] == [0, 1]
    assert best_answer.usage == full_answer.usage


def test_a_full_queue_reports_when_to_retry(generative: Server) -> None:
    body = {"model": "narrow", "prompt": "a", "max_tokens": 60, "ignore_eos": True}

    def send_request(_: int) -> tuple[int, str | None]:
        with generative.http() as http:
            reply = http.post("/v1/completions", body)
            return reply.status, reply.headers.get("Retry-After")

    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(send_request, range(6)))
    with generative.http() as http:
        large_reply = http.post("/v1/completions", {**body, "prompt": ["a"] * 6})
    assert large_reply.status == 400  # not 429, because a retry cannot succeed
    assert "6 prompts are more than the 2" in large_reply.json()["error"]["message"]
    pauses = [s for status, s in replies if status == 429]
    assert pauses and all(s is not None and int(s) >= 1 for s in pauses)
    assert {status for status, _ in replies} == {200, 429}


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_beam_search_equals_transformers(client: openai.OpenAI, beams: Beams, prompt: str) -> None:
    completion = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=COUNT, n=3, extra_body={"use_beam_search": True}
    )
    assert [choice.text for choice in completion.choices] == beams(prompt, COUNT, 3)


@pytest.mark.parametrize("model", ["guessing", "drafting"])
def test_speculation_changes_no_token(generative: Server, greedy: Greedy, model: str) -> None:
    for prompt in PROMPTS[:3]:  # long enough to repeat some tokens
        assert token_ids(generative, model, prompt, max_tokens=60) == greedy(prompt, 60)
    seeded = {"temperature": 0.9, "seed": 4, "ignore_eos": True, "max_tokens": 40}
    first, second = (token_ids(generative, model, PROMPTS[0], **seeded) for _ in range(2))
    assert first == second
    assert generative.metric("shmserve_llm_speculative_drafted", model=model)


def test_metrics_count_generated_tokens(generative: Server) -> None:
    name = "shmserve_llm_"
    generated_before = generative.metric(f"{name}tokens_generated", model="tiny")
    tokens = token_ids(generative, "tiny", PROMPTS[0], ignore_eos=True)
    until(  # a response may arrive before its step is counted
        f"{len(tokens)} tokens are counted",
        lambda: (
            generative.metric(f"{name}tokens_generated", model="tiny") - generated_before
            >= len(tokens)
        ),
    )
    forward = generative.metric(f"{name}step_seconds", model="tiny", phase="forward")
    iterations = generative.metric(f"{name}iteration_latency_seconds_sum", model="tiny")
    assert 0 < forward < iterations
    assert generative.metric(f"{name}time_to_first_token_seconds_count", model="tiny")
    states = {labels["state"] for labels, _ in generative.samples(f"{name}kv_blocks")}
    assert states == {"free", "cached", "used", "host"}


def post_body(server: Server, path: str, body: str) -> tuple[int, Any]:
    with server.http() as http:
        response = http.post(path, json.loads(body))
    return response.status, response.json()


@pytest.mark.parametrize("kind", ["text", "tokens", "texts", "chat", "generate"])
def test_a_large_truncated_prompt_gives_its_last_tokens(generative: Server, kind: str) -> None:
    settings = {"max_tokens": 6, "temperature": 0, "truncate_prompt_tokens": 7, "ignore_eos": True}

    def generate_from_end(times: int) -> Any:
        text = "it was the best of times " * times
        prompts = {"text": text, "tokens": [5, 6, 7, 8] * times, "texts": ["it was the", text]}
        body: dict[str, Any] = {"model": "tiny", **settings}
        if kind == "generate":
            path, body = "/v2/models/tiny/generate", {"text_input": text, **settings}
        elif kind == "chat":
            path = "/v1/chat/completions"
            body |= {"messages": [{"role": "user", "content": text}], "tools": []}
        else:
            path, body["prompt"] = "/v1/completions", prompts[kind]
        status, answer = post_body(generative, path, json.dumps(body))
        assert status == 200, answer
        return answer["text_output"] if kind == "generate" else answer["choices"]

    small_tokens = generate_from_end(100)
    assert small_tokens
    assert generate_from_end(500_000 if kind == "tokens" else 50_000) == small_tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "%"}, {"content": "a"}]},
        ),
        ("/v1/completions", {"prompt": ["%", 5]}),
        ("/v1/completions", {"model": "unknown", "prompt": "%"}),
        ("/v1/completions", {"prompt": "%", "temperature": "hot", "suffix": "a"}),
        ("/v1/completions", {"prompt": "%", "n": 0}),
        ("/v1/embeddings", {"model": "embedder", "input": ["%", None]}),
        ("/v1/embeddings", {"model": "embedder", "input": "%", "encoding_format": "x"}),
        ("/tokenize", {"prompt": "%", "messages": []}),
        ("/v1/responses", {"input": "a", "include": ["%"]}),
        ("/v1/responses", {"input": "a", "stream": "%"}),
        ("/v2/models/tiny/generate", {"text_input": ["%", "b"]}),
        ("/v2/models/tiny/generate", {"input_ids": "%"}),
    ],
)
def test_large_and_small_bodies_have_the_same_errors(
    generative: Server, path: str, body: dict[str, Any]
) -> None:
    model_body = {"model": "tiny", "truncate_prompt_tokens": 5, **body}
    if path.startswith("/v2"):
        del model_body["model"]
    if path in ("/v1/embeddings", "/v1/responses"):  # routes without this field
        del model_body["truncate_prompt_tokens"]
    text = json.dumps(model_body)
    pair = [post_body(generative, path, text.replace("%", "a" * size)) for size in (100, 2_000_000)]
    assert pair[0][0] >= 400 and pair[0] == pair[1]


@pytest.mark.parametrize("chat", [False, True])
def test_large_fields_have_the_effect_of_small_ones(generative: Server, chat: bool) -> None:
    schema = {"const": 57, "description": "a" * 600_000}
    body = {"model": "tiny", "metadata": [{}] * 70_000, "extra": math.nan, "max_tokens": 9}
    body |= {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    prompt = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, answer = post_body(generative, path, json.dumps({**body, **prompt}))
    assert (status, answer["error"]["param"]) == (400, "extra")
    del body["extra"]
    status, answer = post_body(generative, path, json.dumps({**body, **prompt}))
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert (choice["message"]["content"] if chat else choice["text"]) == "57"
    status, answer = post_body(generative, path, json.dumps({**body, **prompt, "n": [0] * 70_000}))
    assert (status, answer["error"]["param"]) == (400, "n")


def test_large_fields_of_responses_have_the_effect_of_small_ones(generative: Server) -> None:
    schema = {"const": 57, "description": "a" * 600_000}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    body = {"model": "tiny", "input": "a", "text": text, "max_output_tokens": 9}
    for fields in ({}, {"input": [{"role": "user", "content": "a"}, {"type": "item_reference"}]}):
        status, answer = post_body(generative, "/v1/responses", json.dumps({**body, **fields}))
        if fields:
            assert (status, answer["error"]["param"]) == (400, "input[1]")
        else:
            assert answer["output"][0]["content"][0]["text"] == "57"
            assert answer["text"] == text


def test_large_texts_are_embedded(generative: Server) -> None:
    body = {"model": "embedder", "input": ["é" * 600_000, "a"]}
    status, answer = post_body(generative, "/v1/embeddings", json.dumps(body, ensure_ascii=False))
    assert status == 200
    assert [item["embedding"] for item in answer["data"]] == [[1_200_000, 195], [1, 97]]


def test_check_sends_a_prompt(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny" / "1")
    completed = run_command("check", str(tmp_path))
    assert completed.returncode == 0, completed.stdout
