"""Trains a small language model on the reference of Python that `help()` shows.

    python examples/generation/train.py FOLDER [--seconds 150] [--draft]

The result is a Hugging Face folder, which `shmserve serve FOLDER` serves. With --draft there is a
second, much smaller model with the same tokens in FOLDER-draft, for speculative decoding.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

END, USER, MODEL = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_VOCABULARY = 2048
_CONTEXT = 1024
_LENGTH = 128  # tokens of a training row
_ROWS = 16
_WIDTH = 40  # of the progress bar


class Size(NamedTuple):
    """The size of a model: the width of its hidden states, and its numbers of layers and heads."""

    hidden: int
    layers: int
    heads: int


SMALL = Size(hidden=256, layers=6, heads=8)
DRAFT = Size(hidden=96, layers=2, heads=4)


def text() -> str:
    """Return Python's reference as plain text."""
    topics: dict[str, str] = pydoc_data.topics.topics
    joined = "\n\n".join(topics.values())
    return re.sub(r"\n{3,}", "\n\n", joined)


def train_tokenizer(corpus: str) -> Tokenizer:
    """Return a byte-level BPE tokenizer that is trained on the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[END, USER, MODEL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.split("\n\n"), trainer)
    return tokenizer


def train(tokens: torch.Tensor, size: Size, seconds: float, label: str) -> LlamaForCausalLM:
    """Train a model for some seconds on a text, with a progress bar on standard error.

    Args:
        tokens: The tokens of the text, int64 [tokens].
        size: The size of the model.
        seconds: The duration of the training.
        label: The text before the progress bar.
    """
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=size.hidden,
            intermediate_size=size.hidden * 11 // 4,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            max_position_embeddings=_CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    began = time.monotonic()
    generator = torch.Generator().manual_seed(2)
    while (progress := (time.monotonic() - began) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, progress * 20 + 0.05) * (1 - 0.9 * progress)
        starts = torch.randint(len(tokens) - _LENGTH, (_ROWS,), generator=generator)
        rows = torch.stack([tokens[start : start + _LENGTH] for start in starts])
        loss: Any = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        _progress(label, progress, float(loss.detach()))
    _progress(label, 1.0, float(loss.detach()))
    print(file=sys.stderr)
    return model.eval()


def _progress(label: str, progress: float, loss: float) -> None:
    bar = "#" * round(progress * _WIDTH)
    print(f"\r{label} [{bar:<{_WIDTH}}] loss {loss:.2f} ", end="", file=sys.stderr, flush=True)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write(folder: Path, seconds: float, draft: bool) -> None:
    """Train and write the model and, if `draft` is true, its draft model."""
    corpus = text()
    tokenizer = train_tokenizer(corpus)
    tokens = torch.tensor(tokenizer.encode(corpus).ids)
    save(train(tokens, SMALL, seconds, "training"), tokenizer, folder)
    if draft:
        draft_folder = folder.with_name(f"{folder.name}-draft")
        save(train(tokens, DRAFT, seconds / 3, "the draft"), tokenizer, draft_folder)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="duration of the training")
    parser.add_argument("--draft", action="store_true", help="train a draft model, too")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.seconds, arguments.draft)


if __name__ == "__main__":
    main()
