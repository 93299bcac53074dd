"""The table of flags of `shmserve serve`, in the groups that its help shows.

Names are Triton's where Triton has the flag, so an existing command line starts.
"""

from __future__ import annotations

from shmserve import logs
from shmserve.config.option import Flag

GROUPS: dict[str, tuple[Flag, ...]] = {
    "Models": (
        Flag("model-repository", help="a folder of model folders", repeat=True),
        Flag(
            "model-control-mode",
            default="none",
            choices=("none", "poll", "explicit"),
            help="none: load all at start; poll: follow the folder; explicit: load on request",
        ),
        Flag(
            "load-model",
            help="load this model at start in explicit mode; '*' alone loads all",
            repeat=True,
        ),
        Flag(
            "repository-poll-secs",
            kind=int,
            default=15,
            low=1,
            high=86400,
            help="seconds between two looks at the repository in poll mode",
        ),
        Flag(
            "model-config-name",
            help="take a model's configuration from configs/TEXT.pbtxt in its folder, where it has "
            "one, in the place of config.pbtxt",
        ),
        Flag(
            "disable-auto-complete-config",
            kind=bool,
            default=False,
            help="take configurations as written, ask models nothing",
        ),
        Flag("backend-config", help="BACKEND,SETTING=VALUE given to that backend", repeat=True),
    ),
    "Defaults for models that do not set them": (
        Flag(
            "dynamic-batching",
            kind=bool,
            default=False,
            help="batch dynamically where a model names no scheduler",
        ),
        Flag(
            "max-batch-size", kind=int, high=2**31 - 1, help="largest batch where a model sets none"
        ),
        Flag(
            "max-queue-delay-us",
            kind=int,
            help="microseconds a request may wait for others where a model sets none",
        ),
        Flag(
            "max-queue-size",
            kind=int,
            default=4096,
            low=1,
            help="requests that may wait where a model sets none; more get 503 with Retry-After",
        ),
        Flag(
            "request-timeout-us",
            kind=int,
            default=0,
            help="microseconds from a request's arrival to its response; 0: no limit. "
            "A request's own `timeout` counts where it is shorter",
        ),
        Flag(
            "execution-timeout-secs",
            kind=float,
            default=300.0,
            high=1_000_000,
            help="seconds one execution may take before its process is killed; 0: no limit. "
            "A model's parameter execution_timeout_seconds overrides it",
        ),
    ),
    "HTTP and metrics": (
        Flag("allow-http", kind=bool, default=True, help="serve HTTP on a port"),
        Flag(
            "http-address",
            default="127.0.0.1",
            help="where HTTP listens; an address that other hosts reach needs --auth-token-file or "
            "--insecure",
        ),
        Flag("http-port", kind=int, default=8000, high=65535, help="0 picks a free port"),
        Flag(
            "http-unix-socket",
            help="serve HTTP on this unix socket too; for the server's user, and for --shm-group",
        ),
        Flag(
            "http-max-input-size",
            kind=int,
            default=64 * 1024 * 1024,
            low=1,
            help="largest JSON, raw or decompressed input, bytes",
        ),
        Flag(
            "http-body-timeout-secs",
            kind=float,
            default=30.0,
            low=0.1,
            high=86400,
            help="seconds a client may stall while it sends a body or reads a response",
        ),
        Flag(
            "gateways",
            kind=int,
            default=1,
            low=1,
            high=64,
            help="HTTP processes that share the port",
        ),
        Flag("allow-metrics", kind=bool, default=True, help="serve GET /metrics"),
        Flag("metrics-address", help="where metrics listen (as --http-address)"),
        Flag("metrics-port", kind=int, default=8002, high=65535, help="0 picks a free port"),
        Flag(
            "metrics-config",
            help="SETTING=VALUE: counter_latencies (true), histogram_latencies or "
            "summary_latencies (false), summary_quantiles (QUANTILE:ERROR,...)",
            repeat=True,
        ),
    ),
    "gRPC": (
        Flag(
            "allow-grpc",
            kind=bool,
            default=True,
            help="serve gRPC, where the extra `grpc` is installed",
        ),
        Flag("grpc-address", help="where gRPC listens (as --http-address)"),
        Flag("grpc-port", kind=int, default=8001, high=65535, help="0 picks a free port"),
        Flag("grpc-use-ssl", kind=bool, default=False, help="TLS"),
        Flag(
            "grpc-use-ssl-mutual",
            kind=bool,
            default=False,
            help="TLS, and clients must show a certificate that --grpc-root-cert has signed",
        ),
        Flag("grpc-server-cert", help="file of the server's certificates, PEM"),
        Flag("grpc-server-key", help="file of the server's private key, PEM"),
        Flag("grpc-root-cert", help="file of the root certificates for clients, PEM"),
        Flag(
            "grpc-infer-response-compression-level",
            default="none",
            choices=("none", "low", "medium", "high"),
            help="none: as is; others: gzip or deflate, where the client takes it",
        ),
        *(
            Flag(f"grpc-{name}", kind=int, default=default, high=2**31 - 1, help=text)
            for name, default, text in (
                ("keepalive-time", 7_200_000, "milliseconds of silence before the server pings"),
                ("keepalive-timeout", 20_000, "milliseconds until a ping must be acknowledged"),
                ("http2-max-pings-without-data", 2, "pings in a row without data; 0: any number"),
                (
                    "http2-min-recv-ping-interval-without-data",
                    300_000,
                    "milliseconds between pings of a client that sends no data",
                ),
                # Not Triton's 2: past it, gRPC's core takes ever longer for each further ping, and
                # a client that goes on has it busy for minutes. An acknowledgement costs next to
                # nothing.
                ("http2-max-ping-strikes", 0, "pings too many before a client is cut off; 0: any"),
                ("max-connection-age", 0, "milliseconds that a connection may last; 0: any"),
                ("max-connection-age-grace", 0, "milliseconds for its calls after that; 0: any"),
            )
        ),
        Flag(
            "grpc-keepalive-permit-without-calls",
            kind=bool,
            default=False,
            help="ping connections without calls too",
        ),
    ),
    "Access": (
        Flag(
            "auth-token-file",
            help="clients must send one of its tokens (Authorization: Bearer); a line is TOKEN or "
            "TOKEN SCOPE,SCOPE",
        ),
        Flag("insecure", kind=bool, default=False, help="listen for other hosts without tokens"),
        Flag(
            "http-restricted-api",
            help="API,API:HEADER=VALUE: these also need that header",
            repeat=True,
        ),
        Flag(
            "grpc-restricted-protocol",
            help="the same for gRPC, with triton-grpc-protocol- before the header's name",
            repeat=True,
        ),
    ),
    "Headers as request parameters": (
        Flag(
            "http-header-forward-pattern",
            help="headers of inferences whose names this regular expression matches become "
            "parameters of the request",
        ),
        Flag("grpc-header-forward-pattern", help="the same for the metadata of gRPC calls"),
    ),
    "Clients' shared memory": (
        Flag(
            "allow-client-shm",
            kind=bool,
            help="clients' shared memory over every listener, or over none "
            "(default: over those that only this host reaches)",
        ),
        Flag(
            "shm-group",
            help="a group whose members may use shmserve.client and the unix socket, and share "
            "regions: objects that it may read and write",
        ),
        Flag(
            "shm-overlap",
            default="warn",
            choices=("error", "warn", "ignore"),
            help="when outputs of two requests in flight go to the same bytes",
        ),
        Flag(
            "shm-max-regions",
            kind=int,
            default=4096,
            low=1,
            high=1 << 20,
            help="regions that may be registered",
        ),
        Flag(
            "shm-max-regions-per-uid",
            kind=int,
            default=2048,
            low=1,
            high=1 << 20,
            help="the same, of one user",
        ),
        Flag(
            "shm-max-byte-size",
            kind=int,
            help="bytes that may be registered (default: the host's memory)",
        ),
        Flag(
            "shm-max-byte-size-per-uid", kind=int, help="the same, of one user (default: as much)"
        ),
        Flag(
            "shm-sparse-byte-size",
            kind=int,
            default=1 << 30,
            help="bytes that the server allocates in objects that clients registered without "
            "allocating them",
        ),
    ),
    "Server": (
        Flag("id", default="triton", help="the name that GET /v2 shows"),
        Flag(
            "run-dir",
            help="private folder for sockets (default: where shmserve.client looks, "
            "$XDG_RUNTIME_DIR/shmserve or /tmp/shmserve-UID; a fresh one when another server is "
            "there)",
        ),
        Flag(
            "arena-byte-size",
            kind=int,
            default=1 << 30,
            low=1 << 20,
            high=1 << 40,
            help="bytes each process may use for tensors that lie in no client's region",
        ),
        Flag(
            "cache-config",
            help="local,size=BYTES: keep responses, so many bytes of them, of models whose "
            "configuration has response_cache { enable: true }",
            repeat=True,
        ),
        Flag("response-cache-byte-size", kind=int, help="the same: Triton's older name of it"),
        Flag(
            "ensemble-scheduling",
            default="hosted",
            choices=("hosted", "separate"),
            help="hosted: the steps of an ensemble are scheduled in its process; separate: each "
            "model in a process of its own",
        ),
        Flag(
            "rate-limit",
            default="off",
            choices=("off", "execution_count"),
            help="execution_count: instances execute when the resources of their rate_limiter are "
            "free, the one that has executed least first",
        ),
        Flag(
            "rate-limit-resource",
            help="NAME:COUNT or NAME:COUNT:DEVICE (a number, or global): how much there is of a "
            "resource (default: the most that one instance needs)",
            repeat=True,
        ),
        Flag(
            "workspace-byte-size",
            help="DEVICE=BYTES: a pool of memory, shared by the device's models, each of which has "
            "of it what it needs for the time of an execution (cpu=BYTES, cuda:0=BYTES)",
            repeat=True,
        ),
        Flag(
            "exit-timeout-secs",
            kind=int,
            default=30,
            high=86400,
            help="seconds to finish what is in flight after SIGTERM",
        ),
        Flag(
            "exit-on-error",
            kind=bool,
            default=True,
            help="end when a model cannot be loaded at start",
        ),
        Flag(
            "strict-readiness",
            kind=bool,
            default=True,
            help="ready only when every model is, and has a live process",
        ),
    ),
    "Log": (
        *(
            Flag(f"log-{name}", kind=bool, default=True, help=f"log {what}")
            for name, what in (
                ("info", "what is worth knowing"),
                ("warning", "what may be wrong"),
                ("error", "what is wrong"),
            )
        ),
        Flag(
            "log-verbose",
            kind=int,
            default=0,
            high=logs.MOST_VERBOSE,
            help="1 and more (or true): log for who looks closely, too",
            words=True,
        ),
        Flag(
            "log-format",
            default=logs.DEFAULT,
            choices=logs.FORMATS,
            help="how a line starts: level, time, process; ISO8601: time, level, pid, process",
        ),
        Flag("log-file", help="append the log to this file, not to stderr"),
    ),
}
ACTED_ON: tuple[Flag, ...] = tuple(flag for flags in GROUPS.values() for flag in flags)

