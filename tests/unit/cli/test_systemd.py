"""`shmserve systemd`: the written units, checked by systemd's own tools, and no other change."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shmserve import cli
from shmserve.cli import systemd
from shmserve.config import command_line
from shmserve.supervisor.host.service_manager import LISTENER_NAMES

SYSTEM = Path("etc/systemd/system")


def run(verb: str, root: Path, *arguments: str) -> int:
    """Run the command for an image, with a program whose path exists wherever the tests run."""
    return cli.main(["systemd", verb, f"--root={root}", "--program=/bin/sh", *arguments])


def run_tool(name: str, *arguments: str | Path) -> str:
    """Return the output of one of systemd's tools, which must exit with 0."""
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here")
    completed = subprocess.run([name, *arguments], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout + completed.stderr


def list_files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


@pytest.fixture(params=["cpu", "nvidia"])
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    token = tmp_path / "etc/shmserve/token"
    token.parent.mkdir(parents=True)
    token.write_text("0123456789abcdef\n")
    assert run("install", tmp_path, f"--device={request.param}") == 0
    assert (tmp_path / SYSTEM / f"shmserve.service.d/10-{request.param}.conf").exists()
    return tmp_path


def test_systemd_analyze_accepts_the_units(image: Path) -> None:
    units = [image / SYSTEM / name for name in systemd.UNITS]
    assert run_tool("systemd-analyze", "verify", "--man=no", *units) == ""


@pytest.mark.parametrize("service", systemd.SERVICES)
def test_a_service_passes_the_security_analysis_of_systemd(image: Path, service: str) -> None:
    """1.5 of 10, by systemd's own count."""
    unit = image / SYSTEM / service
    run_tool("systemd-analyze", "security", "--offline=true", "--threshold=15", unit)


def test_user_and_folders_are_made(image: Path) -> None:
    run_tool("systemd-sysusers", "--dry-run", f"--root={image}")
    run_tool("systemd-sysusers", f"--root={image}")
    assert "shmserve:" in (image / "etc/passwd").read_text()
    assert "shmclients:" in (image / "etc/group").read_text()
    run_tool("systemd-tmpfiles", f"--root={image}", "--create")
    assert (image / "var/lib/shmserve/models").is_dir()
    assert (image / "run/shmserve").is_dir()


def test_the_units_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home_folder = tmp_path / "a home"
    for name, folder in (("CONFIG_HOME", "c"), ("DATA_HOME", "d"), ("RUNTIME_DIR", "r")):
        monkeypatch.setenv(f"XDG_{name}", str(home_folder / folder))
    (home_folder / "r").mkdir(parents=True)
    assert cli.main(["systemd", "install", "--user"]) == 0
    assert "\nrun " not in capsys.readouterr().out  # no manager of this user's runs
    units = [home_folder / "c/systemd/user" / name for name in systemd.UNITS]
    assert not (home_folder / "c/systemd/user/shmserve.service.d").exists()
    repository = command_line.read(str(home_folder / "c/shmserve/shmserve.yaml")).repeated
    assert repository == {"model-repository": [str(home_folder / "d/shmserve/models")]}
    run_tool(
        "systemd-tmpfiles",
        f"--root={tmp_path / 'root'}",
        "--create",
        str(home_folder / "c/user-tmpfiles.d/shmserve.conf"),
    )
    assert run_tool("systemd-analyze", "--user", "verify", "--man=no", *units) == ""
    assert cli.main(["systemd", "remove", "--user"]) == 0
    assert list_files(home_folder) == set()


def test_relative_folders_of_a_user_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, "folder")
    assert cli.main(["systemd", "show", "--user"]) == 0
    shown = capsys.readouterr().out
    assert f"## {tmp_path}/.config/shmserve/shmserve.yaml" in shown
    assert f"{tmp_path}/.local/share/shmserve/models" in shown


def test_written_flags_are_valid(tmp_path: Path) -> None:
    assert run("install", tmp_path) == 0
    options = command_line.read(str(tmp_path / "etc/shmserve/shmserve.yaml"))
    assert options.values == {"shm-group": "shmclients"}
    assert options.repeated == {"model-repository": ["/var/lib/shmserve/models"]}
    names = [
        line.partition("=")[2]
        for unit in (tmp_path / SYSTEM).glob("*[!@].socket")
        for line in unit.read_text().splitlines()
        if line.startswith("FileDescriptorName=")
    ]
    assert sorted(names) == sorted(LISTENER_NAMES)


def test_existing_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "etc/shmserve/shmserve.yaml"
    unit = tmp_path / SYSTEM / "shmserve.service"
    assert run("install", tmp_path, "--dry-run") == 0
    assert list_files(tmp_path) == set()
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("would write ") for line in lines)
    assert run("install", tmp_path) == 0
    capsys.readouterr()
    assert run("install", tmp_path) == 0
    assert not {"written", "updated", "kept"} & set(capsys.readouterr().out.split())
    # Settings of the operator are kept and written to the unit.
    with file.open("a") as stream:
        stream.write("exit-timeout-secs: 100\n")
    assert run("install", tmp_path) == 0
    captured = capsys.readouterr().out
    assert f"kept       {file}" in captured and "    -exit-timeout-secs: 100\n" in captured
    assert "    -TimeoutStopSec=40\n" in captured and "    +TimeoutStopSec=110\n" in captured
    # A changed unit is overwritten only with --force.
    original_unit = unit.read_text()
    unit.write_text(original_unit.replace("RestartSec=1", "RestartSec=9"))
    assert run("install", tmp_path) == 1
    captured = capsys.readouterr().out
    assert f"kept       {unit}" in captured and "    -RestartSec=9\n" in captured
    assert captured.count("--force") == 1
    assert "RestartSec=9" in unit.read_text()
    assert run("install", tmp_path, "--force") == 0
    assert unit.read_text() == original_unit
    assert "exit-timeout-secs" in file.read_text()
    # The drop-in of another device is removed.
    assert run("install", tmp_path, "--device=nvidia") == 0
    drop_ins = {path.name for path in (tmp_path / SYSTEM / "shmserve.service.d").iterdir()}
    assert drop_ins == {"10-nvidia.conf"}


