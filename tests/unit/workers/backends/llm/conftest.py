"""Tiny shared models. Importable without torch, whose tests are then skipped."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread, which is faster for small tensors."""
    import torch

    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads_before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a folder once for each set of arguments."""
    from tests.support.hf_folders import write_folder

    root = tmp_path_factory.mktemp("checkpoints")
    folders: dict[str, Path] = {}

    def write(family: str = "llama", **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in folders:
            folders[key] = write_folder(root / str(len(folders)), family, **options)
        return folders[key]

    return write


@functools.cache
def reference(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def generate(path: Path, prompt: list[int], **options: Any) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, **options}
    with torch.inference_mode():
        output = reference(path).generate(ids, attention_mask=torch.ones_like(ids), **settings)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
