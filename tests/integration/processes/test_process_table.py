"""The supervisor's process table, with real exits and signals."""

from tests.rigs.table_programs import run_table_program

_LATE_SIGNAL = """
logging.disable()
children = ProcessTable()
child = children.adopt(os.posix_spawn("/bin/sleep", ["sleep", "60"], {}), "one")
child.kill(signal.SIGSTOP)
while child.stop_timer is None:
    await asyncio.sleep(0.001)
child.kill(signal.SIGCONT)
time.sleep(table.STOPPED_LIMIT_S)
for _ in range(3):
    await asyncio.sleep(0)
child.kill(signal.SIGTERM)
print(await child.exit_future)
"""

_OOM_PROGRAM = """
kills = 3
table.oom_kills = lambda: kills
children = ProcessTable()
for kills in (3, 4, 4):
    child = children.adopt(os.posix_spawn("/bin/sleep", ["sleep", "60"], {}), "one")
    child.kill()
    await child.exit_future
    print(child.reason_for_clients, child.was_killed)
"""

_NO_DESCRIPTOR_PROGRAM = """
children = ProcessTable()
def oom_kills():
    raise OSError("Too many open files")
table.oom_kills = oom_kills
child = children.adopt(os.posix_spawn("/bin/true", ["true"], {}), "one")
print(await asyncio.wait_for(child.exit_future, 10))
"""

_TROUBLE_PROGRAM = """
logging.basicConfig(stream=sys.stdout, format="%(message)s")
logging.Formatter.formatException = lambda self, error: repr(error[1])
def on_exit(child):
    raise RuntimeError(child.title)
children = ProcessTable()
children.on_exit = on_exit
both = [children.adopt(os.posix_spawn("/bin/true", ["true"], {}), t) for t in ("one", "other")]
for child in both:
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
for child in both:
    await child.exit_future
"""

# A shell is the parent process between a dead zygote and the processes that the zygote was asked to
# fork. The table knows one of them. Another process is older than the table.
_BETWEEN_PROGRAM = """
inherited = os.pidfd_open(os.posix_spawn("/bin/sleep", ["sleep", "60"], {}))
children = ProcessTable()
read, write = os.pipe()
command = ["sh", "-c", "sleep 60 & echo $!; sleep 61 & echo $!; wait"]
with children.spawning():
    between = os.posix_spawn(
        "/bin/sh", command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)]
    )
    with open(read) as pipe:
        child = children.adopt(int(pipe.readline()), "one")
        stray = int(pipe.readline())
    ends = [os.pidfd_open(pid) for pid in (between, stray)]
for end in ends:
    select.select([end], [], [])
child.kill(signal.SIGTERM)
print(await child.exit_future, select.select([inherited], [], [], 0)[0])
children.close()  # `asyncio.run` closes its socket for signals before it ignores SIGCHLD
signal.pidfd_send_signal(inherited, signal.SIGTERM)
"""

# In most cases the kernel is still loading the program when its process is to be killed.
_EXEC_PROGRAM = """
children = ProcessTable()
command = ["python", "-c", "import time; time.sleep(600)"]
for _ in range(10):
    with children.spawning():
        pid = os.posix_spawn(sys.executable, command, {})
    await children.wait_for_trackers(20)
    if os.path.exists(f"/proc/{pid}"):
        return print("it continues")
"""

_RETRY_PROGRAM = """
children, kills = ProcessTable(), []
processes.kill_tree = lambda pid, excluded_pids: kills.append(pid)
with children.spawning():
    pids = [os.posix_spawn("/bin/sleep", ["sleep", "60"], {}) for _ in range(3)]
await asyncio.sleep(0.05)
print(2 * len(pids) <= len(kills) <= 10 * len(pids))
children.close()  # `asyncio.run` closes its socket for signals before it ignores SIGCHLD
for pid in pids:
    os.kill(pid, 9)
"""

