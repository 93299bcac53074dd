"""A server whose aiohttp lacks a part says so in a line, and ends."""

from __future__ import annotations

from pathlib import Path

from tests.support.servers import Server

# As a later release could be, for every process that starts.
_LATER = """
import aiohttp.http

class Parser:
    feed_data = pause_reading = None

aiohttp.http.HttpRequestParser = Parser
"""


def test_it_ends_with_a_clear_line(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_LATER)
    server = Server([tmp_path / "models"], environment={"PYTHONPATH": str(site)})
    try:
        assert server.wait_exit(60) == 1
        assert "does not fit the HTTP gateway: it has no Parser.message_consumed" in server.log()
        assert "the server cannot start: gateway 0 ended at its start" in server.log()
        assert "Traceback" not in server.log()
    finally:
        server.discard()
