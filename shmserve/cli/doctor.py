"""`shmserve doctor`: what is well with this host and what is not, and what to do about it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable

from shmserve.config.server import ServerConfig
from shmserve.supervisor.checks import OK, WARNING, WRONG, Verdict, table
from shmserve.supervisor.checks.places import gather_peer, judge_peer

_WIDTH = 80
_STATUS = {OK: 0, WARNING: 1, WRONG: 2}


def doctor(config: ServerConfig, peer_pid: int | None, *, as_json: bool) -> int:
    """Print what every check says; returns the worst: 0 all is well, 1 a warning, 2 wrong.

    With `peer_pid` it is about that process and the server. Raises InvalidArgument where it cannot
    be looked at.
    """
    looked: Iterable[tuple[str, Verdict]]
    if peer_pid is None:
        looked = ((check.name, verdict) for check, verdict in table.look(config))
    else:
        looked = judge_peer(*gather_peer(config, peer_pid))
    said = []
    for name, verdict in looked:
        said.append({"name": name, **verdict._asdict()})
        if not as_json:
            print(text(name, verdict), flush=True)
    status = max(_STATUS[each["state"]] for each in said)
    if as_json:
        print(json.dumps({"status": status, "checks": said}, indent=2))
    return status


def text(name: str, verdict: Verdict) -> str:
    """A verdict in lines of 80 columns (pure)."""
    first = f"{verdict.state:8}{name:16}"
    lines = [(first, verdict.found)]
    if verdict.fix:
        lines.append((f"{'->':>{len(first) - 1}} ", verdict.fix))
    return "\n".join(
        textwrap.fill(
            "".join(c if c.isprintable() else " " for c in said),
            _WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(first),
            break_on_hyphens=False,
        )
        for start, said in lines
    )
