"""The flags of `shmserve serve`: the tables of flags, and parsers of values.

Most values are text, numbers or booleans, which `Flag.parse` reads. These flags have a syntax of
their own, which is Triton's for Triton's flags: the response cache, workspaces, resources of the
rate limiter, metrics, header patterns, origins of pages, and names of hosts and models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shmserve.errors import InvalidArgument, suggestion

_TRUE = ("true", "1", "on", "yes")
_FALSE = ("false", "0", "off", "no")
# int() and float() alone also accept 1_000, spaces and digits of other scripts. More than 19 digits
# exceed every range.
_NUMBER_PATTERNS = {
    int: re.compile(r"[+-]?[0-9]{1,19}"),
    float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
}

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Flag:
    """A command-line flag.

    Attributes:
        name: The name without dashes.
        help: The help text.
        kind: str, int, float or bool.
        default: The value of a flag that is not set.
        low: The lowest number allowed.
        high: The highest number allowed.
        choices: The values allowed; if empty, any value of the kind is allowed.
        is_repeatable: Whether the flag may be repeated.
        has_effect: False for a flag that is accepted with a warning and has no effect.
        allows_words: Whether true and false stand for 1 and 0.
        metavar: The name of the value in help texts of client commands.
        is_exclusive: Whether only one flag of its group may be set (client commands).
        is_required: Whether the flag must be set (client commands).
        prefix: The text that precedes the value if this is an older name of another flag. For
            example, `--trace-rate=N` stands for `--trace-config=rate=N`, so its prefix is "rate=".
    """

    name: str
    help: str = ""
    kind: type = str
    default: Value | None = None
    low: float = 0
    high: float = 2**63 - 1
    choices: tuple[str, ...] = ()
    is_repeatable: bool = False
    has_effect: bool = True
    allows_words: bool = False
    metavar: str = ""
    is_exclusive: bool = False
    is_required: bool = False
    prefix: str = ""

    def parse(self, text: str) -> Value:
        """Return the value of `text` as the flag's kind.

        Raises:
            InvalidArgument: The flag does not allow this value; the message names the flag.
        """
        if self.kind is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            raise InvalidArgument(f"--{self.name}: '{text}' is not a boolean (true or false)")
        if self.kind is str:
            choices_by_text = {choice.lower(): choice for choice in self.choices}
            if choices_by_text and text.lower() not in choices_by_text:
                allowed_choices = ", ".join(self.choices)
                hint = suggestion(text, self.choices)
                message = f"--{self.name}: '{text}' is not one of {allowed_choices}{hint}"
                raise InvalidArgument(message)
            return choices_by_text.get(text.lower(), text)
        if self.allows_words and text.lower() in ("true", "false"):
            return int(text.lower() == "true")
        if not _NUMBER_PATTERNS[self.kind].fullmatch(text):
            kind = "an integer" if self.kind is int else "a number"
            raise InvalidArgument(f"--{self.name}: '{text}' is not {kind}")
        number: int | float = int(text) if self.kind is int else float(text)
        if not self.low <= number <= self.high:
            message = f"--{self.name}: {text} is out of range (allowed: {self.low} to {self.high})"
            raise InvalidArgument(message)
        return number

    def take_value(self, remaining_words: list[str]) -> str:
        """Return the text of the flag's value, which is removed from `remaining_words`.

        Raises:
            InvalidArgument: The value is missing; the message names the flag.
        """
        if self.kind is bool:
            if remaining_words and remaining_words[0].lower() in _TRUE + _FALSE:
                return remaining_words.pop(0)
            return "true"
        if not remaining_words or remaining_words[0].startswith("--"):
            raise InvalidArgument(f"--{self.name}: a value is missing")
        return remaining_words.pop(0)


_HEADING = re.compile(r"\[(.+)\]")
_ROW = re.compile(
    r"(?P<name>[a-z0-9-]+) (?P<kind>[\w|]+)(?::(?P<metavar>\S+?))?"
    r"(?: (?P<low>[\d.]+?)\.\.(?P<high>\d*))?(?: = (?P<default>\S+?))?"
    r"(?P<is_repeatable>, repeats)?(?P<allows_words>, words)?(?P<is_exclusive>, exclusive)?"
    r"(?P<is_required>, required)?"
)
_KINDS: dict[str, type] = {"text": str, "bool": bool, "int": int, "float": float}


def parse_flag_table(text: str) -> dict[str, tuple[Flag, ...]]:
    """Return the flags of a table by group; the table has the syntax of flags.txt."""
    group: list[Flag] = []
    groups = {"": group}
    rows = [line for line in text.splitlines() if line and not line.startswith("#")]
    for line in rows:
        if heading := _HEADING.fullmatch(line):
            group = groups[heading[1]] = []
        elif line.startswith(" "):
            group[-1] = replace(group[-1], help=f"{group[-1].help} {line.strip()}".lstrip())
        else:
            group.append(_parse_flag(line))
    return {name: tuple(flags) for name, flags in groups.items() if flags}


def _parse_flag(line: str) -> Flag:
    row = _ROW.fullmatch(line)
    assert row, line
    kind = _KINDS.get(row["kind"], str)
    names = ("is_repeatable", "allows_words", "is_exclusive", "is_required")
    options: dict[str, Any] = {name: bool(row[name]) for name in names}
    choices = () if row["kind"] in _KINDS else tuple(row["kind"].split("|"))
    flag = Flag(row["name"], kind=kind, choices=choices, metavar=row["metavar"] or "", **options)
    if row["low"]:
        number = float if "." in row["low"] else int
        flag = replace(flag, low=number(row["low"]), high=int(row["high"] or flag.high))
    default = row["default"]
    return replace(flag, default=flag.parse(default.strip('"'))) if default else flag


def _read_table(name: str) -> dict[str, tuple[Flag, ...]]:
    return parse_flag_table(Path(__file__).with_name(name).read_text(encoding="utf-8"))


GROUPS = _read_table("flags.txt")
SUPPORTED_FLAGS: tuple[Flag, ...] = tuple(flag for flags in GROUPS.values() for flag in flags)

# tritonserver's flags that have no effect here, by the reason or the alternative.
IGNORED_BY_REASON: dict[str, tuple[Flag, ...]] = {
    alternative: tuple(replace(flag, help=alternative, has_effect=False) for flag in flags)
    for alternative, flags in _read_table("ignored_flags.txt").items()
}
IGNORED_FLAGS = tuple(flag for flags in IGNORED_BY_REASON.values() for flag in flags)
FLAGS: dict[str, Flag] = {flag.name: flag for flag in (*SUPPORTED_FLAGS, *IGNORED_FLAGS)}
# Triton's older names of flags: the newer flag, and the text before the value in that flag.
_OLDER_NAMES = {
    "model-store": ("model-repository", ""),
    "trace-file": ("trace-config", "triton,file="),
    "trace-log-frequency": ("trace-config", "triton,log-frequency="),
    **{f"trace-{name}": ("trace-config", f"{name}=") for name in ("level", "rate", "count")},
}
FLAGS |= {old: replace(FLAGS[new], prefix=text) for old, (new, text) in _OLDER_NAMES.items()}


def find_flags(name: str) -> list[Flag]:
    """Return the flag with this name, or all flags whose names begin with it (getopt_long)."""
    if name in FLAGS:
        return [FLAGS[name]]
    return list(dict.fromkeys(flag for key, flag in FLAGS.items() if key.startswith(name)))


_CACHE = "--cache-config"
_CACHE_SIZE = Flag("cache-config", kind=int)


def cache_byte_size(configs: Sequence[str], byte_size: int | None) -> int:
    """Return the byte size of the cache from "local,size=BYTES" or the older flag; 0: no cache.

    Raises:
        InvalidArgument: The syntax is wrong, the cache is not `local`, or there are two caches.
    """
    if configs and byte_size is not None:
        raise InvalidArgument(
            f"Incompatible flags --response-cache-byte-size and {_CACHE} both provided. "
            "Please provide one or the other."
        )
    if len({text.partition(",")[0] for text in configs}) > 1:
        raise InvalidArgument(
            f"{_CACHE}: found multiple cache configurations, but only a single cache is currently "
            "supported"
        )
    sizes = [_parse_cache_size(text) for text in configs]
    return sizes[-1] if sizes else byte_size or 0


def _parse_cache_size(text: str) -> int:
    name, comma, setting = text.partition(",")
    key, equals, value = setting.partition("=")
    if not (name and comma and key and equals):
        raise InvalidArgument(f"{_CACHE}: '{text}' is not local,size=BYTES")
    if name != "local":
        raise InvalidArgument(f"{_CACHE}: there is no cache '{name}' (allowed: local,size=BYTES)")
    if key != "size":
        message = f"{_CACHE}: unknown setting '{key}' of the local cache (allowed: size)"
        raise InvalidArgument(message)
    return int(_CACHE_SIZE.parse(value))


_WORKSPACE = "--workspace-byte-size"
_WORKSPACE_DEVICE = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,2})")
_WORKSPACE_SIZE = Flag("workspace-byte-size", kind=int, low=4096, high=1 << 44)


def workspace_byte_sizes(settings: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each device's pool, by torch's name of the device.

    Raises:
        InvalidArgument: A setting is not DEVICE=BYTES, a device is repeated, or a device is neither
            the host nor a CUDA device.
    """
    sizes: dict[str, int] = {}
    for setting in settings:
        device, equals, value = setting.partition("=")
        if not (device and equals):
            raise InvalidArgument(f"{_WORKSPACE}: expected DEVICE=BYTES, got '{setting}'")
        if _WORKSPACE_DEVICE.fullmatch(device) is None:
            raise InvalidArgument(
                f"{_WORKSPACE}: '{device}' is not a device with a pool (allowed: cpu, cuda:NUMBER)"
            )
        if device in sizes:
            raise InvalidArgument(f"{_WORKSPACE}: device '{device}' is given twice")
        sizes[device] = int(_WORKSPACE_SIZE.parse(value))
    return sizes


