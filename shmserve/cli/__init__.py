"""The program `shmserve VERB ...`, with one module per verb.

arguments.py         tables of flags: *.txt
check.py             `shmserve check`
client.py            `shmserve client VERB`: the table of verbs
doctor.py            `shmserve doctor`
events.py            `shmserve events`
grafana/             `shmserve grafana`: a dashboard and alert rules
guide.py             `shmserve guide`: the pages, some of which are generated
kserve/              `shmserve kserve`: the manifest of a KServe ServingRuntime
perf.py              `shmserve perf`
profile.py           `shmserve profile`
systemd/             `shmserve systemd`
top.py               `shmserve top`
tune.py              `shmserve tune`
verbs.txt            the texts of the verbs in the usage
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shmserve import __version__
from shmserve.common import fd_limits
from shmserve.errors import InvalidArgument, ShmserveError, clip, printable_line, suggestion

if TYPE_CHECKING:
    from shmserve.config.server import ServerConfig

_TRITON = "tritonserver"
# Errors of writing the output. EPIPE: its reader has closed the pipe (`| head`).
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Returns:
        0: success. 1: failure. 2: invalid command line. 130: interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and os.path.basename(sys.argv[0]) == _TRITON:  # started as a link of that name
        arguments.insert(0, _TRITON)
    fd_limits.fill_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # the locale's encoding may lack a character
        sys.stdout.reconfigure(errors="replace")
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except InvalidArgument as error:
        for problem in getattr(error, "problems", [error.message]):
            print(f"shmserve: {printable_line(problem)}", file=sys.stderr)
        return 2
    except ShmserveError as error:
        print(f"shmserve: {printable_line(error.message)}", file=sys.stderr)
        return 1
    except UnicodeEncodeError as error:  # an argument has invalid bytes, or JSON a surrogate
        print(f"shmserve: '{clip(error.object)}' is not UTF-8 text", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"shmserve: not enough memory: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        if error.errno != errno.EPIPE:
            print(f"shmserve: the output cannot be written: {error.strerror}", file=sys.stderr)
        # Python flushes stdout again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _unblock_interrupts() -> None:
    """Unblock SIGINT, which `__main__` blocks during the imports."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP, too.

    `tune` then restores the model, `perf` releases its regions, and `top` restores the terminal.
    """
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(signal_number, signal.default_int_handler)


def _run(arguments: list[str]) -> int:
    command_name = arguments.pop(0) if arguments else ""
    if os.path.basename(command_name) == _TRITON:  # a container's command may begin with it
        command_name = "serve"
    match command_name:
        case "--version":
            print(f"shmserve {__version__}")
            return 0
        case "--help" | "-h":
            print(_USAGE, end="")
            return 0
        case "serve":
            return _serve(arguments)
        case "check" | "doctor":
            return _run_with_server_flags(command_name, arguments)
        case "client":
            from shmserve.cli import client

            _unblock_interrupts()
            return client.run(arguments)
    if command_name in _VERBS:
        _interrupt_on_signals()
        return _run_with_own_flags(command_name, arguments)
    if command_name:
        from shmserve.cli import client

        hint = f", did you mean 'client {command_name}'?" if command_name in client.VERBS else ""
        hint = hint or suggestion(command_name, _VERBS)
        print(f"shmserve: unknown verb '{command_name}'{hint}", file=sys.stderr)
    print(_USAGE, end="", file=sys.stderr)
    return 2


def _serve(arguments: list[str]) -> int:
    if _has_help_flag(arguments):
        from shmserve.cli.guide import flags_reference

        print(flags_reference())
        return 0
    from shmserve.config import command_line, server
    from shmserve.supervisor.main import serve

    _unblock_interrupts()

    def read_config() -> ServerConfig:
        return server.from_flags(command_line.parse(arguments), os.environ)

    return serve(read_config(), read_config)


def _run_with_server_flags(name: str, arguments: list[str]) -> int:
    """Run a verb that also accepts the flags of `shmserve serve`.

    The verb's module defines `run(args, parsed)`. NAME.txt has the verb's own flags.
    """
    if _has_help_flag(arguments):
        print(_VERBS[name][1].replace("\n", "\n\n", 1))
        return 0
    from shmserve.cli.arguments import add_flags
    from shmserve.config import command_line

    module = importlib.import_module(f"shmserve.cli.{name}")
    parser = argparse.ArgumentParser(prog=f"shmserve {name}", add_help=False, allow_abbrev=False)
    _unblock_interrupts()
    add_flags(parser, name)
    args, server_flags = parser.parse_known_args(arguments)
    own_flags = [flag.replace("_", "-") for flag in vars(args)]
    return int(module.run(args, command_line.parse(server_flags, name, own_flags)))


def _has_help_flag(arguments: list[str]) -> bool:
    return "--help" in arguments or "-h" in arguments


def _run_with_own_flags(name: str, arguments: list[str]) -> int:
    """Run a verb whose module defines `run(args)`.

    The parser has the flags of the table NAME.txt, if the verb has one, and then the arguments that
    the module's function `add_arguments(parser)` adds, if there is one.
    """
    from shmserve.cli.arguments import add_flags, has_table

    module = importlib.import_module(f"shmserve.cli.{name}")
    _unblock_interrupts()
    parser = argparse.ArgumentParser(
        prog=f"shmserve {name}", description=_VERBS[name][1], allow_abbrev=False
    )
    if has_table(name):
        add_flags(parser, name)
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)))


def _read_verbs() -> dict[str, tuple[str, str]]:
    """Return, for each verb, its line in the usage text and the description in its help."""
    text = Path(__file__).with_name("verbs.txt").read_text(encoding="utf-8")
    blocks = (block.splitlines() for block in text.split("\n\n")[1:])
    return {name: (line, "\n".join(description)) for name, line, *description in blocks}


_VERBS = _read_verbs()
_VERB_LINES = "\n".join(f"  {name:<15}{line}" for name, (line, _) in _VERBS.items())
_USAGE = f"""\
usage: shmserve VERB ...

{_VERB_LINES}

shmserve VERB --help prints its options; shmserve --version prints the version.
"""
