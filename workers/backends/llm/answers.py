"""The texts of one request's samples, and the responses that carry them.

tokens ──> Detokenizer ──> StopStrings ──> pending ──> response, when the client has credit
                                       └─> MessageParser ─┘ if the message is wanted

In stream mode a response has the new text of one sample; text that the client has no credit for is
merged into a later response. Otherwise one response has all samples at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from shmserve.ipc.messages.generation import Hypothesis, ResponseSent, Resumed
from shmserve.workers.backends import Output, OutputStream, Response
from shmserve.workers.backends.llm.message_parsers import MessageParser
from shmserve.workers.backends.llm.sampler import TokenLogprobs
from shmserve.workers.backends.llm.sequences import Prompt
from shmserve.workers.backends.llm.token_texts import Detokenizer, StopStrings, TokenTexts
from shmserve.workers.links.scheduler import InstanceLink

LEAST_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot represent


def token_entry(token: int, text: str, logprob: float, raw: list[int]) -> dict[str, Any]:
    """Return the log probability of a token in the form that the OpenAI API's handlers read."""
    value = max(logprob, LEAST_LOGPROB)
    return {"token_id": token, "token": text, "logprob": value, "bytes": raw}


class ScoredToken(NamedTuple):
    """The log probabilities of a token, and the index in its text of its first character."""

    logprobs: TokenLogprobs
    offset: int


