"""The exception hierarchy. Each error that a client can see has a code and an HTTP status.

ShmserveError
 ├─ InvalidArgument    INVALID_ARG     400   the request, model file or flag is wrong
 │   └─ Released       a client's memory is used after its release
 ├─ AlreadyExists      ALREADY_EXISTS  400   the name is taken
 ├─ Cancelled          CANCELLED       400   the client disconnected or cancelled
 ├─ Unknown            UNKNOWN         400   a model reported an error without a code
 ├─ NotFound           NOT_FOUND       404   no such model, version or region
 ├─ Unsupported        UNSUPPORTED     501   valid, not supported
 ├─ Unauthenticated    UNAUTHENTICATED 401   no token, or an invalid one
 ├─ PermissionDenied   PERMISSION_DENIED 403 this client may not do this
 ├─ Unavailable        UNAVAILABLE     503   not now: queue full, not ready, deadline passed
 │   ├─ QueueFull      UNAVAILABLE     503   with Retry-After
 │   ├─ TimedOut       a client's call: its `timeout` expired; also a TimeoutError
 │   └─ Disconnected   a client's call: no server, or it exited; also a ConnectionError
 └─ Internal           INTERNAL        500   the server or the model failed

Between processes an error is a (code, message) pair, which `from_code` converts to an exception.
Messages are written for the client: they contain no path, pid, endpoint or traceback. Unexpected
exceptions are logged where they occur, and the client receives `Internal()`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class ShmserveError(Exception):
    """The base class of all errors that are sent to another process or to a client.

        try:
            server.infer("blurr", image=image)
        except shmserve.client.NotFound as error:
            print(error.code, error.status)
        # NOT_FOUND 404

    Attributes:
        message: The text for the client.
        code: The error code: "INVALID_ARG", "NOT_FOUND" and so on.
        status: The HTTP status.
        title: The name of the error in logs.
        server_fault: Whether the server or a model failed; such an error is logged.
        traceparent: The W3C trace context of the span in which the error occurred, or "".
    """

    code = "INTERNAL"
    status = 500
    title = "Internal"
    server_fault = False
    traceparent = ""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(ShmserveError):
    """The request, the model's configuration or the command line is invalid."""

    code = "INVALID_ARG"
    status = 400
    title = "Invalid argument"


class AlreadyExists(ShmserveError):
    """The name is in use."""

    code = "ALREADY_EXISTS"
    status = 400
    title = "Already exists"


class Cancelled(ShmserveError):
    """The request was cancelled by its client."""

    code = "CANCELLED"
    status = 400
    title = "Cancelled"


class Unknown(ShmserveError):
    """A model reported an error with the code UNKNOWN."""

    code = "UNKNOWN"
    status = 400
    title = "Unknown"


class NotFound(ShmserveError):
    """No model, version or region has this name."""

    code = "NOT_FOUND"
    status = 404
    title = "Not found"


class Unsupported(ShmserveError):
    """The request is valid, but not supported."""

    code = "UNSUPPORTED"
    status = 501
    title = "Unsupported"


class Unauthenticated(ShmserveError):
    """The client has sent no valid token."""

    code = "UNAUTHENTICATED"
    status = 401
    title = "Unauthenticated"


class PermissionDenied(ShmserveError):
    """The client lacks the permission."""

    code = "PERMISSION_DENIED"
    status = 403
    title = "Permission denied"


class Unavailable(ShmserveError):
    """The request could succeed later or elsewhere."""

    code = "UNAVAILABLE"
    status = 503
    title = "Unavailable"


class QueueFull(Unavailable):
    """The bounded queue of a model is full.

    Attributes:
        retry_after_s: Seconds after which the client may retry.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TimedOut(Unavailable, TimeoutError):
    """The call's `timeout` expired without a response; the request is cancelled."""


class Disconnected(Unavailable, ConnectionError):
    """There is no server, or it exited before it responded. The next call reconnects."""


class Released(InvalidArgument):
    """A result or a region was used after its `release`."""


class Internal(ShmserveError):
    """The server or the model failed; the message is written for the client."""

    server_fault = True

    def __init__(self, message: str = "internal error; the server's log has the cause") -> None:
        super().__init__(message)


