"""A server whose aiohttp lacks a part says so in a line, and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.servers import Server

# As later releases could be, for every process that starts.
_RENAMED = """
import aiohttp.http

class Parser:
    feed_data = pause_reading = None

aiohttp.http.HttpRequestParser = Parser
"""
_MOVED = """
import aiohttp.http

del aiohttp.http.HttpRequestParser
"""


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (_RENAMED, "it has no Parser.message_consumed"),
        (_MOVED, "cannot import name 'HttpRequestParser' from 'aiohttp.http'"),
    ],
    ids=["renamed", "moved"],
)
def test_it_ends_with_a_clear_line(tmp_path: Path, later: str, why: str) -> None:
    (tmp_path / "models").mkdir()
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(later)
    server = Server([tmp_path / "models"], environment={"PYTHONPATH": str(site)})
    try:
        assert server.wait_exit(60) == 1
        assert f"does not fit the HTTP gateway: {why}" in server.log()
        assert "the server cannot start: gateway 0 ended at its start" in server.log()
        assert "Traceback" not in server.log()
    finally:
        server.discard()
