"""The table of flags, the parser that reads a command line by it, and the settings it makes."""

import contextlib
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve import cli
from shmserve.config import command_line, flags, server
from shmserve.config.flags import Flag, MetricsConfig
from shmserve.errors import InvalidArgument
from shmserve.logs import LogSettings
from shmserve.model_config import ModelDefaults

ROOT = Path(__file__).resolve().parents[3]
ANY_FLAG = st.sampled_from(sorted(flags.FLAGS))


def settings(*arguments: str, **environment: str) -> server.ServerConfig:
    """Return the settings of a command line whose repository is an existing folder."""
    return server.from_flags(
        command_line.parse([f"--model-repository={ROOT}", *arguments]), environment
    )


def refusal(*arguments: str, **environment: str) -> str:
    with pytest.raises(InvalidArgument) as caught:
        server.from_flags(command_line.parse(arguments), environment)
    return caught.value.message


def example_value(flag: Flag) -> str:
    if flag.name == "config":
        return os.devnull  # is read at once
    if flag.choices:
        return flag.choices[-1]
    return {bool: "false", str: "text", int: f"{flag.low:.0f}", float: f"{flag.low}"}[flag.kind]


def test_defaults_are_tritons_or_safe() -> None:
    options = settings()
    assert options.http.address == "127.0.0.1"
    assert options.http.port == 8000
    assert options.metrics_port == 8002
    assert options.metrics_address == options.http.address
    assert (options.model_control_mode, options.repository_poll_s) == ("none", 15)
    assert options.gateway.max_input_size == 1 << 26
    assert options.exit_timeout_s == 30
    assert options.exit_on_error is True
    assert options.strict_readiness is True
    assert options.gateway.request_timeout_us == 0
    assert options.scheduling.execution_timeout_s == 300.0
    assert (options.scheduling.max_queue_size, options.arena_byte_size) == (4096, 1 << 30)
    assert options.model_defaults == ModelDefaults(False, None, None)
    assert (options.run_dir, options.gateway.id, options.gateways) == (None, "triton", 1)
    assert options.without_effect == ()


@pytest.mark.parametrize("name", sorted(flags.FLAGS))
def test_both_spellings_of_every_flag_mean_the_same(name: str) -> None:
    value = example_value(flags.FLAGS[name])
    joined_form = command_line.parse([f"--{name}={value}", "folder"])
    assert joined_form == command_line.parse([f"--{name}", value, "folder"])
    assert joined_form.positional == ["folder"]
    assert joined_form.without_effect == ([] if flags.FLAGS[name].has_effect else [name])


def test_a_boolean_flag_may_omit_its_value_and_accepts_tritons_values() -> None:
    assert settings("--dynamic-batching").model_defaults.dynamic_batching
    assert settings("--dynamic-batching", "--gateways=2").model_defaults.dynamic_batching
    assert command_line.parse(["--dynamic-batching", "folder"]).positional == ["folder"]
    for text in ("false", "FALSE", "0", "off"):
        assert not settings("--exit-on-error", text).exit_on_error
        assert not settings(f"--exit-on-error={text}").exit_on_error
    for text in ("true", "True", "1", "on"):
        assert settings("--exit-on-error=false", "--exit-on-error", text).exit_on_error


