"""`shmserve check DIR`: parse and validate a repository, load each model once, run one batch,
report for each model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import time
from typing import Any

from shmserve import logs
from shmserve.config.server import ServerConfig
from shmserve.errors import ShmserveError
from shmserve.ipc.messages.inference import Failed, Finished, Responded, Submit
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.processes import name_process
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.inference import (
    SEQUENCE_END,
    SEQUENCE_START,
    Inference,
    pack_inference,
)
from shmserve.ipc.tensors.signature import Signature
from shmserve.ipc.transport.dealer import Dealer
from shmserve.supervisor.host.console import StartupReport, written_to
from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.main import hold_signals, run_composed
from shmserve.supervisor.supervisor import Supervisor

_PATIENCE_S = 60.0


def check(config: ServerConfig) -> int:
    """Check the repositories of `config`; prints a line a model; 0 when all is well, 2
    otherwise, 128 + N when signal N came first."""
    with written_to(config.log.log_file):
        return _checked(config)


def _checked(config: ServerConfig) -> int:
    logs.configure("check", config.log)
    name_process("check")
    alone = dataclasses.replace(
        config, gateways=0, model_control_mode="none", exit_on_error=False, load_models=()
    )
    signals = hold_signals()
    return run_composed(alone, RunDirectory(alone.run_dir), Listeners(), signals, _check)


async def _check(supervisor: Supervisor) -> int:
    supervisor.open()
    work = asyncio.ensure_future(_report(supervisor))
    stop = asyncio.ensure_future(supervisor.signalled())
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    interrupted = not work.done()
    for task in (work, stop):
        task.cancel()
    await supervisor.end(int(interrupted))
    return 128 + stop.result() if interrupted else work.result()


async def _report(supervisor: Supervisor) -> int:
    """Load all, try all, print a line each; the exit status."""
    with StartupReport() as progress:
        await supervisor.models.start(progress)
    bad = 0
    rows = await supervisor.models.index(ready=False)
    for row in rows:
        failure = row.get("reason", "")
        seconds = 0.0
        if not failure:
            try:
                where = supervisor.registry.find(row["name"], row["version"])
                failure, seconds = await asyncio.to_thread(_run_one_batch, where)
            except ShmserveError as error:
                failure = error.message
        bad += bool(failure)
        name = f"{row['name']}:{row.get('version', '')}".rstrip(":")
        print(f"{name:<32} {_verdict(failure, seconds)}", flush=True)
    if not rows:
        print("no model found", flush=True)
    return 2 if bad or not rows else 0


def _verdict(failure: str, seconds: float) -> str:
    """The text beside a model's name; of several lines the others are indented."""
    if not failure:
        return f"ok      one batch in {seconds * 1e3:.1f} ms"
    return "FAILED  " + failure.rstrip("; \n").replace("\n", "\n" + " " * 8)


def _run_one_batch(where: dict[str, Any]) -> tuple[str, float]:
    config = ModelSpec.of(where["config"])
    signature = Signature(config, where["version"])
    try:
        inputs = tuple(_zeros(signature, name) for name in signature.inputs)
        work = pack_inference(Inference(inputs))
    except (MemoryError, OverflowError, ValueError):  # ValueError: more than a message holds
        return "not tried: a batch of zeros is too large to be sent", 0.0
    fit = signature.check("check", inputs, ())
    dealer = Dealer(where["endpoint"], f"{os.getpid()}.{secrets.token_hex(4)}")
    began = time.monotonic()
    text = _ids_are_texts(config)
    try:
        dealer.send(
            Submit(
                id=1,
                batch_size=fit.batch_size,
                shape_key=fit.shape_key,
                arrived_ns=time.monotonic_ns(),
                deadline_ns=0,
                timeout_us=0,
                priority=0,
                work=work,
                request_id="check",
                flags=SEQUENCE_START | SEQUENCE_END,
                correlation_id=0 if text else 1,
                correlation_text="check" if text else "",
            )
        )
        while dealer.wait(_PATIENCE_S):
            for message in dealer.receive():
                match message:
                    case Finished():
                        return "", time.monotonic() - began
                    case Responded(message=error, code=code):  # the first, or that there is none
                        return (error, 0.0) if code else ("", time.monotonic() - began)
                    case Failed(message=error):
                        return error, 0.0
            if not dealer.connected:
                return "its scheduler ended", 0.0
        return f"no answer within {_PATIENCE_S:.0f} s", 0.0
    finally:
        dealer.close()


def _ids_are_texts(config: ModelSpec) -> bool:
    """Whether a model with sequences takes texts as their ids."""
    sequences = config.sequence_batching
    return sequences is not None and sequences.correlation_id[1] == "BYTES"


def _zeros(signature: Signature, name: str) -> TensorRef:
    """An input of zeros (empty strings); every open dimension, and the batch, is 1."""
    spec = signature.inputs[name]
    dims = tuple(1 if dim == -1 else dim for dim in spec.dims)
    shape = (1, *dims) if signature.max_batch_size > 0 else dims
    item = ITEM_SIZE[spec.datatype] or 4  # an empty string is its four length bytes
    return TensorRef(name, spec.datatype, shape, bytes(element_count(shape) * item))
