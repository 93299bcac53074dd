"""The prose of the tree: docstrings, comments, pages and messages in plain technical English.

The rules find suspects, not faults. A bound is the number of suspects in 100 sentences. To list the
suspects: `python -m tests.unit.project.test_prose [FOLDER ...]`.
"""

import ast
import functools
import io
import os
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
CODE_FOLDERS = ("shmserve", "workers", "ipc", "bench")
API = (
    "shmserve/model.py",
    "shmserve/client",
    "shmserve/testing.py",
    "workers/backends/__init__.py",
)

# A sentence, or a message, that begins with a relative clause or a pronoun.
HEADLESS = re.compile(
    r"(What|Who|Whoever|Whose|Nobody|Those|That|Such|As `|It|So|Of|Where|None of|These|They)\b"
)
# A program element with a verb of persons.
PERSONIFIED = re.compile(
    r"\b(told|tells|tell|says|said|say|hears|heard|hear|wants|wanted|knows|forgets|forgotten"
    r"|spoken|asks nobody)\b",
    re.IGNORECASE,
)
# A pronoun in place of a noun.
VAGUE_NOUNS = re.compile(
    r"\b(what is|that is none|is none|there is none|the same of|who has|who is|of which|in which"
    r"|whoever|nobody|but for)\b",
    re.IGNORECASE,
)
NO_VERB = re.compile(
    r"(The|A|An|Whether|What|Where|How|Who|That|It|As|None|All|Any|One|Some|This|These|Its|Their|In"
    r"|Of|For|If|When|So)\b|\W"
)
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`(])|\n\s*\n|\n\s*[-*|#]")
MAX_WORDS = 28  # words

MAX_PERCENT = {
    "docstring": {"headless": 0.9, "long": 1.3, "personified": 0.1, "vague": 0.8},
    "comment": {"headless": 0.9, "long": 2.1, "personified": 0.2, "vague": 0.5},
    "page": {"headless": 1.5, "long": 1.8, "personified": 0.1, "vague": 0.4},
}
NO_VERB_PERCENT = 0.2  # percent of the functions' docstrings


class Text(NamedTuple):
    """A piece of prose, and where it stands."""

    where: str
    kind: str  # a key of MAX_PERCENT
    text: str
    of_function: bool = False


def files(roots: Iterable[str], suffix: str) -> Iterator[Path]:
    """Return the files of folders, without generated ones."""
    for root in roots:
        if (ROOT / root).is_file():
            yield ROOT / root
        for folder, folders, names in os.walk(ROOT / root):
            folders[:] = [name for name in folders if not (Path(folder) / name).is_symlink()]
            yield from (Path(folder) / n for n in names if n.endswith(suffix) and "_pb2" not in n)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def docstrings(path: Path) -> Iterator[Text]:
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                location = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                yield Text(location, "docstring", text, function)


def comments(path: Path) -> Iterator[Text]:
    """Yield the comments of a module. Adjacent lines are one comment, unless they follow code."""
    run: list[tokenize.TokenInfo] = []
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    for token in [*(candidate for candidate in tokens if candidate.type == tokenize.COMMENT), None]:
        if run and (
            token is None
            or token.start[0] != run[-1].start[0] + 1
            or any(comment.line[: comment.start[1]].strip() for comment in (token, run[-1]))
        ):
            location = f"{path.relative_to(ROOT)}:{run[0].start[0]}"
            yield Text(
                location, "comment", " ".join(comment.string.lstrip("# ") for comment in run)
            )
            run = []
        if token is not None:
            run.append(token)


def pages() -> Iterator[Text]:
    """Return the Markdown pages without their code."""
    for path in files(("README.md", *CODE_FOLDERS), ".md"):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        yield Text(str(path.relative_to(ROOT)), "page", text)


def texts(roots: Iterable[str] = CODE_FOLDERS) -> Iterator[Text]:
    """Return all docstrings and comments below these folders."""
    for path in files(roots, ".py"):
        yield from docstrings(path)
        yield from comments(path)


def suspects(text: str) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of sentences of a text, and the suspects: (rule, sentence)."""
    count, suspects_found = 0, []
    for sentence in SENTENCE_END.split(text):
        words = sentence.split()
        if len(words) >= 3:
            count += 1
            joined_words = " ".join(words)
            matches = {
                "headless": HEADLESS.match(joined_words),
                "long": len(words) > MAX_WORDS,
                "personified": PERSONIFIED.search(joined_words),
                "vague": VAGUE_NOUNS.search(joined_words),
            }
            suspects_found += [(rule, joined_words) for rule, match in matches.items() if match]
    return count, suspects_found


@pytest.mark.parametrize("kind", MAX_PERCENT)
def test_few_sentences_are_suspect(kind: str) -> None:
    counts: Counter[str] = Counter()
    sentences = 0
    for text in pages() if kind == "page" else texts():
        if text.kind == kind:
            count, hits = suspects(text.text)
            sentences += count
            counts.update(rule for rule, _ in hits)
    rates = {rule: 100 * counts[rule] / sentences for rule in MAX_PERCENT[kind]}
    assert not {rule: rate for rule, rate in rates.items() if rate > MAX_PERCENT[kind][rule]}


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    of_functions = [text for text in texts() if text.of_function]
    without_verb = [text.where for text in of_functions if NO_VERB.match(text.text)]
    assert 100 * len(without_verb) / len(of_functions) <= NO_VERB_PERCENT, without_verb


# --- rules that ruff's D does not check ---------------------------------------------------------


def test_public_methods_have_a_docstring_of_their_own_or_of_a_base_class() -> None:
    """Ruff would require docstrings that only repeat those of the base class."""
    classes: dict[str, list[ast.ClassDef]] = {}
    class_paths: dict[ast.ClassDef, Path] = {}
    for path in files(CODE_FOLDERS, ".py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
                class_paths[node] = path

    def documented(cls: ast.ClassDef, name: str) -> bool:
        own_definitions = (found for found in cls.body if getattr(found, "name", "") == name)
        if any(ast.get_docstring(found) for found in own_definitions):  # type: ignore[arg-type]
            return True
        bases = (re.split(r"[\[.]", ast.unparse(base).split("[")[0])[-1] for base in cls.bases)
        return any(documented(found, name) for base in bases for found in classes.get(base, []))

    undocumented = [
        f"{path.relative_to(ROOT)}:{method.lineno} {cls.name}.{method.name}"
        for cls, path in class_paths.items()
        if not cls.name.startswith("_")
        and not {ROOT / "bench" / "models", ROOT / "bench" / "peers" / "servers"}
        & set(path.parents)
        for method in cls.body
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not method.name.startswith("_")
        and not documented(cls, method.name)
    ]
    assert not undocumented


DOCUMENTED = re.compile(r"^(?:Attributes|Args):\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
DOCUMENTED_NAME = re.compile(r"^ {4}\*{0,2}(\w+)(?: \(.*?\))?: ", re.MULTILINE)


def identifiers(node: ast.AST) -> set[str]:
    """Return the names in a class or a function, without those of its base classes."""
    fields = ("id", "attr", "arg", "name", "value")
    values = (getattr(child, field, None) for child in ast.walk(node) for field in fields)
    return {value for value in values if isinstance(value, str)}


def test_documented_attributes_and_arguments_exist() -> None:
    """A renamed attribute keeps its old name in the docstring otherwise."""
    nodes = [(p, n) for p in files((*CODE_FOLDERS, "tests"), ".py") for n in ast.walk(tree(p))]
    names_by_class: dict[str, set[str]] = {}
    for _, n in nodes:
        if isinstance(n, ast.ClassDef):
            names_by_class.setdefault(n.name, set()).update(identifiers(n))
    missing = []
    for p, n in nodes:
        if not isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        existing = identifiers(n)
        if isinstance(n, ast.ClassDef):
            bases = set().union(*map(identifiers, n.bases))
            existing |= {name for base in bases for name in names_by_class.get(base, ())}
        elif any("signature_of" in identifiers(decorator) for decorator in n.decorator_list):
            continue  # its arguments are those of another function
        sections = "".join(DOCUMENTED.findall(ast.get_docstring(n) or ""))
        unknown = set(DOCUMENTED_NAME.findall(sections)) - existing
        missing += [f"{p.relative_to(ROOT)}:{n.lineno} {name}" for name in unknown]
    assert not missing


BACKTICKED = re.compile(r"`([a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)*|_[A-Za-z0-9_]+)`")
NAMES_OF_OTHERS = {"import_path", "max_digits"}  # of Ray Serve and pydantic


def test_names_in_backticks_exist() -> None:
    """A name that was changed stays in other docstrings and comments otherwise."""
    words, quoted = set(NAMES_OF_OTHERS), []
    for path in files((*CODE_FOLDERS, "tests"), ".py"):
        nodes = list(ast.walk(tree(path)))
        documentation = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and node not in documentation:
                words.update(re.findall(r"\w+", str(node.value)))
        words.update(identifiers(tree(path)))
        for text in (*docstrings(path), *comments(path)):
            quoted += [(text.where, name) for name in BACKTICKED.findall(text.text)]
    assert [entry for entry in quoted if not words.issuperset(entry[1].split("."))] == []


# --- messages -----------------------------------------------------------------------------------

LOG_METHODS = {"debug", "info", "warning", "error", "critical", "exception", "log", "print"}
TEXT_ARGUMENTS = {"help", "description", "epilog", "message", "text", "reason"}
# Texts that clients of Triton compare.
TRITONS = ("It should be either 'int', 'bool', or 'string'.", "If you want to specify the full")


def template(node: ast.expr) -> str:
    """Return the text of an expression with X for its values, or "" if it is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(template(value) or "X" for value in node.values)
        case ast.BinOp(op=ast.Add()):
            return template(node.left) + template(node.right)
    return ""


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Return the message templates of a module: errors, log lines and help with a space."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Call():
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                name = node.func.id if isinstance(node.func, ast.Name) else name
                texts = [k.value for k in node.keywords if k.arg in TEXT_ARGUMENTS]
                if name in LOG_METHODS or name[:1].isupper() or name in ("warning", "ok"):
                    texts += node.args
            case ast.Assign(value=value) | ast.Return(value=ast.expr() as value):
                texts = [value]
            case _:
                continue
        for text_node in texts:
            text = template(text_node)
            if " " in text.strip():
                yield node.lineno, text


def test_messages_are_neither_headless_nor_personified() -> None:
    suspects_found = []
    for path in files(("shmserve", "workers", "ipc"), ".py"):
        for line, text in messages(path):
            for part in re.split(r"(?<=[.!?:;])\s+|\n", text):
                if part.startswith(TRITONS):
                    continue
                match = PERSONIFIED.search(part) or VAGUE_NOUNS.search(part) or HEADLESS.match(part)
                if match and len(part.split()) > 2:
                    suspects_found.append(f"{path.relative_to(ROOT)}:{line} {part}")
    assert not suspects_found, "\n".join(suspects_found)


# Values in the log lines that the pages quote, and the names of processes.
VALUES = re.compile(
    r"\.\.\.|'[^']*'|\b(?:NAME|PID|ID|N)\b|\d+(?:\.\d+)?|signal"
    r"|(?<=^process )(?:worker|workspace|scheduler|gateway).* (?=ended)"
)


def test_the_log_lines_that_the_page_of_faults_quotes_exist() -> None:
    nodes = [n for path in files(("shmserve", "workers"), ".py") for n in ast.walk(tree(path))]
    code_text = "\0".join(
        re.sub(r"%[.0-9]*[a-z]", "", node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    rows = (ROOT / "shmserve/guide/faults.md").read_text().splitlines()
    quoted_parts = [
        part.strip(" ;:()")
        for row in rows
        if row.startswith("| ")
        for line in re.findall("`([^`-][^`]+)`", row.split(" | ")[-1])
        for part in VALUES.split(line)
    ]
    assert len(quoted_parts) > 30
    assert [part for part in quoted_parts if len(part) > 3 and part not in code_text] == []


if __name__ == "__main__":
    paths = sys.argv[1:]
    for passage in [*texts(paths or CODE_FOLDERS), *(() if paths else pages())]:
        if passage.of_function and NO_VERB.match(passage.text):
            print(f"{passage.where} no verb: {passage.text.splitlines()[0]}")
        for rule, sentence in suspects(passage.text)[1]:
            print(f"{passage.where} {passage.kind} {rule}: {sentence}")
