"""Processes forked on request: very many at once, and failures when the host lacks resources."""

import asyncio
import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from shmserve.errors import Unavailable
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.processes import zygote
from shmserve.supervisor.processes.zygote import Zygote
from tests.rigs.table_programs import run_table_program
from tests.support.servers import ROOT, run_python

_CROWD_PROGRAM = """
logging.basicConfig(level=logging.ERROR)  # that it is stopped may be seen, and said
folder = RunDirectory(Path(sys.argv[1]))
children = ProcessTable()
zygote = Zygote(children, folder, "zygote", (), os.environ)
zygote.start()
for process in children.all():  # Ctrl-C is for the supervisor, also this early
    os.kill(process.pid, signal.SIGINT)
first = await zygote.spawn("one", "builtins:len", b"")
count = "tests.integration.processes.test_zygote:exit_with_count"
assert (await (await zygote.spawn("one", count, b"", [0] * 100)).exit_future) == "exit status 100"
process, = [child for child in children.all() if child.title == "zygote"]
os.kill(process.pid, signal.SIGSTOP)
spawned = [asyncio.ensure_future(zygote.spawn("one", "builtins:len", b"")) for _ in range(500)]
await asyncio.sleep(0)  # every request that is sent at once is sent
os.kill(process.pid, signal.SIGCONT)
ends = [await child.exit_future for child in await asyncio.gather(*spawned)]
print(len(ends), set(ends))
os.kill(process.pid, signal.SIGSTOP)
stay = "tests.integration.processes.test_zygote:wait_for_signal"
unwanted = asyncio.ensure_future(zygote.spawn("it", stay, b""))
while not zygote._pending_forks:
    await asyncio.sleep(0)
unwanted.cancel()
os.kill(process.pid, signal.SIGCONT)
lasting = lambda: {child.pid for child in children.all() if child.title.endswith("zygote")}
while zygote._pending_forks or set(processes.children(os.getpid())) != lasting():
    await asyncio.sleep(0.01)
zygote.stop()
await process.exit_future
"""

# The parent is notified of the child's exit before its start, as when both messages arrive
# together.
_SHORT_LIVED = """
entered = []
children = ProcessTable()
children.on_exit = lambda child: print(child in entered, child.exit_future.result())
with children.spawning():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    while pid not in children._early_exits:
        await asyncio.sleep(0.01)
    child = children.adopt(pid, "one")
entered.append(child)
await child.exit_future
"""

# The kernel assigns pids in increasing order and may reuse them: here it reuses the next ones.
_RECYCLED_PROGRAM = """
children = ProcessTable()
zygote = Zygote(children, RunDirectory(Path(sys.argv[1])), "zygote", (), os.environ)
zygote.start()
stay = "tests.integration.processes.test_zygote:wait_for_signal"
last = (await zygote.spawn("one", stay, b"")).pid
children._reserved_pids.extend(range(last + 1, last + 20))
another = await zygote.spawn("another", stay, b"")
known = lambda: {child.pid for child in children.all()}
while set(processes.children(os.getpid())) != known():
    await asyncio.sleep(0.01)
known = known()
print(another.pid in known, another.pid not in range(last + 1, last + 20))
another.kill()
await another.exit_future
print(children.is_reserved(another.pid), children.is_reserved(last))
zygotes = [child for child in children.all() if child.title.endswith("zygote")]
zygote.stop()
for child in zygotes:  # a zygote that outlives its parent reports that the parent was killed
    await child.until_exit()
"""

# The active zygote is killed repeatedly, then the spare, then both. The last line of output is the
# number of imports of the preloaded module.
_KILLED_PROGRAM = """
children = ProcessTable()
folder = RunDirectory(Path(sys.argv[1]))
environment = {**os.environ, "PYTHONPATH": sys.argv[2]}
zygote = Zygote(children, folder, "zygote", ("preloaded",), environment)
imported = Path(sys.argv[2], "imported")

async def child(title):
    while True:
        for child in children.all():
            if child.title == title:
                return child
        await asyncio.sleep(0.001)

async def kill(*titles):
    killed = [await child(title) for title in titles]
    for each in killed:
        each.kill()
    for each in killed:
        await each.until_exit()
    spawned = await zygote.spawn("one", "builtins:len", b"")
    await spawned.until_exit()

zygote.start()
for _ in range(40):
    await child("spare zygote")
    await kill("zygote")
await kill("spare zygote")
await child("spare zygote")
print(imported.read_text())
await kill("zygote", "spare zygote")
await child("spare zygote")
print(imported.read_text())
rest = children.all()
zygote.stop()
print([await each.until_exit() for each in rest])
"""
# Recursion deeper than one zygote's stack, but not as deep as those of many nested zygotes.
_PRELOADED_PROGRAM = """
import sys
from pathlib import Path
with Path(__file__).with_name("imported").open("a") as file:
    file.write("x")
sys.setrecursionlimit(80)
"""

