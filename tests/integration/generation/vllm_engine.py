"""The backend `vllm` with vLLM itself, beside vLLM's own server: `make test-vllm`.

The name keeps this file out of the other tests, which have no vLLM. A start takes minutes.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.hf_folders import write_folder
from tests.support.servers import Server, hold_ports, port_of
from tests.support.waiting import until

START_S = 600.0
ARGUMENTS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 64}
PROMPTS = ("the quick", "it was", "naïve café", "1 2 3", "東京", "fox")
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "stream": True},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 40, "stop": ["the"]},
)


def post(port: int, path: str, body: dict[str, Any]) -> str:
    """The body of a response with status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    raw = response.read().decode()
    connection.close()
    assert response.status == 200, raw
    return raw


def complete(port: int, prompt: str = "the", **more: Any) -> str:
    return post(port, "/v1/completions", {"model": "tiny", "prompt": prompt, **more})


def text_of(port: int, chat: bool, prompt: str, kind: dict[str, Any]) -> tuple[str, str]:
    """The text and the finish reason of a request."""
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
            text += message.get("content") or ""
            reason = choice["finish_reason"] or reason
    return text, reason


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a tiny model, in a repository as Triton's vllm_backend has it."""
    folder = tmp_path_factory.mktemp("models")
    write_folder(folder / "tiny" / "1" / "weights", hidden_size=128, head_dim=32)
    given = {**ARGUMENTS, "model": "weights", "tool_call_parser": "hermes"}
    (folder / "tiny" / "1" / "model.json").write_text(json.dumps(given))
    made = Server([folder], ["--load-timeout-secs=600"])
    try:
        made.wait_ready(within_s=START_S)
        yield made
    finally:
        made.discard()


@pytest.fixture(scope="module")
def peer(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of vLLM's own server of the same model."""
    folder = tmp_path_factory.mktemp("peer")
    write_folder(folder / "weights", hidden_size=128, head_dim=32)
    (held,) = hold_ports(1)
    port = port_of(held)
    flags = [f"--{name.replace('_', '-')}" for name in ARGUMENTS]
    values = [[] if value is True else [str(value)] for value in ARGUMENTS.values()]
    process = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(folder / "weights")),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
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


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=["whole", "stream", "sampled"])
def test_texts_are_those_of_vllm_s_server(
    server: Server, peer: int, kind: dict[str, Any], chat: bool
) -> None:
    for prompt in PROMPTS:
        asked = chat, prompt, kind
        assert text_of(server.http_port, *asked) == text_of(peer, *asked)


def test_log_probabilities_of_a_repeated_prompt(server: Server, peer: int) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 5, "temperature": 0}
    mine, theirs = (
        json.loads(complete(port, **asked))["choices"][0] for port in (server.http_port, peer)
    )
    assert mine["text"] == theirs["text"]
    for name in ("tokens", "text_offset"):
        assert mine["logprobs"][name] == theirs["logprobs"][name]
    both = zip(
        mine["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"], strict=True
    )
    assert all(one == other or one == pytest.approx(other, abs=1e-4) for one, other in both)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_are_called_as_by_vllm_s_server(server: Server, peer: int, choice: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": choice,
        "max_tokens": 100,
        "temperature": 0,
    }
    found = []
    for port in (server.http_port, peer):
        made = json.loads(post(port, "/v1/chat/completions", body))["choices"][0]
        message = made["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        found.append((calls, message.get("content") or "", made["finish_reason"]))
    assert found[0] == found[1]


def test_200_concurrent_requests(server: Server) -> None:
    with ThreadPoolExecutor(200) as pool:
        asked = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}
        found = list(pool.map(lambda n: complete(server.http_port, f"{n}", **asked), range(200)))
    assert all(each.count('"finish_reason":"length"') == 1 for each in found)


def test_requests_of_clients_that_disconnect_are_aborted(server: Server) -> None:
    asked = {
        "model": "tiny",
        "prompt": "the",
        "max_tokens": 450,
        "ignore_eos": True,
        "stream": True,
    }
    connections = []
    for _ in range(20):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port)
        connection.request("POST", "/v1/completions", json.dumps(asked))
        connections.append(connection)
    for connection in connections:
        connection.getresponse().read(100)
        connection.close()
    until("nothing runs", lambda: gauge(server, "vllm:num_requests_running{") == [0.0], 10.0)


def gauge(server: Server, begin: str) -> list[float]:
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics_port)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(begin)]


def test_a_killed_engine_is_replaced(server: Server) -> None:
    engine = next(
        child
        for child in psutil.Process(server.pid).children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline())
    )
    with ThreadPoolExecutor(1) as pool:
        asked: dict[str, Any] = {"max_tokens": 480, "ignore_eos": True, "stream": True}
        told = pool.submit(complete, server.http_port, **asked)
        until("it runs", lambda: any(gauge(server, "vllm:num_requests_running{")), 10.0)
        os.kill(engine.pid, signal.SIGKILL)
        assert "worker died" in told.result()
    assert complete(server.http_port, max_tokens=3)
