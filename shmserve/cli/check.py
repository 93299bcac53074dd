"""`shmserve check DIR`: validates a repository, loads each model, and checks its responses.

The requests to a model are the samples of its `model_warmup`, or zeros and empty strings.
Values of `--input` replace the values of that input in each request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from shmserve import logs
from shmserve.config.command_line import Parsed
from shmserve.config.server import ServerConfig, from_flags
from shmserve.errors import ShmserveError
from shmserve.ipc.credit import FIRST_CREDIT
from shmserve.ipc.messages.inference import Failed, Finished, Responded, make_submit
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.processes import set_process_title
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, TO_CONFIG, element_count
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.samples import warmup_samples
from shmserve.ipc.tensors.schemas import (
    SEQUENCE_END,
    SEQUENCE_START,
    Inference,
    Inferred,
    pack_inference,
    unpack_inferred,
)
from shmserve.ipc.tensors.signature import Signature, shape_text, shapes_match
from shmserve.ipc.transport.zmtp import Dealer
from shmserve.protocols.tensors import ModelTensor, encode, load_inputs
from shmserve.supervisor.host.console import redirect_stderr
from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.main import defer_signals, run_composed
from shmserve.supervisor.supervisor import Supervisor

_RESPONSE_TIMEOUT_S = 60.0
_STREAM_TIMEOUT_S = 10.0  # seconds for the responses after the first one
_TEXT_BACKENDS = ("llm", "vllm")  # backends whose models receive a text prompt
_PROMPT = "text_input"  # the input with the prompt of a text backend
_ZEROS_NOTE = (
    "\nthe inputs were zeros and empty strings; set other values with --input NAME=VALUE, or with "
    "samples in `model_warmup`"
)
# Parts of the errors about a model's outputs, which are the model's fault for any inputs.
_INVALID_OUTPUTS = (
    *("inference output '", "configuration expects datatype "),
    *(" returned the output(s) ", " output(s), but not ", ".predict' did not return "),
)
_NOT_LOADED = "the model is not loaded; see the log for the reason"
_NO_INPUTS_NOTE = "\nthe request had no inputs, because the configuration lists none"


# The outcomes of a check, with their exit statuses. "refused": the model fails with made-up inputs;
# "differs": a response does not match the configuration.
_STATUSES = {"ok": 0, "refused": 0, "differs": 1, "FAILED": 2}


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """The outcome of the check of a model, and its message."""

    outcome: str
    text: str = ""


def run(args: argparse.Namespace, parsed: Parsed) -> int:
    """Check the repositories that the flags name, and print a line for each model.

    Returns:
        The largest status of the models' outcomes; 128 + N if signal N interrupts the check.
    """
    config = dataclasses.replace(from_flags(parsed, os.environ), on_cpu=args.on_cpu)
    values = load_inputs(args.input)
    with os.fdopen(os.dup(1), "w", errors="replace") as report, contextlib.redirect_stdout(report):
        os.dup2(2, 1)  # the models' output goes to stderr, so that stdout has only the report
        with redirect_stderr(config.log.log_file):
            return _check_models(config, values, as_json=args.json)


def _check_models(config: ServerConfig, values: dict[str, Any], *, as_json: bool) -> int:
    logs.configure("check", config.log)
    set_process_title("check")
    config = dataclasses.replace(
        config, gateways=0, model_control_mode="none", exit_on_error=False, load_models=()
    )
    signals = defer_signals()
    task = partial(_check, values=values, as_json=as_json)
    return run_composed(config, RunDirectory(config.run_dir), Listeners(), signals, task)


async def _check(supervisor: Supervisor, values: dict[str, Any], as_json: bool = False) -> int:
    supervisor.open()
    report_task = asyncio.ensure_future(_report(supervisor, values, as_json))
    end_signal = asyncio.ensure_future(supervisor.end_signals.get())
    await asyncio.wait({report_task, end_signal}, return_when=asyncio.FIRST_COMPLETED)
    is_interrupted = not report_task.done()
    for task in (report_task, end_signal):
        task.cancel()
    await supervisor.end(int(is_interrupted))
    return 128 + end_signal.result() if is_interrupted else report_task.result()


async def _report(supervisor: Supervisor, values: dict[str, Any], as_json: bool) -> int:
    """Load and test all models, print a line for each, and return the exit status."""
    with supervisor.progress:
        await supervisor.models.start()
    results: list[dict[str, Any]] = []
    unused_inputs = set(values)
    rows = await supervisor.models.index(ready_only=False)
    for row in rows:
        failure = row.get("reason", "" if "version" in row else _NOT_LOADED)
        verdict, duration_s = _Verdict("FAILED", failure), 0.0
        if not failure:
            start_s = time.monotonic()
            try:
                publication = supervisor.registry.describe_published(row["name"], row["version"])
                version = supervisor.registry.models[row["name"]].published[publication["version"]]
                model = _Model(publication, version.spec.model_dir, values)
                unused_inputs -= model.signature.inputs.keys()
                verdict = await asyncio.to_thread(model.verdict)
            except ShmserveError as error:
                verdict = _Verdict("FAILED", error.message)
            duration_s = time.monotonic() - start_s
        name = f"{row['name']}:{row.get('version', '')}".rstrip(":")
        text = verdict.text.rstrip("; \n")
        outcome = {"outcome": verdict.outcome, "milliseconds": round(duration_s * 1e3, 1)}
        results.append({"model": name, **outcome, "message": text})
        if not as_json:
            summary_text = text or f"one batch in {duration_s * 1e3:.1f} ms"
            lines = summary_text.replace("\n", "\n" + " " * 8)
            print(f"{name:<32} {verdict.outcome:<7} {lines}", flush=True)
    outcomes = [result["outcome"] for result in results]
    status = max(map(_STATUSES.__getitem__, outcomes), default=2)
    notes = [] if rows else ["no model found"]
    notes += [f"--input: no loaded model has an input '{name}'" for name in sorted(unused_inputs)]
    counts = {outcome: outcomes.count(outcome) for outcome in _STATUSES}
    if as_json:
        print(json.dumps({"models": results, "summary": counts, "notes": notes}), flush=True)
    else:
        if len(results) > 1:
            summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
            notes.append(f"{len(results)} models: {summary}")
        for note in notes:
            print(note, flush=True)
    return 2 if unused_inputs else status


class _Model:
    """A loaded model version under test; `values` are the values of --input, by input name."""

    def __init__(self, published: dict[str, Any], model_dir: Path, values: dict[str, Any]) -> None:
        self._config = ModelSpec.of(published["config"])
        self._endpoint = published["endpoint"]
        self.signature = Signature(self._config, published["version"])
        self._samples = warmup_samples(self._config, model_dir)
        self._values = {name: values[name] for name in values if name in self.signature.inputs}

    def verdict(self) -> _Verdict:
        """Return the first outcome that is not "ok", or "ok" if every request succeeds.

        Raises:
            ShmserveError: A request does not fit the model.
        """
        try:
            requests = self._build_requests()
        # A ValueError means that the tensor is larger than a message.
        except (MemoryError, OverflowError, ValueError):
            return _Verdict("refused", "not tested: a batch of zeros is too large for a message")
        verdicts = (self._send(*request) for request in requests)
        return next((verdict for verdict in verdicts if verdict.outcome != "ok"), _Verdict("ok"))

    def _build_requests(self) -> list[tuple[tuple[TensorRef, ...], bytes, list[Any]]]:
        signature = self.signature
        samples = [sample.tensors for sample in self._samples] or [
            [self._generated_input(name) for name in self._generated_names()]
        ]
        requests = []
        for sample in samples:
            tensors = {tensor.name: tensor for tensor in sample if tensor.name in signature.inputs}
            tensors |= {name: self._flag_input(name) for name in self._values}
            inputs = tuple(tensors.values())
            requests.append((inputs, *pack_inference(Inference(inputs))))
        return requests

    def _generated_names(self) -> Iterable[str]:
        if self._config.backend not in _TEXT_BACKENDS:
            return [name for name in self.signature.inputs if name not in self._values]
        # A request has one prompt, as a text, tokens or messages; the other inputs are settings.
        return () if self._values.keys() & {_PROMPT, "input_ids", "messages"} else (_PROMPT,)

    def _generated_input(self, name: str) -> TensorRef:
        tensor = _zero_tensor(self.signature, name)
        if self._config.backend not in _TEXT_BACKENDS:
            return tensor
        return TensorRef(tensor.name, tensor.datatype, tensor.shape, b"\5\0\0\0" + b"Hello")

    def _flag_input(self, name: str) -> TensorRef:
        spec = self.signature.inputs[name]
        batch_dims = (-1,) if self.signature.max_batch_size > 0 else ()
        tensor = ModelTensor(name, spec.datatype, (*batch_dims, *spec.dims))
        shape, data = encode(tensor, self._values[name])
        return TensorRef(name, spec.datatype, tuple(shape), data)

    def _send(self, inputs: tuple[TensorRef, ...], schema: bytes, data: list[Any]) -> _Verdict:
        """Send the packed request (`schema`, `data`) with these inputs, and return its outcome."""
        batch_size = self.signature.check("check", inputs, ()).batch_size
        batching = self._config.sequence_batching
        has_text_ids = batching is not None and batching.correlation_input[1] == "BYTES"
        sequence_id = "check" if has_text_ids else 1
        is_realistic = bool(self._samples or self._values)
        outcome = "FAILED" if is_realistic else "refused"
        note = "" if is_realistic else _ZEROS_NOTE if inputs else _NO_INPUTS_NOTE
        identity = f"{os.getpid()}.{secrets.token_hex(4)}"
        with contextlib.closing(Dealer(self._endpoint, identity)) as dealer:
            now_ns, flags = time.monotonic_ns(), SEQUENCE_START | SEQUENCE_END
            submit = make_submit(
                1, schema, data, now_ns, request_id="check", flags=flags, correlation_id=sequence_id
            )
            dealer.send(submit)
            response_count, deadline = 0, time.monotonic() + _RESPONSE_TIMEOUT_S
            # A stream may be endless, and without credit it stops after `FIRST_CREDIT` responses.
            while response_count < FIRST_CREDIT and dealer.wait(
                max(0.0, deadline - time.monotonic())
            ):
                for message in dealer.receive():
                    match message:
                        case Responded(code="", schema=b""):  # the stream ends without outputs
                            return _Verdict("ok")
                        case Failed() | Responded() if any(
                            text in message.message for text in _INVALID_OUTPUTS
                        ):
                            return _Verdict("differs", message.message)
                        case Failed() | Responded() if message.code:
                            # A worker that dies is a failure, even with made-up inputs.
                            died = message.message.startswith("the model's worker died")
                            return _Verdict("FAILED" if died else outcome, message.message + note)
                        case Responded() | Finished():
                            response = unpack_inferred(message.schema, message.data)
                            differences = self._describe_differences(response, batch_size)
                            if differences or getattr(message, "final", True):
                                return _Verdict("differs" if differences else "ok", differences)
                            if not response_count:
                                deadline = time.monotonic() + _STREAM_TIMEOUT_S
                            response_count += 1
                if not dealer.connected:
                    return _Verdict("FAILED", "the scheduler of the model has exited")
            if response_count:
                return _Verdict("ok")
            return _Verdict("FAILED", f"no response within {_RESPONSE_TIMEOUT_S:.0f} s")

    def _describe_differences(self, response: Inferred, batch_size: int) -> str:
        """Return the differences between a response and the configuration, or ""."""
        config = self._config
        returned_tensors = {tensor.name: tensor for tensor in response.outputs}
        split_outputs = {name for output in config.batch_output for name in output.target_name}
        # Responses of decoupled models and of ensembles with conditional steps may lack outputs.
        all_required = not (config.decoupled and returned_tensors)
        all_required &= not any(name.startswith("step[") for name in config.parameters)
        mismatches = []
        for name, spec in self.signature.outputs.items():
            is_batched = self.signature.max_batch_size > 0
            expected_dims = (batch_size, *spec.dims) if is_batched else spec.dims
            tensor = returned_tensors.get(name)
            configured_text = f"{TO_CONFIG[spec.datatype]} {shape_text(expected_dims)}"
            if tensor is None:
                mismatches += [(name, configured_text, "missing")] if all_required else []
                continue
            # A scalar is one element; configurations have no scalars.
            is_scalar = not tensor.shape and element_count([*map(abs, expected_dims)]) == 1
            fits = name in split_outputs or is_scalar or shapes_match(expected_dims, tensor.shape)
            if tensor.datatype != spec.datatype or not fits:
                shape = shape_text(tensor.shape)
                mismatches.append((name, configured_text, f"{TO_CONFIG[tensor.datatype]} {shape}"))
        if not mismatches:
            return ""
        table_rows = [("output", "configuration", "response"), *mismatches]
        widths = [max(len(row[column]) for row in table_rows) for column in range(2)]
        lines = (f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in table_rows)
        return "the outputs differ from the configuration:\n" + "\n".join(lines)


def _zero_tensor(signature: Signature, name: str) -> TensorRef:
    """Return an input of zeros or empty strings, whose batch and variable dimensions are 1."""
    spec = signature.inputs[name]
    dims = tuple(1 if dim == -1 else dim for dim in spec.dims)
    shape = (1, *dims) if signature.max_batch_size > 0 else dims
    item_size = ITEM_SIZE[spec.datatype] or 4  # 4: the length prefix of an empty string
    return TensorRef(name, spec.datatype, shape, bytes(element_count(shape) * item_size))
