"""The flags of `shmserve serve`: what one is, how the text of its value is read, and the table of
all, in the groups that the help shows (pure).

Names are Triton's where Triton has the flag, so an existing command line starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shmserve import logs
from shmserve.errors import InvalidArgument, suggestion

_TRUE = ("true", "1", "on", "yes")
_FALSE = ("false", "0", "off", "no")
# int() and float() alone would take 1_000, spaces, and the digits of every script; and more than 19
# digits are out of every range.
_NUMBER = {
    int: re.compile(r"[+-]?[0-9]{1,19}"),
    float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
}

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `kind` is str, int, float or bool; `effect` False: accepted, named in a warning.

    Numbers lie in [`low`, `high`]; with `words`, true and false mean 1 and 0. `choices` are all the
    values allowed, if given.
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

    def parse(self, text: str) -> Value:
        """The value that `text` gives; raises InvalidArgument naming the flag."""
        if self.kind is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            raise InvalidArgument(f"--{self.name}: '{text}' is not a boolean (true or false)")
        if self.kind is str:
            if self.choices and text not in self.choices:
                allowed = ", ".join(self.choices)
                near = suggestion(text, self.choices)
                raise InvalidArgument(f"--{self.name}: '{text}' is not one of {allowed}{near}")
            return text
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
        """The text of its value where it stands in the next word, which is taken from `rest`.

        Raises InvalidArgument naming the flag when there is none.
        """
        if self.kind is bool:
            if rest and rest[0].lower() in _TRUE + _FALSE:
                return rest.pop(0)
            return "true"
        if not rest or rest[0].startswith("--"):
            raise InvalidArgument(f"--{self.name}: a value is missing")
        return rest.pop(0)


GROUPS: dict[str, tuple[Flag, ...]] = {
    "Models": (
        Flag("model-repository", "a folder of model folders", repeat=True),
        Flag(
            "model-control-mode",
            "none: load all at start; poll: follow the folder; explicit: load on request",
            default="none",
            choices=("none", "poll", "explicit"),
        ),
        Flag(
            "load-model",
            "load this model at start in explicit mode; '*' alone loads all",
            repeat=True,
        ),
        Flag(
            "load-on-demand",
            "load a model, but those of --load-model, when the first request for it comes",
            bool,
            False,
        ),
        Flag(
            "idle-unload-secs",
            "seconds after which a model on demand is unloaded that was not asked for, where its "
            "parameter idle_unload_secs says nothing; 0: it stays",
            float,
            0.0,
            high=1_000_000,
        ),
        Flag(
            "max-loaded-byte-size",
            "unload the models on demand that were used least recently where all that are loaded "
            "have more bytes of memory; 0: no limit",
            int,
            0,
        ),
        Flag(
            "repository-poll-secs",
            "seconds between two looks at the repository in poll mode; 0: it is not looked at",
            int,
            15,
            high=86400,
        ),
        Flag(
            "model-config-name",
            "take a model's configuration from configs/TEXT.pbtxt in its folder, where it has "
            "one, in the place of config.pbtxt",
        ),
        Flag(
            "disable-auto-complete-config",
            "take configurations as written, ask models nothing",
            bool,
            False,
        ),
        Flag("strict-model-config", "the same: Triton's older name of it", bool, False),
        Flag(
            "set",
            "NAME=VALUE, for a model given as path/model.py:Class: in the `parameters` of the "
            "context that its `load` is given; a value is a text",
            repeat=True,
        ),
        Flag("backend-config", "BACKEND,SETTING=VALUE given to that backend", repeat=True),
    ),
    "Defaults for models that do not set them": (
        Flag("dynamic-batching", "batch dynamically where a model names no scheduler", bool, False),
        Flag("max-batch-size", "largest batch where a model sets none", int, high=2**31 - 1),
        Flag(
            "max-queue-delay-us",
            "microseconds a request may wait for others where a model sets none",
            int,
        ),
        Flag(
            "max-queue-size",
            "requests that may wait where a model sets none; more get 503 with Retry-After",
            int,
            4096,
            low=1,
        ),
        Flag(
            "request-timeout-us",
            "microseconds from a request's arrival to its response; 0: no limit. "
            "A request's own `timeout` counts where it is shorter",
            int,
            0,
        ),
        Flag(
            "execution-timeout-secs",
            "seconds one execution may take before its process is killed; 0: no limit. "
            "A model's parameter execution_timeout_seconds overrides it",
            float,
            300.0,
            high=1_000_000,
        ),
        Flag(
            "load-timeout-secs",
            "seconds an instance may take to complete its configuration, and again to load, with "
            "its warm-up, also when it starts again; its process is killed then, and the error "
            "says where it hung; 0: no limit",
            float,
            0.0,
            high=1_000_000,
        ),
    ),
    "HTTP and metrics": (
        Flag("allow-http", "serve HTTP on a port", bool, True),
        Flag(
            "http-address",
            "where HTTP listens; an address that other hosts reach needs --auth-token-file or "
            "--insecure",
            default="127.0.0.1",
        ),
        Flag("http-port", "0 picks a free port", int, 8000, high=65535),
        Flag(
            "http-unix-socket",
            "serve HTTP on this unix socket too; for the server's user, and for --shm-group",
        ),
        Flag(
            "http-max-input-size",
            "largest JSON, raw or decompressed input, bytes",
            int,
            64 * 1024 * 1024,
            low=1,
        ),
        Flag(
            "http-body-timeout-secs",
            "seconds a client may stall while it sends a body or reads a response",
            float,
            30.0,
            low=0.1,
            high=86400,
        ),
        Flag("gateways", "HTTP processes that share the port", int, 1, low=1, high=64),
        Flag("allow-metrics", "serve GET /metrics", bool, True),
        Flag("metrics-address", "where metrics listen (as --http-address)"),
        Flag("metrics-port", "0 picks a free port", int, 8002, high=65535),
        Flag(
            "metrics-config",
            "SETTING=VALUE: counter_latencies (true), histogram_latencies or "
            "summary_latencies (false), summary_quantiles (QUANTILE:ERROR,...)",
            repeat=True,
        ),
    ),
    "gRPC": (
        Flag("allow-grpc", "serve gRPC", bool, True),
        Flag("grpc-address", "where gRPC listens (as --http-address)"),
        Flag("grpc-port", "0 picks a free port", int, 8001, high=65535),
        Flag(
            "grpc-unix-socket",
            "serve gRPC on this unix socket too, without TLS; for the server's user, and for "
            "--shm-group",
        ),
        Flag("grpc-workers", "gRPC processes that share the port", int, 1, low=1, high=64),
        Flag("grpc-use-ssl", "TLS", bool, False),
        Flag(
            "grpc-use-ssl-mutual",
            "TLS, and clients must show a certificate that --grpc-root-cert has signed",
            bool,
            False,
        ),
        Flag("grpc-server-cert", "file of the server's certificates, PEM"),
        Flag("grpc-server-key", "file of the server's private key, PEM"),
        Flag("grpc-root-cert", "file of the root certificates for clients, PEM"),
        Flag(
            "grpc-infer-response-compression-level",
            "none: as is; others: gzip or deflate, where the client takes it",
            default="none",
            choices=("none", "low", "medium", "high"),
        ),
        *(
            Flag(f"grpc-{name}", text, int, default, high=2**31 - 1)
            for name, default, text in (
                ("keepalive-time", 7_200_000, "milliseconds of silence before the server pings"),
                ("keepalive-timeout", 20_000, "milliseconds until a ping must be acknowledged"),
                ("http2-max-pings-without-data", 2, "pings in a row without data; 0: any number"),
                (
                    "http2-min-recv-ping-interval-without-data",
                    300_000,
                    "milliseconds between pings of a client that sends no data",
                ),
                # Not Triton's 2: an acknowledgement costs next to nothing, and a flood is another
                # limit's.
                ("http2-max-ping-strikes", 0, "pings too many before a client is cut off; 0: any"),
                ("max-connection-age", 0, "milliseconds that a connection may last; 0: any"),
                ("max-connection-age-grace", 0, "milliseconds for its calls after that; 0: any"),
            )
        ),
        Flag(
            "grpc-keepalive-permit-without-calls", "ping connections without calls too", bool, False
        ),
    ),
    "Access": (
        Flag(
            "auth-token-file",
            "clients must send one of its tokens (Authorization: Bearer); a line is TOKEN or "
            "TOKEN SCOPE,SCOPE",
        ),
        Flag("insecure", "listen for other hosts without tokens", bool, False),
        Flag(
            "http-restricted-api", "API,API:HEADER=VALUE: these also need that header", repeat=True
        ),
        Flag(
            "grpc-restricted-protocol",
            "the same for gRPC, with triton-grpc-protocol- before the header's name",
            repeat=True,
        ),
    ),
    "Headers as request parameters": (
        Flag(
            "http-header-forward-pattern",
            "headers of inferences whose names this regular expression matches become "
            "parameters of the request",
        ),
        Flag("grpc-header-forward-pattern", "the same for the metadata of gRPC calls"),
    ),
    "Clients' shared memory": (
        Flag(
            "allow-client-shm",
            "clients' shared memory over every listener, or over none "
            "(default: over those that only this host reaches)",
            bool,
        ),
        Flag(
            "shm-group",
            "a group whose members may use shmserve.client and the unix sockets, and share "
            "regions: objects that it may read and write",
        ),
        Flag(
            "shm-overlap",
            "when outputs of two requests in flight go to the same bytes",
            default="warn",
            choices=("error", "warn", "ignore"),
        ),
        Flag("shm-max-regions", "regions that may be registered", int, 4096, low=1, high=1 << 20),
        Flag("shm-max-regions-per-uid", "the same, of one user", int, 2048, low=1, high=1 << 20),
        Flag("shm-max-byte-size", "bytes that may be registered (default: the host's memory)", int),
        Flag("shm-max-byte-size-per-uid", "the same, of one user (default: as much)", int),
        Flag(
            "shm-sparse-byte-size",
            "bytes that the server allocates in objects that clients registered without "
            "allocating them",
            int,
            1 << 30,
        ),
    ),
    "Server": (
        Flag(
            "config",
            "a YAML file with these flags as keys (http-port: 8000; a list where a flag repeats); "
            "what the command line says of a flag counts",
        ),
        Flag("id", "the name that GET /v2 shows", default="triton"),
        Flag(
            "run-dir",
            "private folder for sockets (default: where shmserve.client looks, "
            "$XDG_RUNTIME_DIR/shmserve or /tmp/shmserve-UID; a fresh one beside it when another "
            "server is there)",
        ),
        Flag(
            "take-over",
            "take the place of the server of the run directory, which goes on until this one is "
            "ready: its listening sockets, wherever they are, and its clients' regions",
            bool,
            False,
        ),
        Flag(
            "arena-byte-size",
            "bytes each process may use for tensors that lie in no client's region",
            int,
            1 << 30,
            low=1 << 20,
            high=1 << 40,
        ),
        Flag(
            "cache-config",
            "local,size=BYTES: keep responses, so many bytes of them, of models whose "
            "configuration has response_cache { enable: true }",
            repeat=True,
        ),
        Flag("response-cache-byte-size", "the same: Triton's older name of it", int),
        Flag(
            "ensemble-scheduling",
            "hosted: the steps of an ensemble are scheduled in its process; separate: each "
            "model in a process of its own",
            default="hosted",
            choices=("hosted", "separate"),
        ),
        Flag(
            "rate-limit",
            "execution_count: instances execute when the resources of their rate_limiter are "
            "free, the one that has executed least first",
            default="off",
            choices=("off", "execution_count"),
        ),
        Flag(
            "rate-limit-resource",
            "NAME:COUNT or NAME:COUNT:DEVICE (a number, or global): how much there is of a "
            "resource (default: the most that one instance needs)",
            repeat=True,
        ),
        Flag(
            "workspace-byte-size",
            "DEVICE=BYTES: a pool of memory, shared by the device's models, each of which has "
            "of it what it needs for the time of an execution (cpu=BYTES, cuda:0=BYTES)",
            repeat=True,
        ),
        Flag(
            "exit-timeout-secs",
            "seconds to finish what is in flight after SIGTERM",
            int,
            30,
            high=86400,
        ),
        Flag("exit-on-error", "end when a model cannot be loaded at start", bool, True),
        Flag(
            "strict-readiness", "ready only when every model is, and has a live process", bool, True
        ),
    ),
    "Log": (
        *(
            Flag(f"log-{name}", f"log {what}", bool, True)
            for name, what in (
                ("info", "what is worth knowing"),
                ("warning", "what may be wrong"),
                ("error", "what is wrong"),
            )
        ),
        Flag(
            "log-verbose",
            "1 and more (or true): log for who looks closely, too",
            int,
            0,
            high=logs.MOST_VERBOSE,
            words=True,
        ),
        Flag(
            "log-format",
            "how a line starts: level, time, process; ISO8601: time, level, pid, process",
            default=logs.DEFAULT,
            choices=logs.FORMATS,
        ),
        Flag("log-file", "append the log to this file, not to stderr"),
        Flag(
            "slow-request-ms",
            "log of each request that takes longer where its time went; 0: of none",
            int,
            0,
            high=86_400_000,
        ),
        Flag(
            "trace-config",
            "SETTING=VALUE: level (OFF, TIMESTAMPS), rate (1000: one of so many requests), count "
            "(-1: of any number), mode (triton, opentelemetry); triton,file=PATH, "
            "triton,log-frequency=N (a file for each N traces); opentelemetry,url=URL, "
            "opentelemetry,resource=KEY=VALUE",
            repeat=True,
        ),
    ),
}
ACTED_ON: tuple[Flag, ...] = tuple(flag for flags in GROUPS.values() for flag in flags)

# Flags of tritonserver that have no counterpart here, and what there is instead.
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
    "--trace-config says so (level=, rate=, count=, triton,file=, triton,log-frequency=)": """
        trace-file trace-level trace-rate trace-count trace-log-frequency""",
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
IDLE: dict[str, tuple[Flag, ...]] = {
    instead: tuple(
        Flag(name, instead, bool if kind else str, repeat=True, effect=False)
        for name, _, kind in (word.partition(":") for word in words.split())
    )
    for instead, words in _WITHOUT_EFFECT.items()
}
ACCEPTED: tuple[Flag, ...] = tuple(flag for flags in IDLE.values() for flag in flags)
FLAGS: dict[str, Flag] = {flag.name: flag for flag in (*ACTED_ON, *ACCEPTED)}
FLAGS["model-store"] = FLAGS["model-repository"]  # Triton's older name of it
