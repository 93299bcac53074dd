"""`shmserve top`: the dashboard's figures in a terminal, with the unhealthiest models first."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import sys
import termios
import threading
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from http.client import BadStatusLine, HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any

from shmserve.cli.arguments import with_scheme
from shmserve.errors import Unavailable, convert_os_errors, missing_package
from shmserve.logs import clean
from shmserve.protocols.http import describe_http_error
from shmserve.protocols.servers import read_token

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

_LOW_HEIGHT = 10  # below this number of terminal lines, the header has one line
_RECEIVE_TIMEOUT_S = 15.0  # after this silence, the server counts as exited
_RETRY_DELAY_S = 1.0
_COLUMN_WIDTH = 8  # width of a column of figures; names are twice as wide
_KEYS_HELP = "q: quit  sort: h problems n name r rate f fail w wait p p99  arrows Enter: open"
_SORT_KEYS = {"h": "hurts", "n": "name", "r": "rate", "f": "fail", "w": "pending", "p": "p99"}
_CURSOR_STEPS = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -10, "\x1b[6~": 10}
_KEY_PATTERN = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
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


def run(args: argparse.Namespace) -> int:
    """Show the figures until a key ends the program, or once if there is no capable terminal.

    Returns:
        0.

    Raises:
        InvalidArgument: A flag is invalid.
        Unavailable: The server is unreachable, or the library `rich` is not installed.
    """
    try:
        from rich.console import Console, Group
    except ImportError as error:
        raise Unavailable(missing_package("shmserve top", error, "top")) from None
    address = with_scheme(args.metrics_url).rstrip("/").removesuffix("/metrics") + "/live"
    request = create_request(address, args.token_file)
    top, console = Top(), Console(highlight=False)
    # On a dumb terminal, rich displays nothing before the program ends, so the figures are shown
    # once.
    if args.once or console.is_dumb_terminal or not (sys.stdin.isatty() and sys.stdout.isatty()):
        events = watch(request)
        for _ in range(2):  # rates are known from the second update on
            top.update(next(events))
        events.close()  # type: ignore[attr-defined]
        console.print(Group(*top.page(len(top.models) + 6, console.width)))
        return 0
    _Screen(top, request).run(console)
    return 0


def watch(request: urllib.request.Request) -> Iterator[dict[str, Any]]:
    """Yield the server's figures each second; raise Unavailable when it stops responding."""
    with open_page(request, _RECEIVE_TIMEOUT_S) as response:
        for line in response:
            if line.startswith(b"data: "):
                figures = json.loads(line[6:])
                if not {"server", "models", "events"} <= set(figures):
                    raise ValueError("this port is not the metrics port of shmserve")
                yield figures
    raise Unavailable(f"{request.full_url}: the server has exited")


def create_request(url: str, token_file: str | None) -> urllib.request.Request:
    """Return a request for a page of the metrics port, with the token of --token-file if given.

    Raises:
        InvalidArgument: The URL or the file is invalid.
    """
    with convert_os_errors(f"--metrics-url: cannot use '{url}'", "it is not a URL"):
        request = urllib.request.Request(url)
    if token_file:
        request.add_header("Authorization", f"Bearer {read_token(token_file)}")
    return request


@contextlib.contextmanager
def open_page(request: urllib.request.Request, timeout_s: float) -> Iterator[HTTPResponse]:
    """Open a page of the metrics port.

    Raises:
        Unavailable: The request or the block has failed. The message has the reason and a remedy.
    """
    remedy = "start a server by `shmserve serve`, or choose its metrics port with --metrics-url"
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            yield response
        return
    except urllib.error.HTTPError as error:
        reason = describe_http_error(error)
        if error.code in (401, 403):
            raise Unavailable(f"{request.full_url}: {reason}") from None
    except BadStatusLine as error:
        is_closed = isinstance(error, OSError)
        reason = str(error) if is_closed else "the response is not HTTP (gRPC has another port)"
    except (OSError, ValueError, TypeError, HTTPException) as error:
        reason = str(getattr(error, "reason", error)).strip()
    raise Unavailable(f"{request.full_url}: {reason}; {remedy}")


