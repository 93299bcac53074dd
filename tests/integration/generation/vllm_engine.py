"""The backend `vllm` with vLLM itself, compared with vLLM's own server: `make test-vllm`.

The file name excludes it from the other tests, which run without vLLM. A start takes minutes.
"""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.support.hf_folders import tokenizer_text, write_folder
from tests.support.servers import Server, hold_ports, port_of
from tests.support.waiting import until

START_S = 600.0
FRESH_S = 1.0  # metrics are reported twice a second
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "override_generation_config": {"max_new_tokens": 490},
    "max_num_seqs": 64,
    "enable_lora": True,
    "max_lora_rank": 8,
    "scheduling_policy": "priority",
    "reasoning_parser": "qwen3",
    "tool_call_parser": "hermes",
}
WIDTH, RANK, LAYERS = 128, 4, 2
LONG_REQUEST: Any = {"model": "tiny", "prompt": "the", "max_tokens": 480, "ignore_eos": True}
THINK_TOKEN = 319  # the number of the token </think>
PROMPTS = ("the quick", "it was", "naïve café", "1 2 3", "東京", "fox")
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "stream": True},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 40, "stop": ["the"]},
)


def post(port: int, path: str, body: dict[str, Any]) -> str:
    """Return the body of a response with status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    raw = response.read().decode()
    connection.close()
    assert response.status == 200, raw
    return raw


def complete(port: int, prompt: str = "the", **fields: Any) -> str:
    return post(port, "/v1/completions", {"model": "tiny", "prompt": prompt, **fields})


def text_of(port: int, chat: bool, prompt: str, kind: dict[str, Any]) -> tuple[str, str]:
    body = {"model": "tiny", "max_tokens": 40, **kind}
    messages = [{"role": "user", "content": prompt}]
    path = "/v1/chat/completions" if chat else "/v1/completions"
    raw = post(port, path, body | ({"messages": messages} if chat else {"prompt": prompt}))
    parts = [raw]
    if kind.get("stream"):
        parts = [line[6:] for line in raw.splitlines() if line.startswith("data: {")]
    text, reason = "", ""
    for part in parts:
        for choice in json.loads(part)["choices"]:
            message = (
                choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            )
            text += f"{message.get('reasoning') or ''}{message.get('content') or ''}"
            reason = choice["finish_reason"] or reason
    return text, reason


def write_model(folder: Path) -> None:
    """Write a model whose vocabulary has the tags of reasoning, and an adapter for it."""
    write_folder(folder / "weights", hidden_size=WIDTH, head_dim=WIDTH // 4)
    tokenizer = Tokenizer.from_str(tokenizer_text(318))
    tokenizer.add_special_tokens(["<think>", "</think>"])
    assert tokenizer.token_to_id("</think>") == THINK_TOKEN
    (folder / "weights" / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "adapter").mkdir()
    generator = torch.Generator().manual_seed(1)
    adapter_weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{name}.weight": torch.randn(
            shape, generator=generator
        )
        for layer in range(LAYERS)
        for name, shape in (("A", (RANK, WIDTH)), ("B", (WIDTH, RANK)))
    }
    save_file(adapter_weights, folder / "adapter" / "adapter_model.safetensors")
    lora = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({**lora, "bias": "none"}))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository for Triton's vllm_backend with a tiny model."""
    folder = tmp_path_factory.mktemp("models")
    version = folder / "tiny" / "1"
    write_model(version)
    settings = {**ARGUMENTS, "model": "weights", "enable_lora": "true"}
    (version / "model.json").write_text(json.dumps(settings))
    (version / "multi_lora.json").write_text(json.dumps({"french": str(version / "adapter")}))
    return folder


@contextlib.contextmanager
def serving(repository: Path) -> Iterator[Server]:
    environment = {"TMPDIR": str(repository.parent)}  # torch keeps a cache in this folder
    with Server([repository], ["--load-timeout-secs=600"], environment=environment) as own_server:
        own_server.wait_ready(within_s=START_S)
        yield own_server


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with serving(repository) as own_server:
        yield own_server


