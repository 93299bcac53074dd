"""The configuration file: every flag by its name, and the precedence of the command line."""

import os
from pathlib import Path

import pytest

from shmserve import cli
from shmserve.config import command_line, flags, server
from shmserve.errors import InvalidArgument


def read_options(tmp_path: Path, text: str, *arguments: str) -> command_line.Parsed:
    file = tmp_path / "shmserve.yaml"
    file.write_text(text)
    return command_line.parse([f"--config={file}", *arguments])


@pytest.mark.parametrize("name", sorted(set(flags.FLAGS) - {"config"}))
def test_the_file_takes_every_flag_as_the_command_line_does(tmp_path: Path, name: str) -> None:
    flag = flags.FLAGS[name]
    text = {bool: "true", str: "text", int: f"{flag.low:.0f}", float: f"{flag.low}"}[flag.kind]
    value = flag.choices[-1] if flag.choices else text
    yaml_value = f'"{value}"' if flag.kind is str else value
    options = read_options(tmp_path, f"{name}: {yaml_value}")
    from_flags = command_line.parse([f"--{name}={value}"])
    assert {**options.values, "config": None} == from_flags.values
    assert options.repeated == from_flags.repeated
    assert options.without_effect == from_flags.without_effect


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    text = """
        http-port: 1  # a comment
        exit-timeout-secs: 7
        execution-timeout-secs: 1.5
        exit-on-error: no
        model-repository: [/a, "/b"]
        backend-config: python,a=1
        model-control-mode: poll
        log-verbose: true
        id: 2026-01-31
    """
    options = read_options(
        tmp_path, text, "--http-port=2", "--model-repository=/c", "--exit-on-error"
    )
    assert options.repeated["model-repository"] == ["/c"]
    assert options.repeated["backend-config"] == ["python,a=1"]
    value = options.values
    assert (value["http-port"], value["exit-timeout-secs"], value["grpc-port"]) == (2, 7, 8001)
    assert (value["exit-on-error"], value["execution-timeout-secs"]) == (True, 1.5)
    assert (value["model-control-mode"], value["log-verbose"]) == ("poll", 1)
    assert value["id"] == "2026-01-31"  # a string is taken literally


def test_a_file_is_all_that_a_server_needs(tmp_path: Path) -> None:
    settings = server.from_flags(read_options(tmp_path, f"model-repository: '{tmp_path}'"), {})
    assert settings.model_repositories == (tmp_path,)
    assert read_options(tmp_path, "# nothing yet\n").repeated == command_line.parse([]).repeated


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("http-prot: 1", "1: http-prot: there is no such flag; did you mean http-port?"),
        ("http_port: 1", "1: http_port: there is no such flag; did you mean http-port?"),
        ("xyzzy: 1", "1: xyzzy: there is no such flag; shmserve serve --help lists all flags"),
        ("[1]: 1", "1: a list or a mapping: there is no such flag; shmserve serve --help"),
        ("http-port: 65536", "1: http-port: 65536 is out of range (allowed: 0 to 65535)"),
        ("http-port: true", "1: http-port: 'true' is not an integer"),
        ("http-port: 1_0", "1: http-port: '1_0' is not an integer"),
        ("http-port: [1]", "1: http-port: takes one value, not a list"),
        ("http-port: {a: 1}", "1: http-port: expected a value, found a mapping"),
        ("load-model: [[a]]", "1: load-model: expected a value, found a list"),
        ("load-model: [a, ]\nid:", "2: id: a value is missing"),
        ('id: "a\\0b"', "1: id: the value contains a NUL character"),
        ("id: a\n\nid: b", "3: id: already set in line 1"),
        ("strict-readiness: x", "1: strict-readiness: 'x' is not a boolean (true or false)"),
        ("shm-overlap: 'x'", "1: shm-overlap: 'x' is not one of error, warn, ignore"),
        ("config: x", "1: config: a configuration file cannot include another file"),
        ("http-port = 1", "1: expected a mapping (FLAG: VALUE), found a string"),
        ("- id: a", "1: expected a mapping (FLAG: VALUE), found a list"),
        ("id: a\nid b", "2: invalid YAML: could not find expected ':'"),
        ("id: *a", "1: invalid YAML: found undefined alias"),
        ("id: a\n---\nid: b", "2: invalid YAML: but found another document"),
    ],
)
def test_errors_name_file_line_key_allowed_values(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_options(tmp_path, text)
    assert caught.value.message.startswith(f"--config: '{tmp_path}/shmserve.yaml' line {error}")


def test_errors_are_reported_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shmserve.yaml"
    file.write_text('id: a\n"gate\\nways": 2\nhttp-port: x\ngateways: 100\n')
    assert cli.main(["serve", f"--config={file}"]) == 2
    start = f"shmserve: --config: '{file}' line"
    assert capsys.readouterr().err.splitlines() == [
        f"{start} 2: gate\\nways: there is no such flag; did you mean gateways?",
        f"{start} 3: http-port: 'x' is not an integer",
        f"{start} 4: gateways: 100 is out of range (allowed: 1 to 64)",
    ]


def test_a_value_that_no_server_accepts_is_reported_with_its_line(tmp_path: Path) -> None:
    text = "model-repository: /no/models"
    with pytest.raises(InvalidArgument) as caught:
        server.from_flags(read_options(tmp_path, text), {})
    start = f"--config: '{tmp_path}/shmserve.yaml' line 1: --model-repository: '/no/models'"
    assert caught.value.message.startswith(start)
    with pytest.raises(InvalidArgument, match=r"^--model-repository: "):
        server.from_flags(read_options(tmp_path, text, "--model-repository=/none"), {})


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read '/no/file': No such file"):
        command_line.parse(["--config=/no/file"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match=r"'.*pipe': it is a pipe without content"):
        command_line.parse([f"--config={tmp_path}/pipe"])
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match=r"shmserve.yaml': invalid YAML: nested too"):
        read_options(tmp_path, "id: " + "[" * 20_000)
    with pytest.raises(InvalidArgument, match=r"cannot read '.*binary': it is not UTF-8 text"):
        command_line.parse([f"--config={tmp_path}/binary"])
    (tmp_path / "binary").write_bytes(b"id: \x01")
    with pytest.raises(InvalidArgument, match=r"'.*binary': invalid YAML: "):
        command_line.parse([f"--config={tmp_path}/binary"])
