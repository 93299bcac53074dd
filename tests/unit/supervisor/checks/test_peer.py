"""Whether another process can share memory with the server: by made-up facts, and for real."""

import os
import shutil
import subprocess
from typing import Any

import pytest

from shmserve.config import command_line, server
from shmserve.errors import InvalidArgument
from shmserve.supervisor.checks import OK, WARNING, WRONG, access

FILE_IDENTITIES: dict[str, tuple[int, int] | None] = {
    "/dev/shm": (1, 2),
    "run directory": (1, 3),
    **{kind: (4, number) for number, kind in enumerate(("user", "net", "ipc", "pid"))},
}
PEER = access.PeerFacts(1000, frozenset({1000}), FILE_IDENTITIES)
SERVER = access.ServerFacts(PEER, is_running=True, group=-1, device_count=1)
CONFIG = server.from_flags(
    command_line.parse(["--run-dir=/nowhere/shmserve"]), {}, needs_models=False
)


def simulate_other_files(*names: str) -> access.PeerFacts:
    """Simulate a process that sees other files under the same paths."""
    return PEER._replace(identities={**FILE_IDENTITIES, **dict.fromkeys(names, (9, 9))})


@pytest.mark.parametrize(
    ("changed", "peer_facts", "name", "state", "expected_text"),
    [
        ({}, simulate_other_files("/dev/shm"), "/dev/shm", WRONG,
         "cannot find regions by their keys"),
        ({}, PEER._replace(identities={**FILE_IDENTITIES, "/dev/shm": None}), "/dev/shm", WRONG,
         "cannot find"),
        ({}, simulate_other_files("user"), "user", WARNING, "user namespace"),
        ({}, PEER._replace(uid=7), "user", WRONG, "uid 7, and the server has uid 1000"),
        ({"group": 50}, PEER._replace(uid=7), "user", WRONG, "may not open its objects"),
        ({"group": 50}, PEER._replace(uid=7, groups=frozenset({50})), "user", OK, "--shm-group"),
        ({"process": PEER._replace(uid=0)}, PEER, "user", OK, "can open all objects"),
        ({}, simulate_other_files("run directory"), "run dir", WARNING, "cannot find it"),
        ({"is_running": False}, PEER, "run dir", OK, "no server is running"),
        ({}, simulate_other_files("net"), "network", WARNING, "127.0.0.1 does not reach"),
        ({}, simulate_other_files("ipc", "pid"), "devices", WARNING,
         "the client's ipc and pid namespace differs"),
        ({}, PEER._replace(visible_devices="1"), "devices", WARNING, "is 1, the server's None"),
        ({"device_count": 0}, simulate_other_files("ipc"), "devices", OK, "no CUDA device"),
    ],
)  # fmt: skip
def test_a_check_judges_a_peer(
    changed: dict[str, Any], peer_facts: access.PeerFacts, name: str, state: str, expected_text: str
) -> None:
    verdict = dict(access.judge_peer(SERVER._replace(**changed), peer_facts))[f"peer's {name}"]
    assert verdict.state == state
    assert expected_text in verdict.found
    assert bool(verdict.fix) == (state != OK)


def test_an_equal_process_passes_every_check() -> None:
    assert {verdict.state for _, verdict in access.judge_peer(SERVER, PEER)} == {OK}


def test_a_process_of_the_same_user_is_inspected() -> None:
    own, other = access.gather_peer(CONFIG, os.getppid())
    assert not own.is_running
    assert other.identities["/dev/shm"] == own.process.identities["/dev/shm"] is not None
    assert other.uid == os.getuid()


def test_a_missing_process_is_reported() -> None:
    with pytest.raises(InvalidArgument, match="--peer: there is no process 4194305"):
        access.gather_peer(CONFIG, 4194305)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="root, and unshare")
def test_a_process_with_another_shm() -> None:
    """As in a container of its own."""
    script = "mount -t tmpfs tmpfs /dev/shm && echo there && read line"
    pipe = subprocess.PIPE
    command = ["unshare", "--mount", "--net", "bash", "-c", script]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as other_process:
        assert other_process.stdin and other_process.stdout and other_process.stderr
        if other_process.stdout.readline() != b"there\n":
            pytest.skip(f"no namespace: {other_process.stderr.read().decode()}")
        verdicts = dict(access.judge_peer(*access.gather_peer(CONFIG, other_process.pid)))
        other_process.communicate(b"\n")
    states = {name.removeprefix("peer's "): verdict.state for name, verdict in verdicts.items()}
    assert states["/dev/shm"] == WRONG and states["network"] == WARNING
    assert states["user"] == OK
