"""A generative worker, and a scheduler that the test plays, one step at a time."""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.ipc.messages import generation as g
from shmserve.ipc.messages.inference import CreditExecution, ExecutionResponded, Work
from shmserve.ipc.tensors.arrays import decode_bytes
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inference, RequestedOutput, pack_inference
from shmserve.workers.backends.llm import LlmBackend
from tests.rigs.worker_rig import CLIENT_PID, Rig, rig, tensor
from tests.support.messages import inferred_of
from tests.support.waiting import DEADLINE_S

ALL_OUTPUTS = (
    "text_output", "index", "token_ids", "finish_reason", "stop_reason", "logprobs", "usage",
)  # fmt: skip


def work(key: int, outputs: Sequence[str] = ALL_OUTPUTS, **fields: Any) -> Work:
    """Return a request; arguments that are inputs of the model are tensors, others parameters."""
    inputs: list[TensorRef] = [
        tensor(name, np.array([fields.pop(name).encode()], object))
        for name in ("text_input", "messages")
        if name in fields
    ]
    if "input_ids" in fields:
        inputs.append(tensor("input_ids", np.array(fields.pop("input_ids"), np.int32)))
    if fields:
        text = json.dumps({"exclude_input_in_output": True, **fields})
        inputs.append(tensor("sampling_parameters", np.array([text.encode()], object)))
    requested_outputs = tuple(RequestedOutput(name) for name in outputs)
    return Work(key, CLIENT_PID, *pack_inference(Inference(tuple(inputs), requested_outputs)))


def decode_outputs(message: ExecutionResponded) -> dict[str, list[Any]]:
    """Return the outputs of a response: texts, decoded JSON values, and numbers."""
    outputs: dict[str, list[Any]] = {}
    for output in inferred_of(message).outputs:
        assert isinstance(output.data, bytes)
        if output.datatype == "INT32":
            outputs[output.name] = np.frombuffer(output.data, np.int32).tolist()
            continue
        texts = decode_bytes(memoryview(output.data), output.shape, output.name, "m")
        outputs[output.name] = [text.decode() for text in texts.ravel()]
        if output.name in ("logprobs", "usage", "stop_reason"):
            outputs[output.name] = [json.loads(text or "null") for text in outputs[output.name]]
    return outputs


