"""Errors as models of the Python backend know them, and checks of what models give."""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import Any

from shmserve.errors import ShmserveError, from_code

_INT64 = 2**63


class ErrorCode(IntEnum):
    """The codes of an error, numbered as Triton numbers them."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonModelException(Exception):
    """Something that a model asked of `triton_python_backend_utils` went wrong."""


class TritonError:
    """An error of one request: a message for the client, and a code (TritonError.NOT_FOUND, ...).

    Raises TypeError for a message that is no text or a code that is no code.
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
        self._message = text(message, "the message of a TritonError")
        if not isinstance(code, ErrorCode):
            raise TypeError(f"the code of a TritonError must be one of its codes, not {code!r}")
        self._code = code

    def code(self) -> ErrorCode:
        """Its code."""
        return self._code

    def message(self) -> str:
        """Its message."""
        return self._message


# What Triton says, as a RuntimeError, of a value that C++ has no room for.
NO_CAST = (
    "Unable to cast Python instance to C++ type (#define PYBIND11_DETAILED_ERROR_MESSAGES or "
    "compile in debug mode for details)"
)


def text(value: object, what: str) -> str:
    """`value`, a str or bytes of UTF-8, as a str; raises TypeError for anything else.

    Triton takes bytes for a str everywhere: an element of a BYTES tensor is one, and its examples
    call the model whose name came in such a tensor.
    """
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise TypeError(f"{what} must be UTF-8, not {value[:64]!r}") from None
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value)}")
    return value


def listed(value: Any, what: str) -> list[Any]:
    """The items of a sequence that is no text; raises TypeError for anything else."""
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__getitem__"):
        raise TypeError(f"{what} must be a list, not {type(value)}")
    return list(value)


def whole(value: object, what: str, least: int = 0, bits: int = 63) -> int:
    """`value` as an int, numpy's too, which must be `least` or more, below 2**bits; else raises
    TypeError.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be an int, not {type(value)}") from None
    if not least <= number < 2**bits:
        raise TypeError(f"{what} must be in the range [{least}, 2**{bits}), not {number}")
    return number


def to_server(error: TritonError) -> ShmserveError:
    """A model's error as the server carries it."""
    return from_code(error.code().name, error.message())


def to_model(error: ShmserveError) -> TritonError:
    """An error of the server, or of another model, as a model sees it."""
    return TritonError(error.message, ErrorCode[error.code])


def checked_parameters(parameters: Any) -> dict[str, bool | int | str]:
    """Custom parameters from a model; raises TritonModelException where one is none."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(value, bool | int | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        if isinstance(value, int) and not -_INT64 <= value < _INT64:
            raise TritonModelException(f"parameter '{key}' is out of the range of int64")
    return dict(parameters)