def test_latencies_are_shown_as_tritons_metrics_are() -> None:
    metrics = settings().metrics
    assert (metrics.counter_latencies, metrics.histogram_latencies) == (True, False)
    assert (metrics.summary_latencies, metrics.summary_quantiles) == (False, ())
    assert settings("--metrics-config=summary_latencies=TRUE").metrics.summary_quantiles == (
        *(0.5, 0.9, 0.95, 0.99, 0.999),
    )
    metrics = settings(
        "--metrics-config=counter_latencies=false",
        "--metrics-config=summary_latencies=1",
        "--metrics-config=histogram_latencies=false",
        "--metrics-config",
        "histogram_latencies=true",
        "--metrics-config=summary_quantiles=0.5:0.05,1:0,0.5:0.1,2:0.0.1,",
    ).metrics
    assert metrics == MetricsConfig(False, True, True, (0.5, 1.0, 2.0))
    assert settings().gateway.allow_cpu_metrics
    options = settings("--allow-cpu-metrics=false")
    assert (options.gateway.allow_cpu_metrics, options.without_effect) == (False, ())


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        ("histogram_latencies", "'histogram_latencies' is not SETTING=VALUE"),
        ("=true", "'=true' is not SETTING=VALUE"),
        ("histogram_latencies=", "'histogram_latencies=' is not SETTING=VALUE"),
        ("nope=1", "unknown setting 'nope' (allowed: counter_latencies, histogram_latencies, "
         "summary_latencies, summary_quantiles)"),
        ("summary_latencies=maybe", "summary_latencies='maybe': expected true or false"),
        ("summary_quantiles=0.5:0.1,0.9",
         "summary_quantiles='0.5:0.1,0.9': Invalid option: [0.9]. No ':' delimiter found. "
         "Expected format is <quantile>:<error>"),
        ("summary_quantiles=a:b", "summary_quantiles='a:b': Invalid option: [a:b]. Error: stod"),
        ("summary_quantiles=.5:", "summary_quantiles='.5:': Invalid option: [.5:]. Error: stod"),
    ],
)  # fmt: skip
def test_unknown_metrics_settings_are_refused(text: str, expected_error: str) -> None:
    assert refusal("m.py:M", f"--metrics-config={text}") == f"--metrics-config: {expected_error}"


# The flags that `tritonserver --help` of version 2.51 lists, and those of other versions.
TRITON_FLAGS = """
    allow-cpu-metrics allow-gpu-metrics allow-grpc allow-http allow-metrics allow-sagemaker
    allow-vertex-ai backend-config backend-directory buffer-manager-thread-count cache-config
    cache-directory cuda-memory-pool-byte-size cuda-virtual-address-size
    disable-auto-complete-config enable-peer-access exit-on-error exit-timeout-secs grpc-address
    grpc-header-forward-pattern grpc-http2-max-ping-strikes grpc-http2-max-pings-without-data
    grpc-http2-min-recv-ping-interval-without-data grpc-infer-allocation-pool-size
    grpc-infer-response-compression-level grpc-keepalive-permit-without-calls
    grpc-keepalive-time grpc-keepalive-timeout grpc-max-connection-age
    grpc-max-connection-age-grace grpc-port grpc-restricted-protocol grpc-root-cert
    grpc-server-cert grpc-server-key grpc-use-ssl grpc-use-ssl-mutual host-policy http-address
    http-header-forward-pattern http-port http-restricted-api http-thread-count id load-model
    log-error log-file log-format log-info log-verbose log-warning metrics-address
    metrics-config metrics-interval-ms metrics-port min-supported-compute-capability
    model-config-name model-control-mode model-load-gpu-limit model-load-retry-count
    model-load-thread-count model-namespacing model-repository model-store
    pinned-memory-pool-byte-size rate-limit rate-limit-resource repoagent-directory
    repository-poll-secs response-cache-byte-size reuse-grpc-port reuse-http-port sagemaker-port
    sagemaker-safe-port-range sagemaker-thread-count strict-model-config strict-readiness
    trace-config trace-count trace-file trace-level trace-log-frequency trace-rate
    vertex-ai-default-model vertex-ai-port vertex-ai-thread-count

    allow-client-shm grpc-max-response-pool-size http-max-input-size
"""