def test_remove_keeps_only_files_that_other_programs_wrote(
    image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wants_folder = image / SYSTEM / "multi-user.target.wants"
    wants_folder.mkdir()
    for name in ("shmserve.service", "shmserve@blue.service", "other.service"):
        (wants_folder / name).symlink_to(f"/etc/systemd/system/{name}")
    (image / "var/lib/shmserve/models").mkdir(parents=True)
    changed_unit = image / SYSTEM / "shmserve.socket"
    changed_unit.write_text(changed_unit.read_text().replace(":8000", ":80"))
    flags = image / "etc/shmserve/shmserve.yaml"
    flags.write_text("[no YAML")  # nothing that stands there has to be right for it to go
    assert run("remove", image, "--dry-run") == 1
    assert (wants_folder / "shmserve.service").is_symlink()
    assert run("remove", image) == 1
    other_files = {"etc/shmserve/token", f"{SYSTEM}/multi-user.target.wants/other.service"}
    kept_files = {f"{SYSTEM}/shmserve.socket", str(flags.relative_to(image))}
    assert list_files(image) == other_files | kept_files
    assert run("remove", image, "--force") == 0
    assert list_files(image) == other_files
    assert not (image / "var/lib/shmserve").exists()
    assert "No units" not in capsys.readouterr().out
    assert run("remove", image) == 0
    assert f"No units are installed in {image / SYSTEM}." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("library", "type_"),
    [
        ("lib/systemd/libsystemd-shared-252.so", "notify\nExecReload="),
        ("lib/x86_64-linux-gnu/systemd/libsystemd-shared-253.so", "notify-reload\n#"),
        ("lib64/systemd/libsystemd-shared-257.9-2.fc42.so", "notify-reload\n#"),
        ("lib/other", "notify\nExecReload="),
    ],
)
def test_systemd_waits_for_a_reload_if_supported(tmp_path: Path, library: str, type_: str) -> None:
    file = tmp_path / "usr" / library
    file.parent.mkdir(parents=True)
    file.touch()
    assert run("install", tmp_path) == 0
    assert f"\nType={type_}" in (tmp_path / SYSTEM / "shmserve.service").read_text()


def test_a_closed_pipe_is_no_failure_to_write() -> None:
    command = [sys.executable, "-m", "shmserve", "systemd", "install", "--user", "--dry-run"]
    completed = subprocess.run(
        ["bash", "-c", '"$@" | true', "-", *command], capture_output=True, text=True, check=False
    )
    assert completed.stderr == ""


def test_show_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", tmp_path) == 0
    captured = capsys.readouterr().out
    assert "## /etc/systemd/system/shmserve.service: the server\n" in captured
    assert "ExecStart=/bin/sh serve --config=%E/shmserve/shmserve.yaml" in captured
    assert list_files(tmp_path) == set()


def test_a_program_that_the_unit_cannot_see_is_shown_and_previewed_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb, *arguments in (("show",), ("install", "--dry-run")):
        arguments = [*arguments, f"--root={tmp_path}", "--program=/tmp/venv/bin/shmserve"]
        assert cli.main(["systemd", verb, *arguments]) == 0
        captured = capsys.readouterr()
        assert "shmserve.service: the server\n" in captured.out
        assert "warning: --program: the units cannot read '/tmp/venv/bin/" in captured.err
        assert "python3 -m venv /opt/shmserve" in captured.err


@pytest.mark.parametrize(
    ("arguments", "expected_error"),
    [
        (["install", "--program=/home/me/shmserve"], "the units cannot read '/home/me/shmserve'"),
        (["install", "--program=/tmp/x"], "elsewhere, with a Python that is elsewhere, too"),
        (["install", "--program=/none/shmserve"], "--program: '/none/shmserve' does not exist"),
        (["show", "--program=shmserve"], "--program: 'shmserve' is not an absolute path"),
        (["show", "--user", "--root=/x"], "--root: an image has no service manager of a user"),
    ],
)
def test_impossible_options_are_rejected(
    arguments: list[str], expected_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["systemd", *arguments]) == 2
    assert expected_error in capsys.readouterr().err


def test_the_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = tmp_path / "etc/systemd/system/shmserve.service"
    unit.mkdir(parents=True)
    assert run("install", tmp_path, "--program=/usr/bin/true") == 2
    assert f"systemd install: cannot change '{unit}': Is a directory" in capsys.readouterr().err


def test_special_characters_are_escaped_for_systemd() -> None:
    assert systemd.quote("/opt/a-b_c.d/bin/x") == "/opt/a-b_c.d/bin/x"
    assert systemd.quote('/a b/100%/$x/"y') == '"/a b/100%%/$$x/\\"y"'
