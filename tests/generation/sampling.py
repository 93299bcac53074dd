"""Sampling beside transformers: as many texts of ours as of `generate` from one prompt must
have the same distribution (a chi-square test of two samples over joint tokens).
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from scipy.stats import chi2_contingency
from transformers import AutoModelForCausalLM

from tests.generation.speculation import MIN_P_VALUE
from tests.rigs.llm_rig import llm_rig
from tests.support.hf_folders import write_folder

PROMPT = [5, 77, 130, 9, 41]
LENGTH = 2
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.4},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 0.6, "top_p": 0.7},
    {"temperature": 0.5, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3},
)
_SAMPLE_COUNT = 128  # samples of one request
_MIN_OCCURRENCES = 10  # texts with fewer occurrences in both samples are counted together
# Without these values transformers uses its presets.
_NO_FILTERS = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


def sample_here(path: Path, rig: Path, fields: dict[str, Any], texts: int, seed: int) -> list[Any]:
    engine = {"kv_cache_blocks": 4 * _SAMPLE_COUNT}
    p_values: list[Any] = []
    with llm_rig(rig, path, engine) as scheduler:
        for key in range(1, -(-texts // _SAMPLE_COUNT) + 1):
            request: Any = {"input_ids": PROMPT, "max_tokens": LENGTH, "ignore_eos": True}
            scheduler.add(key, **request, **fields, n=_SAMPLE_COUNT, seed=seed + key)
            scheduler.run()
            tokens = scheduler.tokens(key)
            p_values += zip(*[iter(tokens)] * LENGTH, strict=True)
    return p_values[:texts]


def sample_with_transformers(
    path: Path, settings: dict[str, Any], texts: int, seed: int
) -> list[Any]:
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    fields = {**_NO_FILTERS, **settings, "max_new_tokens": LENGTH, "num_return_sequences": texts}
    with torch.inference_mode():
        rows = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, pad_token_id=0, **fields
        )
    return list(map(tuple, rows[:, len(PROMPT) :].tolist()))


def chance(path: Path, rig: Path, settings: dict[str, Any], texts: int, seed: int = 0) -> float:
    """Return the p-value of two samples under the hypothesis of one distribution."""
    own_counts = Counter(sample_here(path, rig, settings, texts, seed))
    reference_counts = Counter(sample_with_transformers(path, settings, texts, seed))
    total_counts = own_counts + reference_counts
    frequent_texts = [text for text, count in total_counts.items() if count >= _MIN_OCCURRENCES]
    table = [[counts[text] for text in frequent_texts] for counts in (own_counts, reference_counts)]
    table = [[*row, texts - sum(row) + 1] for row in table]
    assert len(frequent_texts) >= 5, f"{settings}: texts are too various to be compared"
    return float(chi2_contingency(table).pvalue)


def run(size: int, first_seed: int = 0) -> str:
    """Compare this number of texts at each of the settings. Raises AssertionError."""
    p_values: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="shmserve-sampling-") as folder:
        path = write_folder(Path(folder) / "model")
        for number, settings in enumerate(SETTINGS):
            p_value = chance(path, Path(folder) / f"rig{number}", settings, size, first_seed)
            p_values[str(settings)] = p_value
            assert p_value > MIN_P_VALUE, f"{settings}: p = {p_value:g}"
    summary = ", ".join(f"{settings} {p_value:.3f}" for settings, p_value in p_values.items())
    return f"{size} texts at each of {len(SETTINGS)} settings are distributed alike: p {summary}"
