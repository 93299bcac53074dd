"""Flag values with their own syntax, which is Triton's for Triton's flags.

These are the response cache, workspaces, resources of the rate limiter, metrics, header patterns,
origins of pages, and names of hosts and models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shmserve.config.options import Flag
from shmserve.errors import InvalidArgument

_CACHE = "--cache-config"
_CACHE_SIZE = Flag("cache-config", kind=int)


def cache_byte_size(configs: Sequence[str], byte_size: int | None) -> int:
    """Return the bytes of the cache from "local,size=BYTES" or the older flag; 0: no cache.

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
    sizes = [_cache_size(text) for text in configs]
    return sizes[-1] if sizes else byte_size or 0


def _cache_size(text: str) -> int:
    name, comma, setting = text.partition(",")
    key, equals, value = setting.partition("=")
    if not (name and comma and key and equals):
        raise InvalidArgument(f"{_CACHE}: '{text}' is not CACHE,SETTING=VALUE (local,size=BYTES)")
    if name != "local":
        raise InvalidArgument(f"{_CACHE}: there is no cache '{name}' (there is: local,size=BYTES)")
    if key != "size":
        raise InvalidArgument(f"{_CACHE}: the local cache has no setting '{key}' (there is: size)")
    size = _CACHE_SIZE.parse(value)
    assert isinstance(size, int)
    return size


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
            raise InvalidArgument(f"{_WORKSPACE}: '{setting}' is not DEVICE=BYTES (cpu=1073741824)")
        if _WORKSPACE_DEVICE.fullmatch(device) is None:
            raise InvalidArgument(
                f"{_WORKSPACE}: '{device}' is no device with a pool (there are: cpu, cuda:NUMBER)"
            )
        if device in sizes:
            raise InvalidArgument(f"{_WORKSPACE}: device '{device}' stands twice")
        size = _WORKSPACE_SIZE.parse(value)
        assert isinstance(size, int)
        sizes[device] = size
    return sizes


_RATE = "--rate-limit-resource"
_COUNT = Flag("rate-limit-resource", kind=int, high=2**31 - 1)
_GLOBAL = -1

Resources = tuple[tuple[str, int | None, int], ...]


def parse_resources(texts: Iterable[str]) -> Resources:
    """Return (name, device, count) of each "NAME:COUNT[:DEVICE]".

    The device is None for a resource on all devices, and -1 for "global".

    Raises:
        InvalidArgument: A text is malformed.
    """
    return tuple(_resource(text) for text in texts)


def _resource(text: str) -> tuple[str, int | None, int]:
    name, colon, rest = text.partition(":")
    count, _, device = rest.partition(":")
    if not (name and colon and count) or rest.endswith(":"):
        raise InvalidArgument(f"{_RATE}: '{text}' is not NAME:COUNT or NAME:COUNT:DEVICE")
    number = int(_COUNT.parse(count))
    if not device:
        return name, None, number
    return name, _GLOBAL if device.lower() == "global" else int(_COUNT.parse(device)), number


_METRICS = "--metrics-config"
_SWITCH = Flag("metrics-config", kind=bool)
# The prefix that C++ reads as a number; the remainder is ignored.
_LEADING_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """The enabled latency metrics; summary quantiles outside [0, 1] act like the nearest bound."""

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)

    @property
    def kept_quantiles(self) -> tuple[float, ...]:
        """Return the quantiles that schedulers compute; none without summaries."""
        return self.summary_quantiles if self.summary_latencies else ()


def parse_metrics_config(texts: Iterable[str]) -> MetricsConfig:
    """Return the settings of all --metrics-config flags, of which the last for a name counts."""
    config = MetricsConfig()
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise InvalidArgument(f"{_METRICS}: '{text}' is not SETTING=VALUE")
        parse = _SETTINGS.get(name)
        if parse is None:
            known = ", ".join(_SETTINGS)
            raise InvalidArgument(f"{_METRICS}: there is no setting '{name}' (there are: {known})")
        try:
            config = replace(config, **{name: parse(value)})
        except InvalidArgument as error:
            why = error.message if parse is _quantiles else "it is not true or false"
            raise InvalidArgument(f"{_METRICS}: {name}='{value}': {why}") from None
    return config


