"""`shmserve top`: the dashboard's figures in a terminal, with the unhealthiest models first."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import select
import shutil
import sys
import termios
import threading
import tty
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from shmserve.cli.arguments import add_flags
from shmserve.errors import Unavailable, missing_package
from shmserve.protocols.servers import read_token

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_LOW = 10  # number of terminal lines below which mainly models are shown
_SILENT_S = 15.0  # a server that is silent for longer is considered gone
_AGAIN_S = 1.0
_KEYS = "sort: h problems n name r rate f fail w wait p p99  arrows Enter: open  q: quit"
_SORTS = {"h": "hurts", "n": "name", "r": "rate", "f": "fail", "w": "pending", "p": "p99"}
_ARROWS = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -10, "\x1b[6~": 10}
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
_COLUMNS = {
    "name": "MODEL",
    "rate": "REQ/S",
    "fail": "FAIL/S",
    "pending": "WAIT",
    "p50": "P50 MS",
    "p99": "P99 MS",
    "batch": "BATCH",
    "busy": "BUSY",
}

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_flags(parser, "top")


def run(args: argparse.Namespace) -> int:
    """Show the figures until a key ends the program, or once if the output is no terminal.

    Returns:
        0.

    Raises:
        Unavailable: The server is unreachable, or the library `rich` is not installed.
    """
    try:
        from rich.console import Console, Group
    except ImportError as error:
        raise Unavailable(missing_package("shmserve top", error, "top")) from None
    address = args.metrics_url.rstrip("/").removesuffix("/metrics") + "/live"
    request = urllib.request.Request(address)
    if args.token_file:
        request.add_header("Authorization", f"Bearer {read_token(args.token_file)}")
    top, console = Top(), Console(highlight=False)
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        events = watch(request)
        for _ in range(2):  # rates are known from the second update on
            top.take(next(events))
        events.close()  # type: ignore[attr-defined]
        console.print(Group(*top.page(len(top.models) + 6)))
        return 0
    _Screen(top, request).run(console)
    return 0


def watch(request: urllib.request.Request) -> Iterator[dict[str, Any]]:
    """Yield the server's figures each second; raise Unavailable when it stops responding."""
    try:
        with urllib.request.urlopen(request, timeout=_SILENT_S) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
    except urllib.error.HTTPError as error:
        body = error.read(1000).decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            body = json.loads(body)["error"]
        remedy = "; choose the file of a token with --token-file" if error.code == 401 else ""
        raise Unavailable(f"{request.full_url}: {body or error}{remedy}") from None
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"{request.full_url}: {getattr(error, 'reason', error)}; start a server by "
            "`shmserve serve`, or choose its address with --metrics-url"
        ) from None
    raise Unavailable(f"{request.full_url}: the server has exited")


