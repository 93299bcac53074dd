"""The README and the pages of the guide: how long they may be, and where their links lead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "shmserve" / "guide"
PAGES = [ROOT / "README.md", *sorted(GUIDE.glob("*.md"))]


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text())


def test_the_readme_is_a_front_page() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_contents_name_every_page() -> None:
    assert {GUIDE / link for link in links(GUIDE / "contents.md")} >= set(PAGES[1:]) - {
        GUIDE / "contents.md"
    }
