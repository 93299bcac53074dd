"""`make test` runs everything, once."""

from __future__ import annotations

from tests.__main__ import HERE, LANES, pieces


def test_every_file_is_in_one_piece() -> None:
    found = [file for lane in LANES for piece in pieces(lane) for file in piece]
    assert sorted(found) == sorted(map(str, HERE.rglob("test_*.py")))
