"""`shmserve client VERB`: requests to a running server, with JSON lines as output."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from shmserve.cli.arguments import add_flags
from shmserve.errors import InvalidArgument, ShmserveError, clip, printable_line
from shmserve.protocols import (
    AdminTransport,
    InputTensor,
    OutgoingRequest,
    Parameter,
    Transport,
    servers,
)
from shmserve.protocols.tensors import find_input, load_inputs, split_input

_SUCCESS, _FAILED, _INVALID_USAGE = 0, 1, 2
_STATES_HINT = "; `shmserve client models` lists the models with their states and reasons"
_EXIT_STATUSES = (
    "Exit status: 0 success, 1 the server failed or rejected the request, 2 invalid command line."
)


class Verb(NamedTuple):
    """A verb, which calls the transport's method of the same name.

    Attributes:
        help: The help text.
        takes_model: Whether the verb requires a model.
        version_default: The default of --model-version as the help shows it; "": the verb has no
            such flag.
        model_default: The default of MODEL as the help shows it; "": MODEL is required.
    """

    help: str
    takes_model: bool = False
    version_default: str = ""
    model_default: str = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Define the command's arguments."""
        if self.takes_model:
            nargs = "?" if self.model_default else None
            text = f"the name of the model {self.model_default}".rstrip()
            parser.add_argument("model", metavar="MODEL", nargs=nargs, type=_parse_name, help=text)
        if self.version_default:
            help_text = f"the version of the model {self.version_default}"
            parser.add_argument("--model-version", default="", metavar="V", help=help_text)


def _parse_name(text: str) -> str:
    if not text:  # an unset shell variable must not select all models
        raise InvalidArgument("MODEL: the name of the model is empty")
    return text


def _infer(transport: Transport, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Send the request given on the command line, and yield its responses.

    Raises:
        InvalidArgument: A value does not fit the model, or is malformed.
        TransportError: The server is unreachable or rejects the request.
    """
    values = load_inputs(args.input)
    model = transport.inputs(args.model, args.model_version)
    inputs = [InputTensor.of(find_input(name, model), value) for name, value in values.items()]
    request = OutgoingRequest(
        *(args.model, args.model_version, args.request_id, args.timeout_us, inputs, args.output),
        *(_parse_sequence(args.sequence), args.start, args.end),
        parameters=dict(map(_parse_parameter, args.parameter)),
    )
    yield from transport.infer(request)


def _parse_sequence(text: str) -> int | str:
    """Return the sequence of `--sequence`; raise InvalidArgument for a number above 64 bits."""
    if not (text.isascii() and text.isdecimal()):
        return text
    if len(text) > 20 or int(text) >= 2**64:
        raise InvalidArgument(f"--sequence: {clip(text)} exceeds 64 bits (maximum: {2**64 - 1})")
    return int(text)


def _parse_parameter(text: str) -> tuple[str, Parameter]:
    """Return the name and the value of a `--parameter`; raise InvalidArgument if malformed."""
    name, value = split_input(text, "parameter")
    parsed_value: Any = value
    with contextlib.suppress(ValueError, RecursionError):
        parsed_value = json.loads(value)
    if isinstance(parsed_value, int) and not -(2**63) <= parsed_value < 2**63:
        raise InvalidArgument(f"--parameter: '{name}' must be a 64-bit integer, got {value}")
    if isinstance(parsed_value, float) and not math.isfinite(parsed_value):
        raise InvalidArgument(f"--parameter: '{name}' must be a finite number, got {value}")
    if not isinstance(parsed_value, bool | int | float | str):
        message = f"--parameter: '{name}' must be true, false, a number or a string, got {value}"
        raise InvalidArgument(message)
    return name, parsed_value


def _call(server: AdminTransport, name: str, args: argparse.Namespace) -> Iterable[Any]:
    """Call the transport's operation for a verb, and return the objects to print."""
    arguments = [getattr(args, key) for key in ("model", "model_version") if hasattr(args, key)]
    result = getattr(server, name)(*(value or "" for value in arguments))
    if name == "ready":
        return [{"ready": True}]
    if result is None:
        return []
    return result if isinstance(result, list) else [result]


_INFER = "send one request to a model and print each response on a line"
_READY_DEFAULTS = ("[every version]", "[the whole server]")
VERBS = {
    "infer": Verb(_INFER, True),
    "ready": Verb("check whether the server or a model is ready", True, *_READY_DEFAULTS),
    "models": Verb("list the models of the repository and their states"),
    "load": Verb("load or reload a model", True),
    "unload": Verb("unload a model", True),
    "stats": Verb(
        "print counters and durations of one model or all models",
        True,
        "[every version]",
        "[every model]",
    ),
    "config": Verb("print the effective configuration of a model", True, "[the latest]"),
    "regions": Verb("list the registered shared memory regions"),
}

_VERB_LINES = "\n".join(f"  {name:<10}{verb.help}" for name, verb in VERBS.items())
_HELP = f"""\
usage: shmserve client VERB ... [--run-dir DIR | --url URL] [--token-file FILE] ...

{_VERB_LINES}

shmserve client VERB --help prints its options.
{_EXIT_STATUSES}
"""


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            flag = message.split()[1].rstrip(":")
            message += f" (write {flag}=VALUE if the value begins with '-')"
        self.exit(_INVALID_USAGE, f"{self.prog}: {message}\n")


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status; an error is one line on stderr.

    Returns:
        0: all responses are on stdout. 1: the server failed or rejected the request. 2: the command
            line is invalid.
    """
    name, args = parse(arguments)
    if args is None:
        print(_HELP, end="")
        return _SUCCESS
    error_prefix, is_inference = "", name == "infer"
    try:
        create = servers.create_transport if is_inference else servers.create_admin_transport
        transport: Any = create(args)
        with contextlib.closing(transport):
            error_prefix = f"{transport.address_text}: "
            results = _infer(transport, args) if is_inference else _call(transport, name, args)
            for result in results:
                print(json.dumps(result), flush=True)
    except InvalidArgument as error:
        return _report_error(name, str(error), _INVALID_USAGE)
    except ShmserveError as error:
        is_unknown = is_inference and "Request for unknown model" in str(error)
        hint = _STATES_HINT if is_unknown or (name == "ready" and args.model) else ""
        return _report_error(name, f"{error_prefix}{error}{hint}", _FAILED)
    return _SUCCESS


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace | None]:
    """Return the verb and its arguments; None: help was requested.

    The verb is the first word that is a verb's name and not the value of a preceding server flag.
    """
    server_parser = _Parser(prog="shmserve client", add_help=False, allow_abbrev=False)
    add_flags(server_parser, "server")
    args, words = server_parser.parse_known_args(arguments)
    name = next((word for word in words if word in VERBS), "")
    if not name:
        if "--help" in words or "-h" in words:
            return "", None
        hint = f", not '{words[0]}'" if words else ""
        raise InvalidArgument(f"client: a verb is required: {', '.join(VERBS)}{hint}")
    words.remove(name)
    parser = _Parser(
        prog=f"shmserve client {name}",
        description=f"{VERBS[name].help.capitalize()}.",
        epilog=_EXIT_STATUSES,
        parents=[server_parser],
        allow_abbrev=False,
    )
    if name == "infer":
        add_flags(parser, "infer")
    VERBS[name].add_arguments(parser)
    return name, parser.parse_args(words, args)


def _report_error(verb: str, text: str, status: int) -> int:
    print(f"shmserve client {verb}: {printable_line(text)}", file=sys.stderr)
    return status
