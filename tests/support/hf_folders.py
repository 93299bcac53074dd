"""Tiny Hugging Face folders: random weights, and a small byte-level BPE tokenizer.

The standard deviation of weights is 0.2. With the usual 0.02, a model would generate the same text
for every prompt and hide errors.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shmserve.workers.backends.llm.model.architecture import Architecture

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
END, USER, MODEL = "<|end|>", "<|user|>", "<|model|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% endif %}"
)
_TEXT = (
    "the quick brown fox jumps over the lazy dog. it was the best of times, it was the worst of "
    "times. naïve café — 東京 und Köln, größer: 😀 {'a': 1, \"b\": [true, null]}"
)


@functools.cache
def tokenizer_text(size: int = 320) -> str:
    """Return the tokenizer.json of a byte-level BPE with at most `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, USER, MODEL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    return str(tokenizer.to_str())


def config(family: str = "llama", **settings: Any) -> dict[str, Any]:
    tiny = {
        "architectures": [ARCHITECTURES[family]], "model_type": family, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16 if family == "qwen3" else 8, "vocab_size": 320,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": family != "llama", "bos_token_id": None,
        "eos_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    return {**tiny, **settings}


def weights(
    hf_config: dict[str, Any], seed: int = 0, deviation: float = 0.2
) -> dict[str, torch.Tensor]:
    architecture = Architecture.of(hf_config, [])
    assert architecture is not None
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * deviation + ("norm" in name)
        for name, shape in architecture.weights().items()
    }


def write_folder(
    path: Path, family: str = "llama", seed: int = 0, shards: int = 1, **settings: Any
) -> Path:
    """Write a folder with its weights in `shards` files; `settings` are fields of config.json."""
    path.mkdir(parents=True, exist_ok=True)
    configuration = config(family, **settings)
    save_weights(path, weights(configuration, seed), shards)
    files: dict[str, dict[str, Any]] = {
        "config.json": configuration,
        "generation_config.json": {"eos_token_id": configuration["eos_token_id"]},
        "tokenizer_config.json": {
            "chat_template": TEMPLATE,
            "eos_token": END,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    (path / "tokenizer.json").write_text(tokenizer_text(), encoding="utf-8")
    return path


def save_weights(path: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write weights as safetensors, with an index if there are several files."""
    names = sorted(weights)
    if shards == 1:
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        return
    mapped = {name: f"model-{n % shards:05d}.safetensors" for n, name in enumerate(names)}
    for shard in sorted(set(mapped.values())):
        part = {name: weights[name] for name in names if mapped[name] == shard}
        save_file(part, path / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": mapped}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
