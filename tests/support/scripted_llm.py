"""Folders of tiny models that generate scripted texts, such as a tool call."""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shmserve.workers.backends.llm.model.architecture import Architecture
from tests.support.hf_folders import END, config, save_weights

CALLED, ANSWERS = "<|called|>", "<|answers|>"
# The rendered prompt ends with CALLED after a user message, and with ANSWERS after a tool message.
TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }} as <tool_call>...</tool_call>{% endif %}"
    "{% if enable_thinking is defined %}<think></think>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% if messages[-1].role == 'tool' %}<|answers|>{% else %}<|called|>{% endif %}{% endif %}"
)
CALL = (
    *("<think>", "\nhm", " so\n", "</think>", "\n\n", "Look: ", "<tool_call>", '\n{"name": "get_'),
    *('weather", "arg', 'uments": {"ci', 'ty": "Pa', 'ris"}}\n', "</tool_call>"),
)
ANSWER = ("It is ", "sunny.")


@functools.cache
def _alphabet() -> dict[int, str]:
    """Return the character for each byte in a byte-level vocabulary."""
    visible_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    invisible_bytes = [byte for byte in range(256) if byte not in visible_bytes]
    return {
        **{byte: chr(byte) for byte in visible_bytes},
        **{byte: chr(256 + i) for i, byte in enumerate(invisible_bytes)},
    }


def _byte_level_name(piece: str) -> str:
    chars = _alphabet()
    return "".join(chars[byte] for byte in piece.encode())


def write_scripted(
    path: Path,
    scripts: Mapping[str, Sequence[str]],
    template: str = TEMPLATE,
    special: Sequence[str] = (),
) -> Path:
    """Write a folder whose model generates a script after its special token, and then ends.

    After any other token the model begins the first script. Each piece is a token and occurs only
    once in all scripts.
    """
    path.mkdir(parents=True, exist_ok=True)
    vocabulary = {char: byte for byte, char in _alphabet().items()}
    added = [END, *scripts, *special]
    for piece in (piece for script in scripts.values() for piece in script):
        if piece not in added:
            vocabulary[_byte_level_name(piece)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(added)
    successor: dict[int, int] = {}
    for begin, script in scripts.items():
        names = [begin, *script, END]
        vocab = tokenizer.get_vocab()
        ids = [vocab[name if name in added else _byte_level_name(name)] for name in names]
        successor |= dict(itertools.pairwise(ids))
    first_token = successor[tokenizer.get_vocab()[next(iter(scripts))]]
    end = tokenizer.get_vocab()[END]
    configuration = config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32 * (len(successor) // 32 + 1),
        num_hidden_layers=1,
        eos_token_id=end,
        max_position_embeddings=4096,
    )
    save_weights(path, _weights(configuration, successor, first_token))
    files: dict[str, dict[str, Any]] = {
        "config.json": configuration,
        "generation_config.json": {"eos_token_id": end, "temperature": 0.0},
        "tokenizer_config.json": {"chat_template": template, "eos_token": END},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    (path / "tokenizer.json").write_text(str(tokenizer.to_str()), encoding="utf-8")
    return path


def _weights(
    hf_config: dict[str, Any], successor: dict[int, int], first_token: int
) -> dict[str, torch.Tensor]:
    architecture = Architecture.of(hf_config, [])
    assert architecture is not None
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.zeros(shape)
        for name, shape in architecture.weights().items()
    }
    embedding = weights["model.embed_tokens.weight"]
    head = weights["lm_head.weight"]
    embedding[:, 0] = 1
    head[first_token, 0] = 9
    for index, (token, following) in enumerate(successor.items(), 1):
        embedding[token] = 0
        embedding[token, index] = 1
        head[following, index] = 9
    return weights
