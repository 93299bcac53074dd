"""The differences between two records of a script."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from tests.differential.player import Record
from tests.differential.script import Known

_NOTHING = "(nothing)"


@dataclass(frozen=True)
class Difference:
    """One different value; `where` is its path in the record, as in `responses.a.error`."""

    where: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        ours, theirs = (_shown(self.where, side) for side in (self.ours, self.theirs))
        return f"{self.where}:\n    shmserve {ours}\n    Triton   {theirs}"


def _shown(where: str, value: Any) -> str:
    """Return a value for the report. Batches of other sizes are shown as the ids of their
    requests.
    """
    if where == "batches" and isinstance(value, list):
        value = [[entry["id"] or "-" for entry in batch["batch"]] for batch in value]
    return str(value)


def differences(ours: Record, theirs: Record) -> list[Difference]:
    """Return all differences, each at the deepest path that differs."""
    return list(_walk("", asdict(ours), asdict(theirs)))


def judge(found: Sequence[Difference], known: Sequence[Known]) -> list[str]:
    """Return the unexpected results: unknown differences, and known ones that no longer occur."""
    wrong_cases = [
        str(difference)
        for difference in found
        if not any(fnmatchcase(difference.where, one.where) for one in known)
    ]
    return wrong_cases + [
        f"{one.where}: no difference any more, although: {one.reason}"
        for one in known
        if not any(fnmatchcase(difference.where, one.where) for difference in found)
    ]


def _walk(where: str, ours: Any, theirs: Any) -> Iterator[Difference]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            below = f"{where}.{key}".lstrip(".")
            yield from _walk(below, ours.get(key, _NOTHING), theirs.get(key, _NOTHING))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _walk(f"{where}.{index}", *pair)
    elif ours != theirs:
        yield Difference(where, ours, theirs)