_RATE_LIMIT = "--rate-limit-resource"
_COUNT = Flag("rate-limit-resource", kind=int, high=2**31 - 1)  # parses a count and a device
_GLOBAL = -1  # the device of a resource that all devices share

Resources = tuple[tuple[str, int | None, int], ...]


def parse_resources(texts: Iterable[str]) -> Resources:
    """Return (name, device, count) of each "NAME:COUNT[:DEVICE]".

    The device is None for a resource on all devices, and -1 for "global".

    Raises:
        InvalidArgument: A text is malformed.
    """
    return tuple(_parse_resource(text) for text in texts)


def _parse_resource(text: str) -> tuple[str, int | None, int]:
    name, colon, value_text = text.partition(":")
    count, _, device = value_text.partition(":")
    if not (name and colon and count) or value_text.endswith(":"):
        raise InvalidArgument(f"{_RATE_LIMIT}: '{text}' is not NAME:COUNT or NAME:COUNT:DEVICE")
    limit = int(_COUNT.parse(count))
    if not device:
        return name, None, limit
    return name, _GLOBAL if device.lower() == "global" else int(_COUNT.parse(device)), limit


_METRICS = "--metrics-config"
_METRICS_BOOLEAN = Flag("metrics-config", kind=bool)
# Like C++'s stod, a number is the longest valid prefix; the remainder is ignored.
_LEADING_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """The enabled latency metrics.

    Quantiles outside [0, 1] act like the nearest bound. Without summaries there are no quantiles.
    """

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


