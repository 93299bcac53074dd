"""Texts, in a thread of their own: requests become tokens, and tokens texts, beside the engine."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable, clip
from shmserve.ipc.messages.generation import BeamSearch, Choose, Ended, Prepared, Resumed
from shmserve.workers.backends import Request, ResponseStream
from shmserve.workers.backends.llm.answers import Answer
from shmserve.workers.backends.llm.chat import ChatTemplate
from shmserve.workers.backends.llm.engine import Emitted
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.parameters import GenerationParameters, parse
from shmserve.workers.backends.llm.sampler import Grammars
from shmserve.workers.backends.llm.sequences import Prompt
from shmserve.workers.batch.response_stream import MOST_WAIT_S
from shmserve.workers.links.scheduler import InstanceLink

logger = logging.getLogger(__name__)

_MOST_WAIT_NS = int(MOST_WAIT_S * 1e9)
_PROMPTS = ("text_input", "input_ids", "messages")


def given_inputs(request: Request) -> dict[str, Any]:
    """The inputs of a request as values of Python, none of them a view of its memory. Raises
    InvalidArgument for text that is not UTF-8."""
    found: dict[str, Any] = {}
    for name, tensor in request.inputs.items():
        values = tensor.numpy().ravel().tolist()
        if name == "input_ids":
            found[name] = values
        elif tensor.datatype == "BYTES":
            try:
                found[name] = values[0].decode()
            except UnicodeDecodeError:
                raise InvalidArgument(f"{name}: {clip(repr(values[0]))} is not UTF-8") from None
        else:
            found[name] = values[0]
    return found


class Texts:
    """The requests that run, with their texts. `prompts` has what the engine needs of them. All but
    `put` and `close` is called in its thread."""

    def __init__(self, checkpoint: Checkpoint, link: InstanceLink, max_model_len: int) -> None:
        self.prompts: dict[int, Prompt] = {}
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer
        self._link = link
        self._longest = max_model_len
        self._chat = ChatTemplate(checkpoint.template, checkpoint.special)
        self._vocabulary = checkpoint.architecture.vocabulary
        self._grammars = Grammars(self._tokenizer.to_str(), self._vocabulary, checkpoint.ends)
        self._answers: dict[int, Answer] = {}
        self._held: set[int] = set()
        self._worked_ns = self._told_ns = 0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="texts", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Have something done in its thread."""
        self._inbox.put(job)

    def close(self) -> None:
        """End the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            timeout_s = 1.0 if self._held else None
            try:
                job = self._inbox.get(timeout=timeout_s)
            except queue.Empty:
                job = self._end_overdue
            if job is None:
                return
            try:
                job()
            except Exception:
                logger.exception("texts of a model failed")
            self._worked_ns = time.thread_time_ns()

    def spent_ns(self) -> int:
        """The processor's time that its thread has taken since the last call."""
        worked_ns = self._worked_ns
        spent_ns, self._told_ns = worked_ns - self._told_ns, worked_ns
        return spent_ns

    # --- requests

    def prepare(
        self, stream: ResponseStream, given: Mapping[str, Any], resumed: list[Resumed]
    ) -> None:
        """Read a request: it is `Prepared`, or failed."""
        key = stream.request.work.key
        try:
            answer = self._answer(stream, given, resumed)
        except Exception as error:
            failure = error if isinstance(error, ShmserveError) else stream.explain(error)
            stream.fail(failure)
            return
        self._answers[key] = answer
        self.prompts[key] = answer.prompt
        stream.on_credit(partial(self.put, partial(self._respond, key)))
        self._link.send(_prepared(answer.prompt, stream.request.work.priority))
        # Last: it may call at once.
        stream.on_cancel(partial(self.put, partial(self._cancel, key)))
        if resumed:
            self._respond(key)

    def _answer(
        self, stream: ResponseStream, given: Mapping[str, Any], resumed: list[Resumed]
    ) -> Answer:
        settings = self._settings(stream.request, given)
        parameters = parse(settings, self._checkpoint.defaults, self._vocabulary)
        tokens, text = self._tokens(given, parameters)
        most = min(parameters.max_tokens, self._longest - len(tokens))
        parameters = replace(parameters, max_tokens=most)
        ends = () if parameters.ignore_eos else self._checkpoint.ends
        grammar = None
        if parameters.grammar[0]:
            grammar = self._grammars.matcher(parameters.grammar)
        before = {each.sample: np.frombuffer(each.tokens, np.int32).tolist() for each in resumed}
        prompt = Prompt(stream.request.work.key, tokens, parameters, ends, grammar, before)
        echo = text if self._echoes(given, parameters) else ""
        answer = Answer(prompt, self._tokenizer, stream, self._link, echo)
        if not parameters.beams:
            for each in resumed:
                answer.samples[each.sample].resume(each, before[each.sample])
        return answer

    @staticmethod
    def _settings(request: Request, given: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a request: its own, those in `sampling_parameters`, and inputs."""
        found = {**request.inference.parameters}
        text = given.get("sampling_parameters") or found.pop("sampling_parameters", None)
        if text:
            try:
                found |= json.loads(text)
            except (TypeError, ValueError):
                problem = f"sampling_parameters: {clip(repr(text))} is not a JSON object"
                raise InvalidArgument(problem) from None
        for name in ("stream", "exclude_input_in_output"):
            if name in given:
                found[name] = given[name]
        if found.get("exclude_input_in_output") is not None:
            found["echo"] = not found["exclude_input_in_output"]
        elif "echo" not in found:
            # As Triton's vLLM backend: one response begins with its prompt, a stream does not.
            found["echo"] = not found.get("stream", False)
        return found

    @staticmethod
    def _echoes(given: Mapping[str, Any], parameters: GenerationParameters) -> bool:
        return parameters.echo and "messages" not in given

    def _tokens(
        self, given: Mapping[str, Any], parameters: GenerationParameters
    ) -> tuple[list[int], str]:
        """The prompt's tokens and its text."""
        named = [name for name in _PROMPTS if name in given]
        if len(named) != 1:
            found = " and ".join(named) or "none"
            raise InvalidArgument(f"the prompt is one of {', '.join(_PROMPTS)}: {found} is given")
        source = given[named[0]]
        if named[0] == "input_ids":
            tokens = source
            wrong = [token for token in tokens if not 0 <= token < self._vocabulary]
            if wrong:
                most = self._vocabulary - 1
                raise InvalidArgument(
                    f"input_ids: {wrong[0]} is not a token, these are 0 to {most}"
                )
            text = self._tokenizer.decode(tokens) if parameters.echo else ""
        else:
            chat = named[0] == "messages"
            text = self._chat.render(source) if chat else source
            special = parameters.add_special_tokens and not chat
            tokens = self._tokenizer.encode(text, add_special_tokens=special).ids
        if parameters.truncate_prompt_tokens:
            tokens = tokens[-parameters.truncate_prompt_tokens :]
        if not tokens:
            raise InvalidArgument(f"{named[0]}: the prompt is empty, it needs a token")
        if len(tokens) >= self._longest:
            raise InvalidArgument(
                f"{named[0]}: the prompt has {len(tokens)} tokens, and with one more the model "
                f"takes up to {self._longest}"
            )
        return tokens, text

    # --- their tokens

    def emitted(self, news: list[Emitted]) -> None:
        """Sequences have more tokens."""
        touched: dict[int, None] = {}
        for each in news:
            answer = self._answers.get(each.prompt.key)
            if answer is None or answer.prompt is not each.prompt:
                continue
            sample = answer.samples[each.sample]
            if sample.over:
                continue
            if sample.add(each.tokens, each.over, each.logprobs):
                self._link.send(Ended(each.sequence))
            touched[each.prompt.key] = None
        for key in touched:
            self._respond(key)

    def chosen(self, message: Choose) -> None:
        """A beam search has its texts."""
        answer = self._answers.get(message.key)
        if answer is not None:
            answer.choose(message.hypotheses)
            self._respond(message.key)

    def failed(self, keys: set[int], error: BaseException) -> None:
        """A step with these requests could not be carried out; called from the engine's thread, so
        that they end before the step does."""
        for key in keys:
            answer = self._answers.get(key)
            if answer is not None:
                answer.stream.fail(answer.stream.explain(error))
                self.put(partial(self._forget, answer))

    def _respond(self, key: int) -> None:
        answer = self._answers.get(key)
        if answer is None:
            return
        if answer.respond():
            self._forget(answer)
        elif answer.stream.may_send:
            answer.held_since_ns = 0
            self._held.discard(key)
        elif not answer.held_since_ns:
            answer.held_since_ns = time.monotonic_ns()
            self._held.add(key)

    def _end_overdue(self) -> None:
        """End requests whose clients have taken nothing for long."""
        now_ns = time.monotonic_ns()
        for key in list(self._held):
            answer = self._answers[key]
            if now_ns - answer.held_since_ns > _MOST_WAIT_NS:
                why = f"the client has taken no response for {MOST_WAIT_S:g} s: no more are sent"
                answer.stream.fail(Unavailable(why))
                self._forget(answer)

    def _cancel(self, key: int) -> None:
        answer = self._answers.get(key)
        if answer is not None and answer.stream.is_cancelled():
            answer.stream.send(final=True)
            self._forget(answer)

    def _forget(self, answer: Answer) -> None:
        key = answer.prompt.key
        if self._answers.get(key) is answer:
            self._held.discard(key)
            del self._answers[key]
            del self.prompts[key]


def _prepared(prompt: Prompt, priority: int) -> Prepared:
    parameters = prompt.parameters
    beams: list[BeamSearch] = []
    if parameters.beams:
        penalty, early = parameters.length_penalty, parameters.early_stopping
        beams = [BeamSearch(parameters.beams, penalty, early, list(prompt.ends))]
    return Prepared(
        prompt.key,
        np.array(prompt.tokens, np.int32).tobytes(),
        parameters.max_tokens,
        1 if beams else parameters.n,
        parameters.priority or priority,
        parameters.prompt_logprobs >= 0,
        not beams,
        beams,
    )
