"""Speculative decoding: exact at every temperature, with the maximum acceptance."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve.workers.backends.llm.worker_engine import ngram_draft
from tests.rigs.llm_rig import llm_rig
from tests.unit.workers.backends.llm.conftest import generate

Folder = Callable[..., Path]


def test_a_draft_that_is_the_model_is_always_right(folder: Folder, tmp_path: Path) -> None:
    path = folder(eos_token_id=[])
    with llm_rig(tmp_path / "rig", path, draft_settings(path, 3), draft=3) as scheduler:
        for key, temperature in ((1, 0.0), (2, 1.0), (3, 1.7)):
            scheduler.add(
                key, input_ids=[key, 60, 7], temperature=temperature, max_tokens=41, seed=5
            )
        scheduler.run()
        full = [len(result.tokens) for result in scheduler.results if result.draft_count == 3]
        assert set(full) == {4}  # the three proposed tokens, and one more
        assert len(full) == 30
        assert scheduler.tokens(1) == generate(path, [1, 60, 7], max_new_tokens=41)


def draft_settings(path: Path, count: int) -> dict[str, Any]:
    return {
        "speculative_decoding": {
            "enabled": True,
            "method": "draft",
            "draft_model": str(path),
            "num_spec_tokens": count,
        }
    }


NGRAM = {"speculative_decoding": {"enabled": True, "method": "ngram"}}


@pytest.mark.parametrize("method", ["ngram", "draft"])
@pytest.mark.parametrize("disturbance", ["", "swap", "recompute"])
def test_greedy_texts_do_not_change_with_speculation(
    folder: Folder, tmp_path: Path, method: str, disturbance: str
) -> None:
    path = folder()
    draft_model = folder(seed=9, num_hidden_layers=1, max_position_embeddings=38)
    engine = NGRAM if method == "ngram" else draft_settings(draft_model, 4)
    prompts = {key: [5, 6, 7, 8, 9, key, 5, 6, 7, 8] * 2 for key in (20, 21, 22)}
    with llm_rig(tmp_path / "rig", path, engine, draft=4, chunk=64) as scheduler:
        for key, tokens in prompts.items():
            scheduler.add(
                key, input_ids=tokens, temperature=0, max_tokens=24, repetition_penalty=1.1
            )
        for number in range(100):
            if disturbance and number % 3 == 1 and scheduler.running:
                victim = random.Random(number).choice(list(scheduler.running.values()))
                getattr(scheduler, disturbance)(victim)
            scheduler.step()
            if not scheduler.running:
                break
        scheduler.finish()
        for key, tokens in prompts.items():
            expected = generate(path, tokens, max_new_tokens=24, repetition_penalty=1.1)
            assert scheduler.tokens(key) == expected
        assert any(result.draft_count for result in scheduler.results)


def test_deterministic_proposals_do_not_change_seeded_texts(folder: Folder, tmp_path: Path) -> None:
    texts: list[list[int]] = []
    for index, (engine, draft) in enumerate(((None, 0), (NGRAM, 4))):
        with llm_rig(tmp_path / str(index), folder(), engine, draft=draft) as scheduler:
            prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
            settings: dict[str, Any] = {"temperature": 0.3, "presence_penalty": 0.05, "seed": 3}
            scheduler.generate(1, input_ids=prompt, max_tokens=60, ignore_eos=True, **settings)
            texts.append(scheduler.tokens(1))
    assert texts[0] == texts[1]
    accepted_counts = [len(result.tokens) for result in scheduler.results if result.draft_count]
    assert max(accepted_counts) > 1


def test_an_end_among_accepted_tokens_is_the_end(folder: Folder, tmp_path: Path) -> None:
    path = folder()
    full_tokens = generate(path, [5, 77, 130], max_new_tokens=20)
    end = full_tokens[7]
    first_count = full_tokens.index(end) + 1
    with llm_rig(tmp_path / "rig", path, draft_settings(path, 8), draft=8) as scheduler:
        scheduler.generate(
            1, input_ids=[5, 77, 130], temperature=0, max_tokens=20, stop_token_ids=[end]
        )
        assert scheduler.tokens(1) == full_tokens[:first_count]
        assert scheduler.responses[1][-1]["finish_reason"] == ["stop"]


def test_earlier_continuations_are_proposed() -> None:
    assert ngram_draft([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert ngram_draft([1, 2, 9, 1, 2, 3, 1, 2], 2) == [3, 1]  # the most recent occurrence counts
    # The longest matching ending has precedence.
    assert ngram_draft([9, 1, 2, 7, 7, 1, 2, 8, 9, 1, 2], 1) == [7]
    assert ngram_draft([1, 2, 3], 4) == []
    assert ngram_draft([1, 1, 1, 1, 1, 1, 1], 2) == [1]
