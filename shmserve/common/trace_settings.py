"""Triton's trace settings, from flags and requests, and the sampling of requests (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from shmserve.errors import InvalidArgument, Unsupported, how_to_install

_FLAG = "--trace-config"  # for error messages
_INTEGER_PATTERN = re.compile(r"[+-]?[0-9]{1,64}")
_RANGES = {
    "trace_rate": range(2**32),
    "trace_count": range(-1, 2**31),
    "log_frequency": range(2**32),
}
TRITON, OPENTELEMETRY = MODES = ("triton", "opentelemetry")
OFF, TIMESTAMPS, TENSORS = LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
# The field of `TraceSettings`, or the name in its `exporter`, for each setting of --trace-config.
# A prefix such as "triton," limits a setting to the trace mode of that name.
_FIELDS = {
    "mode": "trace_mode",
    "level": "trace_level",
    "rate": "trace_rate",
    "count": "trace_count",
    "triton,file": "trace_file",
    "triton,log-frequency": "log_frequency",
    **{
        f"{OPENTELEMETRY},{name}": name
        for name in (
            *("url", "resource", "bsp_max_queue_size", "bsp_schedule_delay"),
            "bsp_max_export_batch_size",
        )
    },
}
_COUNT_PATTERN = re.compile(r"[1-9][0-9]{0,8}")
# As in Triton, a URL may lack its scheme (collector:4318/v1/traces).
_EXPORTER_PATTERNS = {
    "url": re.compile(r"(https?://\S+)|[^\s/:=]+(:[0-9]+)?(/\S*)?"),
    "resource": re.compile(r"[^=]+=.+"),
}
# Triton's words for a level of --trace-config and of --trace-level, in lower or upper case.
_LEVEL_WORDS = {
    **dict.fromkeys(("off", "false"), OFF),
    **dict.fromkeys(("timestamps", "true", "on", "min", "max"), TIMESTAMPS),
}


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """The trace settings of a model, or of the server.

    Attributes:
        trace_level: OFF, or TIMESTAMPS and TENSORS, which select what is traced of requests.
        trace_rate: One request in this many is traced.
        trace_count: The number of traces; -1: unlimited.
        log_frequency: The number of traces per file; 0: all traces are in one file.
        trace_file: The file of traces.
        trace_mode: The exporter: Triton's files or OpenTelemetry.
        exporter: Pairs (setting, value) of the OpenTelemetry exporter.
    """

    trace_level: tuple[str, ...] = (OFF,)
    trace_rate: int = 1000
    trace_count: int = -1
    log_frequency: int = 0
    trace_file: str = ""
    trace_mode: str = TRITON
    exporter: tuple[tuple[str, str], ...] = ()

    @property
    def is_on(self) -> bool:
        """Return whether requests are traced."""
        return OFF not in self.trace_level and bool(self.trace_rate) and bool(self.trace_count)

    @property
    def problem(self) -> str:
        """Return why requests are not traced although the level is not OFF, or ""."""
        if OFF in self.trace_level:
            return ""
        if not self.trace_rate:
            return "sample rate must be non-zero"
        if self.trace_mode == TRITON and not self.trace_file:
            return "trace file name is not given (--trace-config triton,file=PATH)"
        return ""

    @property
    def with_tensors(self) -> bool:
        """Return whether the tensors of requests are traced, never for OpenTelemetry."""
        return TENSORS in self.trace_level and self.trace_mode == TRITON

    def with_changes(self, changes: Mapping[str, Any]) -> TraceSettings:
        """Return these settings with the changes returned by `read_changes`."""
        changed_values = {key: value for key, value in changes.items() if value is not None}
        return replace(self, **changed_values) if changed_values else self

    def as_string_lists(self) -> dict[str, list[str]]:
        """Return the settings as lists of strings, the protocol's format."""
        names = ("trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode")
        texts = {name: [str(getattr(self, name))] for name in names}
        return {"trace_level": list(self.trace_level), **texts}


def read_changes(settings: Mapping[str, Sequence[str] | None]) -> dict[str, Any]:
    """Return the settings that a request changes; None resets a setting to the server's value.

    Settings that the extension does not define are ignored.

    Raises:
        InvalidArgument: A value is invalid.
        Unsupported: A client may not change the setting.
    """
    if "trace_file" in settings:
        raise Unsupported("trace file location can not be updated through network protocol")
    changes: dict[str, Any] = {}
    for name in ("trace_level", *_RANGES):
        if name not in settings:
            continue
        values = settings[name]
        if not values:
            changes[name] = None
        elif name == "trace_level":
            changes[name] = _parse_levels(values)
        elif len(values) > 1:
            raise InvalidArgument(f"expect only 1 value for '{name}'")
        else:
            changes[name] = _parse_number(name, values[0])
    return changes


def _parse_levels(values: Sequence[str]) -> tuple[str, ...]:
    if OFF in values and len(values) > 1:
        raise InvalidArgument("Expect only one trace level 'OFF' is specified")
    for value in values:
        if value not in LEVELS:
            allowed_levels = ", ".join(LEVELS)
            text = f"Unable to parse 'trace_level', got: {value} (allowed: {allowed_levels})"
            raise InvalidArgument(text)
    return tuple(dict.fromkeys(values))


