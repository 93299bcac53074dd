"""The program `shmserve VERB ...`; each verb is a few lines that call a room.

check.py             `shmserve check`
client.py            `shmserve client VERB`: the table of verbs
client_infer.py      its verb `infer`; client_tensors.py: what that reads and prints
client_server.py     the flags that name a server
doctor.py            `shmserve doctor`
transports/          the ways to a server: HTTP, gRPC, shared memory
events.py            `shmserve events`
grafana/             `shmserve grafana`: a dashboard and alert rules for others' monitoring
guide.py             `shmserve guide`: pages to read, some of which are made when asked for
kserve/              `shmserve kserve`: the manifest by which KServe runs servers
perf.py              `shmserve perf`
profile.py           `shmserve profile`
serve_help.py        `shmserve serve --help`
systemd/             `shmserve systemd`
top.py               `shmserve top`
tune.py              `shmserve tune`
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmserve import __version__
from shmserve.common import fd_limits
from shmserve.errors import InvalidArgument, ShmserveError

if TYPE_CHECKING:
    from shmserve.config.server import ServerConfig

_USAGE = """\
usage: shmserve VERB ...

  serve          run a server
  check          load every model of a repository once, run one batch each, report
  doctor         what this host lacks for a server, and what to do about it
  client         ask a server: infer, ready, models, load, unload, stats, config, regions
  events         what is in a server, and what happens there
  grafana        a dashboard for Grafana, alert rules for Prometheus
  guide          pages to read: how to make models, ask a server, run it
  kserve         the manifest of a ServingRuntime, by which KServe runs servers
  perf           how many requests a second a model answers, and how fast
  profile        where the steps of a model that generates text spend their time
  systemd        install, show, remove: the units by which systemd runs a server
  top            what a server does now, in a terminal: the models that hurt first
  tune           the configuration with which a model answers most within a latency target

