"""A server that a real systemd runs by the units of `shmserve systemd install`, in its sandbox."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.systemd_rig import Systemd, Unavailable, booted
from tests.support import repositories
from tests.support.servers import ROOT
from tests.support.waiting import until

COMMAND = (sys.executable, "-m", "shmserve", "systemd")
CLIENT = 4242  # nobody's number
TOKEN = "0123456789abcdef"
# The checkout is not installed where the service looks for it.
DROP_IN = f"""
[Service]
WatchdogSec=3
Environment=PYTHONPATH={ROOT}
"""
JOURNAL = """
[Service]
Type=notify
ExecStart=/lib/systemd/systemd-journald
StandardOutput=null
"""
ASK = """
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
def systemd() -> Iterator[Systemd]:
    try:
        with booted() as manager:
            yield manager
    except Unavailable as reason:
        pytest.skip(str(reason))


def status_of(systemd: Systemd, *more: str, groups: str) -> str:
    """The HTTP status that a client of these groups gets at the unix socket; 000: none."""
    curl = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *more)
    where = ("--unix-socket", "/run/shmserve/http.sock", "http://host/v2/models/simple/config")
    return systemd.run(*curl, *where, user=CLIENT, groups=groups).split("\n")[0]


def test_a_server_is_installed_runs_and_is_removed(systemd: Systemd) -> None:
    hidden = ("/home", "/root", "/tmp")
    if any(Path(path).is_relative_to(top) for path in (ROOT, sys.executable) for top in hidden):
        pytest.skip("this Python is in a folder that a service does not see")
    said = systemd.run(*COMMAND, "install")
    assert "run        systemctl daemon-reload" in said and "status" not in said
    drop_in = systemd.path("/etc/systemd/system/shmserve.service.d/90-test.conf")
    drop_in.write_text(DROP_IN)
    repositories.add(systemd.path("/var/lib/shmserve/models"), "simple")

    def log(*which: str) -> str:
        return systemd.run("journalctl", "--no-pager", "--output=cat", "-tshmserve", *which)

    systemd.path("/etc/systemd/system/journal.service").write_text(JOURNAL)
    systemd.run("systemctl", "daemon-reload")
    assert "status" not in systemd.run("systemctl", "start", "journal.service")
    started = systemd.run("systemctl", "enable", "--now", "shmserve.service")
    assert "status" not in started, log()
    assert systemd.show("shmserve.service", "StatusText") == "1/1 models ready"

    assert "model simple: loading\nmodel simple: ready" in log("SHMSERVE_MODEL=simple")
    assert "HTTP service at" not in log("SHMSERVE_MODEL=simple")

    # Who is in the group is served, with memory of its own; who is not finds every door closed.
    group = systemd.run("getent", "group", "shmclients").split(":")[2]
    ask = (sys.executable, "-c", ASK)
    assert systemd.run(*ask, user=CLIENT, groups=group) == "32\n64"
    assert "may not connect" in systemd.run(*ask, user=CLIENT)
    assert status_of(systemd, groups=group) == "200"
    assert status_of(systemd, groups="") == "000"

    # It starts again, as it is told to or by itself.
    killed = systemd.show("shmserve.service", "MainPID")
    systemd.run("kill", "-9", killed)
    until("a restart", lambda: systemd.show("shmserve.service", "NRestarts") == "1", within_s=30)
    until("a server", lambda: systemd.show("shmserve.service", "SubState") == "running", 60)
    assert systemd.run(*ask, user=CLIENT, groups=group) == "32\n64"

    # It reloads, and is ended and started again when it says nothing any more.
    file = systemd.path("/etc/shmserve/shmserve.yaml")
    file.write_text(file.read_text() + "log-verbose: 1\nid: another\n")
    assert "status" not in systemd.run("systemctl", "reload", "shmserve.service")
    until("a reload", lambda: "--id has changed, for which a restart" in log(), 20)
    until("a server", lambda: systemd.show("shmserve.service", "ActiveState") == "active", 20)
    assert systemd.show("shmserve.service", "StatusText") == "1/1 models ready"
    # The time that it was given for the reload is over with its next sign of life.
    sign = systemd.show("shmserve.service", "WatchdogTimestampMonotonic")
    until("a sign", lambda: systemd.show("shmserve.service", "WatchdogTimestampMonotonic") != sign)
    assert "log_verbose_level=1" in log("SHMSERVE_INSTANCE=simple.0")
    systemd.run("kill", "-STOP", systemd.show("shmserve.service", "MainPID"))
    until("a restart", lambda: systemd.show("shmserve.service", "NRestarts") == "2", within_s=60)
    until("a server", lambda: systemd.show("shmserve.service", "SubState") == "running", 60)

    token = systemd.path("/etc/shmserve/token")
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    assert "20-token.conf" in systemd.run(*COMMAND, "install")
    assert "status" not in systemd.run("systemctl", "restart", "shmserve.service")
    assert status_of(systemd, groups=group) == "401"
    bearer = f"Authorization: Bearer {TOKEN}"
    assert status_of(systemd, "-H", bearer, groups=group) == "200"

    assert "status" not in systemd.run(*COMMAND, "remove", "--force")  # the flags were changed
    assert systemd.show("shmserve.service", "LoadState") == "not-found"
    drop_in.unlink()
    drop_in.parent.rmdir()
    found = systemd.run(
        "find", "/etc", "/run", "-path", "*shmserve*", "-not", "-path", "*/layers/*"
    )
    assert found == "/etc/shmserve\n/etc/shmserve/token"
    assert not any(systemd.path("/dev/shm").iterdir())