# The first thread ends, and the other one continues.
_THREADED = """
import ctypes, os, threading, time

threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""
_THREAD_PROGRAM = """
children = ProcessTable()
with children.spawning():
    pid = os.posix_spawn(sys.executable, ["python", "-c", sys.argv[1]], {})
    while ") Z " not in open(f"/proc/{pid}/stat").read():
        await asyncio.sleep(0.01)
await children.wait_for_trackers(20)
print(os.path.exists(f"/proc/{pid}"))
"""

# A process of a model has a subprocess with shared memory and a semaphore, as vLLM does. The
# subprocess exits, and its objects are removed, when its standard input is closed, which happens
# even if this program is killed.
_SHARING_MODEL = """
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
import sys

context = get_context("spawn")
held = context.Semaphore(), SharedMemory(create=True, size=4096)
print(held[0]._semlock.name, held[1].name, flush=True)
sys.stdin.read()
"""
_SHARED_PROGRAM = """
children = ProcessTable()
read, write = os.pipe()
until_exit, _ = os.pipe()
between = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
command = [*between, sys.executable, "-c", sys.argv[1]]
with children.spawning():
    pid = os.posix_spawn(
        sys.executable, command, os.environ, file_actions=[
            (os.POSIX_SPAWN_DUP2, until_exit, 0), (os.POSIX_SPAWN_DUP2, write, 1),
            (os.POSIX_SPAWN_OPEN, 2, "/dev/null", 1, 0),
        ]
    )
    child = children.adopt(pid, "one")
with open(read) as pipe:
    semaphore, memory = pipe.readline().split()
paths = [f"/dev/shm/sem.{semaphore[1:]}", f"/dev/shm/{memory}"]
print([os.path.exists(path) for path in paths])
child.kill()
print(await child.exit_future)
await children.wait_for_trackers(60)
print([*map(os.path.exists, paths), *processes.children(os.getpid())])
"""


def test_a_stopped_process_is_continued_after_its_time_limit() -> None:
    """The supervisor was stopped as well, so it detects an expired time limit first."""
    assert output(_LATE_SIGNAL) == "signal 15\n"


def test_a_kill_by_the_kernel_is_told_from_one_by_an_operator() -> None:
    by_kernel = "signal 9: the kernel killed it for lack of memory True"
    assert output(_OOM_PROGRAM).splitlines() == ["signal 9 True", by_kernel, "signal 9 True"]


def test_children_are_reaped_without_a_free_descriptor() -> None:
    assert output(_NO_DESCRIPTOR_PROGRAM) == "exit status 0\n"


def test_an_end_that_cannot_be_dealt_with() -> None:
    """The exception is logged, and the next exit is handled."""
    lines = sorted(output(_TROUBLE_PROGRAM).splitlines())
    assert lines == [
        "RuntimeError('one')",
        "RuntimeError('other')",
        "the exit of one could not be handled; some of its resources may stay reserved",
        "the exit of other could not be handled; some of its resources may stay reserved",
    ]


def test_a_process_whose_maker_is_a_stray() -> None:
    """The unknown parent is killed with its other children; the known and the older one are not."""
    assert output(_BETWEEN_PROGRAM) == "signal 15 []\n"


def test_a_stray_that_is_starting_a_program_is_killed() -> None:
    assert output(_EXEC_PROGRAM) == ""


def test_strays_that_are_starting_programs_are_killed_later_by_one_timer() -> None:
    assert output(_RETRY_PROGRAM) == "True\n"


def test_a_stray_whose_main_thread_has_exited_is_killed() -> None:
    """The kernel shows no command line of such a process, either."""
    assert output(_THREAD_PROGRAM, _THREADED) == "False\n"


def test_shared_memory_of_a_killed_process_is_removed() -> None:
    """Python's resource tracker removes the objects of its program, and exits."""
    assert output(_SHARED_PROGRAM, _SHARING_MODEL) == "[True, True]\nsignal 9\n[False, False]\n"


def output(body: str, *arguments: str) -> str:
    """Return the output of a program, which must not log anything else."""
    run = run_table_program(body, *arguments)
    assert run.stderr == ""
    return run.stdout
