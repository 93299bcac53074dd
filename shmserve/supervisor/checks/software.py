"""Checks of what is installed: packages, the HTTP parser, systemd's units."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from shmserve.config.server import ServerConfig
from shmserve.supervisor.checks.verdict import Verdict, ok, warning, wrong

_SHOWN = ("aiohttp", "pyzmq", "torch", "numpy")
_UNITS = Path("/etc/systemd/system")
_EXPOSURE = "15"  # tenths: what the units have as they are installed
_PATIENCE_S = 30

# By package: the version that is installed ("": none is), and the least that is needed.
Versions = dict[str, tuple[str, str]]


def gather_packages(_: ServerConfig) -> Versions:
    """Of each package that the server needs; none where it is not installed itself."""
    try:
        needed = "\n".join(metadata.requires("shmserve") or [])
    except metadata.PackageNotFoundError:
        return {}
    found = re.findall(r"^([\w.-]+)[^;\n]*?>=([\w.]+)[^;\n]*$", needed, re.MULTILINE)
    return {name: (_installed(name), least) for name, least in found}


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def judge_packages(versions: Versions) -> Verdict:
    """The floors of pyproject.toml are those below which holes are known, too."""
    if not versions:
        return warning("shmserve is not installed", "pip install shmserve")
    old = [name for name, (has, least) in versions.items() if _numbers(has) < _numbers(least)]
    if old:
        found = ", ".join(f"{name} {versions[name][0] or 'is missing'}" for name in old)
        wanted = " ".join(f"'{name}>={versions[name][1]}'" for name in old)
        return wrong(f"too old or missing: {found}", f"pip install --upgrade {wanted}")
    shown = (f"{name} {versions[name][0]}" for name in _SHOWN if name in versions)
    return ok(", ".join((f"Python {platform.python_version()}", *shown)))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def gather_parser(_: ServerConfig) -> bool:
    """Whether HTTP is parsed in C."""
    from aiohttp import http_parser

    return http_parser.HttpRequestParser is not http_parser.HttpRequestParserPy


def judge_parser(in_c: bool) -> Verdict:
    """Most request smuggling was in the parser that stands in for the one in C."""
    if in_c:
        return ok("aiohttp's, in C")
    fix = (
        "unset AIOHTTP_NO_EXTENSIONS, or pip install --force-reinstall --only-binary :all: aiohttp"
    )
    return wrong("aiohttp's in Python, which is slow, and has let requests be smuggled", fix)


def gather_units(_: ServerConfig) -> tuple[int, str]:
    """How many units are installed, and what systemd-analyze, where it is, has against them."""
    units = sorted(map(str, _UNITS.glob("shmserve*.service")))
    said = ""
    if units and shutil.which("systemd-analyze"):
        said = _analyze("verify", "--man=no", *units)[1]
        for unit in units:
            least = ("--offline=true", f"--threshold={_EXPOSURE}")
            status, text = _analyze("security", "--no-pager", *least, unit)
            said += text.strip().splitlines()[-1] if status else ""
    return len(units), said.strip()


def _analyze(*words: str) -> tuple[int, str]:
    command, output = ["systemd-analyze", *words], subprocess.PIPE
    done = subprocess.run(
        command, stdout=output, stderr=subprocess.STDOUT, text=True, timeout=_PATIENCE_S
    )
    return done.returncode, done.stdout


def judge_units(facts: tuple[int, str]) -> Verdict:
    """Of an unknown key systemd-analyze only prints something, so that all it prints counts."""
    count, said = facts
    if said:
        return warning(said, "shmserve systemd install, and look at your drop-ins")
    return ok(f"{count}, verified" if count else "none are installed")