class Top:
    """The displayed state: a sorted list of models with a selected one (pure)."""

    def __init__(self) -> None:
        self.models: dict[str, Row] = {}
        self.server: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.trouble = "connecting"
        self.sort = "hurts"
        self.chosen = ""
        self.open = False
        self.ended = False

    def take(self, news: dict[str, Any]) -> None:
        """Update the state with the server's figures."""
        if news.get("whole"):
            self.models, self.events = {}, []
        self.models |= news["models"]
        for key in news.get("gone", ()):
            self.models.pop(key, None)
        self.server, self.trouble = news["server"], ""
        self.events = [*self.events, *news["events"]][-50:]

    def key(self, key: str) -> None:
        """Handle a key press."""
        keys = self.order()
        if key in ("q", "\x03") or (key == "\x1b" and not self.open):
            self.ended = True
        elif key in _SORTS:
            self.sort = _SORTS[key]
        elif key in _ARROWS and keys:
            at = keys.index(self.chosen) if self.chosen in keys else 0
            self.chosen = keys[min(max(at + _ARROWS[key], 0), len(keys) - 1)]
        elif key in ("\r", "\n", "\x1b"):
            self.open = not self.open and key != "\x1b"

    def order(self) -> list[str]:
        """Return the models in display order: names ascending, figures descending."""
        if self.sort == "name":
            return sorted(self.models)
        return sorted(self.models, key=lambda key: (-_number(self.models[key], self.sort), key))

    def page(self, height: int) -> list[RenderableType]:
        """Return the lines of a page: the server, the models or the selected one, and problems."""
        from rich.text import Text

        keys = self.order()
        if self.chosen not in keys:
            self.chosen = keys[0] if keys else ""
        head = self._head()[: 1 if height < _LOW else 2]
        # The page without the problem, the keys and a spare line.
        free_lines = max(height - len(head) - 3, 1)
        body = (
            self._model(free_lines) if self.open and self.chosen else self._list(keys, free_lines)
        )
        hurts = self.models.get(self.chosen, {}).get("because") or ""
        because = Text(f"{self.chosen}: {hurts}" if hurts else "", "red")
        foot = [because, Text(_KEYS, "dim")]
        return [*map(_line, head), *body, *map(_line, foot)]

    def _head(self) -> list[Text]:
        from rich.text import Text

        if self.trouble:
            return [Text(self.trouble, "bold red")]
        server, rows = self.server, self.models.values()
        ready = sum(row["state"] == "READY" for row in rows)
        rate, fail, waiting = (
            sum(_number(row, key) for row in rows) for key in ("rate", "fail", "pending")
        )
        died, sequences = (
            sum(int(row.get(key) or 0) for row in rows) for key in ("workers_lost", "sequences")
        )
        return [
            Text(
                f"shmserve: {ready} of {len(rows)} ready  {_short(rate)} req/s"
                f"  {_short(fail)} fail/s  {_short(waiting)} wait  {server['cpu']:.0%} cpu"
                f"  {_gib(server['memory_used'])}/{_gib(server['memory_total'])} GiB",
                "bold",
            ),
            Text(
                f"{server['processes']} processes {_gib(server['pss_bytes'])} GiB PSS  {died} died"
                f"  {server['regions']} regions {_gib(server['region_bytes'])} GiB"
                f"  arena {_gib(server['arena_used'])}/{_gib(server['arena_size'])}"
                f"  {sequences} sequences"
            ),
        ]

    def _list(self, keys: list[str], free_lines: int) -> list[RenderableType]:
        """Return the lines of the models, and of the newest events if there is space."""
        from rich.text import Text

        free_rows = free_lines - 2 - len(keys)
        happened = [f"{when}  {text}" for when, text in self._happened("")][: max(free_rows, 0)]
        events = map(_line, map(Text, ["", *happened])) if happened else ()
        return [self._table(keys, free_lines), *events]

    def _table(self, keys: list[str], free_lines: int) -> Table:
        from rich.table import Table

        table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="reverse")
        for key, title in _COLUMNS.items():
            name = f"{title}*" if key == self.sort else title
            wide: dict[str, Any] = {"ratio": 1} if key == "name" else {"justify": "right"}
            table.add_column(name, no_wrap=True, overflow="ellipsis", **wide)
        at = keys.index(self.chosen) if self.chosen else 0
        rows = free_lines - 1  # without the table's header
        first = max(0, min(at - rows // 2, len(keys) - rows))
        for key in keys[first : first + rows]:
            row = self.models[key]
            style = "red" if row.get("because") else ""
            cells = [_cell(row, column) for column in list(_COLUMNS)[1:]]
            reverse = " reverse" if key == self.chosen else ""
            table.add_row(key.removesuffix("/1"), *cells, style=style + reverse)
        return table

    def _model(self, free_lines: int) -> list[RenderableType]:
        from rich.table import Table

        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(no_wrap=True, style="bold")
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        name = self.chosen.rpartition("/")[0]
        lines = [*details(self.models[self.chosen]), *self._happened(name)]
        for name, text in [(self.chosen, ""), *lines][:free_lines]:
            table.add_row(name, text)
        return [table]

    def _happened(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the events about `name`, newest first, as pairs of time and text."""
        for event in reversed(self.events):
            about = str(event.get("name") or event.get("title") or "")
            if name in about:
                when = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
                body = (event.get("state"), event.get("reason"))
                yield (
                    when,
                    " ".join(f"{event['event']} {about} {' '.join(filter(None, body))}".split()),
                )


def details(row: Row) -> Iterator[tuple[str, str]]:
    """Yield the details of a model as pairs of name and text."""
    yield "state", " ".join([row["state"], *(row.get("reason") or "").split()])
    if "success" not in row:
        return
    recent = row.get("recent", {})
    yield "answered", f"{row['success']}, failed {_counts(row['failures']) or 0}"
    yield "ms", _quantiles(recent.get("ms"))
    yield "a request's ms", _counts(recent.get("phases", {}))
    yield "executions", f"{row['execution_count']}, inferences {row['inference_count']}"
    yield "batches up to", _counts(recent.get("sizes", {}))
    yield "closed by", _counts(recent.get("closed", {}))
    if row["instances"]:
        yield "instances", f"{_counts(row['instances'])}  died {row['workers_lost']}"
    if row["sequences"]:
        yield "sequences", f"open {row['sequences']}"
    if row.get("cache"):
        hits = {"hits": row["cache_hit"], "misses": row["cache_miss"]}
        yield "cache", _counts(hits | row["cache"])
    if row.get("steps"):
        yield "steps", "  ".join(row["steps"])
    for name, value in row.get("generation", {}).items():
        yield name, _counts(value) if isinstance(value, dict) else _short(value)
    if "tokens_rate" in recent:
        yield "tokens/s", _short(recent["tokens_rate"])
        yield "first token ms", _quantiles(recent["first_token_ms"])
        yield "next token ms", _quantiles(recent["inter_token_ms"])


def _quantiles(quantiles: list[float] | None) -> str:
    return _counts(dict(zip(("p50", "p90", "p99"), quantiles or (), strict=False)))


def _counts(counts: dict[str, float]) -> str:
    return "  ".join(f"{name} {_short(count)}" for name, count in counts.items())


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _number(row: Row, key: str) -> float:
    recent = row.get("recent", {})
    ms = recent.get("ms") or (0.0, 0.0, 0.0)
    figures = {
        "rate": recent.get("rate"),
        "fail": recent.get("fail_rate"),
        "batch": recent.get("batch"),
        "p50": ms[0],
        "p99": ms[-1],
    }
    return float(figures.get(key, row.get(key)) or 0)


def _cell(row: Row, key: str) -> str:
    if "success" not in row:
        return row["state"] if key == "rate" else "-"
    if key == "busy":
        if not row["instances"]:
            return "-"  # an ensemble has no instances
        busy, idle = (row["instances"].get(state, 0) for state in ("busy", "idle"))
        return f"{busy}/{busy + idle}"
    return _short(_number(row, key)) if "recent" in row or key == "pending" else "-"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"


def _short(number: float) -> str:
    if number >= 100_000:
        return f"{number / 1000:.0f}k"
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


class _Screen:
    """A terminal, and a thread that receives the server's figures."""

    def __init__(self, top: Top, request: urllib.request.Request) -> None:
        self._top = top
        self._request = request
        self._news: queue.SimpleQueue[dict[str, Any] | str] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()

    def run(self, console: Any) -> None:
        """Run until a key ends the program."""
        from rich.console import Group
        from rich.live import Live

        threading.Thread(target=self._read, daemon=True).start()
        stdin = sys.stdin.fileno()
        before = termios.tcgetattr(stdin)
        try:
            tty.setcbreak(stdin)
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not self._top.ended:
                    height = shutil.get_terminal_size().lines
                    live.update(Group(*self._top.page(height)), refresh=True)
                    self._wait(stdin)
        finally:
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)

    def _wait(self, stdin: int) -> None:
        poll = select.poll()
        poll.register(stdin, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        ready = dict(poll.poll())
        if stdin in ready:
            pressed = os.read(stdin, 64).decode(errors="replace")
            for key in _KEY.findall(pressed) or "q":  # no input means that the terminal was closed
                self._top.key(key)
        if self._woken in ready:
            os.read(self._woken, 4096)
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, str):
                self._top.trouble = news
            else:
                self._top.take(news)

    def _read(self) -> None:
        while True:
            try:
                for news in watch(self._request):
                    self._show(news)
            except Unavailable as error:
                self._show(error.message)
            threading.Event().wait(_AGAIN_S)

    def _show(self, news: dict[str, Any] | str) -> None:
        self._news.put(news)
        os.write(self._wake, b"\0")