@pytest.fixture(scope="module")
def vllm_port(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("peer")
    write_model(folder)
    (port_socket,) = hold_ports(1)
    port = port_of(port_socket)
    flags = [f"--{name.replace('_', '-')}" for name in ARGUMENTS]
    texts = [value if isinstance(value, str) else json.dumps(value) for value in ARGUMENTS.values()]
    values = [[] if text == "true" else [text] for text in texts]
    process = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(folder / "weights")),
            *("--enable-auto-tool-choice", "--lora-modules", f"french={folder / 'adapter'}"),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
            *(word for flag, value in zip(flags, values, strict=True) for word in [flag, *value]),
        ]
    )

    def answers() -> bool:
        assert process.poll() is None
        try:
            return bool(complete(port, max_tokens=1))
        except OSError:
            return False

    try:
        until("vLLM's server answers", answers, START_S)
        yield port
    finally:
        process.terminate()
        process.wait(60)
        port_socket.close()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=["whole", "stream", "sampled"])
def test_texts_equal_those_of_vllms_server(
    server: Server, vllm_port: int, kind: dict[str, Any], chat: bool
) -> None:
    for prompt in PROMPTS:
        arguments = chat, prompt, kind
        assert text_of(server.http_port, *arguments) == text_of(vllm_port, *arguments)


def test_the_arguments_limit_all_requests(server: Server, vllm_port: int) -> None:
    for port in (vllm_port, server.http_port):
        response = complete(port, max_tokens=505, ignore_eos=True, temperature=0)
        assert json.loads(response)["usage"]["completion_tokens"] == 490


LONG_MESSAGES = [{"role": "user", "content": "some words " * 600}]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("completions", {"prompt": "a " * 999}, "prompt"),
        ("chat/completions", {"messages": LONG_MESSAGES}, "messages"),
        ("responses", {"input": "some words " * 600}, "input"),
        ("completions", {"prompt": "a", "n": 0}, "n"),
        ("completions", {"prompt": "a", "min_p": 2}, "min_p"),
        ("completions", {"prompt": "a", "lora_name": ["french"]}, None),
    ],
)
def test_errors_name_the_field(
    server: Server, path: str, fields: dict[str, Any], name: str | None
) -> None:
    status, answer = post_json(server.http_port, f"/v1/{path}", {"model": "tiny", **fields})
    assert (status, answer["error"]["param"]) == (400 if name else 404, name), answer


def test_tokens_of_reasoning_are_counted_as_by_vllm(server: Server, vllm_port: int) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "hi"}]
    counts = [
        json.loads(post(port, "/v1/chat/completions", body))["usage"]["completion_tokens_details"]
        for port in (server.http_port, vllm_port)
    ]
    assert counts[0] == counts[1]
    assert counts[0]["reasoning_tokens"] > 0


def test_log_probabilities_of_a_repeated_prompt(server: Server, vllm_port: int) -> None:
    request: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 5, "temperature": 0}
    own, peer = (
        json.loads(complete(port, **request))["choices"][0]
        for port in (server.http_port, vllm_port)
    )
    assert own["text"] == peer["text"]
    for name in ("tokens", "text_offset"):
        assert own["logprobs"][name] == peer["logprobs"][name]
    pairs = zip(own["logprobs"]["token_logprobs"], peer["logprobs"]["token_logprobs"], strict=True)
    assert all(
        logprob == vllm_logprob or logprob == pytest.approx(vllm_logprob, abs=1e-4)
        for logprob, vllm_logprob in pairs
    )


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_are_called_as_by_vllm_s_server(server: Server, vllm_port: int, choice: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": choice,
        "max_tokens": 100,
        "temperature": 0,
    }
    answers = []
    for port in (server.http_port, vllm_port):
        chosen = json.loads(post(port, "/v1/chat/completions", body))["choices"][0]
        message = chosen["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        answers.append((calls, message.get("content") or "", chosen["finish_reason"]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tool_choice": "auto"}])
def test_responses_equal_vllms(server: Server, vllm_port: int, fields: dict[str, Any]) -> None:
    found_responses = []
    for port in (server.http_port, vllm_port):
        body = {"model": "tiny", "input": "hi", "temperature": 0, "max_output_tokens": 20}
        response = json.loads(post(port, "/v1/responses", {**body, **fields}))
        texts = [part["text"] for item in response["output"] for part in item["content"]]
        found_responses.append((texts, response["status"], response["usage"]["output_tokens"]))
    assert found_responses[0] == found_responses[1]


