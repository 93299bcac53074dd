"""Flags whose values have a syntax of their own: the response cache, workspaces, resources of the
rate limiter, metrics, patterns of headers; as Triton has them where it has them.
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
    """The bytes of the cache that "local,size=BYTES" asks for, or of the older flag; 0: none.

    Raises InvalidArgument for anything else, for another cache than `local`, and for two of them.
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
        raise InvalidArgument(f"{_CACHE}: there is no cache '{name}' (there is: local)")
    if key != "size":
        raise InvalidArgument(f"{_CACHE}: the local cache has no setting '{key}' (there is: size)")
    size = _CACHE_SIZE.parse(value)
    assert isinstance(size, int)
    return size


_WORKSPACE = "--workspace-byte-size"
_WORKSPACE_DEVICE = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,2})")
_WORKSPACE_SIZE = Flag("workspace-byte-size", kind=int, low=4096, high=1 << 44)


def workspace_byte_sizes(settings: Sequence[str]) -> dict[str, int]:
    """The bytes of each device's pool, by torch's name of the device.

    Raises InvalidArgument for what is not DEVICE=BYTES, for a device that stands twice, and for one
    that has no pools: the host and CUDA devices have.
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
    """(name, device, count) of each "NAME:COUNT[:DEVICE]"; the device None: every one, and also
    what is global; -1: only that ("global").

    Raises InvalidArgument.
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
    return name, _GLOBAL if device == "global" else int(_COUNT.parse(device)), number


_METRICS = "--metrics-config"
_SWITCH = Flag("metrics-config", kind=bool)
# What C++ reads of a text as a number; what follows it is passed over.
_LEADING_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Counters of time, histograms and summaries; `summary_quantiles` are those of the last: what
    is below 0 or above 1 is as good as these."""

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)

    @property
    def kept_quantiles(self) -> tuple[float, ...]:
        """The quantiles that schedulers keep: none where nobody sees them."""
        return self.summary_quantiles if self.summary_latencies else ()


def parse_metrics_config(texts: Iterable[str]) -> MetricsConfig:
    """The settings of all --metrics-config, the last of a name; raises InvalidArgument."""
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
    """The quantiles of "QUANTILE:ERROR,...", read as Triton reads them. The error is what Triton's
    estimate may be off by in rank: no quantile here is."""
    quantiles = []
    for pair in text.removesuffix(",").split(","):
        quantile, colon, error = pair.partition(":")
        if not colon:
            wants = "No ':' delimiter found. Expected format is <quantile>:<error>"
            raise InvalidArgument(f"Invalid option: [{pair}]. {wants}")
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


# What RE2, whose syntax Triton's patterns have, writes in another way than Python.
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
    """A pattern of headers' names as Python writes it; raises InvalidArgument naming the flag."""
    given: str = value[flag] or ""
    pattern = _in_python(given)
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(f"--{flag}: '{given}' is no regular expression: {error}") from None
    return pattern


def _in_python(re2: str) -> str:
    """The pattern with each flag that RE2 has hold up to the end of a group, (?-i)b|c, as groups of
    Python's, (?-i:b)|(?-i:c); whether it is greedy (U) changes nothing for who only asks if it
    matches."""
    groups: list[list[str]] = [[]]  # of each that is open, the flags set in it
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
