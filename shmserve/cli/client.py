"""`shmserve client infer`: one request from the shell, its answer as JSON.

Datatypes and shapes come from the model's metadata. Every tensor travels as binary, both ways:
one path for all datatypes, FP16 and BF16 among them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from shmserve.cli.client_tensors import ModelTensor, WrongInput, decode, encode, load

_DONE, _FAILED, _USAGE = 0, 1, 2
_HEADER_LENGTH = "Inference-Header-Content-Length"


class _Failed(Exception):
    """The server cannot be reached, refused, or answered with something else than an answer."""


class _Parser(argparse.ArgumentParser):
    """Errors in one line, as every other verb's."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: {message}\n")


@dataclass(frozen=True, slots=True)
class _Server:
    """Where requests go."""

    host: str
    port: int

    def exchange(
        self, method: str, path: str, body: bytes | None = None, header_length: int | None = None
    ) -> tuple[bytes, int | None]:
        """An answer's body and its `Inference-Header-Content-Length`; raises _Failed."""
        headers = {} if header_length is None else {_HEADER_LENGTH: str(header_length)}
        connection = http.client.HTTPConnection(self.host, self.port)
        try:
            with contextlib.closing(connection):
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise _Failed(f"no answer from {self.host}:{self.port}: {reason}") from error
        if response.status != http.HTTPStatus.OK:
            raise _Failed(_error_text(content) or f"{response.status} {response.reason}")
        length = response.getheader(_HEADER_LENGTH)
        return content, None if length is None else int(length)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs of `shmserve client` to its parser."""
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=_Parser, metavar="VERB")
    infer = verbs.add_parser(
        "infer",
        help="send one request and print its answer",
        description="Send one request to a model and print its answer as JSON.",
        epilog="Exit status: 0 done, 1 the server failed or refused, 2 the command line is wrong.",
    )
    infer.add_argument("model", metavar="MODEL")
    infer.add_argument(
        "--url", default="http://127.0.0.1:8000", help="where the server is [%(default)s]"
    )
    infer.add_argument(
        "--input",
        action="append",
        default=[],
        required=True,
        dest="inputs",
        metavar="NAME=VALUE",
        help="an input (repeatable): a JSON number, text or list, or @FILE.npy; a value with one "
        "dimension less than the model takes becomes a batch of one",
    )
    infer.add_argument(
        "--output",
        action="append",
        default=[],
        dest="outputs",
        metavar="NAME",
        help="an output to ask for (repeatable) [all]",
    )
    infer.add_argument("--model-version", default="", metavar="V", help="[the latest]")
    infer.add_argument("--request-id", default="", metavar="ID", help="shown in the server's log")
    infer.add_argument(
        "--timeout-us", type=int, default=0, metavar="N", help="microseconds to answer in [none]"
    )


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status.

    0: the answer is on stdout. 1: the server failed or refused. 2: the command line is wrong.
    Whatever is wrong is one line on stderr.
    """
    try:
        print(json.dumps(_infer(args)))
    except (WrongInput, UnicodeError) as error:  # of a name or a text that is none
        return _complain(str(error), _USAGE)
    except _Failed as error:
        return _complain(str(error), _FAILED)
    return _DONE


def _complain(text: str, status: int) -> int:
    line = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    print(f"shmserve client infer: {line}", file=sys.stderr)
    return status


def _infer(args: argparse.Namespace) -> dict[str, Any]:
    given = [_split(text) for text in args.inputs]
    values = [(name, load(name, value)) for name, value in given]
    server = _server(args.url)
    path = f"/v2/models/{quote(args.model, safe='')}"
    if args.model_version:
        path += f"/versions/{quote(args.model_version, safe='')}"
    model = _inputs_of(server, path)
    inputs, buffers = [], []
    for name, value in values:
        if name not in model:
            raise WrongInput(f"the model has no input '{name}'; it has {', '.join(model)}")
        shape, raw = encode(model[name], value)
        inputs.append(
            {
                "name": name,
                "datatype": model[name].datatype,
                "shape": shape,
                "parameters": {"binary_data_size": len(raw)},
            }
        )
        buffers.append(raw)
    header = json.dumps(_header(args, inputs)).encode()
    body = b"".join([header, *buffers])
    return _answer(*server.exchange("POST", f"{path}/infer", body, len(header)))


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise WrongInput(f"--input takes NAME=VALUE, not '{text}'")
    return name, value


def _server(url: str) -> _Server:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme == "http" and parts.hostname and parts.path in ("", "/"):
            return _Server(parts.hostname, parts.port or 80)
    except ValueError:
        pass
    raise WrongInput(f"--url takes http://HOST:PORT, not '{url}'")


def _inputs_of(server: _Server, path: str) -> dict[str, ModelTensor]:
    metadata = _json(server.exchange("GET", path)[0])
    try:
        return {
            tensor["name"]: ModelTensor(tensor["name"], tensor["datatype"], tuple(tensor["shape"]))
            for tensor in metadata["inputs"]
        }
    except (KeyError, TypeError) as error:
        raise _Failed("the server did not answer with a model's metadata") from error


def _header(args: argparse.Namespace, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    if args.timeout_us:
        parameters["timeout"] = args.timeout_us
    header: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    if args.request_id:
        header["id"] = args.request_id
    if args.outputs:
        binary = {"binary_data": True}
        header["outputs"] = [{"name": name, "parameters": binary} for name in args.outputs]
    else:
        parameters["binary_data_output"] = True
    return header


def _answer(body: bytes, header_length: int | None) -> dict[str, Any]:
    """The answer with each output's data as nested lists of its shape."""
    answer = _json(body if header_length is None else body[:header_length])
    rest = memoryview(body)[len(body) if header_length is None else header_length :]
    try:
        for output in answer["outputs"]:
            size = output.pop("parameters", {}).get("binary_data_size", 0)
            if "data" not in output:
                output["data"] = decode(output["datatype"], output["shape"], rest[:size])
                rest = rest[size:]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _Failed("the server's answer is malformed") from error
    return answer


def _json(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise _Failed("the server did not answer in JSON") from error
    if not isinstance(found, dict):
        raise _Failed("the server did not answer with a JSON object")
    return found


def _error_text(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return ""