# The terminal is closed while a process is being forked, when it briefly has another parent.
_HUNG_UP = """
import os, signal, sys
from shmserve.supervisor.processes import zygote

fork = os.fork

def forked():
    child = fork()
    if not child:
        os.kill(os.getpid(), signal.SIGHUP)
    return child

os.fork = forked
sys.exit(zygote.main(sys.argv[1:]))
"""

# The supervisor kills the process in between as soon as it has received the pid of the new one,
# since the zygote has died.
_ORPHANED_PROGRAM = """
import os, signal, socket, sys
import msgpack
from shmserve.ipc import processes
from shmserve.supervisor.processes import zygote

fork, forks = os.fork, []

def forked():
    child = fork()
    forks.append(os.getpid())
    return child

class Link(socket.socket):
    def send(self, data):
        sent = super().send(data)
        if len(forks) == 2:
            os.kill(forks[0], signal.SIGKILL)
        return sent

os.fork = forked
processes.adopt_orphans()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link = Link(fileno=theirs.detach())
zygote._fork(link, os.getpid(), [zygote.encode_request(7, "builtins:len", b"")])
_, pid = msgpack.unpackb(ours.recv(64))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def exit_with_count(start: bytes, *fds: int) -> None:
    sys.exit(len(set(fds)))


def wait_for_signal(start: bytes) -> None:
    signal.pause()


def test_more_requests_than_a_zygotes_socket_buffers(tmp_path: object) -> None:
    """Hundreds of instances start at once; if a load fails, the others are ended."""
    assert output(_CROWD_PROGRAM, f"{tmp_path}/run") == "500 {'exit status 0'}\n"


def test_a_process_that_ends_at_once() -> None:
    """The caller receives the process before its exit, and can start another one."""
    assert output(_SHORT_LIVED) == "True exit status 0\n"


def test_a_recently_used_pid_is_not_reused(tmp_path: Path) -> None:
    """A process with a recently used pid is ended at once, and the next process has another pid."""
    assert output(_RECYCLED_PROGRAM, f"{tmp_path}/run") == "True True\nTrue False\n"


def test_a_spare_zygote_takes_over(tmp_path: Path) -> None:
    """Works for each death of a zygote, and the spare has the imports of the first one."""
    (tmp_path / "preloaded.py").write_text(_PRELOADED_PROGRAM)
    pids = output(_KILLED_PROGRAM, f"{tmp_path}/run", str(tmp_path))
    assert pids == "x\nxx\n['exit status 0', 'exit status 0']\n"
    assert not (tmp_path / "run").exists()


def test_a_process_whose_zygote_dies_runs_once_its_pid_is_sent() -> None:
    """The supervisor has adopted the process, and would treat its exit as a failed start."""
    run = run_python("-c", _ORPHANED_PROGRAM)
    assert (run.stdout, run.stderr) == ("0\n", "")


def test_a_terminal_that_is_closed_while_a_process_is_forked(tmp_path: Path) -> None:
    """Under `nohup` the server survives, and its run directory remains."""
    folder = RunDirectory(tmp_path / "run")
    own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own_end.settimeout(10)
    fds = (child_end.fileno(), folder.lock_fd)
    command = [sys.executable, "-c", _HUNG_UP, *map(str, (*fds, os.getpid(), folder.path)), "it"]
    with subprocess.Popen(command, cwd=ROOT, pass_fds=fds) as process:
        child_end.close()
        with own_end:
            assert msgpack.unpackb(own_end.recv(64)) == [0, process.pid]
            request = zygote.encode_request(1, "builtins:len", b"")
            socket.send_fds(own_end, [b"fork"], [request])
            os.close(request)
            assert msgpack.unpackb(own_end.recv(64))[0] == 1
            assert (folder.path / "lock").exists()
        assert process.wait(10) == 0
    assert not folder.path.exists()
    os.close(folder.lock_fd)


def output(body: str, *arguments: str) -> str:
    run = run_table_program(body, *arguments)
    assert re.compile(r"process (spare )?zygote ended \(signal 9\)\n").sub("", run.stderr) == ""
    return run.stdout


@pytest.mark.parametrize("fails", ["the first fork", "the second fork"])
def test_a_process_limit_that_allows_no_further_worker(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The zygote logs the error and survives; the caller receives the error."""
    kernels, forks = os.fork, [fails == "the first fork"]

    def fork() -> int:
        if forks.pop():
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        forks.append(True)
        return kernels()

    monkeypatch.setattr(os, "fork", fork)
    own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own_end, child_end:
        zygote._fork(child_end, os.getpid(), [zygote.encode_request(7, "builtins:len", b"")])
        assert msgpack.unpackb(own_end.recv(64)) == [7, -errno.EAGAIN]


def test_a_process_limit_below_a_zygote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the process limit is too low, the server reports it and does not start."""

    def refuse_fork(*_: object, **__: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    async def start() -> None:
        Zygote(None, folder, "zygote", (), {}).start()  # type: ignore[arg-type]

    folder = RunDirectory(tmp_path / "run")
    monkeypatch.setattr(os, "posix_spawn", refuse_fork)
    with pytest.raises(Unavailable, match=r"Resource temporarily unavailable \(raise TasksMax="):
        asyncio.run(start())
    os.close(folder.lock_fd)
