"""The flags of `shmserve serve`: a flag with its value parser, and the reader of flags.txt."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from shmserve.errors import InvalidArgument, suggestion

_TRUE = ("true", "1", "on", "yes")
_FALSE = ("false", "0", "off", "no")
# int() and float() alone also accept 1_000, spaces and digits of other scripts. More than 19 digits
# exceed every range.
_NUMBER = {
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
        choices: All the values allowed, if not empty.
        repeat: Whether the flag may be repeated.
        effect: False for a flag that is accepted with a warning and has no effect.
        words: Whether true and false stand for 1 and 0.
        metavar: The name of the value in help texts of client commands.
        exclusive: Whether only one flag of its group may be set (client commands).
        prefix: The text before each value of a repeatable flag that is an older name.
    """

    name: str
    help: str = ""
    kind: type = str
    default: Value | None = None
    low: float = 0
    high: float = 2**63 - 1
    choices: tuple[str, ...] = ()
    repeat: bool = False
    effect: bool = True
    words: bool = False
    metavar: str = ""
    exclusive: bool = False
    prefix: str = ""

    def parse(self, text: str) -> Value:
        """Return the value of `text`; raise InvalidArgument naming the flag."""
        if self.kind is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            raise InvalidArgument(f"--{self.name}: '{text}' is not a boolean (true or false)")
        if self.kind is str:
            known = {choice.lower(): choice for choice in self.choices}
            if known and text.lower() not in known:
                allowed = ", ".join(self.choices)
                near = suggestion(text, self.choices)
                raise InvalidArgument(f"--{self.name}: '{text}' is not one of {allowed}{near}")
            return known.get(text.lower(), text)
        if self.words and text.lower() in ("true", "false"):
            return int(text.lower() == "true")
        if not _NUMBER[self.kind].fullmatch(text):
            kind = "an integer" if self.kind is int else "a number"
            raise InvalidArgument(f"--{self.name}: '{text}' is not {kind}")
        number: int | float = int(text) if self.kind is int else float(text)
        if not self.low <= number <= self.high:
            raise InvalidArgument(
                f"--{self.name}: {text} is out of range (allowed: {self.low} to {self.high})"
            )
        return number

    def following(self, rest: list[str]) -> str:
        """Return the text of the flag's value if it is the next word, which is removed from `rest`.

        Raises:
            InvalidArgument: The value is missing; the message names the flag.
        """
        if self.kind is bool:
            if rest and rest[0].lower() in _TRUE + _FALSE:
                return rest.pop(0)
            return "true"
        if not rest or rest[0].startswith("--"):
            raise InvalidArgument(f"--{self.name}: a value is missing")
        return rest.pop(0)


_HEADING = re.compile(r"\[(.+)\]")
_ROW = re.compile(
    r"(?P<name>[a-z0-9-]+) (?P<kind>[\w|]+)(?::(?P<metavar>\S+?))?"
    r"(?: (?P<low>[\d.]+?)\.\.(?P<high>\d*))?(?: = (?P<default>\S+?))?"
    r"(?P<repeat>, repeats)?(?P<words>, words)?(?P<exclusive>, exclusive)?"
)
_KINDS: dict[str, type] = {"text": str, "bool": bool, "int": int, "float": float}


def read(text: str) -> dict[str, tuple[Flag, ...]]:
    """Return the flags of a table, in the syntax of flags.txt, by their groups."""
    group: list[Flag] = []
    groups = {"": group}
    rows = [line for line in text.splitlines() if line and not line.startswith("#")]
    for line in rows:
        if heading := _HEADING.fullmatch(line):
            group = groups[heading[1]] = []
        elif line.startswith(" "):
            group[-1] = replace(group[-1], help=f"{group[-1].help} {line.strip()}".lstrip())
        else:
            group.append(_flag(line))
    return {name: tuple(flags) for name, flags in groups.items() if flags}


