"""Validation of a request's options.

The server drops a message whose fields have wrong types, so such a request would get no response.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from numbers import Real
from operator import index
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.inference import (
    LONGEST_CORRELATION_ID,
    SEQUENCE_END,
    SEQUENCE_START,
)
from shmserve.ipc.trace import TraceContext

_FOREVER_S = 2e6  # longer timeouts mean none, since epoll has a limit
_INTEGERS = range(-(1 << 63), 1 << 64)  # the range of MessagePack integers


class Options(NamedTuple):
    """The options of a call, besides its tensors; usually all defaults."""

    request_id: str = ""
    parameters: Mapping[str, Any] | None = None
    priority: int = 0
    timeout_us: int = 0
    deadline_ns: int = 0
    sequence: int | str = 0
    flags: int = 0
    trace: str = ""


PLAIN = Options()


def options_of(
    request_id: str,
    parameters: Mapping[str, Any] | None,
    priority: int,
    timeout_s: float | None,
    sequence: int | str = 0,
    start: bool = False,
    end: bool = False,
    traceparent: str = "",
) -> Options:
    """Return the options of a call; PLAIN if all are defaults. Raises InvalidArgument."""
    flags = SEQUENCE_START * bool(start) | SEQUENCE_END * bool(end)
    few = not request_id and not parameters and not priority
    if few and timeout_s is None and not sequence and not flags and not traceparent:
        return PLAIN
    timeout_us = _timeout_us(timeout_s)
    deadline_ns = time.monotonic_ns() + timeout_us * 1000 if timeout_us else 0
    name = _text("request_id", request_id or "")
    return Options(
        name,
        _parameters(parameters),
        _priority(priority),
        timeout_us,
        deadline_ns,
        _sequence(sequence),
        flags,
        _trace(traceparent, parameters),
    )


def _trace(traceparent: str, parameters: Mapping[str, Any] | None) -> str:
    """Return the trace context of a request that is traced or explained; otherwise ""."""
    if traceparent:
        caller = TraceContext.of_header(_text("traceparent", traceparent))
        if caller is None:
            raise InvalidArgument(
                f"traceparent must be as W3C's trace context has it, 00-TRACE-SPAN-FLAGS, got "
                f"{traceparent!r:.80}"
            )
        return caller.child().message
    asked = isinstance(parameters, Mapping) and parameters.get("explain") is True
    return TraceContext.new().message if asked else ""


def _sequence(sequence: int | str) -> int | str:
    if isinstance(sequence, str):
        text = _text("sequence", sequence)
        if len(text) <= LONGEST_CORRELATION_ID:
            return text
    else:
        with contextlib.suppress(TypeError):
            number = index(sequence)
            if 0 <= number < 1 << 64:
                return number
    raise InvalidArgument(
        f"sequence must be an integer of 64 bits without a sign, or a text of "
        f"{LONGEST_CORRELATION_ID} characters at most, got {sequence!r:.80}"
    )


def _timeout_us(timeout_s: float | None) -> int:
    if timeout_s is None:
        return 0
    if not isinstance(timeout_s, Real) or math.isnan(timeout_s):
        raise InvalidArgument(f"timeout must be a number of seconds, got {timeout_s!r}")
    if timeout_s <= 0:  # already expired, including -inf, which cannot be converted
        return 1
    return max(1, round(timeout_s * 1e6)) if timeout_s < _FOREVER_S else 0


def _priority(priority: int) -> int:
    try:
        number = index(priority)
    except TypeError:
        number = -1
    if number not in _INTEGERS or number < 0:
        raise InvalidArgument(f"priority must be a whole number from 0 on, got {priority!r}")
    return number


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a string, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} is no text that UTF-8 could carry: {error}") from None
    return value


def _parameters(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"parameters must be a mapping, got {given!r:.80}")
    return {_text("the name of a parameter", name): _value(name, given[name]) for name in given}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return _text(f"parameter '{name}'", value)
    if isinstance(value, bool | float) or (isinstance(value, int) and value in _INTEGERS):
        return value
    raise InvalidArgument(
        f"parameter '{name}' must be a string, an integer of 64 bits, a float or a bool, got "
        f"{value!r:.80}"
    )
