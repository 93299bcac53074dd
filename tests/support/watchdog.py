"""A process that ends the servers of a test run, or of a benchmark, that was killed.

Fixtures end servers only if pytest comes to its end, and a server has a session of its own. This
process waits for the exit of its parent, and then ends the servers that are still registered. It
is started as a script and uses the standard library alone, because each pytest process has one.
"""

import contextlib
import functools
import os
import select
import shutil
import signal
import sys
import threading

_STOP_S = 20.0
# Seconds for lines that the parent wrote just before it exited.
_UNREAD_S = 1.0


def register(pid: int, folder: str) -> None:
    """End a server and remove its folder if this process exits before `unregister`."""
    _send(f"{pid} {folder}\n")


def unregister(pid: int) -> None:
    _send(f"{pid}\n")


@functools.cache
def start() -> int:
    """Start the process; return the descriptor of the pipe on which it reads registrations."""
    reading, writing = os.pipe()
    command = (sys.executable, "-S", __file__, str(os.getpid()))
    # Not an object of `subprocess`, which would warn when the interpreter exits.
    stdin = (os.POSIX_SPAWN_DUP2, reading, 0)
    os.posix_spawn(sys.executable, command, os.environ, file_actions=[stdin], setsid=True)
    os.close(reading)
    return writing


def _send(line: str) -> None:
    os.write(start(), line.encode())


def watch(parent: int) -> None:
    """Read registrations until the parent exits; then end the servers that are registered."""
    servers: dict[int, str] = {}
    parent_exit = os.pidfd_open(parent)
    # The end of the pipe is no sign of the parent's exit: forked children may keep it open.
    registrations = threading.Thread(target=_read, args=(servers,), daemon=True)
    registrations.start()
    select.select([parent_exit], [], [])
    registrations.join(timeout=_UNREAD_S)
    for pid, folder in list(servers.items()):
        end(pid)
        shutil.rmtree(folder, ignore_errors=True)


def _read(servers: dict[int, str]) -> None:
    for line in sys.stdin:
        pid, _, folder = line.rstrip("\n").partition(" ")
        if folder:
            servers[int(pid)] = folder
        else:
            servers.pop(int(pid), None)


def end(pid: int) -> None:
    """Send SIGTERM to a process, and SIGKILL if it has not exited 20 seconds later."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if not select.select([descriptor], [], [], _STOP_S)[0]:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