class Top:
    """The displayed state: a sorted list of models, of which one is selected."""

    def __init__(self) -> None:
        self.models: dict[str, Row] = {}
        self.server_figures: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.problem = "connecting"
        self.sort_key = "hurts"
        self.selected_name = ""
        self.is_open = False
        self.is_ended = False

    def update(self, figures: dict[str, Any]) -> None:
        """Merge the server's figures, or only those that have changed, into the displayed state."""
        if figures.get("whole"):
            self.models, self.events = {}, []
        self.models |= figures["models"]
        for key in figures.get("gone", ()):
            self.models.pop(key, None)
        self.server_figures, self.problem = figures["server"], ""
        self.events = [*self.events, *figures["events"]][-50:]

    def fail(self, problem: str) -> None:
        """Show a problem in place of the server's figures."""
        self.problem = problem

    def key(self, key: str) -> None:
        """Handle a key press."""
        keys = self.order()
        if key in ("q", "\x03") or (key == "\x1b" and not self.is_open):
            self.is_ended = True
        elif key in _SORT_KEYS:
            self.sort_key = _SORT_KEYS[key]
        elif key in _CURSOR_STEPS and keys:
            index = keys.index(self.selected_name) if self.selected_name in keys else 0
            self.selected_name = keys[min(max(index + _CURSOR_STEPS[key], 0), len(keys) - 1)]
        elif key in ("\r", "\n", "\x1b"):
            self.is_open = not self.is_open and key != "\x1b"

    def order(self) -> list[str]:
        """Return the models' keys in display order: names ascending, figures descending."""
        if self.sort_key == "name":
            return sorted(self.models)
        return sorted(self.models, key=lambda key: (-_number(self.models[key], self.sort_key), key))

    def page(self, height: int, width: int) -> list[RenderableType]:
        """Return the lines of a page.

        A page shows the server, then the models or the details of one model, and last the problem
        of the selected model.
        """
        from rich.text import Text

        keys = self.order()
        if self.selected_name not in keys:
            self.selected_name = keys[0] if keys else ""
        header = self._header()[: 1 if height < _LOW_HEIGHT else 2]
        # Three lines remain for the problem, the help on keys, and an empty line.
        model_lines = max(height - len(header) - 3, 1)
        if self.is_open and self.selected_name:
            body = self._details(model_lines)
        else:
            body = self._overview(keys, model_lines, width)
        problem = self.models.get(self.selected_name, {}).get("because") or ""
        title = _title(self.selected_name)
        problem_line = Text(clean(f"{title}: {problem}") if problem else "", "red")
        footer = [problem_line, Text(_KEYS_HELP, "dim")]
        return [*map(_single_line, header), *body, *map(_single_line, footer)]

    def _header(self) -> list[Text]:
        from rich.text import Text

        if self.problem:
            return [Text(self.problem, "bold red")]
        server, rows = self.server_figures, self.models.values()
        ready_count = sum(row["state"] == "READY" for row in rows)
        rate, failed_rate, waiting_count = (
            sum(_number(row, key) for row in rows) for key in ("rate", "fail", "pending")
        )
        exits, sequence_count = (
            sum(int(row.get(key) or 0) for row in rows) for key in ("workers_lost", "sequences")
        )
        return [
            Text(
                f"shmserve: {ready_count} of {len(rows)} ready  {_format(rate)} req/s"
                f"  {_format(failed_rate)} fail/s  {_format(waiting_count)} wait"
                f"  {server['cpu']:.0%} cpu"
                f"  {_gib(server['memory_used'])}/{_gib(server['memory_total'])} GiB",
                "bold",
            ),
            Text(
                f"{server['processes']} processes {_gib(server['pss_bytes'])} GiB PSS  {exits} died"
                f"  {server['regions']} regions {_gib(server['region_bytes'])} GiB"
                f"  arena {_gib(server['arena_used'])}/{_gib(server['arena_size'])}"
                f"  {sequence_count} sequences"
            ),
        ]

    def _overview(self, keys: list[str], free_lines: int, width: int) -> list[RenderableType]:
        """Return the lines of the models, and of the newest events if there is space."""
        from rich.text import Text

        free_rows = max(free_lines - 2 - len(keys), 0)
        event_lines = [f"{time}  {text}" for time, text in self._events_about("")][:free_rows]
        events = map(_single_line, map(Text, ["", *event_lines])) if event_lines else ()
        return [self._table(keys, free_lines, width), *events]

    def _columns(self, width: int) -> list[str]:
        """Return the columns that fit: name, the sort column, and the first of the others."""
        ranked_columns = sorted(_COLUMNS, key=lambda key: key not in ("name", self.sort_key))
        shown_columns = ranked_columns[: max(width // _COLUMN_WIDTH - 1, 2)]
        return [key for key in _COLUMNS if key in shown_columns]

    def _table(self, keys: list[str], free_lines: int, width: int) -> Table:
        from rich.table import Table

        table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="reverse")
        columns = self._columns(width)
        for key in columns:
            name = f"{_COLUMNS[key]}*" if key == self.sort_key else _COLUMNS[key]
            column_options: dict[str, Any] = {"ratio": 1} if key == "name" else {"justify": "right"}
            table.add_column(name, no_wrap=True, overflow="ellipsis", **column_options)
        selected_row = keys.index(self.selected_name) if self.selected_name else 0
        row_count = free_lines - 1  # without the table's header
        first_row = max(0, min(selected_row - row_count // 2, len(keys) - row_count))
        for key in keys[first_row : first_row + row_count]:
            row = self.models[key]
            style = "red" if row.get("because") else ""
            cells = [_cell_text(row, column) for column in columns[1:]]
            row_style = " reverse" if key == self.selected_name else ""
            table.add_row(_ShortenedName(_title(key)), *cells, style=style + row_style)
        return table

    def _details(self, free_lines: int) -> list[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(no_wrap=True, style="bold")
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        name = self.selected_name.rpartition("/")[0]
        lines = [*details(self.models[self.selected_name]), *self._events_about(name)]
        for label, text in lines[: free_lines - 1]:
            table.add_row(label, Text(clean(text)))
        return [_ShortenedName(_title(self.selected_name), "bold"), table]

    def _events_about(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the events about `name`, newest first, as pairs of time and text."""
        for event in reversed(self.events):
            subject = str(event.get("name") or event.get("title") or "")
            if name in subject:
                time_text = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
                state_and_reason = (event.get("state"), event.get("reason"))
                text = f"{event['event']} {subject} {' '.join(filter(None, state_and_reason))}"
                yield time_text, clean(" ".join(text.split()))


def details(row: Row) -> Iterator[tuple[str, str]]:
    """Yield the details of a model as pairs of name and text."""
    yield "state", " ".join([row["state"], *(row.get("reason") or "").split()])
    if "success" not in row:
        return
    recent = row.get("recent", {})
    yield "answered", f"{row['success']}, failed {_format_counts(row['failures']) or 0}"
    yield "ms", _format_quantiles(recent.get("ms"))
    yield "a request's ms", _format_counts(recent.get("phases", {}))
    yield "executions", f"{row['execution_count']}, inferences {row['inference_count']}"
    yield "batches up to", _format_counts(recent.get("sizes", {}))
    yield "closed by", _format_counts(recent.get("closed", {}))
    if row["instances"]:
        yield "instances", f"{_format_counts(row['instances'])}  died {row['workers_lost']}"
    if row["sequences"]:
        yield "sequences", f"open {row['sequences']}"
    if row.get("cache"):
        cache_counts = {"hits": row["cache_hit"], "misses": row["cache_miss"]}
        yield "cache", _format_counts(cache_counts | row["cache"])
    if row.get("steps"):
        yield "steps", "  ".join(row["steps"])
    for name, value in row.get("generation", {}).items():
        yield name, _format_counts(value) if isinstance(value, dict) else _format(value)
    if "tokens_rate" in recent:
        yield "tokens/s", _format(recent["tokens_rate"])
        yield "first token ms", _format_quantiles(recent["first_token_ms"])
        yield "next token ms", _format_quantiles(recent["inter_token_ms"])


def _format_quantiles(quantiles: list[float] | None) -> str:
    return _format_counts(dict(zip(("p50", "p90", "p99"), quantiles or (), strict=False)))


def _format_counts(counts: dict[str, float]) -> str:
    return "  ".join(f"{name} {_format(count)}" for name, count in counts.items())


def _title(key: str) -> str:
    """Return a model's name, with its version unless it is 1."""
    return clean(key.removesuffix("/1").removesuffix("/"))


class _ShortenedName:
    """A name on one line, shortened in its middle, because long names often differ at the end."""

    def __init__(self, name: str, style: str = "") -> None:
        self._name = name
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.cells import cell_len, set_cell_size
        from rich.text import Text

        name, width = self._name, options.max_width
        if cell_len(name) > width:
            # `set_cell_size` replaces half of a wide character by a space, which is removed.
            name_end = set_cell_size(name[::-1], (width - 1) // 2).rstrip()[::-1]
            name = f"{set_cell_size(name, width // 2).rstrip()}\u2026{name_end}"
        yield _single_line(Text(name, self._style))


def _single_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _number(row: Row, key: str) -> float:
    recent = row.get("recent", {})
    quantiles_ms = recent.get("ms") or (0.0, 0.0, 0.0)
    figures = {
        "rate": recent.get("rate"),
        "fail": recent.get("fail_rate"),
        "batch": recent.get("batch"),
        "p50": quantiles_ms[0],
        "p99": quantiles_ms[-1],
    }
    return float(figures.get(key, row.get(key)) or 0)


def _cell_text(row: Row, key: str) -> str:
    if "success" not in row:
        return row["state"] if key == "rate" else "-"
    if key == "busy":
        if not row["instances"]:
            return "-"  # an ensemble has no instances
        busy_count, idle_count = (row["instances"].get(state, 0) for state in ("busy", "idle"))
        return f"{busy_count}/{busy_count + idle_count}"
    return _format(_number(row, key)) if "recent" in row or key == "pending" else "-"


def _gib(byte_size: int) -> str:
    return f"{byte_size / 2**30:.3g}"


def _format(number: float) -> str:
    if number >= 100_000:
        return f"{number / 1000:.0f}k"
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


class _Screen:
    """A terminal, and threads that read its keys and receive the server's figures."""

    def __init__(self, top: Top, request: urllib.request.Request) -> None:
        self._top = top
        self._request = request
        self._changes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self, console: Any) -> None:
        """Run until a key ends the program."""
        from rich.console import Group
        from rich.live import Live

        stdin = sys.stdin.fileno()
        terminal_mode = termios.tcgetattr(stdin)
        try:
            tty.setcbreak(stdin)
            threading.Thread(target=self._receive, daemon=True).start()
            threading.Thread(target=self._read_keys, args=(stdin,), daemon=True).start()
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not self._top.is_ended:
                    width, height = shutil.get_terminal_size()
                    live.update(Group(*self._top.page(height, width)), refresh=True)
                    self._changes.get()()
                    while not self._changes.empty():
                        self._changes.get()()
        finally:
            termios.tcsetattr(stdin, termios.TCSADRAIN, terminal_mode)

    def _read_keys(self, stdin_fd: int) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            while text := os.read(stdin_fd, 64).decode(errors="replace"):
                for key in _KEY_PATTERN.findall(text):
                    self._changes.put(partial(self._top.key, key))
        self._changes.put(partial(self._top.key, "q"))

    def _receive(self) -> None:
        while True:
            try:
                for figures in watch(self._request):
                    self._changes.put(partial(self._top.update, figures))
            except Unavailable as error:
                self._changes.put(partial(self._top.fail, error.message))
            time.sleep(_RETRY_DELAY_S)
