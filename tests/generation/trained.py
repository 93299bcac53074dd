"""A model that was trained here for a while: its greedy texts are those of transformers, and with
int8 weights its perplexity is within 1 %.

A step's best two logits may come out the other way round where they are closer than what rounding
does: nowhere else may a text differ.
"""

import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from shmserve.workers.backends.llm.model.attention import Attention, KvCache, Pass
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.transformer import Transformer
from tests.rigs.llm_rig import llm_rig

_EXAMPLE_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "generation"
_MAX_INCREASE = 0.01  # the allowed increase of perplexity
_ROWS, _LENGTH = 24, 128  # the size of the text for perplexity
_PROMPTS, _MAX_TOKENS = 4, 24  # the number and length of greedy texts
_TOLERANCE = 1e-4


def perplexity(path: Path, weights: str, tokens: list[int]) -> float:
    """Return the perplexity of rows of a text under a folder's model."""
    model = Transformer(Checkpoint.open(path), weights)
    cache = KvCache(model.architecture, _LENGTH, 1, 0)
    total = 0.0
    for begin in range(0, _ROWS * _LENGTH, _LENGTH):
        row = tokens[begin : begin + _LENGTH]
        forward_pass = Pass(_LENGTH)
        forward_pass.add(row, 0, [0])
        logits = model.forward(forward_pass, cache, Attention(cache), list(range(_LENGTH - 1)))
        total += float(functional.cross_entropy(logits, torch.tensor(row[1:])))
    return math.exp(total / _ROWS)


def check_greedy(path: Path, rig: Path, tokens: list[int]) -> None:
    """Check that greedy continuations equal those of transformers. Raises AssertionError."""
    starts = [random.Random(7).randrange(len(tokens) - 100) for _ in range(_PROMPTS)]
    prompts = {key: tokens[begin : begin + 5 + 9 * key] for key, begin in enumerate(starts, 1)}
    reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    shuffle = random.Random(5)
    with llm_rig(rig, path, {"kv_cache_blocks": 512}, chunk=16, shuffle=shuffle) as scheduler:
        for key, text in prompts.items():
            scheduler.add(
                key, input_ids=text, temperature=0, max_tokens=_MAX_TOKENS, ignore_eos=True
            )
            scheduler.step()
            scheduler.swap(next(iter(scheduler.running.values())))
        scheduler.run()
        generated = {key: scheduler.tokens(key) for key in prompts}
    for key, text in prompts.items():
        with torch.inference_mode():
            scores = reference(torch.tensor([text + generated[key]])).logits[0, len(text) - 1 : -1]
        best = scores.amax(-1)
        chosen = scores.gather(1, torch.tensor(generated[key]).unsqueeze(1)).squeeze(1)
        assert bool((best - chosen < _TOLERANCE).all()), f"a greedy text differs behind {text}"


def run(size: int, first_token: int = 0) -> str:
    """Train for this number of seconds, and check the model. Raises AssertionError."""
    sys.path.insert(0, str(_EXAMPLE_FOLDER))
    import train  # type: ignore[import-not-found,unused-ignore]

    with tempfile.TemporaryDirectory(prefix="shmserve-trained-") as folder:
        path = Path(folder) / "reference"
        train.write(path, float(size), draft=False)
        text = train.text()
        tokens = train.train_tokenizer(text).encode(text).ids[first_token:]
        check_greedy(path, Path(folder) / "rig", tokens)
        exact, rounded = (perplexity(path, kind, tokens) for kind in ("fp32", "int8"))
    relative_increase = rounded / exact - 1
    assert abs(relative_increase) < _MAX_INCREASE, (
        f"perplexity {exact:.3f}, and {rounded:.3f} with int8 weights"
    )
    return (
        f"trained for {size} s: greedy texts are transformers'; perplexity {exact:.3f}, and "
        f"{rounded:.3f} with int8 weights ({relative_increase:+.2%})"
    )