def test_200_concurrent_requests(server: Server) -> None:
    with ThreadPoolExecutor(200) as pool:
        request = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}
        bodies = list(pool.map(lambda n: complete(server.http_port, f"{n}", **request), range(200)))
    assert all(body.count('"finish_reason":"length"') == 1 for body in bodies)


def test_requests_of_clients_that_disconnect_are_aborted(server: Server) -> None:
    body, generated_before = {**LONG_REQUEST, "stream": True}, count_generated(server)
    connections = []
    for _ in range(20):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port)
        connection.request("POST", "/v1/completions", json.dumps(body))
        connections.append(connection)
    for connection in connections:
        connection.getresponse().read(100)
        connection.close()
    assert is_aborted(server, generated_before, 20 * LONG_REQUEST["max_tokens"])


def gauge(server: Server, begin: str) -> list[float]:
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics_port)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(begin)]


def post_json(port: int, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def count_generated(server: Server) -> float:
    """Return the number of tokens that the engine has generated so far."""
    time.sleep(FRESH_S)
    return sum(gauge(server, "vllm:generation_tokens_total{"))


def is_aborted(server: Server, generated_before: float, max_tokens: int) -> bool:
    """Return whether the engine stops before it has generated `max_tokens` further tokens."""
    time.sleep(FRESH_S)
    running_gauge = "vllm:num_requests_running{"
    until("nothing runs", lambda: gauge(server, running_gauge) == [0.0])
    return count_generated(server) < generated_before + max_tokens


def test_an_adapter_is_selected_by_name(server: Server, vllm_port: int) -> None:
    request: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
    base_text, adapter_text = (
        json.loads(complete(server.http_port, **request, **adapter_fields))["choices"][0]["text"]
        for adapter_fields in ({}, {"lora_name": "french"})
    )
    vllm_text = json.loads(complete(vllm_port, **request, model="french"))["choices"][0]["text"]
    assert adapter_text == vllm_text != base_text
    completion = json.loads(complete(server.http_port, **request, model="french"))
    assert (completion["choices"][0]["text"], completion["model"]) == (adapter_text, "french")
    code, answer = post_json(
        server.http_port, "/v1/completions", {"model": "tiny", "prompt": "a", "lora_name": "x"}
    )
    assert code == 404
    assert "there is no adapter 'x'" in answer["error"]["message"]
    body = {"text_input": "the", "exclude_input_in_output": True}
    sampled = json.dumps({"lora_name": "french", **request})
    code, answer = post_json(
        server.http_port, "/v2/models/tiny/generate", {**body, "sampling_parameters": sampled}
    )
    assert (code, answer["text_output"]) == (200, adapter_text)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_split_as_by_vllm(server: Server, vllm_port: int, stream: bool) -> None:
    """An end tag that completes incomplete characters is content, as in vLLM's parser."""
    messages_by_server = []
    for port in (server.http_port, vllm_port):
        messages = []
        for seed in range(5):
            body = {
                "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60,
                "seed": seed, "logit_bias": {str(THINK_TOKEN): 6.0}, "stream": stream,
            }  # fmt: skip
            raw = post(port, "/v1/chat/completions", body)
            lines = raw.splitlines() if stream else [f"data: {raw}"]
            parts = {"reasoning": "", "content": ""}
            for line in lines:
                for choice in json.loads(line[6:])["choices"] if line[:7] == "data: {" else ():
                    message = choice.get("delta") or choice.get("message") or {}
                    for name in parts:
                        parts[name] += message.get(name) or ""
            messages.append({name: part.removeprefix("</think>") for name, part in parts.items()})
        messages_by_server.append(messages)
    assert messages_by_server[0] == messages_by_server[1]
    assert any(entry["reasoning"] and entry["content"] for entry in messages_by_server[0])


def test_tokens_equal_those_of_vllms_server(server: Server, vllm_port: int) -> None:
    messages = [{"role": "user", "content": "naïve 東京"}]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": "the quick 東京", "return_token_strs": True}),
        ("/tokenize", {"messages": messages}),
        ("/tokenize", {"messages": messages, "add_generation_prompt": False}),
        ("/detokenize", {"tokens": [5, 6, 7, THINK_TOKEN]}),
    ]
    for path, body in cases:
        answers, vllm_answers = (
            json.loads(post(port, path, {"model": "tiny", **body}))
            for port in (server.http_port, vllm_port)
        )
        assert answers == vllm_answers
    status, answer = post_json(
        server.http_port, "/detokenize", {"model": "tiny", "tokens": [99999]}
    )
    assert status == 400, answer
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port)
    connection.request("GET", "/v1/models/tiny")
    assert json.loads(connection.getresponse().read())["max_model_len"] == 512
    connection.close()


