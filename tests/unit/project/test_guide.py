"""README and guide: lengths, links, and the flags, verbs and configurations they show."""

import io
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from shmserve import cli
from shmserve.config.flags import FLAGS
from shmserve.ipc.engine_settings import PROFILES, EngineSettings, SpeculationSettings
from shmserve.model_config import normalise, read_pbtxt, validate
from tests.support.pages import GUIDE, PAGES, Block, blocks

CONTENTS = GUIDE / "contents.md"
BLOCKS = [(page, block) for page in PAGES for block in blocks(page)]
LANGUAGES_BY_USE = {
    "": {"", "text", "sh", "python", "pbtxt", "yaml", "json", "promql"},
    "run": {"sh", "python"},
    "serve": {"sh"},
    "prints": {"text"},
}


def parameter_id(value: object) -> str:
    return value.stem if isinstance(value, Path) else str(getattr(value, "use", value))


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text())


@cache
def known_flags(v: str) -> set[str]:
    if flags := {"check": ("--input", "--json", "--on-cpu"), "doctor": ("--json", "--peer")}.get(v):
        return known_flags("serve") | set(flags)
    if v == "serve":
        return {f"--{name}" for name in FLAGS}
    help_text = io.StringIO()
    with redirect_stdout(help_text), pytest.raises(SystemExit):
        cli.main([*v.split(), "--help"])
    return set(re.findall(r"--[a-z][a-z0-9-]+", help_text.getvalue()))


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    command_words = [
        shlex.split(part, comments=True)
        for line in lines
        for part in re.findall(r"(?:^|[\s(/])(shmserve (?:[^|;)&]|\|(?! ))*)", line)[:1]
    ]
    return [words[1:] for words in command_words]


def test_the_readme_is_a_front_page() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=parameter_id)
def test_links_have_targets(page: Path) -> None:
    for link in links(page):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=parameter_id)
def test_each_table_has_a_header(page: Path) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE)
    assert [table for table in tables if not re.match(r".*\n\|[-|]+\n", table)] == []


def test_the_contents_name_every_page() -> None:
    assert {GUIDE / link for link in links(CONTENTS)} >= set(PAGES[1:]) - {CONTENTS}


@pytest.mark.parametrize("page", PAGES, ids=parameter_id)
def test_each_block_has_a_purpose(page: Path) -> None:
    assert len(re.findall(r"^```", page.read_text(), re.MULTILINE)) == 2 * len(blocks(page))
    for block in blocks(page):
        assert block.is_file or block.language in LANGUAGES_BY_USE[block.use], block
        # A rendered page does not show the name after the language.
        shows_name = block.text.startswith(f"# {block.use}\n")
        assert shows_name or not block.use.endswith((".py", ".pbtxt", ".yaml")), block
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert "\n\n    " not in prose, "indented code says nothing of itself"


@pytest.mark.parametrize("page", PAGES, ids=parameter_id)
def test_commands_use_existing_flags(page: Path) -> None:
    code_blocks = [block.text for block in blocks(page) if block.language == "sh"]
    inline_commands = re.findall(r"`(shmserve [^`]+)`", page.read_text())
    for verb, *arguments in commands("\n".join(code_blocks + inline_commands)):
        if verb.startswith("--") or verb == "VERB":
            continue
        if verb == "client" and arguments and arguments[0].islower():
            verb = f"client {arguments[0]}"
        for flag in (word.partition("=")[0] for word in arguments if word.startswith("--")):
            assert flag in known_flags(verb) | {"--help"}, f"shmserve {verb} {flag}"


@pytest.mark.parametrize("page", PAGES, ids=parameter_id)
def test_flags_in_the_text_exist(page: Path) -> None:
    verbs = ("check", "doctor", "client infer", "events", "perf", "profile", "systemd", "tune")
    valid_flags = set().union(*map(known_flags, verbs))
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for flag in re.findall(r"`(--[a-z][a-z0-9-]+)[^`]*`", text):
        assert flag in valid_flags, flag


@pytest.mark.parametrize(
    ("page", "block"),
    [named_block for named_block in BLOCKS if named_block[1].language == "pbtxt"],
    ids=parameter_id,
)
def test_configurations_are_valid(page: Path, block: Block) -> None:
    is_complete = re.search("^(backend|platform):", block.text, re.MULTILINE)
    text = block.text if is_complete else f'backend: "python"\n{block.text}'
    config, source = read_pbtxt(text)
    validate(normalise(config, "m", 1), gpu_count=1, is_complete=False, source=source)


def engine_rows() -> list[list[str]]:
    """Return the cells of the tables about `engine.yaml`, without backquotes and separators."""
    lines = (GUIDE / "generation.md").read_text().partition("\n## The engine's")[2].splitlines()
    return [re.sub("[`,]", "", line).strip("| ").split(" | ") for line in lines if line[:1] == "|"]


def value_text(value: object) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value).lower()


def test_the_defaults_of_the_engine_are_on_its_page() -> None:
    defaults = {**asdict(EngineSettings(target_itl_ms=50)), **asdict(SpeculationSettings())}
    documented_values = {row[0]: row[1] for row in engine_rows() if len(row) == 3}
    assert documented_values.keys() >= defaults.keys() - {"swap_blocks"}
    derived = {"none", "the model's", "as many as fit", "by the template", "off"}
    for name in documented_values.keys() & defaults.keys() - {"speculative_decoding"}:
        is_derived = defaults[name] in ("", (), 0) and defaults[name] is not False
        assert is_derived == (documented_values[name] in derived), name
        assert is_derived or documented_values[name] == value_text(defaults[name]), name


def test_the_profiles_of_the_engine_are_on_its_page() -> None:
    header, *rows = (row for row in engine_rows() if len(row) == 4)
    for index, profile in enumerate(header[1:], start=1):
        documented = {row[0]: row[index].split()[0] for row in rows if row[index] != "unchanged"}
        assert documented == {name: value_text(value) for name, value in PROFILES[profile].items()}