# Flags of tritonserver that have no counterpart here.
_WITHOUT_EFFECT = """
model-load-thread-count model-load-retry-count model-namespacing:bool
enable-peer-access:bool
reuse-http-port:bool http-thread-count reuse-grpc-port:bool grpc-infer-allocation-pool-size
grpc-max-response-pool-size grpc-infer-thread-count grpc-infer-max-completion-queue-thread-count
allow-sagemaker:bool sagemaker-port sagemaker-safe-port-range sagemaker-thread-count
allow-vertex-ai:bool vertex-ai-port vertex-ai-thread-count vertex-ai-default-model
allow-gpu-metrics:bool allow-cpu-metrics:bool metrics-interval-ms trace-config
backend-directory repoagent-directory cache-directory
pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size
min-supported-compute-capability buffer-manager-thread-count host-policy model-load-gpu-limit
strict-model-config:bool trace-file trace-level trace-rate trace-count
trace-log-frequency
"""
ACCEPTED: tuple[Flag, ...] = tuple(
    Flag(name, kind=bool if kind else str, repeat=True, effect=False)
    for name, _, kind in (word.partition(":") for word in _WITHOUT_EFFECT.split())
)
FLAGS: dict[str, Flag] = {flag.name: flag for flag in (*ACTED_ON, *ACCEPTED)}
FLAGS["model-store"] = FLAGS["model-repository"]  # Triton's older name of it
