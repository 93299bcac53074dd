"""The speed of a generative worker's steps on a GPU, compared with `generate` of transformers.

    python -m bench.load.generation_device [--size m512|b1] [--rows 1 8 32] [--weights fp32|bf16]

The model is random: `m512` is that of bench.load.generation, `b1` has 1.2 billion weights. Prompts
have 128 tokens, and 128 follow. A step's floor is the time in which the device reads its weights at
the speed of a copy. transformers generates all rows as one batch, with a static cache and without a
compiler, with weights of the same kind. All times are in milliseconds of wall time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.load.generation import BLOCK_TOKENS, PROMPT_TOKENS, SIZES, SequenceBatch, count_blocks
from shmserve.workers.backends.llm.model.attention import KvCache
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.transformer import Passes, Transformer
from tests.support.hf_folders import write_folder

NEW_TOKENS, DEVICE = 128, "cuda:0"
MODELS: dict[str, dict[str, Any]] = {
    "m512": SIZES,
    "b1": {
        **SIZES,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 64000,
    },
}


def measure_steps(passes: Passes, rows: int) -> tuple[float, float]:
    """Return the time of the prompts, and the median of the following steps, in ms."""
    batch = SequenceBatch(passes, rows, NEW_TOKENS, time.perf_counter)
    return batch.prefill() * 1e3, statistics.median(batch.decode()) * 1e3


def copy_bytes_per_ms() -> float:
    """Return the memory bandwidth of the device, measured by copying."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return 20 * len(source) / (time.perf_counter() - start_s) / 1e3


def transformers_ms(path: Path, rows: int, weights: str) -> float:
    """Return the time of transformers per token of all rows, including prompts, in ms."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE)
    ids = torch.randint(3, 300, (rows, PROMPT_TOKENS), device=DEVICE)
    settings = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": NEW_TOKENS}
    took_s: list[float] = []
    for _ in range(2):
        start_s = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **settings
        )
        torch.cuda.synchronize()
        took_s.append(time.perf_counter() - start_s)
    return min(took_s) * 1e3 / NEW_TOKENS


def main() -> None:
    """Measure, and print one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=MODELS, default="m512")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--weights", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()
    bytes_per_ms = copy_bytes_per_ms()
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder) / "model", **MODELS[args.size])
        model = Transformer(Checkpoint.open(path), args.weights, DEVICE)
        architecture = model.architecture
        blocks = count_blocks(max(args.rows), NEW_TOKENS)
        passes = Passes(model, KvCache(architecture, BLOCK_TOKENS, blocks, 0, DEVICE))
        start_s = time.perf_counter()
        passes.capture(max(args.rows), PROMPT_TOKENS + NEW_TOKENS)
        capture_s = time.perf_counter() - start_s
        # A step reads all weights, except that it looks up only single rows of the embeddings.
        shapes = architecture.weights().items()
        weights = sum(math.prod(shape) for name, shape in shapes if "embed_tokens" not in name)
        for rows in args.rows:
            measure_steps(passes, rows)
            prompts_ms, step_ms = measure_steps(passes, rows)
            peer_ms = transformers_ms(path, rows, args.weights)
            figures = {
                "rows": rows,
                "prompts_ms": round(prompts_ms, 2),
                "step_ms": round(step_ms, 3),
                "step_floor_ms": round(
                    weights * (2 if args.weights == "bf16" else 4) / bytes_per_ms, 3
                ),
                "tokens_per_s": round(
                    rows * NEW_TOKENS / (prompts_ms + (NEW_TOKENS - 1) * step_ms) * 1e3
                ),
                "transformers_tokens_per_s": round(rows / peer_ms * 1e3),
                "capture_s": round(capture_s, 2),
            }
            sys.stdout.write(json.dumps(figures) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
