"""The settings of a server: frozen, created once from the command line, units in the names."""

from __future__ import annotations

import grp
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shmserve.common.auth_tokens import GRPC_HEADER_PREFIX, Tokens, parse_restrictions, read_tokens
from shmserve.common.names import CLASS_IN_FILE, names_one_model
from shmserve.common.peers import NO_GROUP, ShmPolicy
from shmserve.common.trace_settings import TraceSettings, parse_trace_config
from shmserve.config.command_line import Parsed
from shmserve.config.flags import (
    MetricsConfig,
    Resources,
    cache_byte_size,
    check_host_name,
    check_origin,
    convert_header_pattern,
    parse_metrics_config,
    parse_resources,
    parse_served_name,
    workspace_byte_sizes,
)
from shmserve.errors import Collector, InvalidArgument, Problems, convert_os_errors
from shmserve.gateway.settings import GatewaySettings, GrpcSettings, Tls, check_file
from shmserve.ipc.messages.supervision import SchedulingLimits
from shmserve.logs import LogSettings
from shmserve.model_config import ModelDefaults, plugin_backends

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The settings of the HTTP listener; `allow` enables TCP."""

    allow: bool  # whether the server listens on TCP
    address: str
    port: int
    unix_socket: Path | None


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The settings of the gRPC listener. `workers` processes share its TCP and unix sockets."""

    address: str
    port: int
    unix_socket: Path | None
    workers: int  # number of processes
    settings: GrpcSettings


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The settings of `shmserve serve`.

    Attributes:
        model_files: Models given as "path/model.py:Class".
        class_settings: The parameters of the models in `model_files`.
        tokens: The accepted tokens; if empty, no token is required.
        gateway: The settings of gateways, except those that are set when a gateway starts.
        scheduling: The settings of schedulers.
        flags: The value of each flag, given or default.
        on_cpu: Whether instances of KIND_GPU run on the CPU (`shmserve check --on-cpu`).
    """

    model_repositories: tuple[Path, ...]
    model_files: tuple[str, ...]
    class_settings: Mapping[str, str]
    model_control_mode: str
    load_models: tuple[str, ...]  # names
    load_on_demand: bool
    idle_unload_s: float  # 0: never
    max_models_byte_size: int
    repository_poll_s: int  # seconds; 0: no polling
    auto_complete: bool
    model_config_name: str
    # Tuples of backend, setting and value; the backend "" means all backends.
    backend_config: tuple[tuple[str, str, str], ...]
    model_defaults: ModelDefaults
    on_cpu: bool = field(default=False, kw_only=True)
    load_timeout_s: float
    http: HttpConfig
    gateways: int  # number of HTTP gateway processes
    grpc: GrpcConfig | None
    allow_metrics: bool
    metrics_address: str
    metrics_port: int
    metrics: MetricsConfig
    tokens: Tokens
    insecure: bool
    shm: ShmPolicy
    gateway: GatewaySettings
    scheduling: SchedulingLimits
    run_dir: Path | None
    take_over: bool  # whether the server takes over the sockets of a running one
    arena_byte_size: int
    cache_byte_size: int  # 0: no cache
    ensemble_scheduling: str
    rate_limit: str
    rate_limit_resources: Resources
    workspace_byte_sizes: dict[str, int]  # by device
    exit_timeout_s: int
    exit_on_error: bool
    strict_readiness: bool
    log: LogSettings
    trace: TraceSettings
    visible_devices: str | None
    without_effect: tuple[str, ...]  # flags that are accepted and ignored
    flags: Mapping[str, Any]

    @property
    def allows_remote(self) -> bool:
        """Return whether the server may listen on addresses that other hosts reach."""
        return bool(self.tokens) or self.insecure

    @property
    def protocols(self) -> set[str]:
        """Return the names of the protocols that the server serves."""
        http = self.http.allow or self.http.unix_socket is not None
        is_served = {"http": http, "metrics": self.allow_metrics, "grpc": self.grpc is not None}
        return {name for name, is_enabled in is_served.items() if is_enabled}


# Flags whose values are stored unchanged in the fields of the same names.
_UNCHANGED_FLAGS = (
    *("model-control-mode", "ensemble-scheduling", "gateways", "allow-metrics", "metrics-port"),
    *("insecure", "arena-byte-size", "rate-limit", "exit-on-error", "strict-readiness"),
    *("take-over", "load-on-demand"),
)


def from_flags(
    parsed: Parsed, environment: Mapping[str, str], *, needs_models: bool = True
) -> ServerConfig:
    """Return the settings from a parsed command line and the environment.

    Raises:
        Problems: Each line names the flag and, if a file sets it, its position there.
    """
    collector = Collector()
    config = _from_flags(parsed, environment, needs_models, collector)
    if collector.problems:
        raise Problems(map(parsed.with_position, collector.problems))
    return config


def _from_flags(
    parsed: Parsed, environment: Mapping[str, str], needs_models: bool, collector: Collector
) -> ServerConfig:
    values: dict[str, Any] = parsed.values
    if values["reload"]:
        values = {**values, "model-control-mode": "poll", "repository-poll-secs": 1}
    repositories, files = _split_models(parsed, needs_models, collector)
    repeated_flags = parsed.repeated

    def parse_all(parse: Callable[[str], T], flag: str) -> tuple[T, ...]:
        return tuple(collector(parse, text) for text in repeated_flags[flag])

    return ServerConfig(
        **_select_values(values, *_UNCHANGED_FLAGS),
        model_repositories=tuple(dict.fromkeys(repositories)),
        model_files=tuple(files),
        class_settings=collector(_parse_class_settings, repeated_flags["set"], files),
        load_models=collector(_check_load_models, parsed),
        idle_unload_s=collector(_require_load_on_demand, values, "idle-unload-secs"),
        max_models_byte_size=collector(_require_load_on_demand, values, "max-loaded-byte-size"),
        repository_poll_s=values["repository-poll-secs"],
        auto_complete=not (values["disable-auto-complete-config"] or values["strict-model-config"]),
        model_config_name=collector(_check_config_name, values["model-config-name"]),
        backend_config=parse_all(_parse_backend_setting, "backend-config"),
        model_defaults=ModelDefaults(
            **_select_values(values, "dynamic-batching", "max-batch-size", "max-queue-delay-us")
        ),
        load_timeout_s=values["load-timeout-secs"],
        http=HttpConfig(
            *(values["allow-http"], values["http-address"], values["http-port"]),
            _path(values["http-unix-socket"]),
        ),
        grpc=collector(_read_grpc, values),
        metrics_address=values["metrics-address"] or values["http-address"],
        metrics=collector(parse_metrics_config, repeated_flags["metrics-config"]),
        tokens=collector(_read_tokens, values["auth-token-file"]),
        gateway=GatewaySettings(
            **_select_values(values, "id", "slow-request-ms", "arena-byte-size", "http-address"),
            **_select_values(values, "request-timeout-us", "request-timeout-is-deadline"),
            allow_cpu_metrics=values["allow-cpu-metrics"],
            max_input_size=values["http-max-input-size"],
            body_timeout_s=values["http-body-timeout-secs"],
            http_restricted=collector(
                parse_restrictions, "--http-restricted-api", repeated_flags["http-restricted-api"]
            ),
            grpc_restricted=collector(
                parse_restrictions,
                "--grpc-restricted-protocol",
                repeated_flags["grpc-restricted-protocol"],
                GRPC_HEADER_PREFIX,
            ),
            allow_client_shm=values["allow-client-shm"],
            shm_overlap=values["shm-overlap"],
            http_header_forward_pattern=collector(
                convert_header_pattern, values, "http-header-forward-pattern"
            ),
            grpc_header_forward_pattern=collector(
                convert_header_pattern, values, "grpc-header-forward-pattern"
            ),
            refuse_unknown_fields=values["openai-unknown-fields"] == "refuse",
            cors_origins=parse_all(check_origin, "cors-allow-origin"),
            allowed_hosts=parse_all(check_host_name, "allowed-host"),
            served_names=parse_all(parse_served_name, "served-model-name"),
        ),
        scheduling=SchedulingLimits(
            **_select_values(
                values, "max-queue-size", "request-timeout-us", "request-timeout-is-deadline"
            ),
            execution_timeout_s=values["execution-timeout-secs"],
            delay_scheduler=collector(_parse_count, environment, "TRITONSERVER_DELAY_SCHEDULER"),
            backlog_delay_scheduler=collector(
                _parse_count, environment, "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"
            ),
        ),
        shm=collector(_read_shm_policy, values),
        run_dir=_path(values["run-dir"]),
        cache_byte_size=collector(
            cache_byte_size, repeated_flags["cache-config"], values["response-cache-byte-size"]
        ),
        rate_limit_resources=collector(parse_resources, repeated_flags["rate-limit-resource"]),
        workspace_byte_sizes=collector(workspace_byte_sizes, repeated_flags["workspace-byte-size"]),
        exit_timeout_s=values["exit-timeout-secs"],
        log=LogSettings(
            **_select_values(values, "log-info", "log-warning", "log-error", "log-format"),
            log_file=values["log-file"] or "",
            log_verbose_level=values["log-verbose"],
        ),
        trace=collector(parse_trace_config, repeated_flags["trace-config"]),
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        without_effect=tuple(dict.fromkeys(parsed.without_effect)),
        flags={**parsed.values, **repeated_flags},
    )


def _select_values(values: Mapping[str, Any], *flags: str) -> dict[str, Any]:
    return {flag.replace("-", "_"): values[flag] for flag in flags}


def _path(path_text: str | None) -> Path | None:
    return Path(path_text) if path_text else None


def _check_load_models(parsed: Parsed) -> tuple[str, ...]:
    names = tuple(parsed.repeated["load-model"])
    if names and parsed.values["model-control-mode"] != "explicit":
        raise InvalidArgument("--load-model: needs --model-control-mode=explicit")
    if "*" in names and len(names) > 1:
        raise InvalidArgument("--load-model: '*' loads all models and must stand alone")
    if not all(map(str.strip, names)):
        raise InvalidArgument("--load-model: the name of a model cannot be empty")
    return names


def _require_load_on_demand(values: dict[str, Any], name: str) -> Any:
    if values[name] and not values["load-on-demand"]:
        raise InvalidArgument(f"--{name}: needs --load-on-demand")
    return values[name]


def _check_config_name(name: str | None) -> str:
    if name is not None and (not name or "/" in name or "\0" in name):
        text = "is not a file name (allowed: at least one character, no / and no NUL)"
        raise InvalidArgument(f"--model-config-name: '{name}' {text}")
    return name or ""


def _read_tokens(token_path: str | None) -> Tokens:
    if token_path == "":  # an unset shell variable must not disable authentication
        raise InvalidArgument("--auth-token-file: the path is empty; name a file, or omit the flag")
    return {} if token_path is None else read_tokens(Path(token_path))


def _read_shm_policy(values: Mapping[str, Any]) -> ShmPolicy:
    byte_limit = values["shm-max-byte-size"]
    if byte_limit is None:
        byte_limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    uid_limit = values["shm-max-byte-size-per-uid"]
    return ShmPolicy(
        allow=values["allow-client-shm"],
        group=_resolve_group(values["shm-group"]),
        max_regions=values["shm-max-regions"],
        max_regions_per_uid=values["shm-max-regions-per-uid"],
        max_byte_size=byte_limit,
        max_byte_size_per_uid=byte_limit if uid_limit is None else uid_limit,
        sparse_byte_size=values["shm-sparse-byte-size"],
    )


def _resolve_group(name: str | None) -> int:
    if name is None:
        return NO_GROUP
    if name.isdecimal() and len(name) < 10:
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise InvalidArgument(f"--shm-group: this host has no group '{name}'") from None


def _split_models(
    parsed: Parsed, are_needed: bool, collector: Collector
) -> tuple[list[Path], list[str]]:
    for text in (*parsed.repeated["model-repository"], *parsed.positional):
        collector(_reject_url, text)
    repositories = [Path(text) for text in parsed.repeated["model-repository"]]
    model_files: list[str] = []
    if "" in (*parsed.repeated["model-repository"], *parsed.positional):
        # Path("") is the current folder, which an unset shell variable must not select.
        collector.problems.append("--model-repository: '' is not a folder")
    for argument in parsed.positional:
        if names_one_model(argument):
            model_files.append(argument)
        else:
            repositories.append(Path(argument))
    for path in repositories:
        if not _URL.match(str(path)):
            collector(_check_folder, path, parsed)
    if are_needed and not repositories and not model_files:
        text = "--model-repository: at least one folder is needed (or a path/model.py:Class)"
        collector.problems.append(text)
    return repositories, model_files


# The command that copies models from an object store to a folder, by the scheme of the URL.
_COPY_COMMANDS = {"s3": "aws s3 sync", "gs": "gcloud storage rsync -r", "as": "azcopy sync"}
_URL = re.compile(r"([a-z][a-z0-9+.-]*):/")  # one slash, because Path("s3://b") has only one


def _reject_url(text: str) -> None:
    match = _URL.match(text)
    if match and "://" in text:
        command = _COPY_COMMANDS.get(match[1])
        advice = f"copy its models ({command} {text} FOLDER)" if command else "copy its models"
        raise InvalidArgument(
            f"--model-repository: '{text}' is not a folder of this host: {advice} or mount "
            "it, in a pod with an init container or a volume, and give the folder"
        )


def _check_folder(path: Path, parsed: Parsed) -> None:
    with convert_os_errors(f"--model-repository: cannot read '{path}'"):
        if path.suffix == ".py" and path.is_file():
            raise InvalidArgument(f"'{path}' is a file: name the class to serve, {path}:CLASS")
        if path.is_file():
            if path.suffix not in (".onnx", ".pt", ".pt2", ".om"):
                text = f"'{path}' is a file that no backend reads: write a class that loads it"
                raise InvalidArgument(f"{text} (shmserve guide models), and serve FILE.py:CLASS")
            example = f"FOLDER/{path.stem}/1/model{path.suffix}"
            raise InvalidArgument(f"'{path}' is a file: move it to {example}, and serve FOLDER")
        # A missing folder may be a volume that is mounted later, so it is not rejected here. With
        # --exit-on-error=false, the server starts without it and logs the error.
        may_be_missing = not parsed.values["exit-on-error"] and not path.exists()
        if not path.is_dir() and (str(path) in parsed.boolean_flag_before or not may_be_missing):
            if flag := parsed.boolean_flag_before.get(str(path)):
                text = f"--{flag}: '{path}' is neither true, false nor a folder of models"
                raise InvalidArgument(text)
            module, colon, name = str(path).partition(":")
            is_class = colon and Path(f"{module}.py").is_file()  # uvicorn's form: module:name
            hint = f", did you mean {module}.py:{name}?" if is_class else ""
            raise InvalidArgument(f"--model-repository: '{path}' is not a folder{hint}")


def _parse_class_settings(texts: list[str], files: list[str]) -> dict[str, str]:
    if texts and not any(map(CLASS_IN_FILE.fullmatch, files)):
        raise InvalidArgument("--set: requires the class of a model (path/model.py:Class)")
    pairs = [text.partition("=") for text in texts]
    for text, (name, equals, _) in zip(texts, pairs, strict=True):
        if not name or not equals or name == "class":
            message = f"--set: '{text}' is not NAME=VALUE with a NAME other than 'class'"
            raise InvalidArgument(message)
    return {name: value for name, _, value in pairs}


# The settings of --backend-config that built-in backends read, by backend ("": all backends).
_MAX_BATCH_SIZE = "default-max-batch-size"
_BACKEND_SETTINGS = {
    "": {_MAX_BATCH_SIZE},
    "onnxruntime": {_MAX_BATCH_SIZE, "intra_op_thread_count", "inter_op_thread_count"},
    "pytorch": {_MAX_BATCH_SIZE},
}


def unread_backend_settings(settings: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the settings of --backend-config that no backend reads, as they were given.

    The backends of other packages may read any setting.
    """
    plugins = plugin_backends()
    return [
        f"{backend},{name}={value}" if backend else f"{name}={value}"
        for backend, name, value in settings
        if name not in _BACKEND_SETTINGS.get(backend, ())
        and not (backend in plugins if backend else plugins)
    ]


