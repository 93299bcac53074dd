"""How every process logs: one line a record, with the process's role and, where there is one, the
request id."""

from __future__ import annotations

import logging
import sys
import time

_LETTERS = {"DEBUG": "D", "INFO": "I", "WARNING": "W", "ERROR": "E", "CRITICAL": "C"}
_MAX_LINE = 8192


def clean(text: str) -> str:
    """`text` with control characters escaped and capped: client strings cannot forge log lines."""
    shown = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return shown if len(shown) <= _MAX_LINE else shown[:_MAX_LINE] + "..."


class LineFormatter(logging.Formatter):
    """`I 2026-01-31T12:00:00.123Z role[pid] text key=value`: greppable, one record a line.

    A record's `request_id` (given with `extra={"request_id": ...}`) is printed as `request=ID`.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        """One line for a record; a traceback follows indented."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        letter = _LETTERS.get(record.levelname, "?")
        line = (
            f"{letter} {stamp}.{int(record.msecs):03d}Z {self.role}[{record.process}] "
            f"{clean(record.getMessage())}"
        )
        request_id = getattr(record, "request_id", None)
        if request_id:
            line += f" request={clean(str(request_id))}"
        if record.exc_info:
            line += "\n" + "\n".join(
                "    " + row for row in self.formatException(record.exc_info).splitlines()
            )
        return line


def configure(role: str, verbose: int = 0) -> None:
    """Set up logging to stderr for this process.

    `role` names the process in each line ("supervisor", "gateway 0", "worker simple.0"); `verbose`
    >= 1 shows DEBUG.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose >= 1 else logging.INFO)
    # Libraries' debug and access chatter is theirs to show only when something is wrong.
    for noisy in ("asyncio", "aiohttp", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
