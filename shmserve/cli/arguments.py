"""The flags of verbs: tables in the syntax of config/flags.txt.

check.txt, doctor.txt, ...   the verb of that name
infer.txt                    `shmserve client infer`
server.txt                   all verbs that send requests to a server
"""

from __future__ import annotations

import argparse
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from shmserve.config.flags import Flag, Value, parse_flag_table
from shmserve.errors import InvalidArgument, convert_os_errors


def _table_path(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.txt")


def has_table(name: str) -> bool:
    """Return whether a verb has a table of flags."""
    return _table_path(name).exists()


def add_flags(parser: argparse.ArgumentParser, table_name: str, *groups: str) -> None:
    """Declare the flags of a table in a parser, in the groups of the table.

    Args:
        parser: The parser of the verb.
        table_name: The name of the table's file, without its suffix.
        groups: The groups to add; all if none is named.
    """
    text = _table_path(table_name).read_text(encoding="utf-8")
    for heading, flags in parse_flag_table(text).items():
        if groups and heading not in groups:
            continue
        group = parser.add_argument_group(heading) if heading else parser
        has_exclusive = any(flag.is_exclusive for flag in flags)
        flag_parser = group.add_mutually_exclusive_group() if has_exclusive else group
        for flag in flags:
            _add_flag(flag_parser if flag.is_exclusive else group, flag)


def _add_flag(group: Any, flag: Flag) -> None:
    options: dict[str, Any] = {"type": partial(_parse_value, flag), "default": flag.default}
    if flag.kind is bool:
        options = {"action": "store_true"}
    elif flag.is_repeatable:
        options = {"action": "append", "default": []}
    if flag.choices:
        options["choices"] = flag.choices
    if flag.metavar:
        options["metavar"] = flag.metavar
    group.add_argument(f"--{flag.name}", help=flag.help, required=flag.is_required, **options)


def _parse_value(flag: Flag, text: str) -> Value:
    if not text and flag.default != "":  # an unset shell variable must not select the default
        raise InvalidArgument(f"--{flag.name}: the value is empty; omit the flag for its default")
    return text if flag.kind is str else flag.parse(text)


def with_scheme(url: str) -> str:
    """Return a URL, prefixed with `http://` if it begins with a host instead of a scheme."""
    return f"http://{url}" if re.match(r"(\[[^]]+\]|[\w.-]+)(:\d|/|$)", url) else url


def check_files(args: argparse.Namespace, *flags: str) -> None:
    """Check that the files of these flags can be written, before a long measurement starts.

    Raises:
        InvalidArgument: A file cannot be written, or the file of --plot does not end in .svg.
    """
    for flag in flags:
        path = getattr(args, flag) or os.devnull
        if flag == "plot" and not path.endswith((".svg", os.devnull)):
            raise InvalidArgument(f"--plot: '{path}' does not end in .svg, the only format")
        target = path if os.path.exists(path) else os.path.dirname(path) or "."
        if os.path.isdir(path) or not os.access(target, os.W_OK):
            text = "it is a directory, its folder does not exist, or this user may not write to it"
            raise InvalidArgument(f"--{flag}: cannot write '{path}': {text}")


def write_file(flag: str, path: str, text: str) -> None:
    """Write `text` to the path that is the value of a flag.

    Raises:
        InvalidArgument: The file cannot be written.
    """
    with convert_os_errors(f"--{flag}: cannot write '{path}'"):
        Path(path).write_text(text, encoding="utf-8")
