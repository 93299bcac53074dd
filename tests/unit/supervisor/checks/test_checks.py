"""The checks on invented facts, the gathering of facts, and the report of a start."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from shmserve import cli
from shmserve.cli import doctor
from shmserve.common import fd_limits
from shmserve.config import command_line, server
from shmserve.config.server import ServerConfig
from shmserve.errors import InvalidArgument
from shmserve.supervisor.checks import (
    OK,
    WARNING,
    WRONG,
    Verdict,
    access,
    host,
    memory,
    ok,
    table,
    warning,
)
from shmserve.supervisor.host.listeners import port_users
from tests.support.servers import run_command

GB = 10**9
SHM = memory.ShmFolder(True, "tmpfs", "rw,nosuid", 0o1777, 4 * GB, 3 * GB, True)
UNUSED_OBJECT = memory.ShmObject("psm_1", 2 * GB, 1000, False)
GPU = memory.DeviceList(
    "cuda", 2, 2, None, (), "580.1", ("0 GPU-a H100", "1 GPU-b H100"), 0, "2.13.0+cu130"
)
RUN_DIR_FACTS = access.RunDirectoryFacts(Path("/run/s"), "", 0, GB)
PORTS = access.PortFacts(("127.0.0.1:8000",))
TAKEN_PORTS = PORTS._replace(refused_endpoints=(("127.0.0.1:80", "--http-port: taken", (7, 9)),))

VERDICT_CASES: list[tuple[Callable[[Any], Verdict], Any, str, str]] = [
    (host.judge_packages, {"aiohttp": ("3.14.5", "3.14.5")}, OK, "aiohttp 3.14.5"),
    (host.judge_packages, {"torch": ("2.13.0+cpu", "2.6")}, OK, "torch 2.13.0+cpu"),
    (host.judge_packages, {"aiohttp": ("3.9.1", "3.14.5")}, WRONG, "aiohttp 3.9.1"),
    (host.judge_packages, {"pyzmq": ("", "26")}, WRONG, "pyzmq is missing"),
    (host.judge_packages, {}, WARNING, "not installed"),
    (host.judge_parser, True, OK, "in C"),
    (host.judge_parser, False, WRONG, "request smuggling"),
    (host.judge_units, (0, ""), OK, "none"),
    (host.judge_units, (2, ""), OK, "2, verified"),
    (host.judge_units, (2, "Unknown key 'Typo'"), WARNING, "Typo"),
    (host.judge_files, (65536, 4096), OK, "65536"),
    (host.judge_files, (1024, 4096), WARNING, "512 regions"),
    (host.judge_files, (100, 4096), WRONG, "at least 256"),
    (host.judge_tasks, -1, OK, "no limit"),
    (host.judge_tasks, 4915, OK, "4915"),
    (host.judge_tasks, 512, WARNING, "32 models"),
    (host.judge_processors, (8, None), OK, "8"),
    (host.judge_processors, (2, 1.5), OK, "2"),
    (host.judge_processors, (64, 2.0), WARNING, "a quota of 2"),
    (host.judge_tracing, 0, OK, "any process"),
    (host.judge_tracing, 3, OK, "no process"),
    (host.judge_user, (998, True), OK, "998"),
    (host.judge_user, (1000, False), OK, "1000"),
    (host.judge_user, (1000, True), WARNING, "logind deletes"),
    (host.judge_user, (61571, False), WARNING, "dynamic"),
    (host.judge_clock, (2e9, 1.9e9, "tsc"), OK, "tsc"),
    (host.judge_clock, (2e9, 1.9e9, "hpet"), WARNING, "hpet"),
    (host.judge_clock, (0.0, 1.9e9, "tsc"), WARNING, "certificates"),
    (memory.judge_shm, SHM, OK, "4.0 GB, 3.0 GB free"),
    (memory.judge_shm, SHM._replace(options="rw,noexec"), OK, "noexec"),
    (memory.judge_shm, memory.ShmFolder(False), OK, "--allow-client-shm=false"),
    (memory.judge_shm, memory.ShmFolder(True), WRONG, "does not exist"),
    (memory.judge_shm, SHM._replace(filesystem="ext4"), WRONG, "ext4, not on tmpfs"),
    (memory.judge_shm, SHM._replace(is_writable=False), WRONG, "cannot create an object"),
    (memory.judge_shm, SHM._replace(mode=0o755), WARNING, "mode 0755"),
    (memory.judge_shm, SHM._replace(total_bytes=2**26, free_bytes=2**26), WARNING, "too little"),
    (memory.judge_shm, SHM._replace(free_bytes=GB // 10), WARNING, "100 MB free"),
    (memory.judge_objects, [], OK, "none"),
    (memory.judge_objects, [UNUSED_OBJECT._replace(in_use=True)], OK,
     "1 objects of 1 MB or more, 2.0 GB"),
    (memory.judge_objects, [UNUSED_OBJECT], WARNING, "psm_1 (2.0 GB, uid 1000)"),
    (memory.judge_memory, (16 * GB, 16 * GB, 8 * GB), OK, "of the host"),
    (memory.judge_memory, (16 * GB, 12 * GB, 8 * GB), OK, "memory.max"),
    (memory.judge_memory, (16 * GB, 4 * GB, 8 * GB), WARNING, "may kill it"),
    (memory.judge_locked, (8 << 20, False), OK, "8 MB"),
    (memory.judge_locked, (-1, True), OK, "no limit"),
    (memory.judge_locked, (8 << 20, True), WARNING, "cannot be pinned"),
    (memory.judge_devices, memory.DeviceList(), OK, "none"),
    (memory.judge_devices, GPU, OK, "2 of kind cuda; driver 580.1; 0 GPU-a H100; 1 GPU-b H100"),
    (memory.judge_devices, GPU._replace(mig_instances=3), OK, "3 MIG instances"),
    (memory.judge_devices, GPU._replace(inaccessible_files=("/dev/x",)), WRONG, "open /dev/x"),
    (memory.judge_devices, GPU._replace(driver=""), WRONG, "no driver"),
    (memory.judge_devices, GPU._replace(torch="2.13.0+cpu"), WARNING, "for CPUs only"),
    (memory.judge_devices, GPU._replace(visible_count=0, visible_devices="9"), WARNING,
     "DEVICES=9"),
    (memory.judge_devices, GPU._replace(visible_count=0, visible_devices="-1"), OK,
     "0 of them visible"),
    (memory.judge_devices, memory.DeviceList("npu", 1, 1), OK, "1 of kind npu"),
    (memory.judge_sharing, memory.DeviceSharing(True, "", None), OK, "no CUDA device"),
    (memory.judge_sharing, memory.DeviceSharing(True, "", ""), OK, "a test shared memory"),
    (memory.judge_sharing, memory.DeviceSharing(False, "", "x"), WARNING, "cuda-bindings"),
    (memory.judge_sharing, memory.DeviceSharing(True, "", "error 201"), WARNING, "error 201"),
    (memory.judge_sharing, memory.DeviceSharing(True, ",expandable_segments: True", ""), WARNING,
     "expandable_segments"),
    (access.judge_run_directory, RUN_DIR_FACTS, OK, "/run/s"),
    (access.judge_run_directory, RUN_DIR_FACTS._replace(server_pid=7), OK, "pid 7"),
    (access.judge_run_directory, RUN_DIR_FACTS._replace(problem="'/run/s' is bad"), WRONG,
     "is bad"),
    (access.judge_run_directory, RUN_DIR_FACTS._replace(free_bytes=1 << 20), WARNING,
     "1 MB are free"),
    (access.judge_ports, PORTS, OK, "127.0.0.1:8000: free"),
    (access.judge_ports, access.PortFacts(()), OK, "disabled"),
    (access.judge_ports, TAKEN_PORTS, WRONG, "--http-port: taken"),
    (access.judge_ports, TAKEN_PORTS._replace(server_pid=3), WRONG, "--http-port: taken"),
    (access.judge_ports, TAKEN_PORTS._replace(server_pid=9), OK,
     "127.0.0.1:8000: free; 127.0.0.1:80: in use by the running server (pid 9)"),
    (access.judge_repositories, [], OK, "no --model-repository"),
    (access.judge_repositories, [("/m", 3, False)], OK, "/m: 3 folders"),
    (access.judge_repositories, [("/n", 3, False), ("/m", -1, False)], WRONG, "/m cannot be read"),
    (access.judge_repositories, [("/m", 0, False)], WARNING, "no model"),
    (access.judge_repositories, [("/m", 3, True)], WARNING, "every user"),
]  # fmt: skip


@pytest.mark.parametrize(("judge", "facts", "state", "expected"), VERDICT_CASES)
def test_a_check_judges_its_facts(
    judge: Callable[[Any], Verdict], facts: Any, state: str, expected: str
) -> None:
    verdict = judge(facts)
    assert verdict.state == state
    assert expected in verdict.found
    assert bool(verdict.fix) == (state != OK)
    lines = doctor.text("systemd units", verdict).splitlines()
    # Only a command is longer than 80 columns, because it is never broken.
    assert all(len(line) <= 80 or line[24:] in verdict.fix for line in lines)


_UPGRADE_COMMAND = "pip install --upgrade 'aiohttp>=3.11' 'pyzmq>=26' 'numpy>=1.26'"


@pytest.mark.parametrize(
    ("fix", "shown_lines"),
    [
        (f"chmod -R u=rX /{'a b/' * 30}", [f"chmod -R u=rX /{'a b/' * 30}"]),
        (f"{_UPGRADE_COMMAND}, then start it", [f"{_UPGRADE_COMMAND},", "then start it"]),
        ("end it, or choose another port", ["end it, or choose another port"]),
    ],
)
def test_a_command_is_never_broken(fix: str, shown_lines: list[str]) -> None:
    _, *lines = doctor.text("ports", Verdict(WRONG, "found", fix)).splitlines()
    assert [line[24:] for line in lines] == shown_lines


def test_every_check_is_tried_on_facts() -> None:
    assert {check.judge for check in table.CHECKS} == {case[0] for case in VERDICT_CASES}


def config(*flags: str) -> ServerConfig:
    return server.from_flags(command_line.parse(flags), {}, needs_models=False)


def test_no_check_fails_on_this_machine(tmp_path: Path) -> None:
    """No check fails, and known facts of this machine are found."""
    (tmp_path / "models").mkdir()
    listen = (
        "import os, socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1])"
    )
    command = [sys.executable, "-uc", f"{listen}; os.read(0, 1)"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as listener:
        assert listener.stdout is not None
        port = listener.stdout.readline().strip()
        flags = (f"--http-port={port}", "--grpc-port=0", "--metrics-port=0")
        paths = (f"--run-dir={tmp_path}/run", str(tmp_path / "models"))
        results = {check.name: result for check, result in table.run_checks(config(*flags, *paths))}
    assert not [name for name, result in results.items() if "the check failed" in result.found]
    assert results["packages"].state == results["HTTP parser"].state == OK
    assert str(fd_limits.hard_limit()) in results["open files"].found
    assert results["ports"].state == WRONG
    assert f"pid {listener.pid})" in results["ports"].found
    assert results["run directory"] == ok(f"{tmp_path}/run")
    assert results["models"].found == f"{tmp_path}/models contains no model"


def test_a_failing_check_is_reported() -> None:
    def gather(_: ServerConfig) -> int:
        raise OSError("no such file")

    check = table.HostCheck("broken", gather, lambda _: ok(""))
    assert [verdict.found for _, verdict in table.run_checks(config(), [check])] == [
        "the check failed: no such file"
    ]


def test_a_start_reports_failed_checks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checks = [
        table.HostCheck("one", lambda _: 0, lambda _: warning("is little", "have more"), "log"),
        table.HostCheck("two", lambda _: 0, lambda _: warning("is unseen", "look"), ""),
    ]
    monkeypatch.setattr(table, "CHECKS", checks)
    with caplog.at_level(logging.WARNING):
        table.check_at_start(config())
    assert [record.getMessage() for record in caplog.records] == ["one: is little (have more)"]


def test_a_start_without_descriptors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fd_limits, "hard_limit", lambda: 100)
    with pytest.raises(
        InvalidArgument, match=("open files: a process may open 100 files, but at least 256")
    ):
        table.check_at_start(config())


def test_links_without_a_target_do_not_make_a_repository_unreadable(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "model").mkdir()
    repositories = access.gather_repositories(config(f"--model-repository={tmp_path}"))
    assert repositories == [(str(tmp_path), 1, False)]


def test_an_unusable_run_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    run_dir_facts = access.gather_run_directory(config(f"--run-dir={tmp_path}/run"))
    assert "has mode 0755; it must be 0700" in run_dir_facts.problem


def always_state(state: str) -> Callable[[ServerConfig], str]:
    return lambda _: state


def make_verdict(state: str) -> Verdict:
    return Verdict(state, "x", "y")


@pytest.mark.parametrize(("state", "status"), [(OK, 0), (WARNING, 1), (WRONG, 2)])
def test_exit_status_is_the_worst(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, status: int
) -> None:
    checks = [
        table.HostCheck(name, always_state(model_state), make_verdict)
        for name, model_state in (("one", OK), ("two", state), ("three", OK))
    ]
    monkeypatch.setattr(table.run_checks, "__defaults__", (checks,))
    assert cli.main(["doctor", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == status
    assert report["checks"][1] == {"name": "two", "state": state, "found": "x", "fix": "y"}


def test_objects_of_other_users_are_not_called_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    def user_objects(user: int) -> list[str]:
        monkeypatch.setattr(os, "geteuid", lambda: user)
        return [found.name for found in memory.gather_objects(config())]

    owner = os.geteuid()
    shared = SharedMemory(create=True, size=2 << 20)
    try:
        Path("/dev/shm", shared.name).write_bytes(bytes(shared.size))  # only used pages count
        assert shared.name in user_objects(owner)
        assert shared.name not in user_objects(owner + 1)
    finally:
        shared.close()
        shared.unlink()


def test_the_doctor_command() -> None:
    completed = run_command("doctor", "--http-port=0", "--grpc-port=0", "--metrics-port=0")
    assert completed.returncode in (0, 1, 2), completed.stderr
    lines = completed.stdout.splitlines()
    long_lines = [line for line in lines if len(line) > 80]
    assert all(max(map(len, line.split())) > 50 for line in long_lines), "only paths are not broken"
    names = [line[8:24].strip() for line in lines if line[0] != " "]
    assert names == [check.name for check in table.CHECKS]


@pytest.mark.parametrize(
    ("verb", "flag", "message"),
    [
        ("doctor", "--http-prot=0", "unknown flag --http-prot, did you mean --http-port?"),
        ("check", "--inptu=x=1", "unknown flag --inptu, did you mean --input?"),
        ("check", "--zzz", "unknown flag --zzz; see shmserve check --help"),
    ],
)
def test_wrong_flags_are_reported(verb: str, flag: str, message: str) -> None:
    completed = run_command(verb, flag)
    assert completed.returncode == 2
    assert completed.stderr == f"shmserve: {message}\n"


def test_a_program_holds_a_port() -> None:
    """The check finds the process of another program by its listening socket."""
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], "
    code += "flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as port_holder:
        assert port_holder.stdin and port_holder.stdout
        port = int(port_holder.stdout.readline())
        assert [pid for pid, _ in port_users(port)] == [port_holder.pid]
        port_holder.communicate(b"\n")
    assert port_users(port) == []
