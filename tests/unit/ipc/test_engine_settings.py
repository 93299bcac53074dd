"""The settings in engine.yaml."""

from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.ipc.engine_settings import PROFILES, EngineSettings

WRONG_SETTINGS: dict[str, tuple[Any, str]] = {
    "unknown": ({"max_batchsize": 4}, "max_batchsize: no such setting, did you mean 'max_batch_s"),
    "kind": ({"block_size": "x"}, "block_size: 'x' is not an integer"),
    "truth": ({"block_size": True}, "block_size: True is not an integer"),
    "range": ({"max_batch_size": 0}, "max_batch_size: 0 is not 1 to 1024"),
    "choice": ({"scheduling_policy": "lifo"}, "'lifo' is not one of fcfs, sjf, priority"),
    "profile": ({"profile": "fast"}, "profile: 'fast' is not one of high_throughput"),
    "flag": ({"enable_preemption": 1}, "enable_preemption: 1 is not true or false"),
    "nested": ({"speculative_decoding": {"method": "guess"}},
        "speculative_decoding.method: 'guess' is not one of draft, ngram"),
    "no mapping": ({"speculative_decoding": True}, "speculative_decoding: True is not a mapping"),
    "a list": ([], "engine settings: [] is not a mapping"),
    "no draft": ({"speculative_decoding": {"enabled": True, "method": "draft"}},
        "method 'draft' requires the name or the path of a draft model"),
    "too few tokens": ({"max_tokens_per_batch": 4, "max_batch_size": 8},
        "max_tokens_per_batch: 4 is less than max_batch_size 8"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_SETTINGS, ids=str)
def test_wrong_engine_settings_are_named_with_the_allowed_values(case: str) -> None:
    wrong_settings, text = WRONG_SETTINGS[case]
    with pytest.raises(InvalidArgument) as caught:
        EngineSettings.of(wrong_settings)
    assert text in caught.value.message


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        EngineSettings.of({"block_size": 0, "weights": "int4", "cheese": 1})
    assert caught.value.message.count("\n") == 2


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_sets_only_fields_absent_from_the_file(profile: str) -> None:
    settings = EngineSettings.of({"profile": profile})
    for name, value in PROFILES[profile].items():
        assert getattr(settings, name) == value
    assert EngineSettings.of({"profile": profile, "max_batch_size": 3}).max_batch_size == 3
    assert EngineSettings.read(settings.json_text) == settings
