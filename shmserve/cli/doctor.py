"""`shmserve doctor`: checks of this host and of the server, with advice for each problem."""

from __future__ import annotations

import argparse
import json
import os
import re
import textwrap
from collections.abc import Iterable

from shmserve.config import server
from shmserve.config.command_line import Parsed
from shmserve.supervisor.checks import OK, WARNING, WRONG, Verdict, table
from shmserve.supervisor.checks.access import gather_peer, judge_peer

_WIDTH = 80
# The spaces at which the line of a remedy may be broken, since they are not in a command.
_CLAUSE = re.compile(r"(?<=[,;]) |(?<=\)) | (?=or )")
_EXIT_STATUSES = {OK: 0, WARNING: 1, WRONG: 2}


def run(args: argparse.Namespace, parsed: Parsed) -> int:
    """Print the verdict of each check of this host, or of the process of `--peer`.

    The checks of `--peer` determine whether that process can share memory with the server.

    Returns:
        The worst verdict: 0 good, 1 warning, 2 failure.

    Raises:
        InvalidArgument: The process of `--peer` cannot be examined.
    """
    config = server.from_flags(parsed, os.environ, needs_models=False)
    results: Iterable[tuple[str, Verdict]]
    if args.peer is None:
        results = ((check.name, verdict) for check, verdict in table.run_checks(config))
    else:
        results = judge_peer(*gather_peer(config, args.peer))
    verdicts = []
    for name, verdict in results:
        verdicts.append({"name": name, **verdict._asdict()})
        if not args.json:
            print(text(name, verdict), flush=True)
    status = max(_EXIT_STATUSES[verdict_fields["state"]] for verdict_fields in verdicts)
    if args.json:
        print(json.dumps({"status": status, "checks": verdicts}, indent=2))
    return status


def text(name: str, verdict: Verdict) -> str:
    """Return a verdict as text, wrapped at 80 columns; long commands are not broken."""
    line_start = f"{verdict.state:8}{name:16}"
    parts = (verdict.found, verdict.fix)
    facts, remedy = ("".join(c if c.isprintable() else " " for c in part) for part in parts)
    width = _WIDTH - len(line_start)
    fact_lines = textwrap.wrap(facts, width, break_on_hyphens=False, break_long_words=False) or [""]
    lines = [line_start + fact_lines[0], *(" " * len(line_start) + line for line in fact_lines[1:])]
    line_prefix, line = f"{'->':>{len(line_start) - 1}} ", ""
    for clause in filter(None, _CLAUSE.split(remedy)):
        if line and len(f"{line} {clause}") > width:
            lines.append(line_prefix + line)
            line_prefix, line = " " * len(line_start), ""
        line = f"{line} {clause}".lstrip()
    return "\n".join([*lines, *([line_prefix + line] if line else [])])
