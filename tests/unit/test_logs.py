"""Log lines, what the settings show, and the file that they go to."""

import contextlib
import fcntl
import itertools
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve import logs
from shmserve.errors import InvalidArgument
from shmserve.logs import LogSettings
from shmserve.supervisor.host.console import redirect_stderr
from tests.support.servers import run_python

LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def last_words(capsys: Capture) -> list[str]:
    """Return the last word of each line written since the last call."""
    return [line.split()[-1] for line in capsys.readouterr().err.splitlines()]


def log_all_levels() -> None:
    for level in LEVELS:
        logging.getLogger("shmserve.somewhere").log(level, "%s", logging.getLevelName(level))


@pytest.mark.parametrize("switches", list(itertools.product((False, True), repeat=4)))
def test_each_log_flag_controls_only_its_level(capsys: Capture, switches: tuple[bool, ...]) -> None:
    debug, info, warning, error = switches
    settings = LogSettings(
        log_info=info, log_warning=warning, log_error=error, log_verbose_level=int(debug)
    )
    expected = list(itertools.compress(map(logging.getLevelName, LEVELS), (*switches, error)))
    logs.configure("role", settings)
    log_all_levels()
    assert last_words(capsys) == expected
    # A change logs the same as a start, and a hidden message costs no record.
    logs.configure("role", LogSettings())
    logs.apply(settings)
    last_words(capsys)
    log_all_levels()
    assert last_words(capsys) == expected
    logger = logging.getLogger("shmserve.somewhere")
    lowest = [level for level in LEVELS if settings.shows(level)][:1]
    assert [level for level in LEVELS if logger.isEnabledFor(level)][:1] == lowest


def test_formats(capsys: Capture) -> None:
    logs.configure("gateway 0", LogSettings())
    logger = logging.getLogger("shmserve.somewhere")
    logger.warning("hello", extra={"request_id": "a"})
    logs.apply(LogSettings(log_format="ISO8601"))
    logger.warning("hello")
    first_line, second_line = capsys.readouterr().err.splitlines()
    pid = os.getpid()
    assert re.fullmatch(rf"W {STAMP} gateway 0\[{pid}\] hello request=a", first_line)
    assert re.fullmatch(rf"{STAMP} W {pid} gateway 0\] hello", second_line)


def test_a_foreign_logging_setup_is_kept(capsys: Capture) -> None:
    root = logging.getLogger()
    root.handlers[:] = [logging.StreamHandler()]
    root.setLevel(logging.ERROR)
    logs.apply(LogSettings(log_verbose_level=1))
    assert root.level == logging.ERROR


def test_log_settings_reach_every_process(capsys: Capture) -> None:
    logs.configure("role", LogSettings())
    logs.apply(LogSettings(log_verbose_level=2))
    assert "log_verbose_level=2" in capsys.readouterr().err


MALICIOUS_TEXT = "x\nE 2026 forged\x1b[31m\u2028\x00\r\udc80" + "y" * (1 << 20)


def test_clients_cannot_write_log_lines(capsys: Capture) -> None:
    """The text of a client is escaped and shortened in messages, ids and tracebacks."""
    logs.configure("role", LogSettings())
    logger = logging.getLogger("shmserve.somewhere")
    logger.warning("refused: %s", MALICIOUS_TEXT, extra={"request_id": MALICIOUS_TEXT})
    captured = capsys.readouterr().err
    first_line, second = captured.rstrip("\n").split("\n")
    assert first_line.isprintable() and "] refused: x request=x\\nE 2026 forged" in first_line
    assert second.isprintable() and second.startswith("    E 2026 forged\\x1b[31m\\u2028\\x00\\r")
    assert len(captured) < 40_000
    try:
        raise ValueError(MALICIOUS_TEXT + "\nE forged" * 100_000)
    except ValueError:
        logger.exception("failed")
    captured = capsys.readouterr().err
    first_line, *rows = captured.split("\n")[:-1]
    assert first_line.endswith("] failed")
    assert all(row.startswith("    ") and row.isprintable() for row in rows)
    assert len(rows) < 110
    assert len(captured) < 40_000


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("Grüße ☃ 你好", ["Grüße ☃ 你好"]),
        ("one\ntwo\n  three", ["one", "    two", "      three"]),
        ("zwölf\x1b[31m\u202eé", ["zwölf\\x1b[31m\\u202eé"]),
    ],
)
def test_lines_and_letters_are_printed_unchanged(
    capsys: Capture, text: str, rows: list[str]
) -> None:
    logs.configure("role", LogSettings())
    logging.getLogger("shmserve.somewhere").error("%s", text)
    first_line, *other_lines = capsys.readouterr().err.splitlines()
    assert [first_line.partition("] ")[2], *other_lines] == rows


