"""A server under a real systemd, with the units of `shmserve systemd install` and its sandbox."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.systemd_rig import Systemd
from tests.support import repositories
from tests.support.pages import GUIDE, blocks
from tests.support.servers import ROOT, title_of
from tests.support.waiting import until

COMMAND = (sys.executable, "-m", "shmserve", "systemd")
CLIENT_UID = 4242  # a uid that belongs to no user
TOKEN = "0123456789abcdef"
# The checkout is not installed at the service's path.
DROP_IN = f"""
[Service]
WatchdogSec=3
Environment="PYTHONPATH={ROOT}"
"""
JOURNAL = """
[Service]
Type=notify
ExecStart=/lib/systemd/systemd-journald
StandardOutput=null
"""
SERVICE = "shmserve.service"
HOME, RUNTIME = "/tmp/home", f"/run/user/{CLIENT_UID}"
USERS_MANAGER = f"""
[Service]
User=somebody
Type=notify
Delegate=yes
Environment=XDG_RUNTIME_DIR={RUNTIME}
Environment=SYSTEMD_UNIT_PATH={HOME}/.config/systemd/user:/usr/lib/systemd/user
ExecStart=/lib/systemd/systemd --user --unit=basic.target
"""
_PTRACE_SEIZE, _PTRACE_INTERRUPT, _WALL = 0x4206, 0x4207, 0x40000000
ASKING_PROGRAM = """
import numpy, shmserve.client
ones = numpy.ones((1, 16), "int32")
with shmserve.client.connect("/run/shmserve/server") as server:
    print(server.infer("simple", INPUT0=ones, INPUT1=ones)["OUTPUT0"].sum())
    region = server.allocate({name: ((1, 16), "INT32") for name in ("INPUT0", "INPUT1", "OUTPUT0")})
    region["INPUT0"][:] = region["INPUT1"][:] = 2
    server.infer("simple", region)
    print(region["OUTPUT0"].sum())
"""


@pytest.fixture
def installed_systemd(systemd: Systemd) -> Systemd:
    """Install the units, a journal, and a model in the default repository."""
    hidden = ("/home", "/root", "/tmp")
    if any(Path(path).is_relative_to(top) for path in (ROOT, sys.executable) for top in hidden):
        pytest.skip("this Python is in a folder that a service does not see")
    output = systemd.run(*COMMAND, "install")
    assert "run        systemctl daemon-reload" in output and "status" not in output
    for service in ("shmserve", "shmserve@"):
        folder = systemd.path(f"/etc/systemd/system/{service}.service.d")
        (folder / "90-test.conf").write_text(DROP_IN)
    repositories.add(systemd.path("/var/lib/shmserve/models"), "simple")
    run_beside(systemd, "journal.service", JOURNAL)
    return systemd


def run_beside(systemd: Systemd, unit: str, text: str) -> None:
    systemd.path(f"/etc/systemd/system/{unit}").write_text(text)
    systemd.run("systemctl", "daemon-reload")
    start_output = systemd.run("systemctl", "start", unit)
    assert "status" not in start_output, start_output


def log(systemd: Systemd, *options: str) -> str:
    return systemd.run("journalctl", "--no-pager", "--output=cat", "-tshmserve", *options)


def start(systemd: Systemd, *units: str) -> None:
    start_output = systemd.run("systemctl", "enable", "--now", *units)
    assert "status" not in start_output, start_output + log(systemd)


def install_token(systemd: Systemd) -> None:
    token = systemd.path("/etc/shmserve/token")
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    assert "20-token.conf" in systemd.run(*COMMAND, "install")


def processes(systemd: Systemd) -> dict[str, int]:
    """Return the pids of the server's processes by title, in the test's pid namespace."""
    group = systemd.show(SERVICE, "ControlGroup")
    pids = systemd.path(f"/sys/fs/cgroup{group}/cgroup.procs").read_text().split()
    return {title_of(int(pid)): int(pid) for pid in pids}


@contextlib.contextmanager
def suspend_under_debugger(pid: int) -> Iterator[None]:
    """Suspend a process with a debugger, which no other process can detect, until it is killed."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    for request in (_PTRACE_SEIZE, _PTRACE_INTERRUPT):
        assert ptrace(request, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:  # the namespace ends only after its tracer has reaped it
        while not os.WIFSIGNALED(os.waitpid(pid, _WALL)[1]):
            pass


def wait_restarts(systemd: Systemd, count: int) -> None:
    until("a restart", lambda: systemd.show(SERVICE, "NRestarts") == str(count))
    until("a server", lambda: systemd.show(SERVICE, "SubState") == "running")


def status_of(systemd: Systemd, *curl_options: str, groups: str) -> str:
    """Return the status for a client with these groups at the Unix socket; 000 if unreachable."""
    curl = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *curl_options)
    arguments = ("--unix-socket", "/run/shmserve/http.sock", "http://host/v2/models/simple/config")
    return systemd.run(*curl, *arguments, user=CLIENT_UID, groups=groups).split("\n")[0]


