"""The arguments, the flags and the errors of `shmserve.serve`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shmserve
from shmserve import serving, testing
from shmserve.errors import InvalidArgument


def test_the_error_of_a_failed_load_keeps_its_lines() -> None:
    log = (
        "E 2026-01-31T12:00:00.123Z supervisor[7] failed to load 'm' version 1: Internal: one\n"
        '    two: raise RuntimeError("one\\ntwo")\n'
        "I 2026-01-31T12:00:00.124Z supervisor[7] exited\n"
    )
    error = serving._start_error(log, 1, 1.0)
    assert str(error) == 'one\n    two: raise RuntimeError("one\\ntwo")'


def test_the_fixture_shows_the_output_of_the_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "I 2026-01-31T12 worker[7] loading\n", "printed\n", "E 2026-01-31T12 m.py:3: failed\n"
    (tmp_path / "log").write_text("".join(lines))
    server: Any = SimpleNamespace(log=tmp_path / "log", sources={Path("m.py"): Path("test_m.py")})
    testing._print_log(server)
    assert capsys.readouterr().out == "printed\nE 2026-01-31T12 test_m.py:3: failed\n"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (3, "not an instance of 'int'"),
        (None, "not a NoneType"),
        (len, "not a builtin_function_or_method"),
        ([Path(), object()], "not an instance of 'object'"),
        ([Path, Path], "two classes have the name 'Path'"),
    ],
)
def test_another_model_than_a_class_or_a_path_is_refused(models: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message), serving.serve(models):  # type: ignore[arg-type]
        raise AssertionError("entered")


@pytest.mark.parametrize("timeout", ["3", None])
def test_the_timeout_must_be_a_number(timeout: Any, tmp_path: Path) -> None:
    error = pytest.raises(InvalidArgument, match="timeout must be a number, got")
    with error, shmserve.serve(tmp_path, timeout=timeout):
        pass


def test_the_error_of_a_flag_does_not_name_the_command() -> None:
    error = serving._start_error("shmserve: --http-port: 'x'\nshmserve: --id: 'y'\n", 2, 1.0)
    assert str(error) == "--http-port: 'x'\n--id: 'y'"


def test_folders_of_the_same_name_are_refused(tmp_path: Path) -> None:
    folders = [tmp_path / name / "m" for name in ("a", "b")]
    for folder in folders:
        (folder / "1").mkdir(parents=True)
    error = pytest.raises(InvalidArgument, match="two models have the name 'm'")
    with error, shmserve.serve(folders):
        pass


def test_a_list_repeats_a_flag_and_none_omits_it() -> None:
    assert serving._format_flag("load_model", ["a", "b"]) == ["--load-model=a", "--load-model=b"]
    assert serving._format_flag("load_model", None) == []
    assert serving._format_flag("allow_grpc", True) == ["--allow-grpc=true"]
