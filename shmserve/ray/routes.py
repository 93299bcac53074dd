"""What of HTTP is passed on to a node's server, and what only a node itself can answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# What holds for one connection alone (RFC 9110, 7.6.1).
_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
    *("upgrade", "host"),
}
_OF_ONE_NODE = {
    r"/v2/(system|cuda)sharedmemory\b": "memory is shared with the server of the client's own node",
    r"/v2/repository/models/.*/(un)?load$": "each node loads what its server's flags say",
    r"/v2/(logging|trace/setting|models/.*/trace/setting)$": "settings are those of one node",
}


def path(scope: Mapping[str, Any]) -> str:
    """The path and query of a request (ASGI's scope) below the application's prefix, as its client
    has spelled them."""
    found = scope["raw_path"].decode("latin-1").removeprefix(scope["root_path"])
    query = scope["query_string"].decode("latin-1")
    return f"{found}?{query}" if query else found


def refusal(path: str) -> str:
    """Why this request is not for whichever node comes next; empty if it is."""
    for pattern, reason in _OF_ONE_NODE.items():
        if re.match(pattern, path.partition("?")[0]):
            return f"{reason}: not through Ray's proxy, ask that node's server"
    return ""


def passed_on(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that are for the other end."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
