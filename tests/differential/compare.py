"""The differences between two records of a script."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from tests.differential.player import Record
from tests.differential.script import Known

_NO_VALUE = "(nothing)"


@dataclass(frozen=True)
class Difference:
    """One different value; `where` is its path in the record, as in `responses.a.error`."""

    where: str
    own_value: Any
    triton_value: Any

    def __str__(self) -> str:
        own_text, triton_text = (
            _format_value(self.where, json_value)
            for json_value in (self.own_value, self.triton_value)
        )
        return f"{self.where}:\n    shmserve {own_text}\n    Triton   {triton_text}"


def _format_value(path: str, value: Any) -> str:
    """Return a value for the report; batches of other sizes are shown as their requests' ids."""
    if path == "batches" and isinstance(value, list):
        value = [[entry["id"] or "-" for entry in batch["batch"]] for batch in value]
    return str(value)


def differences(own_record: Record, triton_record: Record) -> list[Difference]:
    """Return all differences, each at the deepest path that differs."""
    return list(_compare_values("", asdict(own_record), asdict(triton_record)))


def judge(found_differences: Sequence[Difference], known_differences: Sequence[Known]) -> list[str]:
    """Return the unexpected results: unknown differences, and known ones that no longer occur."""
    wrong_cases = [
        str(difference)
        for difference in found_differences
        if not any(fnmatchcase(difference.where, entry.where) for entry in known_differences)
    ]
    return wrong_cases + [
        f"{entry.where}: no difference any more, although: {entry.reason}"
        for entry in known_differences
        if entry.always
        and not any(fnmatchcase(difference.where, entry.where) for difference in found_differences)
    ]


def _compare_values(path: str, own: Any, peer: Any) -> Iterator[Difference]:
    if isinstance(own, dict) and isinstance(peer, dict):
        for key in sorted(own.keys() | peer.keys()):
            child_path = f"{path}.{key}".lstrip(".")
            yield from _compare_values(
                child_path, own.get(key, _NO_VALUE), peer.get(key, _NO_VALUE)
            )
    elif isinstance(own, list) and isinstance(peer, list) and len(own) == len(peer):
        for index, pair in enumerate(zip(own, peer, strict=True)):
            yield from _compare_values(f"{path}.{index}", *pair)
    elif own != peer:
        yield Difference(path, own, peer)
