"""The end of the supervisor, reuse of run directories, and several servers on a host."""

import http.client
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.faults.scene import RECOVERY_S, start_processes, wait_replaced
from tests.support.leaks import created_since
from tests.support.load import Load
from tests.support.request_pool import request_pool
from tests.support.servers import Server, kill_together, running
from tests.support.waiting import until

_ORPHANS_S = 1.0
# A zygote that imports torch handles a signal only when the interpreter runs again. On a busy
# machine, loading one library may take this long.
_IMPORT_S = 20.0


def assert_nothing_is_left(
    server: Server, members: list[psutil.Process], within_s: float = _ORPHANS_S
) -> None:
    """Check that the children of a killed supervisor exit and remove their files."""
    server.assert_exited(members, within_s)


def test_kill_the_supervisor(serve: Callable[..., Server]) -> None:
    """Its own processes and those started by models exit, too."""
    server = serve("--gateways=2", grpc=True)
    _, child_processes = start_processes(server)
    members = server.tree()
    assert set(child_processes) < set(members)
    names_before = set(os.listdir("/dev/shm"))
    with Load(server, simple=2, memory=0) as load:
        server.kill()
        assert_nothing_is_left(server, members)
    assert server.log().count(f"the supervisor (pid {server.pid}) was killed") == 1
    assert not created_since(names_before)
    assert all(answer.is_disconnected for answer in load.troubles())


def test_kill_the_supervisor_while_a_model_runs(serve: Callable[..., Server]) -> None:
    """The worker of another model is stopped meanwhile."""
    server = serve()
    members = server.tree()
    with request_pool(server) as pool:
        pending = pool.number("gated", 1)
        server.gate.next()
        server.find_one("worker simple.0").suspend()
        server.kill()
        assert_nothing_is_left(server, members)
        assert isinstance(pending.exception(), OSError | http.client.HTTPException)


def test_kill_the_supervisor_while_loading(repository: Path) -> None:
    with Server([repository]) as server:
        server.wait_log("loading")
        members = server.tree()
        server.kill()
        assert_nothing_is_left(server, members, _IMPORT_S)


def test_stop_the_supervisor_and_continue(serve: Callable[..., Server]) -> None:
    """Inference does not need a suspended supervisor, which later continues normally."""
    server = serve()
    with Load(server) as load:
        os.kill(server.pid, signal.SIGSTOP)
        load.wait_answered(load.answers[-1].ended_at, 1.0)
        victim = server.find_one("worker simple.0")
        victim.kill()
        os.kill(server.pid, signal.SIGCONT)
        wait_replaced(server, victim, "worker simple.0")
    assert load.troubles() == []


def test_a_terminal_that_is_closed(serve: Callable[..., Server]) -> None:
    """Under `nohup` all processes survive the terminal's SIGHUP, and dead ones are replaced."""
    server = serve(prefix=("nohup",))
    members = server.tree()
    os.killpg(server.pid, signal.SIGHUP)
    for title in ("scheduler simple", "worker simple.0", "gateway http 0"):
        victim = server.find_one(title)
        assert victim in members
        victim.kill()
        wait_replaced(server, victim, title)
    until("the server is ready", lambda: server.answers("/v2/health/ready"), RECOVERY_S)
    with Load(server) as load:
        pass
    assert load.troubles() == []
    assert {server.find_one("worker zygote"), server.find_one("front zygote")} < set(members)
    server.stop()


def test_a_parent_that_has_blocked_every_signal(serve: Callable[..., Server]) -> None:
    """Blocked signals are inherited. The server must still detect exits and its own SIGTERM."""
    block = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    server = serve(prefix=(sys.executable, "-c", block))
    victim = server.find_one("worker simple.0")
    victim.kill()
    wait_replaced(server, victim, "worker simple.0")
    server.stop()


def test_hang_up_ends_a_server_whose_terminal_is_closed(serve: Callable[..., Server]) -> None:
    """In other cases, SIGHUP reloads the configuration."""
    terminal, server_end = os.openpty()
    reasons = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "os.close(os.open(sys.argv[1], os.O_RDWR)); os.execv(sys.argv[2], sys.argv[2:])"
    )
    server = serve(prefix=(sys.executable, "-c", reasons, os.ttyname(server_end)))
    os.close(server_end)
    members = server.tree()
    os.kill(server.pid, signal.SIGHUP)
    server.wait_log("no flag has changed")
    os.close(terminal)
    server.process.wait(20)
    assert_nothing_is_left(server, members)


def test_a_run_directory_that_a_killed_server_left(serve: Callable[..., Server]) -> None:
    """The next server starts in the same directory and on the same ports."""
    first = serve("--gateways=2")
    members = first.tree()
    kill_together(members)
    psutil.wait_procs(members, timeout=5)
    first.process.wait()
    leftovers = (
        sorted(path.name for path in first.run_dir.iterdir()) if first.run_dir.exists() else []
    )
    second = serve(run_dir=first.run_dir, ports=(first.http_port, first.metrics_port))
    with Load(second) as load:
        pass
    assert load.troubles() == []
    second.stop()
    assert not first.run_dir.exists(), leftovers


def test_restart_at_once_after_a_kill(serve: Callable[..., Server]) -> None:
    """The new server waits for the exit of the killed one's children (a race: three times)."""
    first = latest = serve()
    for _ in range(3):
        latest.kill()
        latest = serve(run_dir=first.run_dir, ports=(first.http_port, first.metrics_port))
        with Load(latest, simple=1, memory=0) as load:
            pass
        assert load.troubles() == []


def test_two_servers_side_by_side(repository: Path, serve: Callable[..., Server]) -> None:
    server = serve()
    with running(repository) as other_server, Load(other_server) as other_load:
        assert server.run_dir != other_server.run_dir
        with Load(server) as load:
            for title in ("worker simple.0", "scheduler simple", "gateway http 0"):
                victim = server.find_one(title)
                victim.kill()
                wait_replaced(server, victim, title)
        members = server.tree()
        server.kill()
        assert_nothing_is_left(server, members)
    assert other_load.troubles() == []
    assert [answer for answer in load.troubles() if not answer.is_disconnected] == []