def test_a_server_is_installed_runs_and_is_removed(installed_systemd: Systemd) -> None:
    systemd = installed_systemd
    start(systemd, SERVICE)
    assert systemd.show(SERVICE, "StatusText") == "1/1 models ready"
    assert "model simple: loading\nmodel simple: ready" in log(systemd, "SHMSERVE_MODEL=simple")
    assert "HTTP service at" not in log(systemd, "SHMSERVE_MODEL=simple")
    processes_by_title = processes(systemd).items()
    # In containers that do not permit -200, the scores are relative to 0.
    files = {title: Path(f"/proc/{pid}/oom_score_adj") for title, pid in processes_by_title}
    score = {title: int(file.read_text()) for title, file in files.items()}
    supervisor_score = score["supervisor"]
    assert supervisor_score in (-200, 0)
    assert score["gateway http 0"] == supervisor_score + 100
    assert score["scheduler simple"] == supervisor_score + 100
    assert score["worker simple.0 cpu"] == supervisor_score + 500

    # Members of the group are served and have their own shared memory. Other users cannot connect.
    group = systemd.run("getent", "group", "shmclients").split(":")[2]
    client_command = (sys.executable, "-c", ASKING_PROGRAM)
    assert systemd.run(*client_command, user=CLIENT_UID, groups=group) == "32\n64"
    assert "may not connect" in systemd.run(*client_command, user=CLIENT_UID)
    assert status_of(systemd, groups=group) == "200"
    assert status_of(systemd, groups="") == "000"

    # The service restarts on request, and after a failure.
    systemd.run("kill", "-9", systemd.show(SERVICE, "MainPID"))
    wait_restarts(systemd, 1)
    assert systemd.run(*client_command, user=CLIENT_UID, groups=group) == "32\n64"

    install_token(systemd)
    assert "status" not in systemd.run("systemctl", "restart", SERVICE)
    assert status_of(systemd, groups=group) == "401"
    bearer = f"Authorization: Bearer {TOKEN}"
    assert status_of(systemd, "-H", bearer, groups=group) == "200"

    for drop_in in systemd.path("/etc/systemd/system").glob("*/90-test.conf"):
        drop_in.unlink()
    assert "status" not in systemd.run(*COMMAND, "remove")
    assert systemd.show(SERVICE, "LoadState") == "not-found"
    names = ("-path", "*shmserve*", "-not", "-path", "*/layers/*")
    assert systemd.run("find", "/etc", "/run", *names) == "/etc/shmserve\n/etc/shmserve/token"
    assert not any(systemd.path("/dev/shm").iterdir())


def test_other_hosts_are_served_by_the_drop_ins_of_the_page(installed_systemd: Systemd) -> None:
    systemd = installed_systemd
    texts = [block.text for block in blocks(GUIDE / "deployment.md")]
    drop_ins = next(text for text in texts if "hosts.conf" in text)
    commands = next(text for text in texts if "stop shmserve.socket" in text)
    start(systemd, SERVICE)
    install_token(systemd)
    assert systemd.run("ip", "address", "add", "192.0.2.10/24", "dev", "lo") == ""
    for drop_in in drop_ins.split("\n\n"):
        path = systemd.path(drop_in.split()[1])
        path.parent.mkdir(exist_ok=True)
        path.write_text(drop_in)
    output = systemd.run("sh", "-ec", commands.replace("sudo ", ""))
    assert "status" not in output, output
    for host, status in (("192.0.2.10", "200"), ("127.0.0.1", "200"), ("[::1]", "000")):
        address = f"http://{host}:8000/v2/health/ready"
        curl = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", address)
        assert systemd.run(*curl).split("\n")[0] == status, host


