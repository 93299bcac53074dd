"""The logging of every process: one line per record, or an entry if stderr is systemd's journal.

A record has the process's role and, if it has one, the request id.

    flags ──> LogSettings, the supervisor's ──> arguments of a process that starts ──> configure
                       └── SetLogging, when a client has changed them ──────────────> apply
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

logger = logging.getLogger(__name__)

DEFAULT, ISO8601 = FORMATS = ("default", "ISO8601")
MAX_LOG_LEVEL = 2**32 - 1

_LETTERS = {"DEBUG": "D", "INFO": "I", "WARNING": "W", "ERROR": "E", "CRITICAL": "C"}
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
_MAX_LINE_LENGTH = 8192
_MAX_EXTRA_LINES = 100  # maximum lines of a traceback, which may contain a client's text
_MAX_WARNED_NAMES = 1000
_warned: set[tuple[str, str]] = set()  # messages and names that `warn_once` has logged


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The settings of the log, with Triton's names and in its order.

    Clients may change all but `log_file`, which is empty for stderr.
    """

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = DEFAULT

    def shows(self, level: int) -> bool:
        """Return whether records of this level are written; DEBUG needs `log_verbose_level` 1."""
        if level >= logging.ERROR:
            return self.log_error
        if level >= logging.WARNING:
            return self.log_warning
        if level >= logging.INFO:
            return self.log_info
        return self.log_verbose_level >= 1

    @property
    def level(self) -> int:
        """Return the lowest written level. Loggers check it before they create a record."""
        return next(filter(self.shows, _LEVELS), logging.CRITICAL + 1)


def clean(text: str) -> str:
    """Escape control characters and cap the length, so that a client cannot forge log lines."""
    printable = text[: _MAX_LINE_LENGTH + 1]
    if not printable.isprintable():
        printable = "".join(c if c.isprintable() else _escape(c) for c in printable)
    return printable if len(printable) <= _MAX_LINE_LENGTH else printable[:_MAX_LINE_LENGTH] + "..."


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _indented(lines: list[str]) -> str:
    """Return the lines after a record's first line, indented so as not to look like records."""
    if len(lines) > _MAX_EXTRA_LINES:
        lines = [*lines[: _MAX_EXTRA_LINES // 2], "...", *lines[-_MAX_EXTRA_LINES // 2 :]]
    return "".join(f"\n    {clean(line)}" for line in lines)


def enable() -> None:
    """Enable the server's loggers, which a model's `logging.config` disables by default."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("shmserve")]:
        logging.getLogger(name).disabled = False


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress warnings of the server's loggers in this block, but no other records."""

    def is_written(record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING or not record.name.startswith("shmserve.")

    handlers = logging.root.handlers[:]
    for handler in handlers:
        handler.addFilter(is_written)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_written)


def warn_once(log: logging.Logger, message: str, name: str) -> None:
    """Log a warning about a name that a client sent, unless this process has logged it before.

    A process logs at most 1000 of these warnings.
    """
    if (message, name) not in _warned and len(_warned) < _MAX_WARNED_NAMES:
        _warned.add((message, name))
        log.warning(message, name)


class LineFormatter(logging.Formatter):
    """A formatter of one line per record; further lines of its text are indented.

        I 2026-01-31T12:00:00.123Z role[pid] text key=value
        2026-01-31T12:00:00.123Z I pid role] text key=value      ISO8601, Triton's format

    A record's `request_id` (given with `extra={"request_id": ...}`) is printed as `request=ID`, its
    `trace_id` as `trace=ID`.
    """

    def __init__(self, role: str, log_format: str = DEFAULT) -> None:
        super().__init__()
        self.role = role
        self.log_format = log_format

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line, followed by the rest of its text and its traceback."""
        first_line, *more_lines = record.getMessage().split("\n")
        line = f"{self._prefix(record)} {clean(first_line)}"
        request_id = getattr(record, "request_id", None)
        if request_id:
            line += f" request={clean(str(request_id))}"
        trace_id = getattr(record, "trace_id", None)
        if trace_id:
            line += f" trace={clean(str(trace_id))}"
        return line + _indented(more_lines) + self._traceback(record)

    def message(self, record: logging.LogRecord) -> str:
        """Return the text of a record and its traceback."""
        first_line, *more_lines = record.getMessage().split("\n")
        return clean(first_line) + _indented(more_lines) + self._traceback(record)

    def _traceback(self, record: logging.LogRecord) -> str:
        if not record.exc_info:
            return ""
        return _indented(self.formatException(record.exc_info).splitlines())

    def _prefix(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp += f".{int(record.msecs):03d}Z"
        letter = _LETTERS.get(record.levelname, "?")
        if self.log_format == ISO8601:
            return f"{stamp} {letter} {record.process} {self.role}]"
        return f"{letter} {stamp} {self.role}[{record.process}]"


# The minimum level of each syslog priority; DEBUG has the priority 7.
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_MODEL_MESSAGE = re.compile(r"(?:inference of )?model '?%s")  # %s is the model's name
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Journal:
    """The client of systemd's journal (systemd.io/JOURNAL_NATIVE_PROTOCOL)."""

    address = "/run/systemd/journal/socket"

    def __init__(self, formatter: LineFormatter) -> None:
        self._formatter = formatter
        process_type, _, name = formatter.role.partition(" ")
        self._fields = {"SYSLOG_IDENTIFIER": "shmserve", "SHMSERVE_PROCESS": formatter.role}
        if process_type == "worker":
            self._fields |= {"SHMSERVE_MODEL": name.rpartition(".")[0], "SHMSERVE_INSTANCE": name}
        elif process_type in ("scheduler", "ensemble"):
            self._fields |= {"SHMSERVE_MODEL": name}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    @classmethod
    def of_stderr(cls, formatter: LineFormatter) -> Journal | None:
        """Return the journal if JOURNAL_STREAM shows that stderr is connected to it, or None."""
        try:
            stderr_status = os.fstat(2)
            if os.environ.get("JOURNAL_STREAM") == f"{stderr_status.st_dev}:{stderr_status.st_ino}":
                return cls(formatter)
        except OSError:
            pass
        return None

    def send(self, record: logging.LogRecord) -> bool:
        """Write a record; return whether the journal has received it."""
        level = record.levelno
        fields: dict[str, object] = {
            **self._fields,
            "MESSAGE": self._formatter.message(record),
            "PRIORITY": next((priority for lowest, priority in _PRIORITIES if level >= lowest), 7),
            "CODE_FILE": record.pathname,
            "CODE_LINE": record.lineno,
            "CODE_FUNC": record.funcName,
        }
        if isinstance(record.args, tuple) and record.args and _MODEL_MESSAGE.match(str(record.msg)):
            fields["SHMSERVE_MODEL"] = clean(str(record.args[0]))
        if request_id := getattr(record, "request_id", None):
            fields["REQUEST_ID"] = clean(str(request_id))
        if trace_id := getattr(record, "trace_id", None):
            fields["TRACE_ID"] = clean(str(trace_id))
        try:
            self._send(b"".join(_field(name, value) for name, value in fields.items()))
        except OSError:
            return False
        return True

    def _send(self, entry: bytes) -> None:
        try:
            self._socket.sendto(entry, self.address)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            # A large entry is sent as a sealed file.
            with open(os.memfd_create("journal", os.MFD_ALLOW_SEALING), "wb") as file:
                file.write(entry)
                file.flush()
                fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, _SEALS)
                fds = array.array("i", [file.fileno()])
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)
                self._socket.sendmsg([b""], [rights], 0, self.address)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _field(name: str, value: object) -> bytes:
    data = str(value).encode(errors="backslashreplace")
    if b"\n" in data:
        return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)
    return b"%s=%s\n" % (name.encode(), data)