def _parse_backend_setting(text: str) -> tuple[str, str, str]:
    name, equals, value = text.partition("=")
    backend, comma, setting = name.partition(",")
    if not equals or not name:
        raise InvalidArgument(f"--backend-config: '{text}' is not BACKEND,SETTING=VALUE")
    if (setting or backend) == _MAX_BATCH_SIZE and not value.isdecimal():
        raise InvalidArgument(f"--backend-config: {_MAX_BATCH_SIZE}: '{value}' is not an integer")
    return (backend, setting, value) if comma else ("", backend, value)


def _parse_count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "") or "0"
    if not text.isdecimal():
        raise InvalidArgument(f"environment variable {name}: '{text}' is not an integer >= 0")
    return int(text)


# The field of `GrpcSettings` for each flag.
_GRPC_SETTINGS = {
    "grpc-keepalive-time": "keepalive_time_ms",
    "grpc-keepalive-timeout": "keepalive_timeout_ms",
    "grpc-keepalive-permit-without-calls": "keepalive_permit_without_calls",
    "grpc-http2-max-pings-without-data": "max_pings_without_data",
    "grpc-http2-min-recv-ping-interval-without-data": "min_ping_interval_ms",
    "grpc-http2-max-ping-strikes": "max_ping_strikes",
    "grpc-max-connection-age": "max_connection_age_ms",
    "grpc-max-connection-age-grace": "max_connection_age_grace_ms",
}
_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}  # compression levels of zlib


