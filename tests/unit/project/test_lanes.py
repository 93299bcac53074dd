"""`make test` runs everything, and what failed once more."""

from pathlib import Path

import pytest

from tests.__main__ import FOLDER, LANES, MAX_RETRIED, Suite

# Each test writes a file about its run, which its second try reads.
TESTS = """
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def been_here(name):
    file = HERE / name
    return file.exists() or bool(file.write_text(""))


def test_passes():
    been_here("a")


@pytest.mark.parametrize("words", ["one::two [three] \\u00e9", "plain"])
def test_passes_late(words):
    assert been_here(words.split(":")[0]) or words == "plain", "the first time"


@pytest.fixture
def torn_down_badly():
    yield
    assert been_here("b"), "not yet"


def test_is_torn_down_late(torn_down_badly):
    pass


@pytest.mark.skip(reason="of no use")
def test_is_skipped():
    pass
"""
DIES_ONCE = """
import os
from pathlib import Path


def test_passes():
    pass


def test_dies():
    file = Path(__file__).with_name("died")
    if not file.exists():
        file.write_text("")
        os._exit(0)
"""
IS_IMPORTED_LATE = """
from pathlib import Path

file = Path(__file__).with_name("imported")
if not file.exists():
    file.write_text("")
    raise RuntimeError("not at first")


def test_passes():
    pass
"""
# These need no plugin, and each takes its time to load.
_PLUGINS = ("hypothesispytest", "schemathesis", "anyio", "cacheprovider")
BARE_OPTIONS = tuple(word for plugin in _PLUGINS for word in ("-p", f"no:{plugin}"))
NEVER_PASSES = "def test_fails(): assert False, 'in no way'"
DYING_TEST = "import os\ndef test_dies(): os._exit(0)"


def run_files(path: Path, capfd: pytest.CaptureFixture[str], **files: str) -> tuple[int, str, str]:
    """Run these files; return the exit status, the last line, and the other output."""
    (path / "pytest.ini").write_text("[pytest]\n")
    (path / "some").mkdir()
    for name, text in files.items():
        (path / "some" / f"test_{name}.py").write_text(text)
    status = Suite(path, [{"some": 1}, {"none": 1}], BARE_OPTIONS).run()
    *output, summary = capfd.readouterr().out.splitlines()
    return status, summary.rpartition(" in ")[0], "\n".join(output)


def test_every_file_is_in_one_piece() -> None:
    suite = Suite()
    files = [file for lane in LANES for piece in suite.pieces(lane) for file in piece]
    assert sorted(files) == sorted(map(str, FOLDER.rglob("test_*.py")))


def test_a_pass_on_the_second_try_is_a_pass_and_is_listed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, summary, output = run_files(tmp_path, capfd, some=TESTS, late=IS_IMPORTED_LATE)
    assert (status, summary) == (0, "5 passed, 0 failed, 1 skipped")
    table = output.partition("== passed only on the second try: 3\n")[2]
    listed_lines = [line for line in table.splitlines() if not line.startswith("    |")]
    assert listed_lines == [
        "some/test_late.py",
        "some/test_some.py::test_passes_late[one::two [three] \\xe9]",
        "some/test_some.py::test_is_torn_down_late",
    ]
    for text in ("RuntimeError: not at first", "AssertionError: the first time", "not yet"):
        assert f"    | E   {text}" in table or text in table


def test_a_test_that_fails_twice_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, summary, output = run_files(tmp_path, capfd, some=TESTS, never=NEVER_PASSES)
    assert (status, summary) == (1, "4 passed, 1 failed, 1 skipped")
    assert output.count("in no way") >= 2


def test_tests_of_dead_processes_rerun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, summary, output = run_files(tmp_path, capfd, dies=DIES_ONCE)
    assert (status, summary) == (0, "2 passed, 0 failed, 0 skipped")
    assert "some/test_dies.py\n    | the process of these files did not come to its end" in output


def test_a_process_that_dies_twice_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_files(tmp_path, capfd, dies=DYING_TEST)[:2] == (1, "0 passed, 1 failed, 0 skipped")


def test_many_failures_are_not_retried(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tests = "\n".join(f"def test_{n}(): assert 0" for n in range(MAX_RETRIED + 1))
    status, summary, output = run_files(tmp_path, capfd, many=tests)
    assert (status, summary) == (1, f"0 passed, {MAX_RETRIED + 1} failed, 0 skipped")
    assert "nothing is tried again" in output
