"""The configuration file: every flag by its name, and what the command line says counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.config import command_line, options, server
from shmserve.errors import InvalidArgument


def read(tmp_path: Path, text: str, *arguments: str) -> command_line.Parsed:
    """A command line beside a file with this text."""
    file = tmp_path / "shmserve.toml"
    file.write_text(text)
    return command_line.parse([f"--config={file}", *arguments])


@pytest.mark.parametrize("name", sorted(set(options.FLAGS) - {"config"}))
def test_the_file_takes_every_flag_as_the_command_line_does(tmp_path: Path, name: str) -> None:
    flag = options.FLAGS[name]
    text = {bool: "true", str: "text", int: f"{flag.low:.0f}", float: f"{flag.low}"}[flag.kind]
    value = flag.choices[-1] if flag.choices else text
    written = f'"{value}"' if flag.kind is str else value
    found = read(tmp_path, f"{name} = {written}")
    said = command_line.parse([f"--{name}={value}"])
    assert {**found.values, "config": None} == said.values
    assert (found.repeated, found.without_effect) == (said.repeated, said.without_effect)


def test_what_the_command_line_says_counts(tmp_path: Path) -> None:
    text = """
        http-port = 1  # a comment
        exit-timeout-secs = 7
        execution-timeout-secs = 1.5
        exit-on-error = false
        model-repository = ["/a", "/b"]
        backend-config = "python,a=1"
        model-control-mode = "poll"
        log-verbose = true
    """
    found = read(tmp_path, text, "--http-port=2", "--model-repository=/c", "--exit-on-error")
    assert found.repeated["model-repository"] == ["/c"]
    assert found.repeated["backend-config"] == ["python,a=1"]
    value = found.values
    assert (value["http-port"], value["exit-timeout-secs"], value["grpc-port"]) == (2, 7, 8001)
    assert (value["exit-on-error"], value["execution-timeout-secs"]) == (True, 1.5)
    assert (value["model-control-mode"], value["log-verbose"]) == ("poll", 1)


def test_a_file_is_all_that_a_server_needs(tmp_path: Path) -> None:
    found = server.from_flags(read(tmp_path, f"model-repository = '{tmp_path}'"), {})
    assert found.model_repositories == (tmp_path,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http-prot = 1", "http-prot: there is no such flag; did you mean http-port?"),
        ("xyzzy = 1", "xyzzy: there is no such flag; shmserve serve --help lists all flags"),
        ("http-port = 65536", "http-port: 65536 is out of range (allowed: 0 to 65535)"),
        ("http-port = true", "http-port: 'true' is not an integer"),
        ("http-port = 1.0", "http-port: '1.0' is not an integer"),
        ("http-port = [1]", "http-port: takes one value, not a list"),
        ("http-port = {a = 1}", "http-port: a table is no value of a flag"),
        ("[http-port]", "http-port: a table is no value of a flag"),
        ("strict-readiness = 'x'", "strict-readiness: 'x' is not a boolean (true or false)"),
        ("shm-overlap = 'x'", "shm-overlap: 'x' is not one of error, warn, ignore"),
        ("id = 1", 'id: takes a text ("...")'),
        ("load-model = [1]", 'load-model: takes a text ("...")'),
        ("id = 1979-05-27", "id: a date is no value of a flag"),
        ("config = 'x'", "config: a file cannot name another one"),
    ],
)
def test_an_error_names_file_key_and_what_is_allowed(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(tmp_path, text)
    assert caught.value.message == f"--config: '{tmp_path}/shmserve.toml': {says}"


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"shmserve.toml' is not TOML: .* \(at line 2, "):
        read(tmp_path, "id = 'a'\nhttp-port 8000")
    with pytest.raises(InvalidArgument, match="cannot read '/no/file': No such file"):
        command_line.parse(["--config=/no/file"])
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match=r"cannot read '.*binary': it is not UTF-8 text"):
        command_line.parse([f"--config={tmp_path}/binary"])