shmserve VERB --help tells more; shmserve --version prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 done, 1 failed, 2 the command line is wrong, 130
    interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    fd_limits.fill_standard_streams()
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except InvalidArgument as error:
        # One line for each problem, whatever the arguments that it quotes hold.
        for problem in getattr(error, "problems", [error.message]):
            line = "".join(char if char.isprintable() else "?" for char in problem)
            print(f"shmserve: {line}", file=sys.stderr)
        return 2
    except ShmserveError as error:
        print(f"shmserve: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who read our output has what it wanted (`| head`); Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str]) -> int:
    verb = arguments.pop(0) if arguments else ""
    match verb:
        case "serve":
            return _serve(arguments)
        case "check":
            return _check(arguments)
        case "doctor":
            return _doctor(arguments)
        case "client":
            return _client(arguments)
        case "events":
            return _events(arguments)
        case "grafana":
            return _grafana(arguments)
        case "guide":
            return _guide(arguments)
        case "kserve":
            return _kserve(arguments)
        case "perf":
            return _perf(arguments)
        case "profile":
            return _profile(arguments)
        case "systemd":
            return _systemd(arguments)
        case "top":
            return _top(arguments)
        case "tune":
            return _tune(arguments)
        case "--version":
            print(f"shmserve {__version__}")
            return 0
        case "--help" | "-h":
            print(_USAGE, end="")
            return 0
    if verb:
        print(f"shmserve: unknown verb '{verb}'", file=sys.stderr)
    print(_USAGE, end="", file=sys.stderr)
    return 2


def _serve(arguments: list[str]) -> int:
    if _asks_for_help(arguments):
        from shmserve.cli import serve_help

        print(serve_help.text())
        return 0
    from shmserve.config import command_line, server
    from shmserve.supervisor.main import serve

    def read() -> ServerConfig:
        return server.from_flags(command_line.parse(arguments), os.environ)

    return serve(read(), read)


def _check(arguments: list[str]) -> int:
    if _asks_for_help(arguments):
        print(_CHECK_HELP)
        return 0
    from shmserve.cli.check import check
    from shmserve.config import command_line, server

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--input", action="append", default=[])
    ours, others = parser.parse_known_args(arguments)
    return check(server.from_flags(command_line.parse(others), os.environ), ours.input)


def _doctor(arguments: list[str]) -> int:
    if _asks_for_help(arguments):
        print(_DOCTOR_HELP)
        return 0
    from shmserve.cli.doctor import doctor
    from shmserve.config import command_line, server

    parser = argparse.ArgumentParser(prog="shmserve doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", type=int)
    ours, others = parser.parse_known_args(arguments)
    parsed = command_line.parse(others)
    config = server.from_flags(parsed, os.environ, models_needed=False)
    return doctor(config, ours.peer, as_json=ours.json)


def _client(arguments: list[str]) -> int:
    from shmserve.cli import client

    return client.run(arguments)


def _events(arguments: list[str]) -> int:
    from shmserve.cli import events

    parser = argparse.ArgumentParser(
        prog="shmserve events",
        description="Print what is in a server: models, processes, regions; and what happens.",
    )
    events.add_arguments(parser)
    return events.run(parser.parse_args(arguments))


def _grafana(arguments: list[str]) -> int:
    from shmserve.cli import grafana

    parser = argparse.ArgumentParser(
        prog="shmserve grafana",
        description="Print a dashboard of the metrics for Grafana to import.",
    )
    grafana.add_arguments(parser)
    return grafana.run(parser.parse_args(arguments))


def _guide(arguments: list[str]) -> int:
    from shmserve.cli import guide

    parser = argparse.ArgumentParser(
        prog="shmserve guide", description="Show a page of the guide; without a topic its contents."
    )
    guide.add_arguments(parser)
    return guide.run(parser.parse_args(arguments))


def _kserve(arguments: list[str]) -> int:
    from shmserve.cli import kserve

    parser = argparse.ArgumentParser(
        prog="shmserve kserve",
        description="Print the manifest of a ServingRuntime, by which KServe runs servers.",
    )
    kserve.add_arguments(parser)
    return kserve.run(parser.parse_args(arguments))


def _perf(arguments: list[str]) -> int:
    from shmserve.cli import perf

    parser = argparse.ArgumentParser(
        prog="shmserve perf",
        description="Send a model of any v2 server requests, and say how many a second it answers.",
        allow_abbrev=False,
    )
    perf.add_arguments(parser)
    return perf.run(parser.parse_args(arguments))


def _profile(arguments: list[str]) -> int:
    from shmserve.cli import profile

    parser = argparse.ArgumentParser(
        prog="shmserve profile",
        description="Watch a model that generates text, and print where its steps spend time.",
    )
    profile.add_arguments(parser)
    return profile.run(parser.parse_args(arguments))


def _systemd(arguments: list[str]) -> int:
    from shmserve.cli import systemd

    parser = argparse.ArgumentParser(
        prog="shmserve systemd",
        description="Write, show or remove the units by which systemd runs a server.",
    )
    systemd.add_arguments(parser)
    return systemd.run(parser.parse_args(arguments))


def _top(arguments: list[str]) -> int:
    from shmserve.cli import top

    parser = argparse.ArgumentParser(
        prog="shmserve top",
        description="Show what a server does now: its models, those first that hurt.",
        allow_abbrev=False,
    )
    top.add_arguments(parser)
    return top.run(parser.parse_args(arguments))


def _tune(arguments: list[str]) -> int:
    from shmserve.cli import tune

    parser = argparse.ArgumentParser(
        prog="shmserve tune",
        description="Load a model with one configuration after the other, and say with which it "
        "answers most requests a second within a latency target.",
        allow_abbrev=False,
    )
    tune.add_arguments(parser)
    return tune.run(parser.parse_args(arguments))


def _asks_for_help(arguments: list[str]) -> bool:
    return "--help" in arguments or "-h" in arguments


_CHECK_HELP = """\
usage: shmserve check DIR [--input NAME=VALUE ...] [flags of serve]

Parses and validates the repository DIR (or a path/model.py:Class), loads each model once, asks it
once, holds its outputs against its configuration, and prints a line a model. It is asked with each
sample of its model_warmup, or else with zeros and empty texts; --input has an input's value, for
every model with an input of this name: a JSON number, text or list, @FILE.npy, or @FILE for what is
in it, as one text. Exit status: 0 all is well, 2 something is not."""


_DOCTOR_HELP = """\
usage: shmserve doctor [--json] [--peer PID] [flags of serve]

Looks at what a server with these flags (or with those of --config FILE) needs of this host, and
prints a finding a check: ok, warning or wrong, what was found, and behind an arrow what to do about
it. --peer PID asks instead whether that process can share memory with the server, the one that runs
in the run directory, or else one that this user would start here. --json prints an object. Exit
status: 0 all is well, 1 there are warnings, 2 something is wrong."""
