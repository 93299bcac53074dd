"""The program `shmserve`: its exit statuses, and the messages of its verbs."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from shmserve import cli
from shmserve.cli import check, client, tune
from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.protocols import TransportError
from shmserve.supervisor.supervisor import Supervisor
from tests.support.servers import reply_once, run_python


def test_ctrl_c_during_the_start_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_serve", raise_interrupt)
    assert cli.main(["serve"]) == 130


def test_ctrl_c_during_the_imports_exits_with_130(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    completed = run_python("-m", "shmserve", "--version", env=environment)
    assert (completed.returncode, completed.stderr) == (130, "")
    (tmp_path / "argparse.py").unlink()
    text = """
    import os, signal, sys
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("as numpy") from None
    sys.path.remove(os.path.dirname(__file__))
    del sys.modules["numpy"]
    import numpy
    """
    (tmp_path / "numpy.py").write_text(textwrap.dedent(text))
    completed = run_python("-m", "shmserve", "client", "models", env=environment)
    assert (completed.returncode, completed.stderr) == (130, "")


def test_a_lack_of_memory_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_run", lambda _: bytearray(1 << 60))
    assert cli.main(["perf"]) == 1
    assert capsys.readouterr().err.startswith("shmserve: not enough memory")


def test_a_closed_output_pipe_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed_pipe:
        monkeypatch.setattr("sys.stdout", closed_pipe)
        assert cli.main(["--help"]) == 1


@pytest.mark.parametrize("words", [["--help"], ["guide", "models"], ["doctor"]])
def test_a_full_disk_is_reported_in_one_line(words: list[str]) -> None:
    command = [sys.executable, "-m", "shmserve", *words]
    with open("/dev/full", "wb") as full:
        completed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    reason = "shmserve: the output cannot be written: No space left on device\n"
    assert (completed.returncode, completed.stderr.decode()) == (1, reason)


def test_a_terminal_without_unicode_shows_a_page() -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ("-m", "shmserve", "guide", "--search", "confidence interval")
    completed = run_python(*words, env={**os.environ, **ascii_only})
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "perf" in completed.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("perf m --url http://127.0.0.1:1", "http://127.0.0.1:1: no response: Connection refused"),
        ("tune m --p99 9ms --url 127.0.0.1:1", "http://127.0.0.1:1: no response: Connection ref"),
        ("top --once --metrics-url 127.0.0.1:1", "http://127.0.0.1:1/live: [Errno 111] Conne"),
        ("profile m --metrics-url 127.0.0.1:1", "http://127.0.0.1:1/metrics: [Errno 111]"),
    ],
)
def test_an_unreachable_server_is_named(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert cli.main(words.split()) == 1
    assert capsys.readouterr().err.startswith(f"shmserve: {message}")


@pytest.mark.parametrize("words", ["top --once", "profile m"])
@pytest.mark.parametrize("text", ["SSH-2.0\r\n", "HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n"])
def test_another_server_than_shmserve_is_named(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with reply_once(text.encode()) as port:
        assert cli.main([*words.split(), f"--metrics-url=127.0.0.1:{port}"]) in (1, 2)
    error = capsys.readouterr().err
    assert f"http://127.0.0.1:{port}" in error and error.count("\n") == 1


@pytest.mark.parametrize("words", ["top --once", "profile m"])
def test_an_address_of_metrics_is_a_host_or_a_url(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for address, text in (
        ("", "--metrics-url: the value is empty"),
        ("/x", "--metrics-url: cannot use '/x"),
        ("[::1]:9", "http://[::1]:9/"),
        ("localhost/metrics", "http://localhost/"),
    ):
        assert cli.main([*words.split(), f"--metrics-url={address}"]) in (1, 2)
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1


def test_check_reports_names_that_the_locale_lacks(tmp_path: Path) -> None:
    (tmp_path / "é").mkdir()
    (tmp_path / "é/config.pbtxt").write_text('backend: "none"')
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    completed = run_python("-m", "shmserve", "check", str(tmp_path), env=environment)
    assert completed.returncode == 2 and "FAILED" in completed.stdout


class InterruptedSupervisor:
    """A supervisor that receives a stop signal while models load."""

    ended_with = -1

    def __init__(self) -> None:
        self.end_signals: asyncio.Queue[int] = asyncio.Queue()
        self.end_signals.put_nowait(signal.SIGTERM)

    def open(self) -> None:
        pass

    async def end(self, status: int) -> None:
        self.ended_with = status


def test_check_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_forever(*_: Any) -> int:
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(check, "_report", run_forever)
    supervisor = InterruptedSupervisor()
    assert asyncio.run(check._check(cast("Supervisor", supervisor), {})) == 128 + signal.SIGTERM
    assert supervisor.ended_with == 1


@pytest.mark.parametrize("verb", [*cli._VERBS, *(f"client {verb}" for verb in client.VERBS)])
def test_each_verb_explains_itself(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    try:
        status: object = cli.main([*verb.split(), "--help"])
    except SystemExit as exit_error:
        status = exit_error.code
    captured = capsys.readouterr()
    assert status == 0 and "usage:" in captured.out and not captured.err


def test_tune_offers_no_flags_of_text_generation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", "--help"])
    offered = capsys.readouterr().out
    assert "--shared-memory" in offered
    assert "--openai" not in offered and "--max-tokens" not in offered


@pytest.mark.parametrize(
    ("verb", "hint"),
    [("srve", ", did you mean 'serve'?"), ("infer", ", did you mean 'client infer'?"), ("xyz", "")],
)
def test_unknown_verbs_are_named(capsys: pytest.CaptureFixture[str], verb: str, hint: str) -> None:
    assert cli.main([verb]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"shmserve: unknown verb '{verb}'{hint}"


@pytest.mark.parametrize(("kind", "status"), [(InvalidArgument, 2), (Unavailable, 1)])
def test_errors_are_printed_on_one_line_without_control_characters(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: type[ShmserveError],
    status: int,
) -> None:
    monkeypatch.setattr(cli, "_run", Mock(side_effect=kind("gr\xf6\xdfe:\n  \x1b[31m\0 end\n")))
    assert cli.main(["perf"]) == status
    assert capsys.readouterr().err == "shmserve: gr\xf6\xdfe: ?[31m? end\n"


def test_a_refused_load_leaves_nothing_to_restore(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = TransportError("the mode is none")
    server = Mock(**{"load.side_effect": refusal, "config.return_value": {"name": "m"}})
    with pytest.raises(TransportError), tune._restore_at_end(server, "m", {"name": "m"}):
        raise refusal
    assert capsys.readouterr().err == ""
    with pytest.raises(TransportError), tune._restore_at_end(server, "m", {"name": "x"}):
        raise refusal
    assert "`shmserve client load m` restores it" in capsys.readouterr().err


def test_a_second_interrupt_of_tune_says_how_to_restore_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Mock(**{"load.side_effect": KeyboardInterrupt})
    with pytest.raises(KeyboardInterrupt), tune._restore_at_end(server, "m", {}):
        pass
    assert "`shmserve client load m` restores it" in capsys.readouterr().err