def test_the_flags_of_tritonserver_are_all_known() -> None:
    """Each flag is known in both spellings; a flag without effect names its replacement."""
    known_flags = TRITON_FLAGS.split()
    assert set(known_flags) <= set(flags.FLAGS)
    ignored_flags = [name for name in known_flags if not flags.FLAGS[name].has_effect]
    values = {name: "true" if flags.FLAGS[name].kind is bool else "x" for name in ignored_flags}
    for arguments in (
        [f"--{name}={word}" for name, word in values.items()],
        [part for name, word in values.items() for part in (f"--{name}", word)],
    ):
        assert settings(*arguments).without_effect == tuple(ignored_flags)
    assert all(flags.FLAGS[name].help for name in known_flags)
    assert len(ignored_flags) >= 29


def test_log_flags_are_the_first_log_settings() -> None:
    assert settings().log == LogSettings()
    switches = ("--log-info=false", "--log-warning", "off", "--log-error=0", "--log-verbose=3")
    options = settings(*switches, "--log-format=ISO8601", "--log-file=/tmp/x")
    assert options.log == LogSettings("/tmp/x", False, False, False, 3, "ISO8601")
    assert options.without_effect == ()
    for text, level in (("true", 1), ("False", 0), ("4294967295", 2**32 - 1)):
        assert settings(f"--log-verbose={text}").log.log_verbose_level == level


def test_flags_without_effect_are_named_once() -> None:
    ports = ("--vertex-ai-port=8001", "--host-policy", "a,b=c", "--vertex-ai-port", "9")
    options = settings(*ports, "--allow-vertex-ai")
    assert options.without_effect == ("vertex-ai-port", "host-policy", "allow-vertex-ai")


def test_backend_settings_that_no_backend_reads_are_found() -> None:
    idle = ["python,python-runtime=p", "python,shm-default-byte-sze=1", "tensorrt,version=lean"]
    idle.append("a=b")
    read = ["onnxruntime,intra_op_thread_count=2", "default-max-batch-size=8"]
    options = settings(*(f"--backend-config={text}" for text in idle + read))
    assert server.unread_backend_settings(options.backend_config) == idle
    with pytest.raises(InvalidArgument, match="default-max-batch-size: 'many' is not an integer"):
        settings("--backend-config=pytorch,default-max-batch-size=many")


@pytest.mark.parametrize(
    ("flags", "completes"),
    [
        ((), True),
        (("--strict-model-config",), False),
        (("--disable-auto-complete-config",), False),
        (("--strict-model-config=false", "--disable-auto-complete-config"), False),
        (("--strict-model-config=false",), True),
    ],
)
def test_which_flags_complete_configurations(flags: tuple[str, ...], completes: bool) -> None:
    assert settings(*flags).auto_complete is completes


def test_repeatable_flags_and_flags_of_which_the_last_counts() -> None:
    options = settings(
        "--model-control-mode=explicit",
        "--load-model=a",
        "--load-model",
        "b",
        "--backend-config=python,shm-default-byte-size=1=2",
        "--backend-config=auto-complete-config=false",
        "--http-port=1",
        "--http-port=2",
    )
    assert options.load_models == ("a", "b") and options.http.port == 2
    assert options.backend_config == (
        ("python", "shm-default-byte-size", "1=2"),
        ("", "auto-complete-config", "false"),
    )


def test_models_are_folders_and_classes(tmp_path: Path) -> None:
    options = server.from_flags(
        command_line.parse([str(tmp_path), "./model.py:Model", f"--model-store={ROOT}"]), {}
    )
    assert options.model_repositories == (ROOT, tmp_path)
    assert options.model_files == ("./model.py:Model",)
    arguments = ["a.py:A", "--set", "weights=/w.pt", "--set=b=1=2"]
    options = server.from_flags(command_line.parse(arguments), {})
    assert options.class_settings == {"weights": "/w.pt", "b": "1=2"}


