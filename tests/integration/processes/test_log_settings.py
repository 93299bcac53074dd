"""The logging extension over both protocols: every process of a server applies the settings."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2 as pb

from tests.support import repositories
from tests.support.servers import Server, Start, running
from tests.support.waiting import until
from tests.support.wire.grpc_calls import stub
from tests.support.wire.raw_http import Http, json_request

TALKING_MODEL = repositories.python_model("""
    def execute(self, requests):
        say = pb_utils.Logger
        for level in (say.VERBOSE, say.INFO, say.WARNING, say.ERROR):
            say.log(f"I am {level.name}", level)
        return [self.response(OUTPUT0=self.input(requests[0], "INPUT0"))]
""")
ROW = json_request(INPUT0=np.array([1], np.int32))
DEFAULTS = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True,
    "log_verbose_level": 0, "log_format": "default",
}  # fmt: skip
ROLES = ("supervisor", "gateway 0", "gateway 1", "gateway grpc", "scheduler", "worker")
PATH = "/v2/logging"
NO_FILE = "log file location can not be updated through network protocol"


def add_talker(repository: Path, name: str = "talker") -> None:
    config = repositories.identity_config(name, "INT32", [1])
    repositories.write(repository, name, config, TALKING_MODEL)


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    """Start a server with two HTTP gateways, one for gRPC, a scheduler and a worker."""
    add_talker(models)
    add_talker(models, "late")
    flags = ("--gateways=2", "--model-control-mode=explicit", "--load-model=talker")
    return start(models, *flags, grpc=True)


@pytest.fixture
def http(server: Server) -> Iterator[Http]:
    """Yield a connection, and restore the settings afterwards."""
    with server.http() as connection:
        yield connection
    # A new connection, because the gateway of the first may have exited.
    with server.http() as connection:
        connection.post(PATH, {**DEFAULTS, "log_file": None}).ok()


def settings(http: Http) -> dict[str, Any]:
    settings = http.get(PATH).ok()
    assert settings.headers["Content-Type"] == "application/json"
    assert list(settings.json()) == list(DEFAULTS)
    return dict(settings.json())


def set_over_grpc(call: Any, **new_settings: Any) -> dict[str, Any]:
    """Send LogSettings: a bool, int or str sets the member of that type, None sets none."""
    request = pb.LogSettingsRequest()
    for key, value in new_settings.items():
        setting = request.settings[key]
        if value is not None:
            kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
            setattr(setting, kind, value)
    found = call.LogSettings(request, timeout=20).settings
    return {key: getattr(found[key], found[key].WhichOneof("parameter_choice")) for key in found}


# --- responses of Triton 2.51 ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "changed_settings"),
    [
        ("{}", {}),
        *((text, {}) for text in ("null", "[]", "1", '"x"')),
        ('{"unknown": 1, "": 2, "Log_info": false}', {}),
        ('{"unknown": 1, "log_info": false}', {"log_info": False}),
        ('{"log_warning": false, "log_error": false}', {"log_warning": False, "log_error": False}),
        ('{"log_verbose_level": 3}', {"log_verbose_level": 3}),
        ('{"log_verbose_level": 4294967295}', {"log_verbose_level": 2**32 - 1}),
        ('{"log_format": "ISO8601"}', {"log_format": "ISO8601"}),
        ('{"log_file": null, "log_info": null, "log_verbose_level": null, "log_format": null}', {}),
    ],
)
def test_changes_over_http(http: Http, body: str, changed_settings: dict[str, Any]) -> None:
    answer = http.post(PATH, body).ok()
    assert answer.json() == {**DEFAULTS, **changed_settings} == settings(http)
    assert list(answer.json()) == list(DEFAULTS)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (None, 500, "failed to parse the request JSON buffer: "),
        ("{", 500, "failed to parse the request JSON buffer: "),
        ("nonsense", 500, "failed to parse the request JSON buffer: "),
        ('{"log_info": false} x', 500, "failed to parse the request JSON buffer: "),
        *((f'{{"{name}": {value}}}', 500,
            "attempt to access JSON non-boolean as boolean") for name in ("log_info", "log_warning",
            "log_error") for value in ("1", '"true"', "[]")),
        *((f'{{"log_verbose_level": {value}}}', 500,
            "attempt to access JSON non-unsigned-integer as unsigned-integer") for value in ("-1",
            "1.5", "2.0", "true", '"1"', "18446744073709551616", "4294967296")),
        ('{"log_format": 1}', 500, "attempt to access JSON non-string as string"),
        ('{"log_format": ""}', 503, "invalid argument for --log_format, got: "),
        ('{"log_format": "iso8601"}', 503, "invalid argument for --log_format, got: iso8601"),
        ('{"log_format": "x\\n\\"y"}', 503, 'invalid argument for --log_format, got: x\n"y'),
        ('{"log_file": "/tmp/x"}', 501, NO_FILE),
        ('{"log_info": false, "log_file": ""}', 501, NO_FILE),
        # Unlike in Triton, an invalid setting changes none of the others.
        ('{"log_info": false, "log_format": "bad"}', 503, "invalid argument for --log_format"),
    ],
)  # fmt: skip
def test_refusals_over_http(http: Http, body: str | None, status: int, text: str) -> None:
    refused_reply = http.post(PATH, body)
    assert (refused_reply.status, refused_reply.error[: len(text)]) == (status, text)
    assert settings(http) == DEFAULTS


def test_other_methods_and_paths(http: Http) -> None:
    for method in ("PUT", "DELETE", "PATCH"):
        refused_reply = http.call(method, PATH)
        assert (refused_reply.status, refused_reply.error) == (405, "Method Not Allowed")
    refused_reply = http.get(PATH + "/")
    assert (refused_reply.status, refused_reply.error) == (404, "Not Found")
    assert http.call("GET", PATH + "?x=1", {"log_info": False}).ok().json() == DEFAULTS


@pytest.mark.parametrize(
    ("new", "changed"),
    [
        ({}, {}),
        ({"unknown": 1}, {}),
        ({"log_info": False, "unknown": None}, {"log_info": False}),
        ({"log_verbose_level": 2**32 - 1}, {"log_verbose_level": 2**32 - 1}),
        (
            {"log_format": "ISO8601", "log_error": False},
            {"log_format": "ISO8601", "log_error": False},
        ),
    ],
)
def test_changes_over_grpc(
    server: Server, http: Http, new: dict[str, Any], changed: dict[str, Any]
) -> None:
    with stub(server) as call:
        assert set_over_grpc(call, **new) == {**DEFAULTS, **changed} == settings(http)


INVALID, UNSUPPORTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("new", "status", "text"),
    [
        *(({name: value}, INVALID, f"expect boolean for '{name}'") for name in ("log_info",
            "log_warning", "log_error") for value in (1, "true", None)),
        *(({"log_verbose_level": value}, INVALID,
            "expect int32 for 'log_verbose_level'") for value in (True, "1", None)),
        *(({"log_format": value}, INVALID, "expect string for 'log_format'") for value in (True, 1,
            None)),
        ({"log_format": "bad"}, INVALID, "invalid argument for log_format, got: bad"),
        *(({"log_file": value}, UNSUPPORTED, NO_FILE) for value in ("/tmp/x", "", 1, None)),
        ({"log_warning": False, "log_error": 1}, INVALID, "expect boolean for 'log_error'"),
    ],
)  # fmt: skip
def test_refusals_over_grpc(
    server: Server, http: Http, new: dict[str, Any], status: Any, text: str
) -> None:
    with stub(server) as call, pytest.raises(grpc.RpcError) as error_info:
        set_over_grpc(call, **new)
    assert (error_info.value.code(), error_info.value.details()) == (status, text)
    assert settings(http) == DEFAULTS


def test_tritons_clients(server: Server, http: Http) -> None:
    with contextlib.closing(tritonclient.http.InferenceServerClient(server.url)) as client:
        assert client.update_log_settings({"log_verbose_level": 7})["log_verbose_level"] == 7
        assert "logging" in client.get_server_metadata()["extensions"]
    with contextlib.closing(tritonclient.grpc.InferenceServerClient(server.grpc_url)) as client:
        assert client.get_log_settings().settings["log_verbose_level"].uint32_param == 7
        client.update_log_settings({"log_verbose_level": 0, "log_info": True})
        assert "logging" in client.get_server_metadata().extensions
    assert settings(http) == DEFAULTS


# --- effects of the settings ----------------------------------------------------------------------


def lines(server: Server, role: str, pid: int | None = None) -> list[str]:
    """Return the log lines of processes with this prefix of the role, without the role."""
    number = r"\d+" if pid is None else str(pid)
    start = rf"(?m)^([DIWE]) \S+ {re.escape(role)}[^\[\n]*\[{number}\] (.*)$"
    return [" ".join(match) for match in re.findall(start, server.log())]


def level_is_logged(server: Server, level: int) -> Callable[[], bool]:
    """Return a check that every process has logged its change to this level."""

    def holds() -> bool:
        text = f"log_verbose_level={level},"
        return all(
            any("D the log settings have" in line and text in line for line in lines(server, role))
            for role in ROLES
        )

    return holds


def gateway_of(server: Server, http: Http) -> int:
    http.get("/v2/health/live")
    port = http.local_port
    for gateway in server.find("gateway http"):
        if any(c.raddr and c.raddr.port == port for c in gateway.net_connections("tcp")):
            return gateway.pid
    raise AssertionError("nobody has this connection")


def test_a_change_over_any_listener_holds_in_every_process(server: Server, http: Http) -> None:
    with contextlib.ExitStack() as stack:
        listeners: dict[int, Http] = {}

        def has_both_listeners() -> bool:
            connection = stack.enter_context(server.http())
            listeners.setdefault(gateway_of(server, connection), connection)
            return len(listeners) == 2

        until("there is a connection to each gateway", has_both_listeners)
        call = stack.enter_context(stub(server))
        change: list[Callable[[int], object]] = [
            *(
                lambda level, http=listener: http.post(PATH, {"log_verbose_level": level}).ok()
                for listener in listeners.values()
            ),
            lambda level: set_over_grpc(call, log_verbose_level=level),
        ]
        for level, over_this_listener in enumerate(change, 101):
            over_this_listener(level)
            until(f"every process has heard of level {level}", level_is_logged(server, level))
            for listener in listeners.values():
                assert settings(listener)["log_verbose_level"] == level
            assert set_over_grpc(call)["log_verbose_level"] == level


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({}, "IWE"),
        ({"log_verbose_level": 1}, "DIWE"),
        ({"log_info": False}, "WE"),
        ({"log_info": False, "log_verbose_level": 1}, "DWE"),
        ({"log_warning": False}, "IE"),
        ({"log_error": False}, "IW"),
        ({"log_info": False, "log_warning": False, "log_error": False}, ""),
    ],
)
def test_log_settings_reach_the_models_records(
    server: Server, http: Http, changes: dict[str, Any], expected_text: str
) -> None:
    http.post(PATH, changes).ok()
    # The change and the request reach the worker from two processes, in any order.
    until("it is heard so", lambda: logged_levels(server, http) == expected_text)


def logged_levels(server: Server, http: Http) -> str:
    """Return the levels of the lines that the model logs about one request."""
    lines_before = len(lines(server, "worker talker"))
    http.infer("talker", ROW).ok()  # the model's log lines are written before its response is sent
    logged = lines(server, "worker talker")[lines_before:]
    return "".join(line[0] for line in logged if " I am " in line)


def in_iso(server: Server, pid: int) -> bool:
    """Return whether a process has written a debug line in the format ISO8601."""
    return re.search(rf"(?m)^\d\S+Z D {pid} [^\]]+\] ", server.log()) is not None


@pytest.mark.parametrize(
    "title", ["worker talker.0", "scheduler talker", "gateway http 1", "gateway grpc"]
)
def test_a_restarted_process_has_changed_settings(server: Server, http: Http, title: str) -> None:
    http.post(PATH, {"log_verbose_level": 1, "log_format": "ISO8601"}).ok()
    dead = server.find_one(title)
    dead.kill()

    def successor() -> psutil.Process | None:
        return next((process for process in server.find(title) if process.pid != dead.pid), None)

    until("another takes its place", successor)
    process = successor()
    assert process is not None
    until("it logs as the others", lambda: in_iso(server, process.pid))
    server.wait_ready()
    with server.http() as new_client:
        new_client.infer("talker", ROW).ok()


def test_a_model_loaded_later_has_the_changed_settings(server: Server, http: Http) -> None:
    http.post(PATH, {"log_verbose_level": 1, "log_format": "ISO8601"}).ok()
    http.load("late").ok()
    for title in ("worker late.0", "scheduler late"):
        assert in_iso(server, server.find_one(title).pid)
    http.unload("late").ok()


def test_flags_are_the_first_settings(tmp_path: Path) -> None:
    """The flags apply to every process, and to lines written before the listener exists."""
    add_talker(tmp_path / "models")
    path = tmp_path / "file"
    flags = ("--log-info=false", "--log-verbose=true", "--log-format", "ISO8601")
    with (
        running(tmp_path / "models", *flags, f"--log-file={path}") as server,
        server.http() as http,
    ):
        assert http.get(PATH).ok().json() == {
            **DEFAULTS,
            "log_file": str(path),
            "log_info": False,
            "log_verbose_level": 1,
            "log_format": "ISO8601",
        }
        http.infer("talker", ROW).ok()
        text = path.read_text()
        assert "I am VERBOSE" in text
        assert not re.search(r"(?m)^\S+ I ", text)
        http.post(PATH, {"log_info": True}).ok()
        until("it is heard", lambda: http.infer("talker", ROW) and " I am INFO" in path.read_text())
        assert server.log() == ""