def parse_metrics_config(texts: Iterable[str]) -> MetricsConfig:
    """Return the settings of all --metrics-config flags; the last value of each setting applies."""
    config = MetricsConfig()
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise InvalidArgument(f"{_METRICS}: '{text}' is not SETTING=VALUE")
        parse = _METRICS_PARSERS.get(name)
        if parse is None:
            allowed_names = ", ".join(_METRICS_PARSERS)
            message = f"{_METRICS}: unknown setting '{name}' (allowed: {allowed_names})"
            raise InvalidArgument(message)
        try:
            config = replace(config, **{name: parse(value)})
        except InvalidArgument as error:
            reason = error.message if parse is _parse_quantiles else "expected true or false"
            raise InvalidArgument(f"{_METRICS}: {name}='{value}': {reason}") from None
    return config if config.summary_latencies else replace(config, summary_quantiles=())


def _parse_quantiles(text: str) -> tuple[float, ...]:
    """Return the quantiles of "QUANTILE:ERROR,...", parsed like Triton.

    Triton's ERROR is the permitted deviation in rank. It is ignored, because quantiles are exact.
    """
    quantiles = []
    for pair in text.removesuffix(",").split(","):
        quantile, colon, error = pair.partition(":")
        if not colon:
            expected_text = "No ':' delimiter found. Expected format is <quantile>:<error>"
            raise InvalidArgument(f"Invalid option: [{pair}]. {expected_text}")
        numbers = [_LEADING_NUMBER.match(part) for part in (quantile, error)]
        if numbers[0] is None or numbers[1] is None:
            raise InvalidArgument(f"Invalid option: [{pair}]. Error: stod")
        quantiles.append(float(numbers[0][0]))
    return tuple(dict.fromkeys(quantiles))