@pytest.mark.parametrize("arguments", [("",), ("--model-repository=",), ("--model-store", "")])
def test_an_empty_repository_is_not_the_working_folder(arguments: tuple[str, ...]) -> None:
    assert refusal(*arguments) == "--model-repository: '' is not a folder"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--http-prot=1", "unknown flag --http-prot, did you mean --http-port?"),
        ("--http_port", "unknown flag --http_port, did you mean --http-port?"),
        ("--set=a=1", "--set: requires the class of a model (path/model.py:Class)"),
        ("-x", "unknown flag -x; see shmserve serve --help"),
        ("--http-port", "--http-port: a value is missing"),
        ("--http-port=", "--http-port: '' is not an integer"),
        ("--http-port=1_0", "--http-port: '1_0' is not an integer"),
        ("--http-port= 1", "--http-port: ' 1' is not an integer"),
        ("--http-port=65536", "--http-port: 65536 is out of range (allowed: 0 to 65535)"),
        ("--http-port=-1", "--http-port: -1 is out of range"),
        ("--gateways=0", "--gateways: 0 is out of range"),
        ("--exit-timeout-secs=x", "--exit-timeout-secs: 'x' is not"),
        ("--max-batch-size=-1", "--max-batch-size: -1 is out of range"),
        ("--max-queue-delay-us=1.5", "--max-queue-delay-us: '1.5' is not an integer"),
        ("--http-max-input-size=0", "--http-max-input-size: 0 is out of range"),
        (
            "--arena-byte-size=1",
            "--arena-byte-size: 1 is out of range (allowed: 1048576 to 1099511627776)",
        ),
        ("--execution-timeout-secs=nan", "--execution-timeout-secs: 'nan' is not a number"),
        ("--strict-readiness=perhaps", "--strict-readiness: 'perhaps' is not a boolean"),
        ("--log-verbose=4294967296", "--log-verbose: 4294967296 is out of range"),
        ("--log-verbose=yes", "--log-verbose: 'yes' is not an integer"),
        ("--log-format=iso", "--log-format: 'iso' is not one of default, ISO8601"),
        ("--model-control-mode=x", "'x' is not one of none, poll, explicit"),
        ("--load-model=m", "--load-model: needs --model-control-mode=explicit"),
        ("--model-config-name=", "--model-config-name: '' is not a file name (allowed: at"),
        ("--idle-unload-secs=5", "--idle-unload-secs: needs --load-on-demand"),
        ("--max-loaded-byte-size=5", "--max-loaded-byte-size: needs --load-on-demand"),
        ("--backend-config=python", "--backend-config: 'python' is not BACKEND,SETTING=VALUE"),
        ("--auth-token-file=", "--auth-token-file: the path is empty"),
        ("--workspace-byte-size=cpu", "--workspace-byte-size: expected DEVICE=BYTES, got 'cpu'"),
        ("--workspace-byte-size=cpu=1", "--workspace-byte-size: 1 is out of range"),
        ("--workspace-byte-size=cuda:00=4096", "'cuda:00' is not a device with a pool"),
        ("--id=\udcff", "--id: '--id=\udcff' is not UTF-8 text"),
        ("--model-repository=" + "x" * 300, "x': File name too long"),
    ],
)
def test_an_error_names_the_flag_its_value_and_allowed_values(argument: str, message: str) -> None:
    assert message in refusal(str(ROOT), argument)


def test_errors_of_the_whole_command_line() -> None:
    assert "at least one folder is needed" in refusal()
    assert "--model-repository: '/no/where' is not a folder" in refusal("/no/where")
    repositories = settings("/no/where", "--exit-on-error=false").model_repositories
    assert repositories == (ROOT, Path("/no/where"))
    assert "is a file that no backend reads" in refusal(f"{ROOT}/Makefile", "--exit-on-error=false")
    assert f"did you mean {__file__}:Blur?" in refusal(f"{__file__[:-3]}:Blur")
    expected_error = "--strict-readiness: 'maybe' is neither true, false nor a folder of models"
    assert refusal(str(ROOT), "--strict-readiness", "maybe", "--log-info=false") == expected_error
    assert "--model-repository: 'maybe'" in refusal("--strict-readiness", "true", "maybe")
    assert settings("--strict-readiness", str(ROOT)).model_repositories == (ROOT,)
    assert f"name the class to serve, {__file__}:CLASS" in refusal(__file__)
    mode = "--model-control-mode=explicit"
    assert "must stand alone" in refusal(str(ROOT), mode, "--load-model=*", "--load-model=m")
    assert "cannot be empty" in refusal(str(ROOT), mode, "--load-model=m", "--load-model= ")
    assert settings(mode, "--load-model=*").load_models == ("*",)
    assert "--http-port: a value is missing" in refusal("--http-port", "--gateways=2")


