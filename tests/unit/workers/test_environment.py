"""The Python environment of a model: unpacking, the interpreter, and its requirements."""

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from shmserve.errors import InvalidArgument
from shmserve.ipc.class_source import class_attribute
from shmserve.workers.environment import (
    _check_interpreter,
    _find_interpreter,
    _locate_environment,
)

Member = tuple[str, bytes, str]  # the name, the type for tarfile, and the target of a link


def archive(path: Path, *members: Member, mode: int = 0o6755) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, kind, link_target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode, member.mtime = kind, link_target, mode, 1e9
            member.size = 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"text"))
    return path


def test_an_archive_is_unpacked(tmp_path: Path) -> None:
    packed_archive = archive(
        tmp_path / "env.tar.gz",
        ("./bin/python3.11", tarfile.REGTYPE, ""),
        ("bin/python", tarfile.SYMTYPE, "python3.11"),
        ("bin/same", tarfile.LNKTYPE, "bin/python3.11"),
        ("lib64", tarfile.SYMTYPE, "lib"),
        ("lib/deep/module.py", tarfile.REGTYPE, ""),
        ("lib", tarfile.DIRTYPE, ""),
    )
    python = _find_interpreter(packed_archive, tmp_path / "copies")
    root = python.parent.parent
    assert python.resolve() == root / "bin" / "python3.11"
    assert (root / "lib64" / "deep" / "module.py").read_text() == "text"
    status = (root / "bin" / "same").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime) == (0o755, 1e9)
    # The archive is not unpacked a second time.
    assert _find_interpreter(packed_archive, tmp_path / "copies") == python


def test_symbolic_links_may_lead_outside(tmp_path: Path) -> None:
    packed_archive = archive(
        tmp_path / "env.tar",
        ("README", tarfile.REGTYPE, ""),
        ("env/bin/python3", tarfile.SYMTYPE, "/usr/bin/env"),
        ("env/share/zoneinfo", tarfile.SYMTYPE, "/usr/share/zoneinfo"),
        ("env/up", tarfile.SYMTYPE, "../../.."),
    )
    interpreter = _find_interpreter(packed_archive, tmp_path / "copies")
    assert interpreter.parts[-3:] == ("env", "bin", "python3")
    assert os.readlink(interpreter.parents[1] / "up") == "../../.."


@pytest.mark.parametrize(
    "members",
    [
        [("../out", tarfile.REGTYPE, "")],
        [("lib/../../out", tarfile.REGTYPE, "")],
        [("same", tarfile.LNKTYPE, "../../out")],
        [("bin/python3", tarfile.SYMTYPE, ".."), ("bin/python3/out", tarfile.REGTYPE, "")],
        [("bin/python", tarfile.CHRTYPE, "")],
        [("bin/python", tarfile.FIFOTYPE, "")],
    ],
)
def test_nothing_is_written_outside(tmp_path: Path, members: list[Member]) -> None:
    packed_archive = archive(tmp_path / "env.tar.gz", *members)
    (tmp_path / "out").write_text("before")
    with pytest.raises(InvalidArgument, match="cannot be unpacked"):
        _find_interpreter(packed_archive, tmp_path / "copies")
    assert (tmp_path / "out").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"copies", "env.tar.gz", "out"}


def test_an_absolute_name_is_relative_to_the_folder(tmp_path: Path) -> None:
    packed = archive(tmp_path / "env.tar.gz", ("/bin/python", tarfile.REGTYPE, ""))
    assert _find_interpreter(packed, tmp_path / "copies").is_relative_to(tmp_path / "copies")


@pytest.mark.parametrize("variable", ["$TRITON_MODEL_DIRECTORY", "${TRITON_MODEL_DIRECTORY}"])
def test_the_message_about_a_variable_with_one_dollar_sign(variable: str) -> None:
    start = SimpleNamespace(environment=f"{variable}/env", model_dir=Path("m"), version="1")
    with pytest.raises(InvalidArgument, match=r"write \$\$TRITON_MODEL_DIRECTORY, with two"):
        _locate_environment(start)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\3\4", b"half"])