_METRICS_PARSERS: dict[str, Callable[[str], Any]] = {
    "counter_latencies": _METRICS_BOOLEAN.parse,
    "histogram_latencies": _METRICS_BOOLEAN.parse,
    "summary_latencies": _METRICS_BOOLEAN.parse,
    "summary_quantiles": _parse_quantiles,
}


# Constructs of RE2, the syntax of Triton's patterns, that Python writes differently.
_RE2_TOKEN = re.compile(
    r"\\Q(?P<verbatim>.*?)(?:\\E|$)"
    r"|(?P<end>\\z)|\\."
    r"|\[\^?\]?(?:\[:\w+:\]|\\.|[^\]])*\]"
    r"|\(\?(?P<flags>[imsU]*(?:-[imsU]+)?)(?P<colon>[:)])"
    r"|(?P<name>\(\?<(?![=!]))"
    r"|(?P<open>\()|(?P<close>\))|(?P<bar>\|)|.",
    re.DOTALL,
)
_POSIX_CLASSES = {
    "[:alnum:]": "0-9A-Za-z",
    "[:alpha:]": "A-Za-z",
    "[:digit:]": "0-9",
    "[:lower:]": "a-z",
    "[:upper:]": "A-Z",
    "[:xdigit:]": "0-9A-Fa-f",
    "[:punct:]": r"!-/:-@\[-`{-~",
    "[:space:]": r"\s",
    "[:word:]": r"\w",
}


def convert_header_pattern(values: Mapping[str, Any], flag: str) -> str:
    """Return a header-name pattern in Python's syntax.

    Raises:
        InvalidArgument: The value is not a regular expression; the message names the flag.
    """
    re2: str = values[flag] or ""
    pattern = _convert_re2(re2)
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(f"--{flag}: '{re2}' is not a regular expression: {error}") from None
    return pattern


def _convert_re2(re2: str) -> str:
    """Return an RE2 pattern in Python's syntax.

    An RE2 flag applies up to the end of its group: (?-i)b|c becomes (?-i:b)|(?-i:c). The flag U
    (ungreedy) is dropped because it does not affect whether a text matches.
    """
    group_flags: list[list[str]] = [[]]  # the RE2 flags set in each open group
    pattern_parts: list[str] = []
    for match in _RE2_TOKEN.finditer(re2):
        text = match.group()
        match match.lastgroup:
            case "verbatim":
                text = re.escape(match["verbatim"])
            case "end":
                text = r"\Z"
            case "name":
                text = "(?P<"
            case "colon":
                text = f"(?{match['flags'].replace('U', '').rstrip('-')}:"
                if match["colon"] == ":":
                    group_flags.append([])
                else:
                    group_flags[-1].append(text)
            case "bar":
                text = ")" * len(group_flags[-1]) + "|" + "".join(group_flags[-1])
            case "close" if len(group_flags) > 1:
                text = ")" * len(group_flags.pop()) + ")"
            case None if text.startswith("["):
                for name, posix_ranges in _POSIX_CLASSES.items():
                    text = text.replace(name, posix_ranges)
        if match.lastgroup in ("open", "name"):
            group_flags.append([])
        pattern_parts.append(text)
    return "".join(pattern_parts) + ")" * sum(map(len, group_flags))


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.IGNORECASE)


def check_origin(text: str) -> str:
    """Return `text` if it is an origin or "*", else raise InvalidArgument (--cors-allow-origin)."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise InvalidArgument(
            f"--cors-allow-origin: got '{text}' (allowed: '*', or SCHEME://HOST or "
            "SCHEME://HOST:PORT in lower case and without a path)"
        )
    return text


def check_host_name(text: str) -> str:
    """Return `text` if it is a name, *.NAME or "*", else raise InvalidArgument (--allowed-host)."""
    if not _HOST.fullmatch(text):
        raise InvalidArgument(
            f"--allowed-host: got '{text}' (allowed: '*', NAME or *.NAME, without scheme and port)"
        )
    return text


def parse_served_name(text: str) -> tuple[str, str]:
    """Return the model and the name in "[MODEL=]NAME"; the model "" stands for the only model.

    Raises:
        InvalidArgument: The text has another form.
    """
    model_name, equals, name = text.rpartition("=")
    if not name or (equals and not model_name):
        raise InvalidArgument(f"--served-model-name: '{text}' is neither NAME nor MODEL=NAME")
    return model_name, name
