"""A flat table of counters as an object: its public attributes are the entries."""

from __future__ import annotations

from typing import Any

from shmserve.scheduler.statistics.histograms import Histogram


class Table:
    """A table whose entries are counted in place: attributes with numbers, lists of numbers, either
    of them by key, histograms, or tables whose entries are of this one too. One whose name begins
    with _ is no entry."""

    def table(self) -> dict[str, Any]:
        """The entries, as shmserve/common/counters.py has them."""
        entries: dict[str, Any] = {}
        for name, value in self._entries():
            entries |= value.table() if isinstance(value, Table) else {name: _plain(value)}
        return entries

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Count on from there. Raises AttributeError, KeyError, TypeError or ValueError where that
        is none, and may then be half done."""
        for name, value in self._entries():
            if isinstance(value, (Table, Histogram)):
                value.restore(snapshot if isinstance(value, Table) else snapshot[name])
            else:
                setattr(self, name, _restored(value, snapshot[name]))

    def _entries(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in vars(self).items() if name[0] != "_"]


def _plain(value: Any) -> Any:
    if isinstance(value, Histogram):
        return value.report()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _restored(value: Any, found: Any) -> Any:
    if isinstance(value, dict):
        return value | {key: _numbers(each) for key, each in found.items()}
    return _numbers(found)


def _numbers(found: Any) -> Any:
    return [_numbers(each) for each in found] if isinstance(found, list) else int(found)
