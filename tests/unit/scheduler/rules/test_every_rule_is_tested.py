"""The rules of the schedulers: `rules.txt` lists each rule with the tests of it."""

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[3]
RULES = Path(__file__).with_name("rules.txt").read_text()


@cache
def _find_tests(file: str) -> set[str]:
    text = (TESTS / file).read_text()
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", text, re.MULTILINE))


@pytest.mark.parametrize(
    "rule",
    re.findall(r"^\w.*(?:\n    .*)*", RULES, re.MULTILINE),
    ids=lambda rule: rule.splitlines()[0],
)
def test_a_rule_has_tests(rule: str) -> None:
    tests = [line.strip().split("::") for line in rule.splitlines()[1:]]
    missing_tests = [f"{file}::{name}" for file, name in tests if name not in _find_tests(file)]
    assert tests and not missing_tests