def _quantiles(text: str) -> tuple[float, ...]:
    """Return the quantiles of "QUANTILE:ERROR,...", parsed like Triton.

    Triton's error is the permitted deviation in rank. Quantiles are exact here, so it is ignored.
    """
    quantiles = []
    for pair in text.removesuffix(",").split(","):
        quantile, colon, error = pair.partition(":")
        if not colon:
            expected = "No ':' delimiter found. Expected format is <quantile>:<error>"
            raise InvalidArgument(f"Invalid option: [{pair}]. {expected}")
        numbers = [_LEADING_NUMBER.match(part) for part in (quantile, error)]
        if numbers[0] is None or numbers[1] is None:
            raise InvalidArgument(f"Invalid option: [{pair}]. Error: stod")
        quantiles.append(float(numbers[0][0]))
    return tuple(dict.fromkeys(quantiles))


_SETTINGS: dict[str, Callable[[str], Any]] = {
    "counter_latencies": _SWITCH.parse,
    "histogram_latencies": _SWITCH.parse,
    "summary_latencies": _SWITCH.parse,
    "summary_quantiles": _quantiles,
}


# Constructs of RE2, the syntax of Triton's patterns, that Python writes differently.
_RE2 = re.compile(
    r"\\Q(?P<verbatim>.*?)(?:\\E|$)"
    r"|(?P<end>\\z)|\\."
    r"|\[\^?\]?(?:\[:\w+:\]|\\.|[^\]])*\]"
    r"|\(\?(?P<flags>[imsU]*(?:-[imsU]+)?)(?P<colon>[:)])"
    r"|(?P<name>\(\?<(?![=!]))"
    r"|(?P<open>\()|(?P<close>\))|(?P<bar>\|)|.",
    re.DOTALL,
)
_CLASSES = {
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


def header_pattern(value: Mapping[str, Any], flag: str) -> str:
    """Return a header-name pattern in Python's syntax; raise InvalidArgument naming the flag."""
    given: str = value[flag] or ""
    pattern = _in_python(given)
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(f"--{flag}: '{given}' is no regular expression: {error}") from None
    return pattern


def _in_python(re2: str) -> str:
    """Return an RE2 pattern in Python's syntax.

    An RE2 flag applies up to the end of its group: (?-i)b|c becomes (?-i:b)|(?-i:c). The flag U
    (ungreedy) is dropped because it does not affect whether a text matches.
    """
    groups: list[list[str]] = [[]]  # the flags set in each open group
    parts: list[str] = []
    for found in _RE2.finditer(re2):
        text = found.group()
        match found.lastgroup:
            case "verbatim":
                text = re.escape(found["verbatim"])
            case "end":
                text = r"\Z"
            case "name":
                text = "(?P<"
            case "colon":
                text = f"(?{found['flags'].replace('U', '').rstrip('-')}:"
                if found["colon"] == ":":
                    groups.append([])
                else:
                    groups[-1].append(text)
            case "bar":
                text = ")" * len(groups[-1]) + "|" + "".join(groups[-1])
            case "close" if len(groups) > 1:
                text = ")" * len(groups.pop()) + ")"
            case None if text.startswith("["):
                for name, members in _CLASSES.items():
                    text = text.replace(name, members)
        if found.lastgroup in ("open", "name"):
            groups.append([])
        parts.append(text)
    return "".join(parts) + ")" * sum(map(len, groups))


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.IGNORECASE)


def origin(text: str) -> str:
    """Return the origin of pages, or "*"; raise InvalidArgument."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise InvalidArgument(
            f"--cors-allow-origin: '{text}' is not SCHEME://HOST or SCHEME://HOST:PORT in lower "
            "case and without a path, and not '*'"
        )
    return text


def host_name(text: str) -> str:
    """Return the name of a host, or of all below it ("*.example.com"); raise InvalidArgument."""
    if not _HOST.fullmatch(text):
        raise InvalidArgument(
            f"--allowed-host: '{text}' is not a name without scheme and port, *.NAME, or '*'"
        )
    return text


def served_name(text: str) -> tuple[str, str]:
    """Return the model ("": the only one) and its name in "[MODEL=]NAME"; raise InvalidArgument."""
    model, equals, name = text.rpartition("=")
    if not name or (equals and not model):
        raise InvalidArgument(f"--served-model-name: '{text}' is neither NAME nor MODEL=NAME")
    return model, name
