"""The text thread: conversion of requests to tokens, and of tokens to responses.

tokens ──> Detokenizer ──> StopStrings ──> pending ──> response, when the client has credit
                                       └─> MessageParser ─┘ if the output `message` is requested

A streaming response has the new tokens and text of one sample. Without credit, they are merged into
a later response. Other requests have one response with all samples.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import orjson

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import (
    Choose,
    Hypothesis,
    ResponseSent,
    Resumed,
    StopStringFound,
)
from shmserve.workers.backends import Output, OutputStream, Response
from shmserve.workers.backends.llm.message_parsers import MessageParser
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.prompts import LONG, PromptReader
from shmserve.workers.backends.llm.sampler import TokenLogprobs
from shmserve.workers.backends.llm.token_texts import (
    Detokenizer,
    StopStrings,
    TokenTexts,
    encode_logprobs,
    token_entry,
    with_pauses,
)
from shmserve.workers.backends.llm.worker_engine import Prompt, SequenceOutput
from shmserve.workers.batch.response_stream import MAX_CREDIT_WAIT_S, unread_responses
from shmserve.workers.links import InstanceLink

logger = logging.getLogger(__name__)

_MAX_WAIT_NS = int(MAX_CREDIT_WAIT_S * 1e9)


class ScoredToken(NamedTuple):
    """The log probabilities of a token, and the index of its first character in the text."""

    logprobs: TokenLogprobs
    offset: int  # in the text


class SampleText:
    """The text of one sample.

    Attributes:
        pending_text: The text that was not sent yet; the pending tokens and log probabilities
            belong to it.
        sent_characters: The number of characters sent, by this instance and its predecessors.
        sent_tokens: The number of tokens sent, by this instance and its predecessors.
        is_open: Whether the end of the sample was not sent yet.
        has_sent_any: Whether a response with the sample was sent.
        parser: The parser of the message if the output `message` is requested, or None.
        reasoning_tokens: The number of reasoning tokens.
        stop_reason: The stop string or the token that has ended the sample, as in vLLM: None for
            the tokenizer's end token.
    """

    def __init__(
        self, prompt: Prompt, texts: TokenTexts, index: int, echo: str, parses_message: bool = False
    ) -> None:
        parameters = prompt.parameters
        self.parser = None
        if parses_message and prompt.message_format:
            self.parser = MessageParser(prompt.message_format, parameters.stream)
        self.reasoning_tokens = 0
        # The number of tokens that are reasoning, unless the text that is being read is a call.
        self._possible_reasoning_tokens = self._counted_calls = 0
        self.index = index
        self.token_count = 0  # number of generated tokens
        self.finish_reason = ""
        self.stop_reason: str | int | None = None
        self.sent_characters = self.sent_tokens = 0  # counts
        self.pending_text = echo
        self.pending_tokens: list[int] = []
        self.pending_logprobs: list[ScoredToken] = []
        self.is_open = True
        self.has_sent_any = False
        self._earlier_characters = self._earlier_tokens = 0  # sent by an earlier instance
        self._prompt, self._token_texts = prompt, texts
        self._echo_length = len(echo)
        skip, self._dropped_tokens = parameters.skip_special_tokens, frozenset[int]()
        if skip and self.parser is not None and self.parser.format.kept_tokens:
            skip, self._dropped_tokens = False, texts.special - self.parser.format.kept_tokens
        self._detokenizer = Detokenizer(texts, skip, prompt.tokens)
        self._stop_strings = StopStrings(parameters.stop, parameters.include_stop_str_in_output)

    def resume(self, resumed: Resumed, tokens: Sequence[int]) -> None:
        """Continue a sample of another instance, which has generated `tokens`.

        Text and tokens that the client has received are not sent again.
        """
        self.is_open = not resumed.is_end_sent
        self.has_sent_any = resumed.sent_tokens > 0 or resumed.sent_characters > 0
        self._earlier_characters = resumed.sent_characters
        self._earlier_tokens = resumed.sent_tokens
        self._skip_sent()
        for position, token in enumerate(tokens, 1):
            if not self.finish_reason:
                self.add([token], resumed.finish_reason if position == len(tokens) else "", [])

    def _skip_sent(self) -> None:
        """Discard pending text and tokens that an earlier instance has sent to the client."""
        count = min(len(self.pending_text), self._earlier_characters - self.sent_characters)
        if count > 0:
            if self.parser is not None:
                # All parsed parts were sent, because earlier responses ended at token boundaries.
                self.parser.take()
            self.pending_text = self.pending_text[count:]
            self.sent_characters += count
        if self.pending_tokens and self.sent_tokens < self._earlier_tokens:
            self.sent_tokens += len(self.pending_tokens)
            self.pending_tokens, self.pending_logprobs = [], []

    def add(self, tokens: Sequence[int], reason: str, logprobs: Sequence[TokenLogprobs]) -> bool:
        """Append tokens; return whether a stop string has ended the sample.

        Args:
            tokens: The tokens.
            reason: The finish reason if the last token ends the sample, else "".
            logprobs: The log probabilities of the tokens, if they are requested.
        """
        if not self._prompt.parameters.max_tokens:  # the sampled token is not a part of the text
            self.finish_reason = "length"
            return False
        for position, token in enumerate(tokens):
            self.token_count += 1
            self.pending_tokens.append(token)
            if logprobs:
                offset = self._echo_length + self._detokenizer.position_of(token)
                self.pending_logprobs.append(ScoredToken(logprobs[position], offset))
            end_reason = reason if position == len(tokens) - 1 else ""
            start = len(self.pending_text)
            stop_string = self._append_text(token, end_reason)
            if self.parser is not None:
                self._possible_reasoning_tokens += self.parser.is_reasoning
                self.parser.feed(self.pending_text[start:], is_end=bool(stop_string or end_reason))
                self._count_reasoning(self.parser)
            if self._earlier_characters or self._earlier_tokens:
                self._skip_sent()
            if stop_string:
                self.finish_reason, self.stop_reason = "stop", stop_string
                return not end_reason
        self.finish_reason = reason
        if reason == "stop":
            self.stop_reason = self._stop_token(tokens[-1])
        return False

    def _count_reasoning(self, parser: MessageParser) -> None:
        """Count the tokens of reasoning as soon as it is certain that no call begins in them."""
        if parser.is_reading_call:
            return
        if parser.call_count == self._counted_calls:
            self.reasoning_tokens += self._possible_reasoning_tokens
        self._possible_reasoning_tokens, self._counted_calls = 0, parser.call_count

    def _stop_token(self, token: int) -> str | int | None:
        """Return the stop reason of a sample that ends with a token: a stop string or the token.

        The result is None for the tokenizer's end token, and for a token that ends no text.
        """
        parameters = self._prompt.parameters
        if token not in self._prompt.end_tokens:
            return None
        if token == self._prompt.eos and not parameters.beams:
            return None
        text, _ = self._token_texts.text_and_bytes(token)
        return text if text in parameters.stop else token

    def _append_text(self, token: int, finish_reason: str) -> str:
        """Append the text of a token; return the stop string that it completes, or ""."""
        parameters = self._prompt.parameters
        is_end_token = token in self._prompt.end_tokens
        is_excluded = is_end_token and not parameters.include_stop_str_in_output
        text = "" if is_excluded or token in self._dropped_tokens else self._detokenizer.add(token)
        if finish_reason:
            text += self._detokenizer.flush()
        can_stop = self.token_count > parameters.min_tokens
        text, stop_string = self._stop_strings.add(text, can_stop)
        self.pending_text += text
        if finish_reason and not stop_string:
            self.pending_text += self._stop_strings.flush()
        return stop_string

    @property
    def has_unsent(self) -> bool:
        """Return whether a token, a part of the message, or the end was not sent yet.

        As in vLLM, a token without text is sent, unless the message is parsed and the client does
        not receive the token itself. Clients count responses to measure the time between tokens.
        """
        if self.finish_reason:
            return True
        if self.parser is None:
            return bool(self.pending_tokens or self.pending_text)
        parameters = self._prompt.parameters
        shows_tokens = parameters.logprobs >= 0 or parameters.return_token_ids
        return self.parser.has_parts or (shows_tokens and bool(self.pending_tokens))

    def take_message(self, text: str, counts_reasoning: bool) -> bytes:
        """Return and clear the parts of the message that were not sent yet, as JSON.

        If the text is not parsed, the message has the content `text`. With `counts_reasoning`, the
        message has the number of the sample's reasoning tokens so far.
        """
        if self.parser is None:
            return orjson.dumps({"content": text})
        count = {"reasoning_tokens": self.reasoning_tokens} if counts_reasoning else {}
        return orjson.dumps({**self.parser.take(), **count})

    def take(self) -> tuple[str, list[int], list[ScoredToken]]:
        """Return and clear the pending text, tokens and log probabilities."""
        pending_parts = self.pending_text, self.pending_tokens, self.pending_logprobs
        self.sent_characters += len(self.pending_text)
        self.sent_tokens += len(self.pending_tokens)
        self.pending_text, self.pending_tokens, self.pending_logprobs = "", [], []
        return pending_parts


def _mean_logprob(sample: SampleText) -> float:
    logprobs = [token.logprobs.logprob for token in sample.pending_logprobs]
    return sum(logprobs) / max(len(logprobs), 1)


class RequestSamples:
    """The samples of one request, and the responses that contain them."""

    def __init__(
        self, prompt: Prompt, texts: TokenTexts, stream: OutputStream, link: InstanceLink, echo: str
    ) -> None:
        self.prompt = prompt
        self.output_stream = stream
        self._token_texts = texts
        self._link = link
        self._echoed_text = echo
        parameters = prompt.parameters
        self._requested_outputs = {output.name for output in stream.request.schema.outputs}
        if not self._requested_outputs:
            has_scores = max(parameters.logprobs, parameters.prompt_logprobs) >= 0
            self._requested_outputs = {"text_output", *["logprobs"] * has_scores}
            if parameters.return_token_ids:
                self._requested_outputs |= {"token_ids", "prompt_token_ids"}
        # Two JSON entries for each token of the prompt: in the log probabilities of the echoed
        # text, and in `prompt_logprobs`.
        self._prompt_entries: list[tuple[orjson.Fragment, orjson.Fragment]] = []
        self.samples = [self._sample(index) for index in range(parameters.samples)]

    def _sample(self, index: int) -> SampleText:
        parses_message = "message" in self._requested_outputs
        return SampleText(self.prompt, self._token_texts, index, self._echoed_text, parses_message)

    @property
    def is_finished(self) -> bool:
        """Return whether all samples have ended."""
        return bool(self.samples) and all(sample.finish_reason for sample in self.samples)

    def add_hypotheses(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Add the hypotheses of a beam search as samples."""
        for index, hypothesis in enumerate(hypotheses[: self.prompt.parameters.n]):
            tokens = np.frombuffer(hypothesis.tokens, np.int32).tolist()
            sample = self._sample(index)
            sample.add(tokens, hypothesis.finish_reason, [])
            self.samples.append(sample)

    def append(self, output: SequenceOutput) -> None:
        """Append the tokens of a step to the text of their sample."""
        if not output.tokens:
            self.encode_prompt()
            return
        sample = self.samples[output.sequence.sample]
        if sample.finish_reason:
            # The text may have ended in a worker that died before it notified the scheduler.
            has_stopped = not output.finish_reason
        else:
            has_stopped = sample.add(output.tokens, output.finish_reason, output.logprobs)
        if has_stopped:
            self._link.send(StopStringFound(output.sequence.number))

    def respond(self) -> None:
        """Send the responses that credit allows."""
        if not self.prompt.parameters.stream:
            if self.is_finished:
                self._send(self._best_samples(), True)
            return
        for sample in self.samples:
            needs_response = sample.is_open and sample.has_unsent
            if needs_response and not self._send([sample], self._is_last(sample)):
                return

    def _best_samples(self) -> list[SampleText]:
        """Return the samples with the highest likelihood per token, as many as are requested."""
        count = self.prompt.parameters.n
        if len(self.samples) <= count:
            return self.samples
        best_samples = sorted(self.samples, key=_mean_logprob, reverse=True)[:count]
        for index, sample in enumerate(best_samples):
            sample.index = index
        return best_samples

    def _is_last(self, sample: SampleText) -> bool:
        has_open = any(other.is_open for other in self.samples if other is not sample)
        return bool(sample.finish_reason) and not has_open

    def _send(self, samples: list[SampleText], is_final: bool) -> bool:
        """Send one response; return False if the client has no credit."""
        with self._link.lock:
            if not self.output_stream.may_send:
                return False
            response = Response(self._encode_outputs(samples, is_final))
            for sample in samples:
                sample.is_open = not sample.finish_reason
                if not is_final:
                    sent_state = sample.sent_characters, not sample.is_open, sample.sent_tokens
                    self._link.post(ResponseSent(self.prompt.key, sample.index, *sent_state))
            self.output_stream.send(response, is_final)
        return True

    def _encode_outputs(self, samples: list[SampleText], is_final: bool) -> list[Output]:
        texts, tokens, logprobs = zip(*(sample.take() for sample in samples), strict=True)
        # The chunks of a stream may report the numbers of tokens so far.
        counts_reasoning = itertools.repeat("token_ids" in self._requested_outputs)
        values: dict[str, tuple[str, Iterable[Any]]] = {  # (datatype, elements) by output
            "text_output": ("BYTES", map(str.encode, texts)),
            "index": ("INT32", (sample.index for sample in samples)),
            "token_ids": ("INT32", itertools.chain(*tokens)),
            "finish_reason": ("BYTES", (sample.finish_reason.encode() for sample in samples)),
            "logprobs": ("BYTES", map(self._encode_logprobs, samples, logprobs)),
            "message": ("BYTES", map(SampleText.take_message, samples, texts, counts_reasoning)),
            "stop_reason": ("BYTES", (orjson.dumps(sample.stop_reason) for sample in samples)),
            "prompt_token_ids": ("INT32", () if samples[0].has_sent_any else self.prompt.tokens),
            "usage": ("BYTES", [self._encode_usage(samples) if is_final else b""]),
        }
        outputs = Output.select(values, self._requested_outputs)
        for sample in samples:
            sample.has_sent_any = True
        return outputs

    def _encode_usage(self, samples: list[SampleText]) -> bytes:
        counted_samples = self.samples if self.prompt.parameters.stream else samples
        prompt = self.prompt
        parsed_samples = [sample for sample in self.samples if sample.parser is not None]
        reasoning_tokens = sum(sample.reasoning_tokens for sample in parsed_samples)
        usage = {
            **({"reasoning_tokens": reasoning_tokens} if parsed_samples else {}),
            "prompt_tokens": len(prompt.tokens),
            "completion_tokens": sum(sample.token_count for sample in self.samples),
            "cached_tokens": max(prompt.cached_tokens, 0),
            "samples": [sample.token_count for sample in counted_samples],
        }
        return orjson.dumps(usage)

    def _encode_logprobs(self, sample: SampleText, tokens: list[ScoredToken]) -> bytes:
        """Return the log probabilities of a response as JSON.

        The member `content` is about the text, which may begin with the prompt. The member `prompt`
        is about the prompt, and present if `prompt_logprobs` is set.
        """
        prompt = self.prompt
        content = with_pauses(itertools.starmap(self._score_entry, tokens))
        lists_by_name: dict[str, Iterable[Any]] = {"content": content}
        if prompt.top_logprobs >= 0 and not sample.has_sent_any:
            self.encode_prompt()
            if prompt.offsets:
                echo = (entry for entry, _ in self._prompt_entries)
                lists_by_name["content"] = itertools.chain(echo, content)
            if prompt.parameters.prompt_logprobs >= 0:
                lists_by_name["prompt"] = [entry for _, entry in self._prompt_entries]
        return encode_logprobs(lists_by_name)

    def encode_prompt(self) -> None:
        """Encode the log probabilities of the prompt's tokens that have been computed.

        A long prompt is encoded in parts, so that it does not delay the texts of other requests.
        """
        prompt, parameters = self.prompt, self.prompt.parameters
        for position in with_pauses(range(len(self._prompt_entries), len(prompt.tokens))):
            token, score = prompt.tokens[position], prompt.logprobs_by_position.get(position)
            if position and score is None:
                return
            echo_entry = prompt_entry = None
            if prompt.offsets:
                echo_entry = self._echo_entry(score, token, prompt.offsets[position])
            if score is not None and parameters.prompt_logprobs >= 0:
                prompt_entry = self._score_entry(score, top=parameters.prompt_logprobs)
            parts = orjson.dumps(echo_entry), orjson.dumps(prompt_entry)
            self._prompt_entries.append((orjson.Fragment(parts[0]), orjson.Fragment(parts[1])))

    def _echo_entry(
        self, score: TokenLogprobs | None, token: int, text_offset: int
    ) -> dict[str, Any]:
        if score is not None:
            return self._score_entry(score, text_offset, self.prompt.parameters.logprobs)
        entry = {**self._token_entry(token, 0.0), "logprob": None, "top_logprobs": None}
        return {**entry, "text_offset": text_offset}

    def _score_entry(
        self, score: TokenLogprobs, text_offset: int = 0, top: int | None = None
    ) -> dict[str, Any]:
        likeliest_entries = [self._token_entry(token, value) for token, value in score.top[:top]]
        entry = {**self._token_entry(score.token, score.logprob), "rank": score.rank}
        return {**entry, "top_logprobs": likeliest_entries, "text_offset": text_offset}

    def _token_entry(self, token: int, logprob: float) -> dict[str, Any]:
        shows_id = self.prompt.parameters.return_tokens_as_token_ids
        text, token_bytes = self._token_texts.text_and_bytes(token)
        return token_entry(token, text, logprob, token_bytes, shows_id)


