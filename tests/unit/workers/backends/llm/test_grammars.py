"""Structured output costs those who ask for it, and nobody else."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve.workers.backends.llm import engine, sampler
from tests.rigs.llm_rig import llm_rig

Folder = Callable[..., Path]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function was called that is there for grammars alone."""
    counted: Counter[str] = Counter()

    def count(where: Any, name: str) -> None:
        real = getattr(where, name)

        def counting(*given: Any) -> Any:
            counted[name] += 1
            return real(*given)

        monkeypatch.setattr(where, name, counting)

    for where, name in (
        (engine, "allowed_tokens"),
        (sampler, "_bits"),
        (sampler.Grammars, "matcher"),
        (sampler, "_mask"),
    ):
        count(where, name)
    return counted


def test_requests_without_a_grammar_pay_nothing(
    folder: Folder, tmp_path: Path, calls: Counter[str]
) -> None:
    plain: dict[str, Any] = {"input_ids": [5, 6, 7], "max_tokens": 9, "ignore_eos": True}
    with llm_rig(tmp_path / "rig", folder()) as scheduler:
        for key in range(1, 5):
            scheduler.add(key, **plain, n=2)
        scheduler.run()
        assert not calls
        scheduler.add(5, **plain)
        scheduler.add(6, input_ids=[5, 6, 7], max_tokens=9, regex="[ab]{4}")
        scheduler.run()
        rows = len(scheduler.tokens(6))
        assert calls == {"matcher": 1, "allowed_tokens": rows, "_bits": rows, "_mask": rows}
