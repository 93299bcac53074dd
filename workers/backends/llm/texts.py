"""The text thread: conversion of requests to tokens and of tokens to responses."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import BeamSearch, Choose, Ended, Prepared, Resumed
from shmserve.workers.backends import OutputStream
from shmserve.workers.backends.llm.answers import TextResponse
from shmserve.workers.backends.llm.engine import SequenceOutput
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.prompts import LONG, PromptReader
from shmserve.workers.backends.llm.sequences import Prompt
from shmserve.workers.backends.llm.token_texts import TokenTexts
from shmserve.workers.batch.response_stream import MAX_CREDIT_WAIT_S, unread_responses
from shmserve.workers.links.scheduler import InstanceLink

logger = logging.getLogger(__name__)

_MAX_WAIT_NS = int(MAX_CREDIT_WAIT_S * 1e9)


class Texts:
    """The texts of all running requests, processed in a separate thread.

    `put` and `close` may be called in any thread. The engine's thread calls `fail_requests` and
    `spent_ns`. No lock is needed: these methods read single values that the text thread replaces,
    and a stream has its own lock. All other methods run in the text thread.

    Attributes:
        prompts: The prompt of each prepared request by key. The engine's thread reads it.
    """

    def __init__(
        self, checkpoint: Checkpoint, link: InstanceLink, settings: EngineSettings
    ) -> None:
        self.prompts: dict[int, Prompt] = {}
        self._texts = TokenTexts(checkpoint.tokenizer)
        self._link = link
        self.reader = PromptReader(checkpoint, settings, self._texts)
        # Long prompts and grammars are processed in another thread, which delays no other text.
        self._slow_jobs = ThreadPoolExecutor(1, "long prompts")
        # A long conversation waits seconds for the process that renders it.
        self._renderings = ThreadPoolExecutor(1, "long conversations")
        self._responses: dict[int, TextResponse] = {}
        # The time (monotonic ns) since which a request waits for credit, by key, oldest first.
        self._unread_since_ns: dict[int, int] = {}
        self._cpu_ns = self._reported_cpu_ns = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="texts", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job for the text thread."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the text thread after the queued jobs."""
        for executor in (self._slow_jobs, self._renderings):
            executor.shutdown(wait=False, cancel_futures=True)
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=1.0 if self._unread_since_ns else None)
                if job is None:
                    return
                job()
            except queue.Empty:
                pass
            except Exception:
                logger.exception("texts of a model failed")
            self._fail_overdue()
            self._cpu_ns = time.thread_time_ns()

    def spent_ns(self) -> int:
        """Return the CPU time (ns) of the text thread since the last call."""
        cpu_ns = self._cpu_ns
        spent_ns, self._reported_cpu_ns = cpu_ns - self._reported_cpu_ns, cpu_ns
        return spent_ns

    # --- requests

    def prepare(
        self, stream: OutputStream, inputs: Mapping[str, Any], resumed: list[Resumed]
    ) -> None:
        """Read a request, and send `Prepared` or the error of the request."""
        size = sum(len(text) for text in inputs.values() if isinstance(text, str | memoryview))
        if isinstance(inputs.get("messages"), memoryview):
            self._renderings.submit(self._read_request, stream, inputs, resumed)
        elif size > LONG or "task" in stream.request.schema.parameters:
            self._slow_jobs.submit(self._read_request, stream, inputs, resumed)
        else:
            self._read_request(stream, inputs, resumed)

    def _read_request(
        self, stream: OutputStream, inputs: Mapping[str, Any], resumed: list[Resumed]
    ) -> None:
        """Read a request in any thread."""
        try:
            converted = self.reader.convert(stream.request, inputs)
            if converted is not None:
                stream.send(converted, final=True)
                return
            prompt, echo = self.reader.read(stream.request, inputs, resumed)
        except Exception as error:
            stream.fail_raised(error)
            return
        start = partial(self._start, stream, prompt, echo, resumed)
        if prompt.parameters.grammar[0] or prompt.message_grammar:
            self._slow_jobs.submit(self._compile_grammar, prompt, stream, start)
        elif threading.current_thread() is self._thread:
            start()
        else:
            self.put(start)

    def _compile_grammar(
        self, prompt: Prompt, stream: OutputStream, start: Callable[[], None]
    ) -> None:
        try:
            self.reader.compile(prompt)
        except Exception as error:
            stream.fail_raised(error)
        else:
            self.put(start)

    def _start(
        self, stream: OutputStream, prompt: Prompt, echo: str, resumed: list[Resumed]
    ) -> None:
        key = prompt.key
        response = TextResponse(prompt, self._texts, stream, self._link, echo)
        if not prompt.parameters.beams:
            for earlier in resumed:
                tokens = prompt.resumed_tokens.get(earlier.sample, [])
                response.samples[earlier.sample].resume(earlier, tokens)
        self._responses[key] = response
        self._unread_since_ns.pop(key, None)
        self.prompts[key] = prompt
        stream.on_credit(partial(self.put, partial(self._respond, key)))
        self._link.send(_make_prepared(prompt, stream.request.work.priority))
        # Last, because a stream that is already cancelled calls the function immediately.
        stream.on_cancel(partial(self.put, partial(self._cancel, key)))
        if prompt.resumed_tokens:
            self._respond(key)

    # --- tokens

    def append_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Append the tokens of a step to the texts of their samples, and respond."""
        updated_keys: dict[int, None] = {}
        for output in outputs:
            response = self._responses.get(output.prompt.key)
            if response is None or response.prompt is not output.prompt:
                continue
            if not output.tokens:
                response.encode_prompt()
                continue
            sample = response.samples[output.sample]
            if sample.finish_reason:
                continue
            if sample.add(output.tokens, output.finish_reason, output.logprobs):
                self._link.send(Ended(output.sequence))
            updated_keys[output.prompt.key] = None
        for key in updated_keys:
            self._respond(key)

    def end_beam_search(self, message: Choose) -> None:
        """Respond with the best hypotheses of a beam search."""
        response = self._responses.get(message.key)
        if response is not None:
            response.add_hypotheses(message.hypotheses)
            self._respond(message.key)

    def fail_requests(self, keys: set[int], error: BaseException) -> None:
        """Fail requests of a step.

        The engine's thread calls it, so that the requests end before the step does.
        """
        for key in keys:
            response = self._responses.get(key)
            if response is not None:
                response.stream.fail_raised(error)
                self.put(partial(self._remove, response))

    def _respond(self, key: int) -> None:
        response = self._responses.get(key)
        if response is None:
            return
        if response.respond():
            self._remove(response)
        elif response.stream.may_send:
            self._unread_since_ns.pop(key, None)
        else:
            self._unread_since_ns.setdefault(key, time.monotonic_ns())

    def _fail_overdue(self) -> None:
        """Fail requests whose clients have granted no credit for too long."""
        deadline_ns = time.monotonic_ns() - _MAX_WAIT_NS if self._unread_since_ns else 0
        while self._unread_since_ns:
            key, unread_since_ns = next(iter(self._unread_since_ns.items()))
            if unread_since_ns >= deadline_ns:
                return
            response = self._responses[key]
            self._remove(response)
            response.stream.fail(unread_responses())

    def _cancel(self, key: int) -> None:
        response = self._responses.get(key)
        if response is not None and response.stream.is_cancelled():
            self._remove(response)  # before the scheduler plans another step with the request
            response.stream.send(final=True)

    def _remove(self, response: TextResponse) -> None:
        key = response.prompt.key
        if self._responses.get(key) is response:
            self._unread_since_ns.pop(key, None)
            del self._responses[key]
            del self.prompts[key]


def _make_prepared(prompt: Prompt, priority: int) -> Prepared:
    parameters = prompt.parameters
    beams: list[BeamSearch] = []
    if parameters.beams:
        penalty, early = parameters.length_penalty, parameters.early_stopping
        beams = [BeamSearch(parameters.beams, penalty, early, list(prompt.end_tokens))]
    return Prepared(
        prompt.key,
        np.array(prompt.tokens, np.int32).tobytes(),
        max(parameters.max_tokens, 1),
        parameters.samples or 1,
        parameters.priority or priority,
        prompt.top_logprobs >= 0,
        not (beams or prompt.replayed_tokens),
        beams,
        bool(prompt.replayed_tokens),
    )