def test_a_reload_and_a_hanging_process(installed_systemd: Systemd) -> None:
    systemd = installed_systemd
    start(systemd, SERVICE)
    file = systemd.path("/etc/shmserve/shmserve.yaml")
    file.write_text(file.read_text() + "log-verbose: 1\nid: another\n")
    assert "status" not in systemd.run("systemctl", "reload", SERVICE)
    until("a reload", lambda: "--id has changed, and takes effect" in log(systemd))
    until("a server", lambda: systemd.show(SERVICE, "SubState") == "running")
    assert systemd.show(SERVICE, "StatusText") == "1/1 models ready"
    assert "log_verbose_level=1" in log(systemd, "SHMSERVE_INSTANCE=simple.0")

    # The extended timeout of the reload ends with the next watchdog message.
    sign = systemd.show(SERVICE, "WatchdogTimestampMonotonic")
    until("a sign", lambda: systemd.show(SERVICE, "WatchdogTimestampMonotonic") != sign)
    with suspend_under_debugger(processes(systemd)["gateway http 0"]):
        until("a log", lambda: "do not respond: gateway 0 (pid " in log(systemd))
    wait_restarts(systemd, 1)
    systemd.run("kill", "-STOP", systemd.show(SERVICE, "MainPID"))
    wait_restarts(systemd, 2)


def test_further_servers(installed_systemd: Systemd) -> None:
    """One server listens at the addresses of its flags, the other at its sockets."""
    systemd = installed_systemd
    flags = "model-repository: /var/lib/shmserve/models\n"
    green = flags + "http-port: 9000\nmetrics-port: 9002\nallow-grpc: no\n"
    systemd.path("/etc/shmserve/green.yaml").write_text(green)
    systemd.path("/etc/shmserve/blue.yaml").write_text(flags)
    sockets = [f"shmserve{kind}@blue.socket" for kind in ("", "-grpc", "-metrics")]
    start(systemd, *sockets, "shmserve@blue.service", "shmserve@green.service")
    curl = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code} ")
    for door, page in (("http", "v2/health/ready"), ("metrics", "metrics")):
        path = f"/run/shmserve/blue-{door}.sock"
        assert systemd.run(*curl, "--unix-socket", path, f"http://host/{page}") == "200"
    ready = (*curl, "http://127.0.0.1:9000/v2/health/ready")
    until("it is ready", lambda: systemd.run(*ready) == "200")
    assert "shmserve@blue.service" in systemd.run("systemctl", "list-units")
    assert "status" not in systemd.run(*COMMAND, "remove")
    assert "shmserve@" not in systemd.run("systemctl", "list-units", "--state=active")


def test_a_server_of_a_user(systemd: Systemd) -> None:
    for file, line in (("passwd", f"{CLIENT_UID}::{HOME}:/bin/sh"), ("group", f"{CLIENT_UID}:")):
        with systemd.path(f"/etc/{file}").open("a") as stream:
            stream.write(f"somebody:x:{CLIENT_UID}:{line}\n")
    systemd.run("mkdir", "--parents", HOME, RUNTIME)
    systemd.run("chown", "somebody", HOME, RUNTIME)

    def run(*words: str) -> str:
        environment = ("env", f"HOME={HOME}", f"XDG_RUNTIME_DIR={RUNTIME}")
        return systemd.run(*environment, *words, user=CLIENT_UID)

    run("mkdir", "--parents", f"{HOME}/.config/systemd/user/{SERVICE}.d")
    drop_in = f"{HOME}/.config/systemd/user/{SERVICE}.d/90-test.conf"
    systemd.path(drop_in).write_text(DROP_IN)
    assert "status" not in run(*COMMAND, "install", "--user")
    run_beside(systemd, "manager.service", USERS_MANAGER)
    assert "daemon-reload" in run(*COMMAND, "install", "--user")
    repositories.add(systemd.path(f"{HOME}/.local/share/shmserve/models"), "simple")
    start_output = run("systemctl", "--user", "start", SERVICE)
    assert "status" not in start_output, start_output
    completed = run("systemctl", "--user", "show", "-pStatusText", SERVICE)
    assert completed == "StatusText=1/1 models ready"
    path = f"{RUNTIME}/shmserve-http.sock"
    assert run("curl", "-si", "--unix-socket", path, "http://host/v2/health/ready")[9:12] == "200"
    assert "status" not in run(*COMMAND, "remove", "--user")
    systemd.path(drop_in).unlink()
    leftover_paths = run("find", f"{HOME}/.config", RUNTIME, "-name", "*shmserve*")
    assert leftover_paths.split("\n")[0] == f"{HOME}/.config/systemd/user/{SERVICE}.d"
