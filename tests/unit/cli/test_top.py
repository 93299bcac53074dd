"""`shmserve top`: the display of the figures at any size, and the keys."""

import io
import re
import urllib.request
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group

from shmserve.cli.top import Top, open_page
from shmserve.errors import Unavailable
from shmserve.protocols import TOKEN_HINT
from tests.support.servers import reply_once
from tests.unit.gateway.test_figures import build_rows, report

SERVER = {
    "cpu": 0.5, "memory_used": 2**30, "memory_total": 2**31, "processes": 5, "pss_bytes": 2**29,
    "regions": 2, "region_bytes": 2**28, "arena_used": 0, "arena_size": 2**30,
}  # fmt: skip
ENDED_EVENT = {
    "event": "ProcessEnded", "time": 0, "pid": 7, "title": "worker quick.0", "reason": "oops",
}  # fmt: skip


@pytest.mark.parametrize(
    ("response", "error_text"),
    [
        (b"HTTP/1.1 404 No\r\n\r\nNot Found", "HTTP Error 404: No; start a server by `shmserve"),
        (b'HTTP/1.1 401 No\r\n\r\n{"error": "who?"}', f"who?{TOKEN_HINT}"),
        (b"HTTP/1.1 403 No\r\n\r\n", "HTTP Error 403: No"),
        (b"\0\0\x18\4\0\0\0\r\n", "the response is not HTTP (gRPC has another port); start"),
        (b"", "Remote end closed connection without response; start a server by"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "IncompleteRead(0 bytes read, 9 more"),
    ],
)
def test_an_unusable_metrics_port_is_reported(response: bytes, error_text: str) -> None:
    with reply_once(response) as port:
        url = f"http://127.0.0.1:{port}/live"
        text = re.escape(f"{url}: {error_text}")
        request = urllib.request.Request(url)
        with pytest.raises(Unavailable, match=text), open_page(request, timeout_s=20) as page:
            page.read()


def render(top: Top, width: int = 80, height: int = 24) -> list[str]:
    stdout = io.StringIO()
    Console(file=stdout, width=width).print(Group(*top.page(height, width)))
    return stdout.getvalue().splitlines()


def build_top(**models: dict[str, Any]) -> Top:
    top = Top()
    rows = {f"{name}/1": {"state": "READY", **row} for name, row in models.items()}
    top.update({"whole": True, "server": SERVER, "models": rows, "events": [ENDED_EVENT]})
    return top


def example_top() -> Top:
    """Return three serving models, one of which fails requests, and a model that is not loaded."""
    _, quick_row = build_rows(report(0), report(50))
    _, failing_row = build_rows(report(0), report(10, fail=10, workers_lost=1))
    _, idle_row = build_rows(report(0), report(0))
    broken_row = {"state": "UNAVAILABLE", "reason": "no file", "hurts": 9000, "because": "no file"}
    return build_top(quick=quick_row, failing=failing_row, idle=idle_row, broken=broken_row)


def model_names(top: Top) -> list[str]:
    return [line.split()[0] for line in render(top)[3:7]]


def test_models_with_problems_are_first() -> None:
    lines = render(example_top())
    assert lines[0].startswith("shmserve: 3 of 4 ready  60 req/s  10 fail/s  0 wait")
    assert lines[1].startswith("5 processes 0.5 GiB PSS  1 died  2 regions 0.25 GiB  arena 0/1")
    assert "ProcessEnded worker quick.0 oops" in lines[-3]
    assert model_names(example_top()) == ["broken", "failing", "quick", "idle"]
    assert "broken: no file" in lines[-2]
    assert "h problems" in lines[-1] and "q: quit" in lines[-1] and len(lines) <= 24


@pytest.mark.parametrize(
    ("key", "first_name"), [("n", "broken"), ("r", "quick"), ("f", "failing"), ("h", "broken")]
)
def test_letter_keys_sort_the_table(key: str, first_name: str) -> None:
    top = example_top()
    top.key(key)
    assert model_names(top)[0] == first_name


def test_arrow_keys_select_and_enter_opens() -> None:
    top = example_top()
    render(top)
    top.key("\x1b[A")
    top.key("j")
    top.key("\x1b[B")
    assert top.selected_name == "quick/1"
    top.key("\r")
    text = "\n".join(render(top))
    assert "closed by       full 50" in text and "oops" in text
    top.key("\x1b")
    assert not top.is_open and not top.is_ended
    top.key("q")
    assert top.is_ended


def test_models_appear_and_disappear() -> None:
    top = example_top()
    top.update({"server": SERVER, "models": {}, "gone": ["broken/1", "idle/1"], "events": []})
    assert set(top.models) == {"quick/1", "failing/1"}
    top.problem = "it is gone"
    assert render(top)[0].rstrip() == "it is gone"


@given(
    st.integers(0, 300),
    st.integers(20, 200),
    st.integers(6, 60),
    st.lists(st.sampled_from(("j", "k", "\x1b[6~", "\r", "n", "p")), max_size=20),
)
def test_the_screen_fits_any_terminal(count: int, width: int, height: int, keys: list[str]) -> None:
    _, row = build_rows(report(0), report(10**6, pending=10**7))
    top = build_top(**{f"model_with_a_long_name_{n}": row for n in range(count)})
    for key in keys:
        top.key(key)
    lines = render(top, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    if top.selected_name:
        # The selected row is on the screen, even if its name is truncated.
        selected = top.selected_name.removesuffix("/1")
        ends = selected[:4], selected[-4:]
        assert any(line.startswith(ends[0]) and ends[1] in line for line in lines)


def test_a_narrow_terminal_shows_names_and_the_sorted_column() -> None:
    top = example_top()
    top.key("p")
    lines = render(top, 40, 15)
    assert lines[2].split() == ["MODEL", "REQ/S", "FAIL/S", "P99", "MS*"]
    assert "broken       UNAVAILABLE" in "\n".join(lines)
    assert "q: quit" in lines[-1]


def test_long_names_are_shortened_in_their_middle() -> None:
    names = ["encoder_of_the" + "\u6f22" * 40 + end for end in ("_1", "_2")]
    top = build_top(**{name: {"state": "READY"} for name in names})
    shown_names = [line.split()[0] for line in render(top)[3:5]]
    assert [name[:14] + name[-3:] for name in shown_names] == [
        "encoder_of_the\u6f22_1", "encoder_of_the\u6f22_2",
    ]  # fmt: skip
    top.key("\r")
    assert render(top)[2].rstrip().endswith("\u6f22_1")


def test_names_are_neither_markup_nor_control_characters() -> None:
    row = {"state": "UNAVAILABLE", "reason": "\x1b[2Jno\n[/b]", "because": "\x1b[2Jno"}
    top = Top()
    names = ("[/b]/1", "\x1b[31m/2", "two\nlines/")
    models = dict.fromkeys(names, row)
    event = {"event": "ModelChanged", "time": 0, "name": "[/b]", "state": "\x1b[2J"}
    top.update({"whole": True, "server": SERVER, "models": models, "events": [event]})
    lines = render(top)
    shown = "\n".join(lines)
    assert [line.split()[0] for line in lines[3:6]] == [r"\x1b[31m/2", "[/b]", r"two\nlines"]
    assert r"ModelChanged [/b] \x1b[2J" in shown
    top.key("\r")
    shown += "\n".join(render(top))
    assert r"\x1b[2Jno [/b]" in shown and "\x1b" not in shown
