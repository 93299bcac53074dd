"""`shmserve guide [TOPIC]`: a page of the guide in the terminal.

Most pages are files of the package. The pages on flags and on the client's interface are generated
from the flags and docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import pydoc
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import shmserve
from shmserve.config.flags import GROUPS, IGNORED_BY_REASON, Flag
from shmserve.errors import InvalidArgument, nearest

_CONTENTS_PAGE = "contents"
# Pages that a search lists last: the contents, and the pages for developers of the server.
_LISTED_LAST = frozenset(
    f"{_CONTENTS_PAGE} architecture design differences events measurements protocol trust".split()
)
_MAX_WIDTH = 140  # columns of text in a wide terminal
# Methods of a region that only other modules of the client use.
_INTERNAL_METHODS = ("memory_range", "ref", "store_request", "output_range", "attached_to")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument(
        "topic", nargs="?", default=_CONTENTS_PAGE, metavar="TOPIC", help="the name of the page"
    )
    parser.add_argument(
        "--search", nargs="+", metavar="WORD", help="list the sections with these words"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show a page, or the result of a search, in a pager if the output is a terminal.

    Raises:
        InvalidArgument: The page is unknown, or no section has the words.
    """
    words = " ".join(arguments.search or ())
    width = min(shutil.get_terminal_size((100, 24)).columns, _MAX_WIDTH)
    pydoc.pager(search(words) if words else with_columns(page(arguments.topic), width))
    return 0


def _pages() -> dict[str, Callable[[], str]]:
    """Return, for each topic, the function that returns the text of its page."""
    files = sorted(Path(shmserve.__path__[0]).glob("**/*.md"))
    readers = {file.stem.lower(): partial(file.read_text, encoding="utf-8") for file in files}
    return {**readers, **_GENERATED_PAGES}


def page(topic: str) -> str:
    """Return the text of a page; raise InvalidArgument with the nearest topic if it is unknown."""
    pages = _pages()
    name = topic.lower()
    if name in pages:
        links = rf"\[([^]]*)\]\([\w./]*?\b({'|'.join(pages)})\.md\)"
        return re.sub(links, _link_command, pages[name](), flags=re.IGNORECASE).rstrip("\n") + "\n"
    nearest_topic = nearest(name, tuple(pages), min_similarity=0.55)
    hint = f", did you mean '{nearest_topic}'?" if nearest_topic else ";"
    message = f"guide: there is no page '{topic}'{hint} `shmserve guide` lists the pages"
    raise InvalidArgument(message)


def _link_command(link: re.Match[str]) -> str:
    """Replace a link to another page by the command that shows it in a terminal."""
    label, topic = link[1], link[2].lower()
    command = f"shmserve guide {topic}"
    return f"`{command}`" if label == topic else f"{label} ({command})"


def with_columns(text: str, width: int) -> str:
    """Return a page with its Markdown tables as columns of text, wrapped to `width`."""
    lines: list[str] = []
    rows: list[list[str]] = []
    is_in_code = False
    for line in text.splitlines(keepends=True):
        is_in_code ^= line.startswith("```")
        if line.startswith("|") and not is_in_code:
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            rows.append([cell.strip().replace("\\|", "|") for cell in cells])
            continue
        lines += [*_format_table(rows, width), line]
        rows = []
    return "".join([*lines, *_format_table(rows, width)])