def _flag(line: str) -> Flag:
    row = _ROW.fullmatch(line)
    assert row, line
    kind = _KINDS.get(row["kind"], str)
    flag = Flag(
        row["name"],
        kind=kind,
        choices=() if row["kind"] in _KINDS else tuple(row["kind"].split("|")),
        repeat=bool(row["repeat"]),
        words=bool(row["words"]),
        metavar=row["metavar"] or "",
        exclusive=bool(row["exclusive"]),
    )
    if row["low"]:
        number = float if "." in row["low"] else int
        flag = replace(flag, low=number(row["low"]), high=int(row["high"] or flag.high))
    default = row["default"]
    return replace(flag, default=flag.parse(default.strip('"'))) if default else flag


GROUPS = read(Path(__file__).with_name("flags.txt").read_text(encoding="utf-8"))
ACTED_ON: tuple[Flag, ...] = tuple(flag for flags in GROUPS.values() for flag in flags)

# Flags of tritonserver without a counterpart, and the reason or alternative.
_WITHOUT_EFFECT = {
    "models load side by side, in processes of their own": """
        model-load-thread-count buffer-manager-thread-count""",
    "load it again, or have --model-control-mode=poll do so": "model-load-retry-count",
    "--gateways has so many processes share the port": """
        http-thread-count reuse-http-port:bool reuse-grpc-port:bool""",
    "one process serves gRPC, and keeps nothing for later": """
        grpc-infer-allocation-pool-size grpc-max-response-pool-size grpc-infer-thread-count
        grpc-infer-max-completion-queue-thread-count""",
    "there is no such listener": """
        allow-sagemaker:bool sagemaker-port sagemaker-safe-port-range sagemaker-thread-count
        allow-vertex-ai:bool vertex-ai-port vertex-ai-thread-count vertex-ai-default-model""",
    "GET /metrics says what is so when it is asked, of this server's processes": """
        metrics-interval-ms allow-gpu-metrics:bool allow-cpu-metrics:bool""",
    "backends are Python packages (pip install), and there are no agents": """
        backend-directory repoagent-directory""",
    "the cache is the server's own, --cache-config": "cache-directory",
    "tensors lie in regions, --arena-byte-size and --workspace-byte-size": """
        pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size""",
    "CUDA_VISIBLE_DEVICES says which devices there are": """
        min-supported-compute-capability enable-peer-access:bool model-load-gpu-limit""",
    "taskset and numactl place the server's processes": "host-policy",
    "names are those of all repositories": "model-namespacing:bool",
}
# Triton's settings of --backend-config that no backend here reads.
IDLE_BACKEND_SETTINGS = frozenset(
    [
        *("shm-default-byte-size", "shm-growth-byte-size", "shm-region-prefix-name"),
        *("stub-timeout-seconds", "python-runtime", "version", "gpu-memory-fraction"),
        *("allow-soft-placement", "coalesce-request-input", "plugins", "version-compatible"),
    ]
)
IDLE: dict[str, tuple[Flag, ...]] = {
    instead: tuple(
        Flag(name, instead, bool if kind else str, repeat=True, effect=False)
        for name, _, kind in (word.partition(":") for word in words.split())
    )
    for instead, words in _WITHOUT_EFFECT.items()
}
ACCEPTED: tuple[Flag, ...] = tuple(flag for flags in IDLE.values() for flag in flags)
FLAGS: dict[str, Flag] = {flag.name: flag for flag in (*ACTED_ON, *ACCEPTED)}
# Triton's older names of flags, with the text before their values.
_OLDER_NAMES = {
    "model-store": ("model-repository", ""),
    "trace-file": ("trace-config", "triton,file="),
    "trace-log-frequency": ("trace-config", "triton,log-frequency="),
    **{f"trace-{name}": ("trace-config", f"{name}=") for name in ("level", "rate", "count")},
}
FLAGS |= {old: replace(FLAGS[new], prefix=text) for old, (new, text) in _OLDER_NAMES.items()}


def named(name: str) -> list[Flag]:
    """Return the flag with this name, or all flags whose names begin with it (getopt_long)."""
    if name in FLAGS:
        return [FLAGS[name]]
    return list(dict.fromkeys(flag for full, flag in FLAGS.items() if full.startswith(name)))
