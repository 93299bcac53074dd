"""`shmserve check DIR`: validate a repository, load each model, and check a response of it.

The requests to a model are the samples of its `model_warmup`, or else zeros and empty strings.
Values of `--input` override both.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Any

from shmserve import logs
from shmserve.config.command_line import Parsed
from shmserve.config.server import ServerConfig, from_flags
from shmserve.errors import ShmserveError
from shmserve.ipc.messages.inference import Failed, Finished, Responded, Submit
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.processes import name_process
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, TO_CONFIG, element_count
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.inference import (
    SEQUENCE_END,
    SEQUENCE_START,
    Inference,
    Inferred,
    pack_inference,
    unpack_inferred,
)
from shmserve.ipc.tensors.samples import warmup_samples
from shmserve.ipc.tensors.signature import Signature, agree, shape_text
from shmserve.ipc.transport.dealer import Dealer
from shmserve.protocols.tensors import ModelTensor, encode, load, split_input
from shmserve.supervisor.host.console import written_to
from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.main import hold_signals, run_composed
from shmserve.supervisor.supervisor import Supervisor

_PATIENCE_S = 60.0
_MADE_UP = (
    "\nit was asked with zeros and empty texts: --input NAME=VALUE, or a sample of `model_warmup`, "
    "asks with others"
)
_GONE = "it is not loaded (any more): the log says why"
_NO_INPUTS = "\nits configuration names no input, so it was asked with none"


HELP = """\
usage: shmserve check DIR [--input NAME=VALUE ...] [flags of serve]

Parses and validates the repository DIR (or a path/model.py:Class), loads each model once, asks it
once, holds its outputs against its configuration, and prints a line a model. It is asked with each
sample of its model_warmup, or else with zeros and empty texts; --input has an input's value, for
every model with an input of this name: a JSON number, text or list, @FILE.npy, or @FILE for what is
in it, as one text. Exit status: 0 all is well, 2 something is not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own flag to its parser."""
    parser.add_argument("--input", action="append", default=[])


def run(args: argparse.Namespace, parsed: Parsed) -> int:
    """Check the repositories that the flags name, and print a line for each model.

    Returns:
        0 if all models pass, 2 otherwise, 128 + N if signal N interrupts the check.
    """
    config = from_flags(parsed, os.environ)
    values = {name: load(name, text) for name, text in map(split_input, args.input)}
    with written_to(config.log.log_file):
        return _checked(config, values)


def _checked(config: ServerConfig, values: dict[str, Any]) -> int:
    logs.configure("check", config.log)
    name_process("check")
    alone = dataclasses.replace(
        config, gateways=0, model_control_mode="none", exit_on_error=False, load_models=()
    )
    signals = hold_signals()
    return run_composed(
        alone, RunDirectory(alone.run_dir), Listeners(), signals, partial(_check, values=values)
    )


async def _check(supervisor: Supervisor, values: dict[str, Any]) -> int:
    supervisor.open()
    work = asyncio.ensure_future(_report(supervisor, values))
    stop = asyncio.ensure_future(supervisor.signalled())
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    interrupted = not work.done()
    for task in (work, stop):
        task.cancel()
    await supervisor.end(int(interrupted))
    return 128 + stop.result() if interrupted else work.result()


async def _report(supervisor: Supervisor, values: dict[str, Any]) -> int:
    """Load and try all models, print a line for each, and return the exit status."""
    with supervisor.progress:
        await supervisor.models.start()
    bad = 0
    unused = set(values)
    rows = await supervisor.models.index(ready=False)
    for row in rows:
        failure = row.get("reason", "" if "version" in row else _GONE)
        seconds = 0.0
        if not failure:
            began = time.monotonic()
            try:
                where = supervisor.registry.find(row["name"], row["version"])
                version = supervisor.registry.models[row["name"]].shown[where["version"]]
                model = _Model(where, version.spec.model_dir, values)
                unused -= model.signature.inputs.keys()
                failure = await asyncio.to_thread(model.failure)
            except ShmserveError as error:
                failure = error.message
            seconds = time.monotonic() - began
        bad += bool(failure)
        name = f"{row['name']}:{row.get('version', '')}".rstrip(":")
        print(f"{name:<32} {_verdict(failure, seconds)}", flush=True)
    if not rows:
        print("no model found", flush=True)
    for name in sorted(unused):
        print(f"--input: no model that was loaded has an input '{name}'", flush=True)
    return 2 if bad or unused or not rows else 0


def _verdict(failure: str, seconds: float) -> str:
    """Return the text beside a model's name, with further lines indented."""
    if not failure:
        return f"ok      one batch in {seconds * 1e3:.1f} ms"
    return "FAILED  " + failure.rstrip("; \n").replace("\n", "\n" + " " * 8)