def _format_table(rows: list[list[str]], width: int) -> Iterator[str]:
    """Yield the lines of a table.

    Narrow columns keep their width, and the others share the rest. An empty line follows each row
    that has several lines.
    """
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(rows[0], *rows[2:], strict=True)]
    free_width = width - 2 * (len(widths) - 1)
    for placed_columns, index in enumerate(sorted(range(len(widths)), key=widths.__getitem__)):
        widths[index] = max(1, min(widths[index], free_width // (len(widths) - placed_columns)))
        free_width -= widths[index]
    rows = [*(rows[:1] if any(rows[0]) else []), ["-" * size for size in widths], *rows[2:]]
    wrapped_rows = [
        [
            textwrap.wrap(cell, size, break_on_hyphens=False)
            for cell, size in zip(row, widths, strict=True)
        ]
        for row in rows
    ]
    for row in wrapped_rows:
        lines = list(itertools.zip_longest(*row, fillvalue=""))
        for line in lines:
            cells = (cell_line.ljust(size) for cell_line, size in zip(line, widths, strict=True))
            yield "  ".join(cells).rstrip() + "\n"
        if len(lines) > 1 and row is not wrapped_rows[-1]:
            yield "\n"


def search(words: str) -> str:
    """Return the sections with all of these words, and their first matching lines.

    A section matches if each word, or its singular, begins a word of the section. Titles with the
    words come first, then sections with the phrase, then sections with the most matches. Generated
    references and pages for developers come last.

    Raises:
        InvalidArgument: No section has all words.
    """
    prefixes = words.lower().split()
    singulars = [re.escape(word.removesuffix("s")) for word in prefixes]
    patterns = [
        re.compile(rf"(?<![a-z])({re.escape(word)}|{singular}(?![a-z]))")
        for word, singular in zip(prefixes, singulars, strict=True)
    ]
    title_patterns = [re.compile(rf"(?<![a-z]){singular}s?(?![a-z])") for singular in singulars]
    ranked_sections: list[tuple[tuple[int, bool, bool, bool, int], str]] = []
    for topic, read_page in _pages().items():
        topic_rank = 2 if topic in _LISTED_LAST else topic in _GENERATED_PAGES
        for section in _sections(read_page()):
            matches = [len(pattern.findall(section.lower())) for pattern in patterns]
            if not section or not all(matches):
                continue
            title = section.splitlines()[0].lstrip("# ")
            in_title = all(pattern.search(f"{topic} {title}".lower()) for pattern in title_patterns)
            lines = [line for line in section.splitlines() if patterns[0].search(line.lower())]
            entry = (f"shmserve guide {topic}   {title}", *_indented("\n".join(lines[:2])), "")
            has_phrase = words.lower() in section.lower()
            is_page = topic == words.lower() and section.startswith("# ")
            sort_key = (topic_rank, not in_title, not is_page, not has_phrase, -sum(matches))
            ranked_sections.append((sort_key, "\n".join(entry)))
    if not ranked_sections:
        raise InvalidArgument(f"guide: no section has '{words}'; `shmserve guide` lists the pages")
    return "\n".join(entry for _, entry in sorted(ranked_sections, key=itemgetter(0)))


def _sections(text: str) -> Iterator[str]:
    """Split a page at its headings outside of code blocks."""
    section, in_code = "", False
    for line in text.splitlines(keepends=True):
        in_code ^= line.startswith("```")
        if not in_code and re.match("#+ ", line):
            yield section
            section = ""
        section += line
    yield section


def client_reference() -> str:
    """Return the reference of the client (sync, asyncio, errors) from its docstrings."""
    from shmserve import client
    from shmserve.client import aio
    from shmserve.errors import ShmserveError

    public_objects = {name: getattr(client, name) for name in client.__all__}
    classes = filter(inspect.isclass, public_objects.values())
    error_classes = [value for value in classes if issubclass(value, ShmserveError)]
    documented_objects = [value for value in public_objects.values() if value not in error_classes]
    lines = ["# The client: shmserve.client", ""]
    for member in sorted(documented_objects, key=inspect.isclass):
        lines += _describe(client, member)
    lines += ["# For asyncio: shmserve.client.aio", ""]
    for member in (aio.connect, aio.Server, aio.ResponseStream):
        lines += _describe(aio, member)
    lines += ["# Errors", "", "All are ShmserveError, and have `code`, `status` and `message`.", ""]
    for error in error_classes:
        base_names = ", ".join(base.__name__ for base in error.__bases__)
        lines += [f"{error.__name__}({base_names})  {error.code}, {error.status}"]
        lines += [*_indented(inspect.getdoc(error)), ""]
    return "\n".join(lines)


def _describe(module: ModuleType, member_object: Any) -> Iterator[str]:
    module_name = module.__name__
    if not inspect.isclass(member_object):
        yield from _describe_function(f"{module_name}.{member_object.__name__}", member_object)
        return
    heading = f"## {module_name}.{member_object.__name__}"
    yield from (heading, "", *_indented(inspect.getdoc(member_object)), "")
    for name, member in vars(member_object).items():
        if not name.startswith("_") and name not in _INTERNAL_METHODS:
            yield from _describe_function(f"{member_object.__name__}.{name}", member)


def _describe_function(name: str, function: Any) -> Iterator[str]:
    signature = str(inspect.signature(function)) if isinstance(function, FunctionType) else ""
    signature = re.sub(r"\(self(, /)?(, )?", "(", signature, count=1)
    # The annotations are strings in this signature, so their quotes are removed.
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    prefix = "await " if inspect.iscoroutinefunction(function) else ""
    yield from textwrap.wrap(f"{prefix}{name}{signature}", 96, subsequent_indent=" " * 8)
    yield from (*_indented(inspect.getdoc(function)), "")


def _indented(text: str | None) -> list[str]:
    return [f"    {line}".rstrip() for line in (text or "").splitlines()]


def flags_reference() -> str:
    """Return the reference of all flags, including tritonserver's flags without effect."""
    lines = [
        "usage: shmserve serve --model-repository DIR [flags]",
        "       shmserve serve path/model.py:Class [flags]",
    ]
    for group, flags in GROUPS.items():
        lines += ["", f"{group}:"]
        for flag in flags:
            lines += _flag_help(flag)
    lines += ["", "Accepted and without effect, so that a tritonserver command line starts:"]
    for reason, flags in IGNORED_BY_REASON.items():
        names = ", ".join(f"--{flag.name}" for flag in flags)
        lines += _wrapped(f"{names}: {reason}", "  ", "    ")
    return "\n".join(lines)


def _flag_help(flag: Flag) -> list[str]:
    value_kind = "|".join(flag.choices) or {"bool": "true|false"}.get(
        flag.kind.__name__, flag.kind.__name__.upper().replace("STR", "TEXT")
    )
    default = "" if flag.default is None else f" [{str(flag.default).lower()}]"
    return [
        f"  --{flag.name} {value_kind}{' (repeatable)' if flag.is_repeatable else ''}",
        *_wrapped(flag.help + default, "      ", "      "),
    ]


def _wrapped(text: str, indent: str, next_indent: str) -> list[str]:
    return textwrap.wrap(
        text, 92, initial_indent=indent, subsequent_indent=next_indent, break_on_hyphens=False
    )


_GENERATED_PAGES = {"client": client_reference, "flags": flags_reference}
