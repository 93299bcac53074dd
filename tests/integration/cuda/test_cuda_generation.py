"""Text generation on a real device: the texts equal those of transformers."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_folders import write_folder
from tests.support.servers import Server, Start, running

pytestmark = pytest.mark.gpu

CONFIG = 'backend: "llm"\ninstance_group { kind: KIND_GPU count: 1 }\n'
MODELS = {
    "plain": "",
    "halves": "weights: bf16\n",
    "swapping": "kv_cache_blocks: 24\nblock_size: 8\nswap_space_gb: 0.01\npreemption_mode: swap\n",
    "computing": "kv_cache_blocks: 24\nblock_size: 8\npreemption_mode: recompute\n",
    "guessing": "speculative_decoding: {enabled: true, adaptive_length: false}\n",
    "drafting": (
        "speculative_decoding: {enabled: true, method: draft, draft_model: plain, "
        "adaptive_length: false}\n"
    ),
}
PROMPTS = [[3 + (7 * n + i * i) % 300 for i in range(3 + 9 * n)] for n in range(12)]
NEW_TOKENS = 24
_LENIENT_FLAGS = ("--exit-on-error=false", "--strict-readiness=false")


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    for name, engine in MODELS.items():
        write_folder(models / name / "1")
        (models / name / "config.pbtxt").write_text(CONFIG)
        if engine:
            (models / name / "engine.yaml").write_text(engine)
    return start(models, gpu=True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the continuation of each prompt by transformers on the same device."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_folder(tmp_path_factory.mktemp("oracle") / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts: list[str] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        texts.append(tokenizer.decode(made[0, len(prompt) :].tolist(), skip_special_tokens=True))
    return texts


def text(server: Server, model: str, prompt: list[int], **sampling_parameters: Any) -> str:
    body = {
        "input_ids": prompt,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps(
            {"max_tokens": NEW_TOKENS, "temperature": 0, **sampling_parameters}
        ),
    }
    request = urllib.request.Request(
        f"http://{server.url}/v2/models/{model}/generate", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        text: str = json.load(response)["text_output"]
    return text


@pytest.mark.parametrize("model", [name for name in MODELS if name != "halves"])
def test_texts_equal_those_of_transformers(server: Server, expected: list[str], model: str) -> None:
    single_texts = [text(server, model, prompt) for prompt in PROMPTS[:4]]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        parallel_texts = list(pool.map(lambda prompt: text(server, model, prompt), PROMPTS))
    assert single_texts == expected[:4]
    assert parallel_texts == expected


def test_weights_of_16_bits_generate(server: Server) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(lambda prompt: text(server, "halves", prompt), PROMPTS))
    assert all(texts)


def test_a_seed_reproduces_the_sampled_text(server: Server) -> None:
    drawn = [text(server, "plain", PROMPTS[5], temperature=1, top_p=0.9, seed=s) for s in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_weights_of_8_bits_are_for_processors(tmp_path: Path) -> None:
    write_folder(tmp_path / "models" / "narrow" / "1")
    (tmp_path / "models" / "narrow" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "models" / "narrow" / "engine.yaml").write_text("weights: int8\n")
    with running(tmp_path / "models", *_LENIENT_FLAGS, gpu=True) as running_server:
        request = urllib.request.Request(f"http://{running_server.url}/v2/repository/index", b"")
        with urllib.request.urlopen(request, timeout=30) as response:
            (row,) = json.load(response)
    assert "weights: int8 is supported on CPUs only" in row["reason"]