def test_the_environment_sets_options() -> None:
    options = settings(TRITONSERVER_DELAY_SCHEDULER="3", CUDA_VISIBLE_DEVICES="1")
    assert (options.scheduling.delay_scheduler, options.visible_devices) == (3, "1")
    assert settings(TRITONSERVER_DELAY_SCHEDULER="").scheduling.delay_scheduler == 0
    scheduling = settings(TRITONSERVER_BACKLOG_DELAY_SCHEDULER="2").scheduling
    assert scheduling.backlog_delay_scheduler == 2
    for text in ("x", "-1", "\N{SUPERSCRIPT TWO}"):
        error = refusal(str(ROOT), TRITONSERVER_DELAY_SCHEDULER=text)
        assert "TRITONSERVER_DELAY_SCHEDULER" in error


@given(ANY_FLAG, st.text(max_size=200))
def test_any_value_is_accepted_or_refused_by_name(name: str, text: str) -> None:
    flag = flags.FLAGS[name]
    try:
        value = flag.parse(text)
    except InvalidArgument as error:
        named_flag = error.message
    else:
        named_flag = f"--{flag.name}: "
        assert type(value) is flag.kind
        if isinstance(value, int | float) and flag.kind is not bool:
            assert flag.low <= value <= flag.high
    assert named_flag.startswith(f"--{flag.name}: ")


@given(st.lists(st.text(max_size=30), max_size=8))
def test_no_command_line_breaks_the_parser(arguments: list[str]) -> None:
    with contextlib.suppress(InvalidArgument):
        command_line.parse(arguments)


def test_help_names_every_flag_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    captured = capsys.readouterr().out
    assert set(re.findall(r"--([a-z0-9-]+)", captured)) >= set(flags.FLAGS) - {"model-store"}
    assert max(map(len, captured.splitlines())) <= 100


@pytest.mark.parametrize("verb", [[], ["serve"], ["check"], ["client"], ["client", "infer"]])
def test_every_verb_has_help(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = cli.main([*verb, "--help"])
    except SystemExit as exit_error:  # argparse ends with SystemExit
        status = exit_error.code
    assert status == 0
    captured = capsys.readouterr().out
    assert "usage" in captured.lower()
    assert max(map(len, captured.splitlines())) <= 120


@pytest.mark.parametrize("line", [[], ["bogus"], ["serve"], ["check"], ["client"]])
def test_a_wrong_flag_ends_with_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(("usage:", "shmserve: "))


@pytest.mark.parametrize(
    "arguments", [["--http-port=1\n2"], ["--a\nb"], ["--model-repository=a\nb"], ["\x1b[2J"]]
)
def test_an_error_is_one_line_for_any_arguments(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.endswith("\n") and error[:-1].isprintable()


def test_the_version_flag_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"shmserve \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_header_pattern_is_a_regular_expression() -> None:
    for protocol in ("http", "grpc"):
        flag = f"--{protocol}-header-forward-pattern"
        text = refusal(f"--model-repository={ROOT}", f"{flag}=(x")
        assert text.startswith(f"{flag}: '(x' is not a regular expression: ")
    options = settings("--grpc-header-forward-pattern=^x-")
    assert options.gateway.grpc_header_forward_pattern == "^x-"
    assert options.gateway.http_header_forward_pattern == ""
