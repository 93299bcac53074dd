"""The one exception tree; every error a client can see has a code, and every code an HTTP status.

ShmserveError
 ├─ InvalidArgument    INVALID_ARG     400   the request, model file or flag is wrong
 ├─ AlreadyExists      ALREADY_EXISTS  400   the name is taken
 ├─ Cancelled          CANCELLED       400   the client left or cancelled
 ├─ Unknown            UNKNOWN         400   a model reported an error without a code
 ├─ NotFound           NOT_FOUND       404   no such model, version or region
 ├─ Unsupported        UNSUPPORTED     501   understood, not offered
 ├─ Unauthenticated    UNAUTHENTICATED 401   no token, or not one of ours
 ├─ PermissionDenied   PERMISSION_DENIED 403 this client may not do this
 ├─ Unavailable        UNAVAILABLE     503   not now: queue full, not ready, deadline passed
 │   └─ QueueFull      UNAVAILABLE     503   with Retry-After
 └─ Internal           INTERNAL        500   our side or the model failed

Between processes an error is a (code, message) pair; `from_code` makes it an exception again.
Messages are written for the client: they carry no path, pid, endpoint or traceback. What is
unexpected is logged where it happens and reaches the client as `Internal("internal error")`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class ShmserveError(Exception):
    """Base of all errors that cross a process or reach a client; `message` is shown to the
    client. `server_fault`: the server or a model is to blame, which is worth a line in the log.
    `traceparent`: the span that it happened in, as W3C's trace context has it; "" for none."""

    code = "INTERNAL"
    status = 500
    title = "Internal"
    server_fault = False
    traceparent = ""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(ShmserveError):
    """An error in what the client, the model's configuration or the command line says."""

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
    """The request is well formed and asks for something that is not offered."""

    code = "UNSUPPORTED"
    status = 501
    title = "Unsupported"


class Unauthenticated(ShmserveError):
    """The client has not said who it is."""

    code = "UNAUTHENTICATED"
    status = 401
    title = "Unauthenticated"


class PermissionDenied(ShmserveError):
    """The client may not do this."""

    code = "PERMISSION_DENIED"
    status = 403
    title = "Permission denied"


class Unavailable(ShmserveError):
    """The request could succeed later or elsewhere."""

    code = "UNAVAILABLE"
    status = 503
    title = "Unavailable"


class QueueFull(Unavailable):
    """The bounded queue of a model is full; `retry_after_s` says when to come back."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Internal(ShmserveError):
    """The server or the model failed; the message was written for the client."""

    server_fault = True


_BY_CODE = {cls.code: cls for cls in ShmserveError.__subclasses__()}


def from_code(code: str, message: str) -> ShmserveError:
    """The exception for a (code, message) pair; an unknown code is an `Internal`."""
    return _BY_CODE.get(code, Internal)(message)


def clip(text: str, limit: int = 60) -> str:
    """`text` short enough for an error line, with control characters escaped."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= limit else shown[:limit] + "..."


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that a misspelt one is most like, by difflib's ratio (0 to 1); None where none
    is as like it as `likeness`."""
    close = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=likeness)
    return close[0] if close else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'NAME'?` with the `nearest`, to end an error with; "" where there is none."""
    near = nearest(name, known)
    return f", did you mean '{near}'?" if near else ""


class Problems(InvalidArgument):
    """All that is wrong with something, a line each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("; ".join(self.problems))


class Collected:
    """Calls whose refusals are collected, so that they can be told at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def __call__(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a call returns. Where it raises InvalidArgument: None, which nobody gets to see, as
        `check` raises."""
        try:
            return make(*args, **kwargs)
        except InvalidArgument as error:
            self.problems += getattr(error, "problems", [error.message])
            return cast("T", None)

    def check(self) -> None:
        """Raise Problems, if there were any."""
        if self.problems:
            raise Problems(self.problems)


@contextmanager
def refused(text: str, otherwise: str = "cannot be read") -> Iterator[None]:
    """Raise InvalidArgument, `text` and the reason, for what the operating system refuses in this
    block, or is not even asked since the value makes no sense to it: then `otherwise`."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or otherwise
        raise InvalidArgument(f"{text}: {reason}") from None