class _Handler(logging.StreamHandler[TextIO]):
    """The log handler of a process, which filters and formats records by the `LogSettings`."""

    def __init__(self, role: str) -> None:
        super().__init__(sys.stderr)
        self._formatter = LineFormatter(role)
        self._journal = Journal.of_stderr(self._formatter)
        self._settings = LogSettings()
        self.setFormatter(self._formatter)
        self.addFilter(lambda record: self._settings.shows(record.levelno))

    def emit(self, record: logging.LogRecord) -> None:
        if self._journal is None or not self._journal.send(record):
            super().emit(record)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        super().close()

    def set_settings(self, settings: LogSettings) -> None:
        self._settings = settings
        self._formatter.log_format = settings.log_format


def configure(role: str, settings: LogSettings) -> None:
    """Configure logging to stderr or the journal for this process.

    Args:
        role: The name of this process in the log, such as "gateway 0" or "worker simple.0".
        settings: The settings.
    """
    handlers = logging.getLogger().handlers
    for handler in handlers:
        if isinstance(handler, _Handler):
            handler.close()
    handlers[:] = [_Handler(role)]
    _apply_to_handlers(settings)
    # Debug messages and access logs of libraries are not written.
    for library in ("asyncio", "aiohttp", "urllib3"):
        logging.getLogger(library).setLevel(logging.WARNING)


def apply(settings: LogSettings) -> None:
    """Apply settings that a client has changed, if `configure` has configured the logging."""
    _apply_to_handlers(settings)
    logger.debug("the log settings have changed: %s", settings)


def _apply_to_handlers(settings: LogSettings) -> None:
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, _Handler):
            handler.set_settings(settings)
            root.setLevel(settings.level)