def _parse_number(name: str, text: str) -> int:
    if not _INTEGER_PATTERN.fullmatch(text):
        raise InvalidArgument(f"Unable to parse '{name}', got: {text}")
    number, allowed_range = int(text), _RANGES[name]
    if name == "trace_count" and number < -1:
        raise InvalidArgument(f"Unable to parse 'trace_count'. Expecting value >= -1, got:{text}")
    if number not in allowed_range:
        bounds_text = f"[ {allowed_range.start}, {allowed_range.stop - 1} ]"
        message = f"Unable to parse '{name}', value is out of range {bounds_text}, got: {text}"
        raise InvalidArgument(message)
    return number


def parse_trace_config(texts: Iterable[str]) -> TraceSettings:
    """Return the settings of all --trace-config flags.

    All levels and exporter settings apply, and the last value of each other setting.

    Raises:
        InvalidArgument: A flag is invalid, or a package that it needs is not installed.
    """
    all_values: dict[str, list[str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        mode, comma, setting = name.partition(",")
        name = f"{mode.lower()}{comma}{setting}"
        if not equals or not value or name not in _FIELDS:
            raise InvalidArgument(
                f"{_FLAG}: '{text}' is not SETTING=VALUE, where SETTING is one of "
                f"{', '.join(_FIELDS)}"
            )
        all_values.setdefault(name, []).append(value)
    latest_values = {name: [values[-1]] for name, values in all_values.items()}
    mode = latest_values.get("mode", [TRITON])[0].lower()
    if mode not in MODES:
        raise InvalidArgument(f"{_FLAG}: mode={mode} is not one of {', '.join(MODES)}")
    if mode == OPENTELEMETRY and find_spec("opentelemetry") is None:
        hint = how_to_install("opentelemetry-sdk", "otel")
        raise InvalidArgument(f"{_FLAG}: mode={mode} needs the package opentelemetry-sdk: {hint}")
    levels = [_LEVEL_WORDS.get(text.lower(), text.upper()) for text in all_values.get("level", [])]
    changes = {"trace_level": [OFF] if OFF in levels else levels}
    changes |= {
        _FIELDS[name]: value for name, value in latest_values.items() if _FIELDS[name] in _RANGES
    }
    try:
        settings = TraceSettings().with_changes(read_changes(changes))
    except (InvalidArgument, Unsupported) as error:
        raise InvalidArgument(f"{_FLAG}: {error.message}") from None
    exporter = tuple(
        (
            _FIELDS[name],
            value if name != f"{OPENTELEMETRY},url" or "://" in value else f"http://{value}",
        )
        for name, values in all_values.items()
        if name.startswith(f"{OPENTELEMETRY},")
        for value in values
    )
    for name, value in exporter:
        if not _EXPORTER_PATTERNS.get(name, _COUNT_PATTERN).fullmatch(value):
            expected_texts = {"url": "an http or https URL", "resource": "KEY=VALUE"}
            expected_text = expected_texts.get(name, "a number")
            raise InvalidArgument(f"{_FLAG}: {OPENTELEMETRY},{name}={value} is not {expected_text}")
    trace_file = latest_values.get("triton,file", [""])[0]
    return replace(settings, trace_file=trace_file, trace_mode=mode, exporter=exporter)


@dataclass(slots=True, eq=False)
class Sampler:
    """The sampler of a model, or of all models without their own settings.

    Attributes:
        settings: The trace settings.
        remaining_count: The number of requests still to trace; -1: unlimited.
        pending: Traces that are not written yet.
    """

    settings: TraceSettings
    remaining_count: int = field(init=False)
    pending: list[Any] = field(default_factory=list)
    _request_count: int = 0
    _is_enabled: bool = field(init=False)

    def __post_init__(self) -> None:
        self.remaining_count, self._is_enabled = self.settings.trace_count, self.settings.is_on

    def should_trace(self, is_sampled: bool | None = None) -> bool:
        """Return whether to trace the next request.

        Args:
            is_sampled: The caller's decision in an OpenTelemetry context; None: no such context.
        """
        if not self._is_enabled:
            return False
        if is_sampled is None or self.settings.trace_mode != OPENTELEMETRY:
            self._request_count += 1
            is_sampled = not self._request_count % self.settings.trace_rate
        if not is_sampled or not self.remaining_count:
            return False
        if self.remaining_count > 0:
            self.remaining_count -= 1
        return True


@dataclass(slots=True, eq=False)
class Samplers:
    """The samplers by model; "" is the sampler of all other models."""

    _samplers_by_model: dict[str, Sampler] = field(
        default_factory=lambda: {"": Sampler(TraceSettings())}
    )

    def of(self, model: str) -> Sampler:
        """Return the sampler of a model."""
        return self._samplers_by_model.get(model) or self._samplers_by_model[""]

    @property
    def is_on(self) -> bool:
        """Return whether any model is traced."""
        return any(sampler.settings.is_on for sampler in self._samplers_by_model.values())

    @property
    def all(self) -> list[Sampler]:
        """Return all samplers."""
        return list(self._samplers_by_model.values())

    def set(self, settings: dict[str, dict[str, Any]]) -> None:
        """Replace the settings. Samplers whose settings do not change keep their counts."""
        previous_samplers, self._samplers_by_model = self._samplers_by_model, {}
        for model, settings_of_model in settings.items():
            sampler = Sampler(TraceSettings(**settings_of_model))
            previous_sampler = previous_samplers.get(model)
            if previous_sampler and previous_sampler.settings == sampler.settings:
                sampler = previous_sampler
            self._samplers_by_model[model] = sampler
