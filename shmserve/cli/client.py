"""`shmserve client infer`: one request from the shell, each of its responses as a line of JSON.

Datatypes and shapes come from what the server says of the model, and every way to it (transports/)
gives the same responses.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import urlsplit

from shmserve.cli.client_tensors import WrongInput, encode, load, split_input
from shmserve.cli.transports import InputTensor, OutgoingRequest, Transport, TransportError
from shmserve.cli.transports.http import HttpTransport
from shmserve.client.errors import Disconnected
from shmserve.client.server.discovery import VARIABLE
from shmserve.errors import InvalidArgument, ShmserveError

_DONE, _FAILED, _USAGE = 0, 1, 2
_USUAL_PORTS = {"http": 80, "grpc": 8001}


class _Parser(argparse.ArgumentParser):
    """Errors in one line, as every other verb's."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: {message}\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs of `shmserve client` to its parser."""
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=_Parser, metavar="VERB")
    infer = verbs.add_parser(
        "infer",
        help="send one request and print its response",
        description="Send one request to a model and print its response as JSON; where a model "
        "gives many, each on a line when it comes.",
        epilog="Exit status: 0 done, 1 the server failed or refused, 2 the command line is wrong.",
    )
    infer.add_argument("model", metavar="MODEL", help="the model to ask")
    _add_server(infer)
    _add_tensors(infer)
    infer.add_argument("--model-version", default="", metavar="V", help="of the model [the latest]")
    infer.add_argument("--request-id", default="", metavar="ID", help="shown in the server's log")
    infer.add_argument(
        "--sequence",
        default="",
        metavar="ID",
        help="the sequence that the request belongs to, a number or a text [none]",
    )
    infer.add_argument("--start", action="store_true", help="it is the first of its sequence")
    infer.add_argument("--end", action="store_true", help="it is the last of its sequence")
    infer.add_argument(
        "--timeout-us",
        type=int,
        default=0,
        metavar="N",
        help="how long it may take, in microseconds [no limit]",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--run-dir",
        metavar="DIR",
        help="the run directory of a server on this host [that of this user's server, if it runs]",
    )
    where.add_argument(
        "--url",
        help="http://HOST:PORT, unix:PATH (HTTP at a unix socket) or grpc://HOST:PORT "
        "[http://127.0.0.1:8000, where no server of this user's runs]",
    )


def _add_tensors(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        required=True,
        dest="inputs",
        metavar="NAME=VALUE",
        help="an input (repeatable): a JSON number, text or list, @FILE.npy, or @FILE for "
        "what is in it, as one text; a value with one "
        "dimension less than the model takes becomes a batch of one",
    )
    parser.add_argument(
        "--output",
        action="append",
        default=[],
        dest="outputs",
        metavar="NAME",
        help="an output to ask for (repeatable) [all]",
    )


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status.

    0: every response is on stdout. 1: the server failed or refused. 2: the command line is wrong.
    Whatever is wrong is one line on stderr.
    """
    try:
        for response in _infer(args):
            print(json.dumps(response), flush=True)
    except (WrongInput, UnicodeError) as error:  # of a name or a text that is none
        return _complain(str(error), _USAGE)
    except TransportError as error:
        return _complain(str(error), _FAILED)
    except ShmserveError as error:
        return _complain(error.message, _FAILED)
    return _DONE


def _complain(text: str, status: int) -> int:
    line = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    print(f"shmserve client infer: {line}", file=sys.stderr)
    return status


def _infer(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    given = [split_input(text) for text in args.inputs]
    values = [(name, load(name, value)) for name, value in given]
    with contextlib.closing(_transport(args)) as transport:
        model = transport.inputs(args.model, args.model_version)
        inputs = []
        for name, value in values:
            if name not in model:
                raise WrongInput(f"the model has no input '{name}'; it has {', '.join(model)}")
            shape, raw = encode(model[name], value)
            inputs.append(InputTensor(name, model[name].datatype, shape, raw))
        yield from transport.infer(
            OutgoingRequest(
                args.model,
                args.model_version,
                args.request_id,
                args.timeout_us,
                inputs,
                args.outputs,
                int(args.sequence) if args.sequence.isdecimal() else args.sequence,
                args.start,
                args.end,
            )
        )


def _transport(args: argparse.Namespace) -> Transport:
    """The way to the server that the command line names; else this user's, if one runs."""
    from shmserve.cli.transports.native import NativeTransport

    if args.url:
        return _transport_at(args.url)
    try:
        return NativeTransport(args.run_dir)
    except (Disconnected, InvalidArgument):
        if args.run_dir or os.environ.get(VARIABLE):
            raise
        return HttpTransport("127.0.0.1", 8000)


def _transport_at(url: str) -> Transport:
    try:
        if url.startswith("unix:"):
            return HttpTransport("", unix_socket=url.removeprefix("unix:").replace("///", "/", 1))
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme in _USUAL_PORTS and parts.hostname and parts.path in ("", "/"):
            port = parts.port or _USUAL_PORTS[parts.scheme]
            if parts.scheme == "http":
                return HttpTransport(parts.hostname, port)
            return _grpc_transport(parts.hostname, port)
    except ValueError:
        pass
    raise WrongInput(f"--url takes http://HOST:PORT, unix:PATH or grpc://HOST:PORT, not '{url}'")


def _grpc_transport(host: str, port: int) -> Transport:
    if importlib.util.find_spec("grpc") is None:
        raise WrongInput("--url grpc://... takes the extra: pip install 'shmserve[grpc]'")
    from shmserve.cli.transports.grpc import GrpcTransport

    return GrpcTransport(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
