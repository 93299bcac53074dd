"""`shmserve client infer`: one request from the shell, each of its responses as a line of JSON.

Datatypes and shapes come from what the server says of the model, and every way to it (transports/)
gives the same responses.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from shmserve.cli.client_tensors import WrongInput, encode, load, split_input
from shmserve.cli.transports import InputTensor, OutgoingRequest, Transport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("model", metavar="MODEL", help="the model to ask")
    _add_tensors(parser)
    parser.add_argument(
        "--model-version", default="", metavar="V", help="of the model [the latest]"
    )
    parser.add_argument("--request-id", default="", metavar="ID", help="shown in the server's log")
    parser.add_argument(
        "--sequence",
        default="",
        metavar="ID",
        help="the sequence that the request belongs to, a number or a text [none]",
    )
    parser.add_argument("--start", action="store_true", help="it is the first of its sequence")
    parser.add_argument("--end", action="store_true", help="it is the last of its sequence")
    parser.add_argument(
        "--timeout-us",
        type=int,
        default=0,
        metavar="N",
        help="how long it may take, in microseconds [no limit]",
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


def infer(transport: Transport, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Send the request that the command line says. Raises WrongInput or TransportError."""
    given = [split_input(text) for text in args.inputs]
    values = [(name, load(name, value)) for name, value in given]
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