class IllegalEvent(Exception):
    """An event that the state of an object does not allow: a defect of the server."""


# The errors that a message can contain by code. Subclasses that other modules define are not among
# them.
KINDS = tuple(ShmserveError.__subclasses__())
_KIND_BY_CODE = {kind.code: kind for kind in KINDS}
_KIND_BY_STATUS = {kind.status: kind for kind in reversed(KINDS)}  # the first one of a status


def from_code(code: str, message: str) -> ShmserveError:
    """Return the exception of a (code, message) pair; an unknown code is an `Internal`."""
    return _KIND_BY_CODE.get(code, Internal)(message)


def from_status(status: int, message: str) -> ShmserveError:
    """Return the exception of an HTTP status; an unknown status is an `Internal`."""
    return _KIND_BY_STATUS.get(status, Internal)(message)


def clip(text: str, limit: int = 60) -> str:
    """Shorten `text` for an error line, and escape its control characters."""
    printable_text = text if text.isprintable() else ascii(text)[1:-1]
    return printable_text if len(printable_text) <= limit else printable_text[:limit] + "..."


def printable_line(text: str) -> str:
    """Return `text` on one line, in which `?` replaces the control characters of a terminal."""
    line = " ".join(filter(None, map(str.strip, text.splitlines())))
    return "".join(char if char.isprintable() else "?" for char in line)


def nearest(name: str, names: Iterable[str], min_similarity: float = 0.6) -> str | None:
    """Return the known name with the highest difflib ratio, or None below `min_similarity`."""
    import difflib  # imported late, because only errors need it

    matches = difflib.get_close_matches(name[:80], list(names), n=1, cutoff=min_similarity)
    return matches[0] if matches else None


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return a suffix for an error message: `, did you mean 'NAME'?`, or "" if no name is near."""
    nearest_name = nearest(name, names)
    return f", did you mean '{nearest_name}'?" if nearest_name else ""


def how_to_install(package: str, extra: str) -> str:
    """Return the commands that install a package through an extra of shmserve."""
    command = f"pip install 'shmserve[{extra}]'"
    if package != "torch":
        return command
    index_url = "https://download.pytorch.org/whl/cpu"
    return f"{command}, or for the CPU only first: pip install torch --index-url {index_url}"


def missing_package(component: str, error: ImportError, extra: str) -> str:
    """Return the error message for a `component` whose import of a package failed."""
    package = (error.name or extra).partition(".")[0]
    return (
        f"{component} needs the package {package}, which cannot be imported ({error}): "
        + how_to_install(package, extra)
    )


class Problems(InvalidArgument):
    """Several problems, reported together."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("; ".join(self.problems))


class Collector:
    """A collector of errors from several calls, which are reported together."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function, and collect the InvalidArgument that it raises.

        Returns:
            The function's result, or None after an error. Call `check` before using the result.
        """
        try:
            return function(*args, **kwargs)
        except InvalidArgument as error:
            self.problems += getattr(error, "problems", [error.message])
            return cast("T", None)

    def check(self) -> None:
        """Raise Problems with the collected errors, if there are any."""
        if self.problems:
            raise Problems(self.problems)


@contextmanager
def convert_os_errors(text: str, default_reason: str = "cannot be read") -> Iterator[None]:
    """Convert OSError and ValueError in this block to InvalidArgument.

    Args:
        text: The start of the message; the reason of the operating system follows.
        default_reason: The reason if the operating system gives none, as for an invalid value.

    Raises:
        InvalidArgument: An operation failed, or a value is invalid.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of the standard output has closed it, as `head` does
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or default_reason
        raise InvalidArgument(f"{text}: {reason}") from None


def read_text(flag: str, path: str | os.PathLike[str]) -> str:
    """Return the text of the file that a flag names.

    Raises:
        InvalidArgument: The file cannot be read, or is a pipe without content.
    """

    def open_without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # else, a pipe would wait for a writer

    problem = f"{flag}: cannot read '{path}'"
    with (
        convert_os_errors(problem, "it is not UTF-8 text"),
        open(path, encoding="utf-8", opener=open_without_waiting) as file,
    ):
        os.set_blocking(file.fileno(), True)
        text = file.read()
        if not text and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise InvalidArgument(f"{problem}: it is a pipe without content")
        return text
