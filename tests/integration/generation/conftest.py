"""A server with models that generate text, and the expected texts by transformers."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support import repositories
from tests.support.servers import Server, running

EMBEDDER_MODEL = repositories.python_model("""
    def one(self, request):
        texts = self.input(request, "TEXT")
        rows = [[len(text), text[0]] for text in texts.ravel()]
        return self.response(VECTOR=np.array(rows, np.float32))
""")
EMBEDDER_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "VECTOR" data_type: TYPE_FP32 dims: [ 2 ] }
"""
# The models and the contents of their engine.yaml.
MODELS = {
    "tiny": "aliases: [gpt-tiny, org/tiny]\n",
    "tight": "kv_cache_blocks: 10\nblock_size: 8\nswap_space_gb: 0.01\npreemption_mode: swap\n",
    "crowded": "kv_cache_blocks: 10\nblock_size: 8\nswap_blocks: 3\npreemption_mode: swap\n",
    "narrow": "max_waiting_requests: 1\nmax_batch_size: 1\n",
    "guessing": "speculative_decoding: {enabled: true, adaptive_length: false}\n",
    "drafting": (
        "speculative_decoding: {enabled: true, method: draft, draft_model: tiny, "
        "adaptive_length: false}\n"
    ),
}

Oracle = Callable[..., list[tuple[list[int], str]]]
Greedy = Callable[[str, int], list[int]]
Beams = Callable[[str, int, int], list[str]]


def write_folder(path: Path) -> Path:
    """Write a tiny model. Without torch, the tests that need it are skipped."""
    from tests.support import hf_folders

    return hf_folders.write_folder(path)


def add_model(repository: Path, name: str, engine: str = "") -> None:
    """Add a tiny model with these engine settings, and without a configuration."""
    write_folder(repository / name / "1")
    if engine:
        (repository / name / "engine.yaml").write_text(engine)


@pytest.fixture(scope="session")
def generative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of MODELS and of an embedder; tests must restore its state."""
    repository = tmp_path_factory.mktemp("generative") / "models"
    repository.mkdir()
    for name, engine in MODELS.items():
        add_model(repository, name, engine)
    repositories.write(repository, "embedder", EMBEDDER_CONFIG, EMBEDDER_MODEL)
    with running(repository, grpc=True) as running_server:
        yield running_server


@pytest.fixture
def client(generative: Server) -> Iterator[openai.OpenAI]:
    with client_of(generative) as openai_client:
        yield openai_client


def client_of(server: Server) -> openai.OpenAI:
    url = f"http://{server.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(write_folder(tmp_path_factory.mktemp("tokens") / "model"))


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Return a function for transformers' continuation of a prompt: tokens and text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_folder(tmp_path_factory.mktemp("oracle") / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def generate_reference(prompt: str, **settings: Any) -> list[tuple[list[int], str]]:
        ids = torch.tensor([tokenizer.encode(prompt)])
        with torch.no_grad():
            rows = model.generate(ids, do_sample=False, **settings)[:, ids.shape[1] :].tolist()
        return [(row, tokenizer.decode(row, skip_special_tokens=True)) for row in rows]

    generate_reference.model = model  # type: ignore[attr-defined]
    return generate_reference


@pytest.fixture(scope="session")
def greedy(oracle: Oracle) -> Greedy:
    @functools.cache
    def tokens(prompt: str, count: int) -> list[int]:
        ((quantised, _),) = oracle(prompt, max_new_tokens=count)
        return quantised

    return tokens


@pytest.fixture(scope="session")
def beams(oracle: Oracle) -> Beams:
    """Return a function for the texts of a beam search, best first."""

    def texts(prompt: str, count: int, width: int) -> list[str]:
        expected = oracle(prompt, max_new_tokens=count, num_beams=width, num_return_sequences=width)
        return [text for _, text in expected]

    return texts