def test_a_file_that_is_no_archive(tmp_path: Path, content: bytes) -> None:
    path = archive(tmp_path / "env.tar.gz", ("bin/python", tarfile.REGTYPE, ""))
    path.write_bytes(path.read_bytes()[:60] if content == b"half" else content)
    reason = "end-of-stream" if content == b"half" else "expected a tar archive"
    with pytest.raises(InvalidArgument, match=f"cannot be unpacked: .*{reason}"):
        _find_interpreter(path, tmp_path / "copies")


def test_the_interpreter_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no bin/python: name the folder"):
        _find_interpreter(tmp_path, tmp_path / "copies")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/nowhere/python3.9")
    with pytest.raises(InvalidArgument, match=r"a link to '/nowhere/python3\.9', which is missing"):
        _find_interpreter(tmp_path, tmp_path / "copies")
    standalone = tmp_path / "standalone" / "python" / "bin" / "python3"
    standalone.parent.mkdir(parents=True)
    standalone.touch(0o755)
    assert _find_interpreter(tmp_path / "standalone", tmp_path) == standalone
    assert _find_interpreter(standalone, tmp_path) == standalone


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a shell script as the interpreter of a `bin` folder."""
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()

    def write(text: str) -> Path:
        path.write_text(text)
        path.chmod(0o755)
        return path

    return write


@pytest.mark.parametrize(
    ("printed_text", "problem"),
    [
        ('[[3, 11, 0], "1.26.4"]', ""),
        ('[[3, 14, 1], "2.4.0.dev0"]', ""),
        ('[[3, 10, 13], "1.26.4"]', "has Python 3.10.13, and a worker needs 3.11 or later"),
        ('[[3, 12, 1], "ImportError"]', "has no numpy for its Python 3.12.1.*pip install"),
        ('[[3, 11, 2], "1.24.4"]', "has numpy 1.24.4, and a worker needs 1.26 or later.*pack"),
    ],
)
def test_an_interpreter_must_meet_the_requirements(
    script: Callable[[str], Path], printed_text: str, problem: str
) -> None:
    python = script(f"#!/bin/sh\necho a line of a site package\necho '{printed_text}'\n")
    if not problem:
        assert _check_interpreter(python) == python
        return
    with pytest.raises(InvalidArgument, match=problem):
        _check_interpreter(python)


def test_an_interpreter_that_does_not_run(script: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidArgument, match=r"status 4 at its start: no libpython"):
        _check_interpreter(script("#!/bin/sh\necho no libpython >&2\nexit 4\n"))
    with pytest.raises(InvalidArgument, match=r"cannot be run: .*Exec format error"):
        _check_interpreter(script("\x7fELF of a different processor"))
    os.chmod(script(""), 0o644)
    with pytest.raises(InvalidArgument, match=r"cannot be run: .*Permission denied"):
        _check_interpreter(script("").parent)


SOURCE = """
class Base:
    environment: str = "of the base"
class Model(Base):
    environment = "first"
    environment = "last"
    size = [1, 2]
class Heir(Model):
    computed = str(1)
"""


def test_the_attribute_of_a_class_in_a_text() -> None:
    assert class_attribute(SOURCE, "Model", "environment") == "last"
    assert class_attribute(SOURCE, "Heir", "environment") == "last"
    assert class_attribute(SOURCE, "Base", "environment") == "of the base"
    assert class_attribute(SOURCE, "Model", "size") == [1, 2]
    assert class_attribute(SOURCE, "Model", "absent") is None
    assert class_attribute("class Model(", "Model", "environment") is None
    with pytest.raises(InvalidArgument, match=r"9:5: 'Heir.computed' must be a literal"):
        class_attribute(SOURCE, "Heir", "computed")
