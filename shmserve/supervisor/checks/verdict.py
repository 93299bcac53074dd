"""What a check says: how good it is what was found, and what to do about it."""

from __future__ import annotations

from typing import NamedTuple

OK, WARNING, WRONG = "ok", "warning", "wrong"


class Verdict(NamedTuple):
    """`state` is OK, WARNING or WRONG; `fix` is "" where nothing is to be done."""

    state: str
    found: str
    fix: str = ""


def ok(found: str) -> Verdict:
    """Nothing is to be done."""
    return Verdict(OK, found)


def warning(found: str, fix: str) -> Verdict:
    """The server runs, and something of it does not, or not well."""
    return Verdict(WARNING, found, fix)


def wrong(found: str, fix: str) -> Verdict:
    """The server does not start, or is no use."""
    return Verdict(WRONG, found, fix)


def megabytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"
