"""The service manager's side of a server: notifications, descriptors, passed sockets."""

import contextlib
import fcntl
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.servers import ROOT

_OWN_LINE, _END_LINE = "TOLD_BY_ITSELF=1", "ENDS=1"


class Manager:
    """A service manager that reads all notifications and stores descriptors."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self._sock = sock
        self.address = address
        self.kept_descriptors: dict[str, list[int]] = {}
        self._received: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def receive(self, text: str) -> list[str]:
        message = [self._received.get(timeout=60)]
        while text not in message[-1]:
            message.append(self._received.get(timeout=60))
        return message

    def receive_all(self) -> list[str]:
        """Return the notifications so far, including those of processes that have exited."""
        self._send(_OWN_LINE)
        return self.receive(_OWN_LINE)[:-1]

    def _send(self, text: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(text.encode(), self.address)

    def _read(self) -> None:
        while (message := self._receive()) != _END_LINE:
            self._received.put(message)

    def _receive(self) -> str:
        data, fds, _, _ = socket.recv_fds(self._sock, 4096, 4)
        fields = dict(line.split("=", 1) for line in data.decode().split("\n"))
        if "FDSTORE" in fields:
            assert fields["FDPOLL"] == "0"
            self.kept_descriptors[fields["FDNAME"]] = fds
        elif "FDSTOREREMOVE" in fields:
            self._release(fields["FDNAME"])
        return data.decode()

    def _release(self, name: str) -> None:
        for fd in self.kept_descriptors.pop(name):
            os.close(fd)

    def close(self) -> None:
        """Stop reading, and close the stored descriptors."""
        self._send(_END_LINE)
        self._thread.join()
        for name in list(self.kept_descriptors):
            self._release(name)


@contextlib.contextmanager
def run_manager() -> Iterator[Manager]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        address = tempfile.mktemp(prefix="notify-")
        sock.bind(address)
        manager = Manager(sock, address)
        try:
            yield manager
        finally:
            manager.close()
            os.unlink(address)


def start(
    inherited_fds: Sequence[int], names: str, repository: Path, folder: Path, **environment: str
) -> subprocess.Popen[bytes]:
    """Start a server that receives these descriptors from number 3 on."""

    def renumber_descriptors() -> None:
        # Above the numbers that the server expects.
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in inherited_fds]
        for number, copy in enumerate(copies):
            os.dup2(copy, 3 + number)

    exec_with_own_pid = 'LISTEN_PID=$$ exec "$@"'
    return subprocess.Popen(
        [
            *("sh", "-c", exec_with_own_pid, "sh", sys.executable, "-m", "shmserve", "serve"),
            *(f"--model-repository={repository}", f"--run-dir={folder / 'run'}"),
            *("--metrics-port=0", "--grpc-port=0"),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            **environment,
            "LISTEN_FDS": str(len(inherited_fds)),
            "LISTEN_FDNAMES": names,
        },
        pass_fds=range(3, 3 + len(inherited_fds)),
        preexec_fn=renumber_descriptors,
    )