def test_the_file_gets_what_is_written_to_stderr(tmp_path: Path) -> None:
    """Includes processes started later. The file is appended to, and only as long as configured."""
    path = tmp_path / "log"
    path.write_text("before\n")
    program = f"""if True:
        import os, subprocess, sys
        from shmserve.supervisor.host.console import redirect_stderr
        with redirect_stderr({str(path)!r}):
            print("ours", file=sys.stderr, flush=True)
            subprocess.run(["sh", "-c", "echo theirs >&2"], check=True)
            print("printed", flush=True)
        print("after", file=sys.stderr)
    """
    completed = run_python("-c", program, check=True)
    assert path.read_text() == "before\nours\ntheirs\n"
    assert (completed.stdout, completed.stderr) == ("printed\n", "after\n")


@pytest.mark.parametrize("path", ["/nowhere/x", "/", "a\0b"])
def test_a_file_that_cannot_be_written(path: str) -> None:
    with pytest.raises(InvalidArgument, match="--log-file: cannot write"), redirect_stderr(path):
        pass


def entries(sock: socket.socket) -> list[dict[str, str]]:
    """Yield the fields of the entries that a journal received, in datagrams or sealed files."""
    entries_found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            data, fds, _, _ = socket.recv_fds(sock, 1 << 20, 1)
            if fds:
                seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
                assert seals & fcntl.F_SEAL_WRITE and seals & fcntl.F_SEAL_SEAL
                with open(fds[0], "rb") as file:
                    file.seek(0)
                    data = file.read()
            fields = {}
            while data:
                name, _, remaining = data.partition(b"\n")
                if b"=" in name:
                    name, _, value = name.partition(b"=")
                else:
                    size = int.from_bytes(remaining[:8], "little")
                    value, remaining = remaining[8 : 8 + size], remaining[8 + size + 1 :]
                fields[name.decode()] = value.decode()
                data = remaining
            entries_found.append(fields)
    return entries_found


@pytest.fixture
def journal_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[socket.socket]:
    """Yield the socket of a journal of which stderr is a stream."""
    stream = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{stream.st_dev}:{stream.st_ino}")
    monkeypatch.setattr(logs.Journal, "address", str(tmp_path / "journal"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(logs.Journal.address)
        sock.setblocking(False)
        yield sock
        for handler in logging.getLogger().handlers:
            handler.close()


def test_a_journal_has_fields(
    journal_socket: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.configure("worker a.b.1", LogSettings(log_verbose_level=1))
    logger = logging.getLogger("shmserve.somewhere")
    logger.warning("hello\nworld", extra={"request_id": "r\n7"})
    (entry,) = entries(journal_socket)
    assert entry.pop("CODE_FILE") == __file__ and int(entry.pop("CODE_LINE")) > 0
    assert entry == {
        "SYSLOG_IDENTIFIER": "shmserve",
        "SHMSERVE_PROCESS": "worker a.b.1",
        "SHMSERVE_MODEL": "a.b",
        "SHMSERVE_INSTANCE": "a.b.1",
        "MESSAGE": "hello\n    world",
        "PRIORITY": "4",
        "CODE_FUNC": "test_a_journal_has_fields",
        "REQUEST_ID": "r\\n7",
    }
    log_all_levels()
    assert [entry["PRIORITY"] for entry in entries(journal_socket)] == ["7", "6", "4", "3", "3"]
    assert capfd.readouterr().err == ""  # stderr is the journal's, too


def test_records_about_a_model_name_it(journal_socket: socket.socket) -> None:
    logs.configure("supervisor", LogSettings())
    logger = logging.getLogger("shmserve.somewhere")
    logger.info("model %s: %s", "a", "loading")
    logger.info("inference of model '%s' failed", "b")
    logger.info("models: %s", "c")
    logger.info("model %(name)s", {"name": "d"})
    models = [entry.get("SHMSERVE_MODEL") for entry in entries(journal_socket)]
    assert models == ["a", "b", None, None]


def test_a_long_entry_is_in_a_file(journal_socket: socket.socket) -> None:
    logs.configure("gateway 0", LogSettings())
    try:
        raise ValueError("\n".join("x" * 8000 for _ in range(90)))
    except ValueError:
        logging.getLogger("shmserve.somewhere").exception("failed")
    (entry,) = entries(journal_socket)
    assert entry["MESSAGE"].startswith("failed\n    Traceback (most")
    assert len(entry["MESSAGE"]) > 90 * 8000


def test_a_closed_journal(
    journal_socket: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Entries are then written to stderr, as they are if stderr is no journal."""
    logs.configure("role", LogSettings())
    journal_socket.close()
    logging.getLogger("shmserve.somewhere").info("one")
    monkeypatch.setattr(logs.Journal, "address", "/nowhere")
    logs.configure("role", LogSettings())
    logging.getLogger("shmserve.somewhere").info("two")
    monkeypatch.setenv("JOURNAL_STREAM", "1:1")
    logs.configure("role", LogSettings())
    logging.getLogger("shmserve.somewhere").info("three")
    log_lines = capfd.readouterr().err.splitlines()
    assert [line.split()[-1] for line in log_lines] == ["one", "two", "three"]
