"""A short part of each long check, and that the checks find errors."""

from collections import Counter

import pytest

from shmserve.workers.backends.llm.model import attention
from tests.generation import sampling, schedules, schemas, speculation, trained
from tests.generation.schedules import Schedule


def test_logits_do_not_depend_on_other_requests() -> None:
    counts: Counter[str] = Counter()
    for seed in (12, 15, 21, 30):
        schedule = Schedule(seed)
        schedule.run()
        counts += schedule.counts
    assert all(counts[counter] for counter in ("swapped", "copied_on_write", "prefix_hits"))


@pytest.mark.usefixtures("fresh_schedule_cache")
def test_different_bits_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "padded_count", lambda count: count)
    with pytest.raises(AssertionError, match="logits behind"):
        schedules.run(5)


@pytest.fixture
def fresh_schedule_cache() -> None:
    """Clear the cached results of single requests before and after a test."""
    schedules.run_alone.cache_clear()


def test_texts_are_distributed_as_with_transformers() -> None:
    assert sampling.run(512)


def test_proposals_of_a_draft_do_not_change_the_distribution() -> None:
    assert speculation.run(2_500)


def test_structured_output_is_valid() -> None:
    assert schemas.run(20)


def test_a_trained_model_in_full_and_in_int8() -> None:
    assert trained.run(2)