@pytest.mark.parametrize("limit", ["parameter", "header"])
def test_an_expired_request_is_aborted(server: Server, limit: str) -> None:
    """A deadline applies while the engine generates."""
    sampled, before = ({"max_tokens": 480, "ignore_eos": True, "n": 16}, count_generated(server))
    if limit == "parameter":
        body: dict[str, Any] = {"text_input": "the", "sampling_parameters": json.dumps(sampled)}
        path, body["parameters"] = "/v2/models/tiny/generate", {"deadline_us": 300_000}
        headers = {}
    else:
        path, body = "/v1/completions", {"model": "tiny", "prompt": "the", **sampled}
        headers = {"X-Request-Timeout-Ms": "300"}
    status, answer = post_json(server.http_port, path, body, **headers)
    assert status == 503, answer
    assert "Request timeout expired (300000 microseconds" in json.dumps(answer)
    assert is_aborted(server, before, 16 * 480)


def test_a_request_of_higher_priority_overtakes_waiting_requests(server: Server) -> None:
    """As in vLLM, the lowest number is first. The wait is longer than two reports of metrics."""
    ended_priorities: list[int] = []

    def send_request(priority: int) -> None:
        sampled: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "priority": priority}
        complete(server.http_port, **sampled)
        ended_priorities.append(priority)

    # 64 requests run at a time. More than 128 of 320 wait at most until the third 64 begin. As the
    # reported number may be old, request 1 runs with the fourth 64 at the latest.
    with ThreadPoolExecutor(330) as pool:
        for _ in range(320):
            pool.submit(send_request, 9)
        until("many wait", lambda: sum(gauge(server, "vllm:num_requests_waiting{")) > 128)
        pool.submit(send_request, 1)
    # In order of arrival, request 1 would be the last one.
    assert ended_priorities.index(1) < 256


def test_metrics_of_vllm_count(server: Server) -> None:
    generated_before = count_generated(server)
    complete(server.http_port, max_tokens=400, ignore_eos=True)
    until("the tokens are counted", lambda: count_generated(server) >= generated_before + 400)
    assert len(gauge(server, "vllm:time_to_first_token_seconds_bucket{")) > 3


def test_long_prompts_are_refused_while_others_stream(server: Server) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "some words " * 6_000_000, "max_tokens": 1}
    status, answer = post_json(server.http_port, "/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


# --- the end of processes


def shared_memory(server: Server) -> set[str]:
    """Return the objects of Python's multiprocessing that the server's processes use."""
    paths = set()
    for child in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            paths |= {memory_map.path for memory_map in child.memory_maps()}
    return {path for path in paths if path.startswith(("/dev/shm/psm_", "/dev/shm/sem.mp-"))}


@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_a_killed_process_is_replaced(server: Server, victim: str) -> None:
    """Nothing of it stays in /dev/shm."""
    word = {"engine": "spawn_main", "worker": "worker tiny"}[victim]
    process = next(
        child
        for child in psutil.Process(server.pid).children(recursive=True)
        if word in " ".join(child.cmdline())
    )
    objects_before = shared_memory(server)
    request = {**LONG_REQUEST, "stream": True, "n": 64}
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port)
    connection.request("POST", "/v1/completions", json.dumps(request))
    response = connection.getresponse()
    assert response.read(100)  # the engine generates
    os.kill(process.pid, signal.SIGKILL)
    assert b"worker died" in response.read()
    connection.close()
    assert complete(server.http_port, max_tokens=3)
    assert objects_before
    until("its objects are removed", lambda: not any(map(os.path.exists, objects_before)))


def end(server: Server, end_server: Callable[[Server], None]) -> None:
    """End a server, and wait until its objects are removed."""
    objects_before = shared_memory(server)
    assert objects_before
    end_server(server)
    until("all is removed", lambda: not any(map(os.path.exists, objects_before)))


def test_an_ended_server_leaks_nothing(server: Server, repository: Path) -> None:
    """The last test, because the others need the server."""
    end(server, Server.kill)
    with serving(repository) as stopped_server:
        end(stopped_server, Server.stop)
