"""The differential test's own rules: what counts as a difference, and its scripts' names."""

from tests.differential.compare import differences, judge
from tests.differential.player import Record
from tests.differential.script import Known
from tests.differential.scripts import GROUPS

OWN = Record([{"batch": [{"id": "a"}]}], {"a": {"error": ["X", "text"]}}, {"m": {"count": 1}})
PEER_RECORD = Record([{"batch": [{"id": "a"}]}], {"a": {"error": ["X", "other"]}}, {"m": {}})


def test_each_difference_is_reported_with_its_path() -> None:
    found = differences(OWN, PEER_RECORD)
    assert [d.where for d in found] == ["responses.a.error.1", "statistics.m.count"]
    assert differences(OWN, OWN) == []


def test_known_differences_are_accepted_and_required() -> None:
    found_differences = differences(OWN, PEER_RECORD)
    known = [Known("responses.*", "texts"), Known("statistics.*", "counts")]
    assert judge(found_differences, known) == []
    assert len(judge(found_differences, known[:1])) == 1
    assert judge([], known[:1]) == ["responses.*: no difference any more, although: texts"]


def test_models_and_scripts_have_names_of_their_own() -> None:
    for group in GROUPS:
        models = [model.name for script in group.scripts for model in script.models]
        assert len(models) == len(set(models))
    names = [script.name for group in GROUPS for script in group.scripts]
    assert len(names) == len(set(names))
