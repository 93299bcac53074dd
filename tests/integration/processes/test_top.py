"""`shmserve top` in a terminal of 80 by 24 characters, with a real server."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.rigs import watched
from tests.support import repositories
from tests.support.servers import ROOT, Server, Start, run_command, running, write_tokens

FLAGS = ("--exit-on-error=false", "--strict-readiness=false", "--cache-config=local,size=1048576")


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    watched.add_models(models)
    return start(models, *FLAGS)


class Terminal:
    """A program in its own terminal, and the contents of its screen."""

    def __init__(self, *arguments: str, kind: str = "xterm-256color") -> None:
        self._ours, child_terminal = pty.openpty()
        fcntl.ioctl(child_terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shmserve", "top", *arguments],
            cwd=ROOT,
            env={**os.environ, "TERM": kind, "COLUMNS": "80", "LINES": "24"},
            stdin=child_terminal,
            stdout=child_terminal,
            stderr=child_terminal,
            start_new_session=True,
        )
        self._modes = termios.tcgetattr(child_terminal)
        self._theirs = child_terminal
        self._written = ""

    def screen(self) -> list[str]:
        """Return the lines of the last complete frame."""
        frame = self._written.rpartition("\x1b[H")[2]
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).replace("\r", "").split("\n")

    def wait(self, pattern: str, within_s: float = 20.0) -> list[str]:
        """Return the screen once its text matches a pattern."""
        deadline = time.monotonic() + within_s
        while not re.search(pattern, "\n".join(self.screen())):
            left_s = deadline - time.monotonic()
            assert left_s > 0, (pattern, self._written[-3000:])
            if select.select([self._ours], [], [], left_s)[0]:
                self._written += os.read(self._ours, 65536).decode(errors="replace")
        return self.screen()

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def close(self) -> None:
        """End the program; the terminal's settings must be restored."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._ours)


def terminal(*arguments: str, **options: str) -> contextlib.closing[Terminal]:
    return contextlib.closing(Terminal(*arguments, **options))


def test_top_is_controlled_by_keys(server: Server) -> None:
    url = f"--metrics-url=http://127.0.0.1:{server.metrics_port}/metrics"
    with watched.send_under_load(server), terminal(url) as opened:
        screen = opened.wait(r"(?s)MODEL.*broken.*crimes +\d\S* +\d.*broken: .*no such weight")
        assert len(screen) <= 24 and max(map(len, screen)) <= 80
        assert re.search(r"\d of 7 ready", screen[0])
        assert re.search(
            r"\d+ processes \S+ GiB PSS +\d died +0 regions .*arena \S+ +\d sequences", screen[1]
        )
        opened.wait(r"(?m)^\d\d:\d\d:\d\d  ModelChanged \w+ READY +$")
        opened.press("n")
        opened.wait(r"MODEL\*")
        opened.press("\x1b[B" * 2)
        opened.wait(r"(?m)^cached")
        opened.press("r")
        opened.wait(r"REQ/S\*")
        opened.press("\r")
        screen = opened.wait(r"(?s)closed by +\w+ \d+.*instances")
        assert len(screen) <= 24 and max(map(len, screen)) <= 80
        opened.press("\x1bn" + "k" * 9 + "jjjj\r")
        opened.wait("(?ms)^pipeline +$.*^steps +half  half")
        opened.press("q")
        assert opened.process.wait(10) == 0
        assert termios.tcgetattr(opened._theirs) == opened._modes, "the terminal is as it was"


def test_top_continues_after_a_restart(tmp_path: Path) -> None:
    repositories.add(tmp_path / "models", "identity")
    first_server = Server([tmp_path / "models"]).wait_ready()
    first_server.wait_named()
    ports = first_server.http_port, first_server.metrics_port
    with terminal(f"--metrics-url=http://127.0.0.1:{first_server.metrics_port}") as opened_terminal:
        opened_terminal.wait("1 of 1 ready")
        first_server.process.terminate()
        assert first_server.wait_exit(20) == 0
        opened_terminal.wait("the server has exited|refused")
        second_server = Server([tmp_path / "models"], ports=ports)
        try:
            second_server.wait_ready()
            second_server.wait_named()
            opened_terminal.wait("1 of 1 ready")
            opened_terminal.process.terminate()
            assert opened_terminal.process.wait(10) == 130
            assert termios.tcgetattr(opened_terminal._theirs) == opened_terminal._modes
        finally:
            first_server.discard()
            second_server.stop()


def test_top_without_a_terminal_prints_once(server: Server) -> None:
    url = f"--metrics-url=http://127.0.0.1:{server.metrics_port}"
    completed = run_command("top", url)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert re.search(r"(?m)^simple +", completed.stdout) and "UNAVAILA" in completed.stdout
    with terminal(url, kind="dumb") as opened:
        opened.wait(r"(?m)^simple +")
        assert opened.process.wait(10) == 0


def test_a_missing_server_and_a_missing_token_are_reported(tmp_path: Path) -> None:
    nobody = run_command("top", "--metrics-url=http://127.0.0.1:1")
    assert nobody.returncode == 1 and "] Connection refused; start a server by" in nobody.stderr
    assert len(nobody.stderr.splitlines()) == 1
    repositories.add(tmp_path / "models", "identity")
    tokens = write_tokens(tmp_path / "tokens", "a-token-for-metrics metrics")
    with running(tmp_path / "models", f"--auth-token-file={tokens}") as server:
        url = f"--metrics-url=http://127.0.0.1:{server.metrics_port}"
        error_text = run_command("top", url).stderr
        assert "requires a known token" in error_text and "--token-file" in error_text
        completed = run_command("top", url, f"--token-file={tokens}")
        assert completed.returncode == 0 and "identity" in completed.stdout
