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
from shmserve.workers.backends.llm.prompts import LONG, LongText, PromptReader
from shmserve.workers.backends.llm.sequences import Prompt
from shmserve.workers.backends.llm.token_texts import TokenTexts
from shmserve.workers.batch.response_stream import MAX_CREDIT_WAIT_S, unread_responses
from shmserve.workers.links.scheduler import InstanceLink

logger = logging.getLogger(__name__)

_MAX_WAIT_NS = int(MAX_CREDIT_WAIT_S * 1e9)


class Texts:
    """The texts of all running requests, processed in a separate thread.

    `put` and `close` may be called in any thread. The engine's thread calls `failed` and
    `spent_ns`. No lock is needed: these methods read single values that the text thread replaces,
    and a stream has its own lock. All other methods run in the text thread.

    Attributes:
        prompts: The prompt of each prepared request by key. The engine's thread reads it.
        reader: The reader of requests.
    """

    def __init__(
        self, checkpoint: Checkpoint, link: InstanceLink, settings: EngineSettings
    ) -> None:
        self.prompts: dict[int, Prompt] = {}
        self._texts = TokenTexts(checkpoint.tokenizer)
        self._link = link
        self.reader = PromptReader(checkpoint, settings, self._texts)
        # Long prompts and grammars are read beside the texts of others.
        self._aside = ThreadPoolExecutor(1, "long prompts")
        self._answers: dict[int, TextResponse] = {}
        # Key -> the time (monotonic ns) since which the client has read no response, oldest first.
        self._held: dict[int, int] = {}
        self._worked_ns = self._reported_ns = 0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="texts", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job for the text thread."""
        self._inbox.put(job)

    def close(self) -> None:
        """End the text thread after the jobs that were put before."""
        self._aside.shutdown(wait=False, cancel_futures=True)
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                job = self._inbox.get(timeout=1.0 if self._held else None)
                if job is None:
                    return
                job()
            except queue.Empty:
                pass
            except Exception:
                logger.exception("texts of a model failed")
            self._end_overdue()
            self._worked_ns = time.thread_time_ns()

    def spent_ns(self) -> int:
        """Return the CPU time (ns) of the text thread since the last call."""
        worked_ns = self._worked_ns
        spent_ns, self._reported_ns = worked_ns - self._reported_ns, worked_ns
        return spent_ns

    # --- requests

    def prepare(
        self, stream: OutputStream, inputs: Mapping[str, Any], resumed: list[Resumed]
    ) -> None:
        """Read a request, and send `Prepared` or the error of the request."""
        size = sum(len(each) for each in inputs.values() if isinstance(each, str | LongText))
        if size > LONG or "task" in stream.request.schema.parameters:
            self._aside.submit(self._read, stream, inputs, resumed)
        else:
            self._read(stream, inputs, resumed)

    def _read(
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
        begin = partial(self._begin, stream, prompt, echo, resumed)
        if prompt.parameters.grammar[0] or prompt.message_grammar:
            self._aside.submit(self._compile, prompt, stream, begin)
        elif threading.current_thread() is self._thread:
            begin()
        else:
            self.put(begin)

    def _compile(self, prompt: Prompt, stream: OutputStream, begin: Callable[[], None]) -> None:
        try:
            self.reader.compile(prompt)
        except Exception as error:
            stream.fail_raised(error)
        else:
            self.put(begin)

    def _begin(
        self, stream: OutputStream, prompt: Prompt, echo: str, resumed: list[Resumed]
    ) -> None:
        key = prompt.key
        answer = TextResponse(prompt, self._texts, stream, self._link, echo)
        if not prompt.parameters.beams:
            for each in resumed:
                answer.samples[each.sample].resume(each, prompt.resumed_tokens.get(each.sample, []))
        self._answers[key] = answer
        self._held.pop(key, None)
        self.prompts[key] = prompt
        stream.on_credit(partial(self.put, partial(self._respond, key)))
        self._link.send(_prepared(prompt, stream.request.work.priority))
        # Last, because it may call the function immediately.
        stream.on_cancel(partial(self.put, partial(self._cancel, key)))
        if prompt.resumed_tokens:
            self._respond(key)

    # --- tokens

    def emitted(self, news: list[SequenceOutput]) -> None:
        """Append the tokens of a step to the texts of their samples."""
        touched: dict[int, None] = {}
        for each in news:
            answer = self._answers.get(each.prompt.key)
            if answer is None or answer.prompt is not each.prompt:
                continue
            if not each.tokens:
                answer.encode_prompt()
                continue
            sample = answer.samples[each.sample]
            if sample.finish_reason:
                continue
            if sample.add(each.tokens, each.finish_reason, each.logprobs):
                self._link.send(Ended(each.sequence))
            touched[each.prompt.key] = None
        for key in touched:
            self._respond(key)

    def chosen(self, message: Choose) -> None:
        """Take the samples that a beam search has chosen."""
        answer = self._answers.get(message.key)
        if answer is not None:
            answer.choose(message.hypotheses)
            self._respond(message.key)

    def failed(self, keys: set[int], error: BaseException) -> None:
        """Fail the requests of a step that raised an error.

        The engine's thread calls it, so that the requests end before the step does.
        """
        for key in keys:
            answer = self._answers.get(key)
            if answer is not None:
                answer.stream.fail_raised(error)
                self.put(partial(self._forget, answer))

    def _respond(self, key: int) -> None:
        answer = self._answers.get(key)
        if answer is None:
            return
        if answer.respond():
            self._forget(answer)
        elif answer.stream.may_send:
            self._held.pop(key, None)
        else:
            self._held.setdefault(key, time.monotonic_ns())

    def _end_overdue(self) -> None:
        """End requests whose clients have taken no response for too long."""
        overdue_ns = time.monotonic_ns() - _MAX_WAIT_NS if self._held else 0
        while self._held:
            key, since_ns = next(iter(self._held.items()))
            if since_ns >= overdue_ns:
                return
            answer = self._answers[key]
            self._forget(answer)
            answer.stream.fail(unread_responses())

    def _cancel(self, key: int) -> None:
        answer = self._answers.get(key)
        if answer is not None and answer.stream.is_cancelled():
            self._forget(answer)  # before the scheduler plans another step with the request
            answer.stream.send(final=True)

    def _forget(self, answer: TextResponse) -> None:
        key = answer.prompt.key
        if self._answers.get(key) is answer:
            self._held.pop(key, None)
            del self._answers[key]
            del self.prompts[key]


def _prepared(prompt: Prompt, priority: int) -> Prepared:
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
