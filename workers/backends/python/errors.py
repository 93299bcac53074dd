"""Errors in the API of the Python backend, and checks of values from models."""

from __future__ import annotations

import operator
from enum import Enum
from typing import Any

from shmserve.errors import ShmserveError, from_code
from shmserve.workers.user_code import shorten_error

_INT64_LIMIT = 2**63


class ErrorCode(int, Enum):
    """The codes of an error, with Triton's numbers."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonModelException(Exception):
    """Raised when a call of `triton_python_backend_utils` fails."""


class TritonError:
    """An error of one request: a message for the client, and a code (TritonError.NOT_FOUND, ...).

    Raises:
        TypeError: The message is not a string, or the code is not an ErrorCode.
    """

    __slots__ = ("_code", "_message")

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self._message = as_text(message, "the message of a TritonError")
        if not isinstance(code, ErrorCode):
            raise TypeError(f"a TritonError's code must be like TritonError.INTERNAL, not {code!r}")
        self._code = code

    def code(self) -> ErrorCode:
        """Return the code."""
        return self._code

    def message(self) -> str:
        """Return the message."""
        return self._message


# Triton's RuntimeError for a value that does not fit a C++ type.
NO_CAST = (
    "Unable to cast Python instance to C++ type (#define PYBIND11_DETAILED_ERROR_MESSAGES or "
    "compile in debug mode for details)"
)


def as_text(value: object, name: str) -> str:
    """Return a str, or bytes of UTF-8, as a str; raise TypeError for anything else.

    Triton accepts bytes wherever a str is expected. Its examples call the model whose name is an
    element of a BYTES tensor, which is of type bytes.
    """
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise TypeError(f"{name} must be UTF-8, not {value[:64]!r}") from None
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    return value


def as_list(value: Any, name: str) -> list[Any]:
    """Return the items of a sequence that is not a string.

    Raise TypeError for any other value; `name` names it in the message.
    """
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__getitem__"):
        raise TypeError(f"{name} must be a list, not {type(value).__name__}")
    return list(value)


def as_int(value: object, name: str, minimum: int = 0, bits: int = 63) -> int:
    """Return `value`, which may be numpy's, as an int in [`minimum`, 2**bits).

    Raise TypeError for any other value.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None
    if not minimum <= number < 2**bits:
        raise TypeError(f"{name} must be in the range [{minimum}, 2**{bits}), not {number}")
    return number


def to_server_error(error: TritonError) -> ShmserveError:
    """Return a model's error as an error of the server."""
    return from_code(error.code().name, shorten_error(error.message()))


def to_model_error(error: ShmserveError) -> TritonError:
    """Return an error of the server, or of another model, in the API's form."""
    return TritonError(error.message, ErrorCode[error.code])


def check_parameters(parameters: Any) -> dict[str, bool | int | str]:
    """Return custom parameters of a model; raise TritonModelException if one is invalid."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            text = f"Expect parameters keys to have type str, found type {type(key)}"
            raise TritonModelException(text)
        if not isinstance(value, bool | int | str):
            text = f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            raise TritonModelException(text)
        if isinstance(value, int) and not -_INT64_LIMIT <= value < _INT64_LIMIT:
            raise TritonModelException(f"parameter '{key}' is out of the range of int64")
    return dict(parameters)