@dataclass(eq=False)
class Running:
    """A sequence as this scheduler has it."""

    number: int
    key: int
    sample: int
    tokens: list[int]
    computed: int = 0
    table: list[int] = field(default_factory=list)
    sent_blocks: int = 0
    host: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Scheduler:
    """The scheduler's end: steps of `chunk` prompt tokens and `draft` proposed ones."""

    rig: Rig
    blocks: int
    block_size: int
    chunk: int = 16
    draft: int = 0
    shuffle: random.Random | None = None
    responses: dict[int, list[dict[str, list[Any]]]] = field(default_factory=dict)
    errors: dict[int, tuple[str, str]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    responses_sent: list[g.ResponseSent] = field(default_factory=list)
    prepared: dict[int, g.Prepared] = field(default_factory=dict)
    running: dict[int, Running] = field(default_factory=dict)
    results: list[g.RowResult] = field(default_factory=list)
    released_sequences: list[int] = field(default_factory=list)
    new_sequences: list[g.NewSequence] = field(default_factory=list)
    block_copies: list[int] = field(default_factory=list)  # to be copied in the next step
    clients_read: bool = True  # clients take all responses at once
    stepped: g.Stepped | None = None

    def __post_init__(self) -> None:
        self._steps = itertools.count(1)
        self._numbers = itertools.count(1)
        self.free = list(range(self.blocks))
        if self.shuffle is not None:
            self.shuffle.shuffle(self.free)

    # --- the socket

    def send(self, message: Any) -> None:
        self.rig.instance.link._dispatch(message)
        self.rig.instance.serve_commands()

    def listen(self, timeout_s: float = 5.0) -> None:
        """Handle the messages of the worker; wait for a first one."""
        for message in self.rig.sent(timeout_s):
            match message:
                case g.Prepared(key=key):
                    self.prepared[key] = message
                case g.ResponseSent():
                    self.responses_sent.append(message)
                case g.StopStringFound(sequence=number):
                    if number in self.running:
                        self.release(number)
                case g.Stepped():
                    self.stepped = message
                case ExecutionResponded():
                    self._respond(message)

    def _respond(self, message: ExecutionResponded) -> None:
        if message.code:
            self.errors[message.key] = (message.code, message.message)
        elif message.schema:
            self.responses.setdefault(message.key, []).append(decode_outputs(message))
            if self.clients_read and not message.final:
                self.rig.instance.link._dispatch(CreditExecution(message.key, 1))
        if message.final:
            self.ended.add(message.key)
            for number in [n for n, g in self.running.items() if g.key == message.key]:
                self.release(number)

    # --- requests

    def prepare(self, key: int, resumed: Sequence[g.Resumed] = (), **fields: Any) -> None:
        self.send(g.Prepare([work(key, **fields)], list(resumed)))
        self._wait(f"request {key} is prepared", lambda: key in {*self.prepared, *self.ended})

    def add(self, key: int, resumed: Sequence[g.Resumed] = (), **fields: Any) -> None:
        """Prepare a request, and begin its samples."""
        self.prepare(key, resumed, **fields)
        if key not in self.prepared or self.prepared[key].beams:
            return
        resumed_samples = {entry.sample: entry for entry in resumed}
        prompt = np.frombuffer(self.prepared[key].prompt, np.int32).tolist()
        for sample in range(self.prepared[key].samples):
            resumed_sample = (
                None if self.prepared[key].replays_tokens else resumed_samples.get(sample)
            )
            if resumed_sample is None or not resumed_sample.finish_reason:
                tokens = (
                    []
                    if resumed_sample is None
                    else np.frombuffer(resumed_sample.tokens, np.int32).tolist()
                )
                self.enter(key, sample, [*prompt, *tokens])

    def enter(self, key: int, sample: int, tokens: list[int]) -> Running:
        sequence = Running(next(self._numbers), key, sample, tokens)
        self.running[sequence.number] = sequence
        self.new_sequences.append(g.NewSequence(sequence.number, key, sample))
        return sequence

    def fork(self, parent: Running, sample: int, token: int = -1) -> Running:
        """Begin a sequence from another one, with copies of its blocks instead of shared ones."""
        c = self.enter(parent.key, sample, parent.tokens + [token] * (token >= 0))
        self.new_sequences[-1] = g.NewSequence(c.number, parent.key, sample, parent.number, token)
        c.computed = parent.computed
        c.table = [self.free.pop() for _ in parent.table]
        self.block_copies += _pairs(parent.table, c.table)
        return c

    def release(self, number: int) -> None:
        sequence = self.running.pop(number)
        self.free += sequence.table
        self.released_sequences.append(number)

    def swap(self, sequence: Running) -> None:
        """Copy all blocks of a sequence to the host and back to other blocks."""
        host = list(range(len(sequence.table)))
        self.step(rows=[], swap_out=_pairs(sequence.table, host))
        self.free = sequence.table + self.free  # not to be taken first
        sequence.table = [self.free.pop() for _ in host]
        sequence.sent_blocks = 0
        self.step(rows=[], swap_in=_pairs(host, sequence.table))

    def recompute(self, sequence: Running) -> None:
        self.free = sequence.table + self.free
        sequence.table = []
        sequence.sent_blocks = sequence.computed = 0

    # --- steps

    def row(self, sequence: Running) -> g.Row:
        missing_tokens = len(sequence.tokens) - sequence.computed
        count = min(missing_tokens, self.chunk)
        samples = count == missing_tokens
        draft = self.draft if samples else 0
        max_length = np.frombuffer(self.prepared[sequence.key].prompt, np.int32).size
        max_length += self.prepared[sequence.key].max_tokens
        draft = max(min(draft, max_length - len(sequence.tokens) - 1), 0)
        needed = -(-(sequence.computed + count + draft) // self.block_size)
        while len(sequence.table) < needed:
            sequence.table.append(self.free.pop())
        keep, sequence.sent_blocks = sequence.sent_blocks, len(sequence.table)
        blocks = sequence.table[keep:]
        computed_range = sequence.number, sequence.computed, count
        return g.Row(*computed_range, keep, blocks, draft, samples)

    def step(self, rows: list[g.Row] | None = None, **swaps: Any) -> list[g.RowResult]:
        if rows is None:
            rows = [self.row(sequence) for sequence in self.running.values()]
        begun, released, copies = (self.new_sequences, self.released_sequences, self.block_copies)
        self.new_sequences, self.released_sequences, self.block_copies = [], [], []
        self.stepped = None
        running_before = dict(self.running)
        self.send(g.Step(next(self._steps), rows, begun, released, copies=copies, **swaps))
        self._wait("the step ends", lambda: self.stepped is not None)
        assert self.stepped is not None
        results = {result.sequence: result for result in self.stepped.results}
        skipped_rows = self.stepped.skipped
        assert results.keys() == {row.sequence for row in rows if row.samples_next} - {
            *skipped_rows
        }
        self.results += self.stepped.results
        for row in rows:
            self._computed(running_before[row.sequence], row, results.get(row.sequence))
        return self.stepped.results

    def _computed(self, sequence: Running, row: g.Row, result: g.RowResult | None) -> None:
        sequence.computed = row.start + row.count
        if result is not None and not result.candidates:
            assert 1 <= len(result.tokens) <= row.draft_count + 1
            sequence.tokens += result.tokens
            sequence.computed += len(result.tokens) - 1
            if result.finish_reason and sequence.number in self.running:
                self.release(sequence.number)

    def run(self) -> None:
        """Step until no sequence is left, and all requests have ended."""
        while self.running:
            self.step()
        self.finish()

    def generate(self, key: int, resumed: Sequence[g.Resumed] = (), **fields: Any) -> None:
        """Run a request, and those that were added before, to the end."""
        self.add(key, resumed, **fields)
        self.run()

    def finish(self) -> None:
        self._wait("all requests end", lambda: self.prepared.keys() <= self.ended)

    def _wait(self, condition_text: str, is_true: Callable[[], bool]) -> None:
        """Take the worker's messages until a condition holds, for at most `DEADLINE_S`."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_true():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {condition_text}"
            self.listen(0.2)

    @property
    def is_idle(self) -> bool:
        """Return whether the worker has completed all requests."""
        link = self.rig.instance.link
        with link.lock:
            return not link.has_open_requests

    @property
    def kept_prompts(self) -> dict[int, Any]:
        """Return the worker's prompts of requests that have not ended."""
        backend: Any = self.rig.instance._backend
        prompts: dict[int, Any] = backend._text_thread.prompts
        return prompts

    def text(self, key: int, index: int = 0) -> str:
        return "".join(
            response["text_output"][response["index"].index(index)]
            for response in self.responses[key]
            if index in response["index"]
        )

    def tokens(self, key: int) -> list[int]:
        return [token for response in self.responses[key] for token in response["token_ids"]]


def _pairs(sources: list[int], targets: list[int]) -> list[int]:
    return [block for pair in zip(sources, targets, strict=True) for block in pair]


@contextmanager
def llm_rig(
    folder: Path, checkpoint: Path, engine: dict[str, Any] | None = None, **scheduling: Any
) -> Iterator[Scheduler]:
    s = {"block_size": 4, "kv_cache_blocks": 256, "swap_space_gb": 0.001, **(engine or {})}
    folder.mkdir(exist_ok=True)
    with rig(folder) as model_rig:
        model_rig.context.version_dir.rmdir()
        model_rig.context.version_dir.symlink_to(checkpoint.resolve())
        (model_rig.context.model_dir / "engine.yaml").write_text(json.dumps(s), encoding="utf-8")
        backend = LlmBackend(model_rig.context)
        model_rig.serve(backend, backend.complete_config({"name": "m", "backend": "llm"}))
        try:
            yield Scheduler(model_rig, s["kv_cache_blocks"], s["block_size"], **scheduling)
        finally:
            backend.unload()