class SampleText:
    """The text of one sample.

    Attributes:
        pending: The text that was not sent yet; `tokens` and `logprobs` belong to it.
        sent_characters: The number of characters sent, by this instance and its predecessors.
        sent_tokens: The number of tokens sent, likewise.
        open: Whether the end of the sample was not sent yet.
        begun: Whether a response with the sample was sent.
        parser: The parser of the message, if it is wanted.
        thoughts: The number of tokens of reasoning.
        stop_reason: The stop string or the token that has ended the sample, as in vLLM: None for
            the tokenizer's end token.
    """

    def __init__(
        self, prompt: Prompt, texts: TokenTexts, index: int, echo: str, message: bool = False
    ) -> None:
        parameters = prompt.parameters
        form = prompt.message_format
        self.parser = MessageParser(form, parameters.stream) if message and form else None
        self.thoughts = 0
        self.index = index
        self.count = 0  # number of generated tokens
        self.finish_reason = ""
        self.stop_reason: str | int | None = None
        self.sent_characters = self.sent_tokens = 0
        self.pending = echo
        self.tokens: list[int] = []
        self.logprobs: list[ScoredToken] = []
        self.open = True
        self.begun = False
        self._sent_before = self._tokens_before = 0  # characters and tokens sent by other instances
        self._prompt, self._texts = prompt, texts
        self._echoed = len(echo)
        skip, self._dropped = parameters.skip_special_tokens, frozenset[int]()
        if skip and self.parser is not None and self.parser.format.kept:
            skip, self._dropped = False, texts.special - self.parser.format.kept
        self._detokenizer = Detokenizer(texts, skip, prompt.tokens)
        self._stops = StopStrings(parameters.stop, parameters.include_stop_str_in_output)

    def resume(self, earlier: Resumed, tokens: Sequence[int]) -> None:
        """Continue a sample of another instance, which has generated `tokens`.

        Text and tokens that were sent are not sent again.
        """
        self.open, self.begun = (
            not earlier.closed,
            earlier.sent_tokens > 0 or earlier.sent_characters > 0,
        )
        self._sent_before, self._tokens_before = earlier.sent_characters, earlier.sent_tokens
        self._skip_sent()
        for position, token in enumerate(tokens, 1):
            if not self.finish_reason:
                self.add([token], earlier.finish_reason if position == len(tokens) else "", [])

    def _skip_sent(self) -> None:
        """Skip pending text and tokens that another instance has sent."""
        count = min(len(self.pending), self._sent_before - self.sent_characters)
        if count > 0:
            if self.parser is not None:
                # Discarded, because the other instance has sent it: responses end at token
                # boundaries.
                self.parser.take()
            self.pending = self.pending[count:]
            self.sent_characters += count
        if self.tokens and self.sent_tokens < self._tokens_before:
            self.sent_tokens += len(self.tokens)
            self.tokens, self.logprobs = [], []

    def add(
        self, tokens: Sequence[int], finish_reason: str, logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        """Append tokens; return whether a stop string has ended the sample.

        Args:
            tokens: The tokens.
            finish_reason: The finish reason if the last token ends the sample, else "".
            logprobs: The log probabilities of the tokens, if they are requested.
        """
        # If nothing is generated, only the prompt is scored.
        if not self._prompt.parameters.max_tokens:
            self.finish_reason = "length"
            return False
        for position, token in enumerate(tokens):
            self.count += 1
            self.tokens.append(token)
            if logprobs:
                offset = self._echoed + self._detokenizer.position
                self.logprobs.append(ScoredToken(logprobs[position], offset))
            last = finish_reason if position == len(tokens) - 1 else ""
            before = len(self.pending)
            stop = self._text(token, last)
            if self.parser is not None:
                self.thoughts += self.parser.thinking
                self.parser.feed(self.pending[before:], ended=bool(stop or last))
            if self._sent_before or self._tokens_before:
                self._skip_sent()
            if stop:
                self.finish_reason, self.stop_reason = "stop", stop
                return not last
        self.finish_reason = finish_reason
        if finish_reason == "stop":
            self.stop_reason = self._stop_token(tokens[-1])
        return False

    def _stop_token(self, token: int) -> str | int | None:
        """Return the stop reason for the last token, which ends the sample."""
        parameters = self._prompt.parameters
        if token not in (*self._prompt.end_tokens, *parameters.stop_token_ids):
            return None
        if token == self._prompt.eos and not parameters.beams:
            return None
        text, _ = self._texts.shown(token)
        return text if text in parameters.stop else token

    def _text(self, token: int, finish_reason: str) -> str:
        """Append the text of a token; return the stop string that it completes, or ""."""
        parameters = self._prompt.parameters
        # The text excludes end tokens.
        ends = token in self._prompt.end_tokens or token in parameters.stop_token_ids
        silent = (ends and not parameters.include_stop_str_in_output) or token in self._dropped
        text = "" if silent else self._detokenizer.add(token)
        if finish_reason:
            text += self._detokenizer.flush()
        if self.count <= parameters.min_tokens and not finish_reason:
            self.pending += text
            return ""
        text, stop = self._stops.add(text)
        self.pending += text
        if finish_reason and not stop:
            self.pending += self._stops.flush()
        return stop

    @property
    def has_news(self) -> bool:
        """Return whether the client lacks text, a part of the message, or the end."""
        lacks = self.pending if self.parser is None else self.parser.has_news
        return bool(lacks or self.finish_reason)

    def message(self, text: str) -> bytes:
        """Return and clear the parts of the message that were not sent yet, as JSON."""
        return orjson.dumps({"content": text} if self.parser is None else self.parser.take())

    def take(self) -> tuple[str, list[int], list[ScoredToken]]:
        """Return and clear the pending text, tokens and log probabilities."""
        pending = self.pending, self.tokens, self.logprobs
        self.sent_characters += len(self.pending)
        self.sent_tokens += len(self.tokens)
        self.pending, self.tokens, self.logprobs = "", [], []
        return pending


def _likelihood(sample: SampleText) -> float:
    return sum(logprob.logprobs.logprob for logprob in sample.logprobs) / max(
        len(sample.logprobs), 1
    )


class TextResponse:
    """The samples of one request, and the responses that contain them."""

    def __init__(
        self,
        prompt: Prompt,
        texts: TokenTexts,
        stream: OutputStream,
        link: InstanceLink,
        echo: str,
    ) -> None:
        self.prompt = prompt
        self.stream = stream
        self._texts = texts
        self._link = link
        self._echo = echo
        parameters = prompt.parameters
        self._requested = {output.name for output in stream.request.schema.outputs}
        if not self._requested:
            scored = max(parameters.logprobs, parameters.prompt_logprobs) >= 0
            self._requested = {"text_output", *["logprobs"] * scored}
            if parameters.return_token_ids:
                self._requested |= {"token_ids", "prompt_token_ids"}
        # The log probabilities of the prompt as JSON: with the text, and by themselves.
        self._scored: list[tuple[orjson.Fragment, orjson.Fragment]] = []
        self.samples = [self._sample(index) for index in range(parameters.samples)]

    def _sample(self, index: int) -> SampleText:
        message = "message" in self._requested
        return SampleText(self.prompt, self._texts, index, self._echo, message)

    @property
    def finished(self) -> bool:
        """Return whether all samples have ended."""
        return bool(self.samples) and all(sample.finish_reason for sample in self.samples)

    def choose(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Use the hypotheses of a beam search as samples."""
        for index, hypothesis in enumerate(hypotheses[: self.prompt.parameters.n]):
            tokens = np.frombuffer(hypothesis.tokens, np.int32).tolist()
            sample = self._sample(index)
            sample.add(tokens, hypothesis.finish_reason, [])
            self.samples.append(sample)

    def respond(self) -> bool:
        """Send the responses that the client has credit for; return whether the request ended."""
        if not self.prompt.parameters.stream:
            return self.finished and self._send(self._best(), True)
        for sample in self.samples:
            if sample.open and sample.has_news and not self._send([sample], self._is_last(sample)):
                return False
        return not any(sample.open for sample in self.samples)

    def _best(self) -> list[SampleText]:
        """Return the samples with the highest likelihood per token, as many as are requested."""
        most = self.prompt.parameters.n
        if len(self.samples) <= most:
            return self.samples
        best = sorted(self.samples, key=_likelihood, reverse=True)[:most]
        for index, sample in enumerate(best):
            sample.index = index
        return best

    def _is_last(self, sample: SampleText) -> bool:
        siblings = (each for each in self.samples if each is not sample)
        return bool(sample.finish_reason) and not any(each.open for each in siblings)

    def _send(self, samples: list[SampleText], final: bool) -> bool:
        """Send one response; return False if the client has no credit."""
        with self._link.lock:
            if not self.stream.may_send:
                return False
            response = Response(self._outputs(samples, final))
            for sample in samples:
                sample.open = not sample.finish_reason
                if not final:
                    sent = sample.sent_characters, not sample.open, sample.sent_tokens
                    self._link.post(ResponseSent(self.prompt.key, sample.index, *sent))
            self.stream.send(response, final)
        return True

    def _outputs(self, samples: list[SampleText], final: bool) -> list[Output]:
        pending = [sample.take() for sample in samples]
        new = [token for _, each, _ in pending for token in each]
        outputs: dict[str, tuple[str, Any]] = {
            "text_output": ("BYTES", [text.encode() for text, _, _ in pending]),
            "index": ("INT32", [sample.index for sample in samples]),
            "token_ids": ("INT32", new),
            "finish_reason": ("BYTES", [sample.finish_reason.encode() for sample in samples]),
        }
        if "logprobs" in self._requested:
            pairs = zip(samples, pending, strict=True)
            texts = [self._logprobs(sample, logprobs) for sample, (_, _, logprobs) in pairs]
            outputs["logprobs"] = ("BYTES", texts)
        if "message" in self._requested:
            parts = zip(samples, pending, strict=True)
            outputs["message"] = ("BYTES", [sample.message(text) for sample, (text, *_) in parts])
        if "stop_reason" in self._requested:
            reasons = [orjson.dumps(sample.stop_reason) for sample in samples]
            outputs["stop_reason"] = ("BYTES", reasons)
        if "prompt_token_ids" in self._requested:
            tokens = [] if samples[0].begun else self.prompt.tokens
            outputs["prompt_token_ids"] = ("INT32", tokens)
        for sample in samples:
            sample.begun = True
        if "usage" in self._requested:
            outputs["usage"] = ("BYTES", [self._usage(samples) if final else b""])
        return [
            Output.of_values(name, *outputs[name]) for name in outputs if name in self._requested
        ]

    def _usage(self, samples: list[SampleText]) -> bytes:
        shown = self.samples if self.prompt.parameters.stream else samples
        prompt = self.prompt
        thoughts = [sample.thoughts for sample in self.samples if sample.parser is not None]
        return orjson.dumps(
            {
                **({"reasoning_tokens": sum(thoughts)} if thoughts else {}),
                "prompt_tokens": len(prompt.tokens),
                "completion_tokens": sum(sample.count for sample in self.samples),
                "cached_tokens": max(prompt.cached_tokens, 0),
                "samples": [sample.count for sample in shown],
            }
        )

    def _logprobs(self, sample: SampleText, scored: list[ScoredToken]) -> bytes:
        """Return the log probabilities of a response as JSON.

        They are those of its text, the prompt included if the text contains it, and those of the
        prompt if they were requested.
        """
        prompt = self.prompt
        content = list(itertools.starmap(self._logprob, scored))
        members: dict[str, Any] = {"content": content}
        if prompt.top_logprobs >= 0 and not sample.begun:
            self.encode_prompt()
            if prompt.offsets:
                members["content"] = [*(echoed for echoed, _ in self._scored), *content]
            if prompt.parameters.prompt_logprobs >= 0:
                members["prompt"] = [alone for _, alone in self._scored]
        return orjson.dumps(members)

    def encode_prompt(self) -> None:
        """Encode the log probabilities of the prompt's tokens that are known by now.

        A long prompt is encoded in parts, as it is computed, so that no other text waits for long.
        """
        prompt, parameters = self.prompt, self.prompt.parameters
        for position in range(len(self._scored), len(prompt.tokens)):
            score = prompt.logprobs_by_position.get(position)
            if position and score is None:
                return
            echoed = alone = None
            if prompt.offsets:
                echoed = self._echoed(score, prompt.tokens[position], prompt.offsets[position])
            if score is not None and parameters.prompt_logprobs >= 0:
                alone = self._logprob(score, most=parameters.prompt_logprobs)
            parts = orjson.dumps(echoed), orjson.dumps(alone)
            self._scored.append((orjson.Fragment(parts[0]), orjson.Fragment(parts[1])))

    def _echoed(self, score: TokenLogprobs | None, token: int, offset: int) -> dict[str, Any]:
        if score is not None:
            return self._logprob(score, offset, self.prompt.parameters.logprobs)
        first = {**self._token(token, 0.0), "logprob": None, "top_logprobs": None}
        return {**first, "text_offset": offset}

    def _logprob(
        self, score: TokenLogprobs, offset: int = 0, most: int | None = None
    ) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in score.top[:most]]
        entry = {**self._token(score.token, score.logprob), "rank": score.rank, "top_logprobs": top}
        return {**entry, "text_offset": offset}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._texts.shown(token)
        if self.prompt.parameters.return_tokens_as_token_ids:
            text = f"token_id:{token}"
        return token_entry(token, text, logprob, raw)