@contextmanager
def _fail_on_error(stream: OutputStream) -> Iterator[None]:
    """Fail a request with the error that the block raises, such as a panic of a library in Rust."""
    try:
        yield
    except BaseException as error:
        stream.fail_raised(error)


class TextThread:
    """The thread that processes the texts of all running requests.

    `put` and `close` may be called in any thread. The engine's thread calls `fail_requests` and
    `spent_ns`. No lock is needed: these methods read single values that the text thread replaces,
    and a stream has its own lock. All other methods run in the text thread.

    Attributes:
        prompts: The prompt of each prepared request by key. The engine's thread reads it.
    """

    def __init__(
        self, checkpoint: Checkpoint, link: InstanceLink, settings: EngineSettings
    ) -> None:
        self.prompts: dict[int, Prompt] = {}  # by key of the request
        self._token_texts = TokenTexts(checkpoint.tokenizer)
        self._link = link
        self.reader = PromptReader(checkpoint, settings, self._token_texts)
        # Long prompts, grammars and bad words are processed in another thread, so that they do not
        # delay other texts.
        self._slow_job_executor = ThreadPoolExecutor(1, "long prompts")
        # This thread waits for processes that render long conversations, which takes seconds.
        self._rendering_executor = ThreadPoolExecutor(1, "long conversations")
        self._requests: dict[int, RequestSamples] = {}  # by key
        # By key of a request: since when it waits for credit (monotonic ns), oldest first.
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
        for executor in (self._slow_job_executor, self._rendering_executor):
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
            except BaseException:
                logger.exception("the thread that decodes texts failed, and continues")
            self._fail_overdue()
            self._cpu_ns = time.thread_time_ns()

    def spent_ns(self) -> int:
        """Return the CPU time (ns) of the text thread since the last call."""
        cpu_ns = self._cpu_ns
        spent_ns, self._reported_cpu_ns = cpu_ns - self._reported_cpu_ns, cpu_ns
        return spent_ns

    # --- requests

    def prepare(self, stream: OutputStream, inputs: dict[str, Any], resumed: list[Resumed]) -> None:
        """Read a request, and send `Prepared` or the error of the request."""
        length = sum(len(text) for text in inputs.values() if isinstance(text, str | memoryview))
        if isinstance(inputs.get("messages"), memoryview):
            self._rendering_executor.submit(self._read_request, stream, inputs, resumed)
        elif length > LONG or "task" in stream.request.schema.parameters:
            self._slow_job_executor.submit(self._read_request, stream, inputs, resumed)
        else:
            self._read_request(stream, inputs, resumed)

    def _read_request(
        self, stream: OutputStream, inputs: Mapping[str, Any], resumed_samples: list[Resumed]
    ) -> None:
        """Convert a request to tokens and prepare it, or respond with its result or error.

        This method may run in any thread.
        """
        with _fail_on_error(stream):
            if threading.current_thread() is not self._thread and stream.is_cancelled():
                stream.send(final=True)
                return
            response = self.reader.convert(stream.request, inputs)
            if response is not None:
                stream.send(response, final=True)
                return
            prompt, echo = self.reader.read(stream.request, inputs, resumed_samples)
            start = partial(self._start, stream, prompt, echo, resumed_samples)
            if prompt.needs_compilation:
                self._slow_job_executor.submit(self._compile, prompt, stream, start)
            elif threading.current_thread() is self._thread:
                start()
            else:
                self.put(start)

    def _compile(self, prompt: Prompt, stream: OutputStream, start: Callable[[], None]) -> None:
        with _fail_on_error(stream):
            if not stream.is_cancelled():
                self.reader.compile(prompt)
            self.put(start)

    def _start(
        self, stream: OutputStream, prompt: Prompt, echo: str, resumed_samples: list[Resumed]
    ) -> None:
        key = prompt.key
        with _fail_on_error(stream):
            request = RequestSamples(prompt, self._token_texts, stream, self._link, echo)
            if not prompt.parameters.beams:
                for resumed_sample in resumed_samples:
                    tokens = prompt.resumed_tokens.get(resumed_sample.sample, [])
                    request.samples[resumed_sample.sample].resume(resumed_sample, tokens)
            with self._link.lock:
                if stream.is_cancelled():
                    # The scheduler's successor may use the same key for another request.
                    stream.send(final=True)
                    return
                self._requests[key] = request
                self._unread_since_ns.pop(key, None)
                self.prompts[key] = prompt
                stream.on_credit(partial(self.put, partial(self._respond, key)))
                stream.on_cancel(partial(self.put, partial(self._cancel, key)))
                self._link.send(prompt.describe(stream.request.work.priority))
        if prompt.resumed_tokens:
            self._respond(key)

    # --- tokens

    def append_outputs(self, outputs: list[SequenceOutput]) -> None:
        """Append the tokens of a step to the texts of their samples, and respond."""
        updated_keys: dict[int, None] = {}
        for output in outputs:
            sequence = output.sequence
            key = sequence.prompt.key
            request = self._requests.get(key)
            if request is None or request.prompt is not sequence.prompt:
                continue
            with _fail_on_error(request.output_stream):
                request.append(output)
            if output.tokens or request.output_stream.is_closed:
                updated_keys[key] = None
        for key in updated_keys:
            self._respond(key)

    def end_beam_search(self, message: Choose) -> None:
        """Respond with the best hypotheses of a beam search."""
        request = self._requests.get(message.key)
        if request is not None:
            with _fail_on_error(request.output_stream):
                request.add_hypotheses(message.hypotheses)
            self._respond(message.key)

    def fail_requests(self, keys: set[int], error: BaseException) -> None:
        """Fail requests of a step.

        The engine's thread calls this method, so that the requests end before the step does.
        """
        for key in keys:
            request = self._requests.get(key)
            if request is not None:
                request.output_stream.fail_raised(error)
                self.put(partial(self._remove, request))

    def _respond(self, key: int) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        with _fail_on_error(request.output_stream):
            request.respond()
        if request.output_stream.is_closed:
            self._remove(request)
        elif request.output_stream.may_send:
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
            request = self._requests[key]
            self._remove(request)
            request.output_stream.fail(unread_responses())

    def _cancel(self, key: int) -> None:
        request = self._requests.get(key)
        if request is not None and request.output_stream.is_cancelled():
            self._remove(request)  # before the scheduler plans another step with the request
            request.output_stream.send(final=True)

    def _remove(self, request: RequestSamples) -> None:
        key = request.prompt.key
        if self._requests.get(key) is request:
            self._unread_since_ns.pop(key, None)
            del self._requests[key]
            del self.prompts[key]