def _read_grpc(values: Mapping[str, Any]) -> GrpcConfig | None:
    """Return the gRPC settings from the flags' values; None for --allow-grpc=false.

    Raises:
        InvalidArgument: A value is invalid; the message names the flag.
    """
    if not values["allow-grpc"]:
        return None
    level = _COMPRESSION_LEVELS[values["grpc-infer-response-compression-level"]]
    settings = {setting: values[flag] for flag, setting in _GRPC_SETTINGS.items()}
    return GrpcConfig(
        address=values["grpc-address"] or values["http-address"],
        port=values["grpc-port"],
        unix_socket=_path(values["grpc-unix-socket"]),
        workers=values["grpc-workers"],
        settings=GrpcSettings(tls=_read_tls(values), compression_level=level, **settings),
    )


def _read_tls(values: Mapping[str, Any]) -> Tls | None:
    requires_client_cert: bool = values["grpc-use-ssl-mutual"]
    if not (values["grpc-use-ssl"] or requires_client_cert):
        return None
    tls = Tls(
        server_cert=_resolve_file(values, "grpc-server-cert"),
        server_key=_resolve_file(values, "grpc-server-key"),
        root_cert=_resolve_file(values, "grpc-root-cert") if requires_client_cert else None,
    )
    tls.context()  # checks the files, because a gateway with an invalid file would restart forever
    return tls


def _resolve_file(values: Mapping[str, Any], flag: str) -> str:
    path: str = values[flag] or ""
    check_file(flag, path)
    return str(Path(path).absolute())
