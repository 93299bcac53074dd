"""Log lines, what the settings show, and the file that they go to."""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve import logs
from shmserve.errors import InvalidArgument
from shmserve.logs import LogSettings
from shmserve.supervisor.host.console import written_to

LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def logging_is_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def words(capsys: Capture) -> list[str]:
    """The last word of each line that was written since the last time."""
    return [line.split()[-1] for line in capsys.readouterr().err.splitlines()]


def say() -> None:
    for level in LEVELS:
        logging.getLogger("shmserve.somewhere").log(level, "%s", logging.getLevelName(level))


@pytest.mark.parametrize("switches", list(itertools.product((False, True), repeat=4)))
def test_each_switch_is_for_its_level_alone(capsys: Capture, switches: tuple[bool, ...]) -> None:
    debug, info, warning, error = switches
    settings = LogSettings(
        log_info=info, log_warning=warning, log_error=error, log_verbose_level=int(debug)
    )
    expected = list(itertools.compress(map(logging.getLevelName, LEVELS), (*switches, error)))
    logs.configure("role", settings)
    say()
    assert words(capsys) == expected
    # A change says the same as a start, and what is shown by none costs no record.
    logs.configure("role", LogSettings())
    logs.apply(settings)
    words(capsys)
    say()
    assert words(capsys) == expected
    logger = logging.getLogger("shmserve.somewhere")
    lowest = [level for level in LEVELS if settings.shows(level)][:1]
    assert [level for level in LEVELS if logger.isEnabledFor(level)][:1] == lowest


def test_formats(capsys: Capture) -> None:
    logs.configure("gateway 0", LogSettings())
    logger = logging.getLogger("shmserve.somewhere")
    logger.warning("hello", extra={"request_id": "a"})
    logs.apply(LogSettings(log_format="ISO8601"))
    logger.warning("hello")
    first, second = capsys.readouterr().err.splitlines()
    pid = os.getpid()
    assert re.fullmatch(rf"W {STAMP} gateway 0\[{pid}\] hello request=a", first)
    assert re.fullmatch(rf"{STAMP} W {pid} gateway 0\] hello", second)


def test_who_logs_in_a_way_of_its_own_is_left_alone(capsys: Capture) -> None:
    root = logging.getLogger()
    root.handlers[:] = [logging.StreamHandler()]
    root.setLevel(logging.ERROR)
    logs.apply(LogSettings(log_verbose_level=1))
    assert root.level == logging.ERROR


def test_every_process_says_what_it_was_told(capsys: Capture) -> None:
    logs.configure("role", LogSettings())
    logs.apply(LogSettings(log_verbose_level=2))
    assert "log_verbose_level=2" in capsys.readouterr().err


EVIL = "x\nE 2026 forged\x1b[31m\u2028\x00\r\udc80" + "y" * (1 << 20)


def test_clients_cannot_write_log_lines(capsys: Capture) -> None:
    """R23: what a client says is escaped and cut: in texts, in ids and in tracebacks."""
    logs.configure("role", LogSettings())
    logger = logging.getLogger("shmserve.somewhere")
    logger.warning("refused: %s", EVIL, extra={"request_id": EVIL})
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1
    assert shown.rstrip("\n").isprintable()
    assert len(shown) < 40_000
    try:
        raise ValueError(EVIL + "\nE forged" * 100_000)
    except ValueError:
        logger.exception("failed")
    shown = capsys.readouterr().err
    first, *rows = shown.split("\n")[:-1]
    assert first.endswith("] failed")
    assert all(row.startswith("    ") and row.isprintable() for row in rows)
    assert len(rows) < 110
    assert len(shown) < 40_000


def test_the_file_gets_what_is_written_to_stderr(tmp_path: Path) -> None:
    """Also by processes that are started meanwhile, after what is there, and no longer than
    asked."""
    path = tmp_path / "log"
    path.write_text("before\n")
    program = f"""if True:
        import os, subprocess, sys
        from shmserve.supervisor.host.console import written_to
        with written_to({str(path)!r}):
            print("ours", file=sys.stderr, flush=True)
            subprocess.run(["sh", "-c", "echo theirs >&2"], check=True)
            print("printed", flush=True)
        print("after", file=sys.stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert path.read_text() == "before\nours\ntheirs\n"
    assert (done.stdout, done.stderr) == ("printed\n", "after\n")


@pytest.mark.parametrize("path", ["/nowhere/x", "/", "a\0b"])
def test_a_file_that_cannot_be_written(path: str) -> None:
    with pytest.raises(InvalidArgument, match="--log-file: cannot write"), written_to(path):
        pass