class _Model:
    """A loaded model version under test; `values` are those of --input, by input name."""

    def __init__(self, where: dict[str, Any], model_dir: Path, values: dict[str, Any]) -> None:
        self._config = ModelSpec.of(where["config"])
        self._endpoint = where["endpoint"]
        self.signature = Signature(self._config, where["version"])
        self._samples = warmup_samples(self._config, model_dir)
        self._values = {n: v for n, v in values.items() if n in self.signature.inputs}

    def failure(self) -> str:
        """Return the error of the first failing request or invalid response, or "".

        Raises:
            ShmserveError: A request does not fit the model.
        """
        try:
            requests = self._requests()
        except (MemoryError, OverflowError, ValueError):  # ValueError: larger than a message
            return "not tried: a batch of zeros is too large to be sent"
        failures = (self._ask(*request) for request in requests)
        return next(filter(None, failures), "")

    def _requests(self) -> list[tuple[tuple[TensorRef, ...], bytes, list[Any]]]:
        signature = self.signature
        samples = [sample.tensors for sample in self._samples] or [
            [_zeros(signature, name) for name in signature.inputs if name not in self._values]
        ]
        requests = []
        for sample in samples:
            tensors = {tensor.name: tensor for tensor in sample if tensor.name in signature.inputs}
            tensors |= {name: self._given(name) for name in self._values}
            inputs = tuple(tensors.values())
            requests.append((inputs, *pack_inference(Inference(inputs))))
        return requests

    def _given(self, name: str) -> TensorRef:
        spec = self.signature.inputs[name]
        batch = (-1,) if self.signature.max_batch_size > 0 else ()
        tensor = ModelTensor(name, spec.datatype, (*batch, *spec.dims))
        shape, raw = encode(tensor, self._values[name])
        return TensorRef(name, spec.datatype, tuple(shape), raw)

    def _ask(self, inputs: tuple[TensorRef, ...], schema: bytes, data: list[Any]) -> str:
        """Return the error of a request with these inputs or of its outputs, or ""."""
        fit = self.signature.check("check", inputs, ())
        dealer = Dealer(self._endpoint, f"{os.getpid()}.{secrets.token_hex(4)}")
        text = _ids_are_texts(self._config)
        made_up = _MADE_UP if inputs else _NO_INPUTS
        if self._samples or self._values:
            made_up = ""
        try:
            dealer.send(
                Submit(
                    id=1,
                    schema=schema,
                    data=data,
                    arrived_ns=time.monotonic_ns(),
                    deadline_ns=0,
                    timeout_us=0,
                    priority=0,
                    request_id="check",
                    flags=SEQUENCE_START | SEQUENCE_END,
                    correlation_id=0 if text else 1,
                    correlation_text="check" if text else "",
                )
            )
            while dealer.wait(_PATIENCE_S):
                for message in dealer.receive():
                    match message:
                        case Failed(message=error):
                            return error + made_up
                        case Responded(code="", schema=b""):  # the end, without a response
                            return ""
                        case Responded(message=error, code=code) if code:
                            return error + made_up
                        case Responded() | Finished():
                            response = unpack_inferred(message.schema, message.data)
                            return self._misfit(response, fit.batch_size)
                if not dealer.connected:
                    return "its scheduler ended"
            return f"no answer within {_PATIENCE_S:.0f} s"
        finally:
            dealer.close()

    def _misfit(self, response: Inferred, batch_size: int) -> str:
        """Return the differences between a response and the configuration, or ""."""
        config = self._config
        given = {tensor.name: tensor for tensor in response.outputs}
        free = {name for each in config.batch_output for name in each.target_name}
        # Responses of decoupled models and of ensembles with conditional steps may lack outputs.
        whole = not (config.decoupled and given)
        whole &= not any(name.startswith("step[") for name in config.parameters)
        wrong = []
        for name, spec in self.signature.outputs.items():
            wanted = (batch_size, *spec.dims) if self.signature.max_batch_size > 0 else spec.dims
            tensor = given.get(name)
            if tensor is None:
                wrong += [f"the model gave no output '{name}'"] if whole else []
            elif tensor.datatype != spec.datatype or (
                name not in free and not agree(wanted, tensor.shape)
            ):
                wrong.append(
                    f"the model's output '{name}' is {TO_CONFIG[tensor.datatype]} "
                    f"{shape_text(tensor.shape)}, where the configuration says "
                    f"{TO_CONFIG[spec.datatype]} {shape_text(wanted)}"
                )
        return "\n".join(wrong)


def _ids_are_texts(config: ModelSpec) -> bool:
    """Check whether the sequence IDs of a model are texts."""
    sequences = config.sequence_batching
    return sequences is not None and sequences.correlation_id[1] == "BYTES"


def _zeros(signature: Signature, name: str) -> TensorRef:
    """Return an input of zeros or empty strings; the batch and variable dimensions are 1."""
    spec = signature.inputs[name]
    dims = tuple(1 if dim == -1 else dim for dim in spec.dims)
    shape = (1, *dims) if signature.max_batch_size > 0 else dims
    item = ITEM_SIZE[spec.datatype] or 4  # the length prefix of an empty string
    return TensorRef(name, spec.datatype, shape, bytes(element_count(shape) * item))
