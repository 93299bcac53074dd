"""The texts of one request's samples, and the responses that carry them.

tokens ──> Detokenizer ──> StopStrings ──> pending ──> response, when the client has credit

In stream mode a response has the new text of one sample; text that the client has no credit for is
merged into a later response. Otherwise one response has all samples at the end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from shmserve.ipc.messages.generation import Hypothesis, Resumed, Told
from shmserve.workers.backends import Output, Response, ResponseStream
from shmserve.workers.backends.llm.sampler import TokenLogprobs
from shmserve.workers.backends.llm.sequences import Prompt
from shmserve.workers.links.scheduler import InstanceLink

_REPLACEMENT = "\ufffd"  # the decoding of an incomplete character
_MOST_HELD = 16  # tokens; longer invalid sequences are no characters


class Detokenizer:
    """The incremental text of one sequence.

    Tokens are decoded together with those of the text before them, since a token's text depends on
    what it follows. A token that leaves a character incomplete is held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens: list[int] = []  # tokens of the last text, followed by the pending ones
        self._read = 0  # the number of tokens of the last text
        self._before = ""

    def add(self, token: int) -> str:
        """Append a token, and return the text that is complete now."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(_REPLACEMENT) and len(self._tokens) - self._read < _MOST_HELD:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """Return the text of all tokens held back."""
        return self._take(self._decode(self._tokens))

    def _take(self, text: str) -> str:
        new = text[len(self._before) :]
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        self._before = self._decode(self._tokens)
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


class StopStrings:
    """The stop strings of one sequence. Text that may begin a stop string is held back."""

    def __init__(self, stops: Sequence[str], included: bool) -> None:
        self._stops = stops
        self._included = included
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Append text.

        Return the text outside of stop strings, and whether a stop string was found.

        If there are several stop strings, the one that ends first counts.
        """
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops]
        places = [(begin + len(stop), begin) for begin, stop in found if begin >= 0]
        if places:
            end, begin = min(places)
            self._held = ""
            return text[: end if self._included else begin], True
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Return the text held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that begins a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0)


class SampleText:
    """The text of one sample.

    Attributes:
        pending: The text that was not sent yet; `tokens` and `logprobs` belong to it.
        told: The number of characters sent, by this instance and its predecessors.
        open: Whether the end of the sample was not sent yet.
    """

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, index: int, echo: str) -> None:
        parameters = prompt.parameters
        self.index = index
        self.count = 0  # number of tokens
        self.over = ""
        self.told = 0
        self.pending = echo
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.open = True
        self._told_before = 0  # characters sent by other instances
        self._prompt = prompt
        self._detokenizer = Detokenizer(tokenizer, parameters.skip_special_tokens)
        self._stops = StopStrings(parameters.stop, parameters.include_stop_str_in_output)

    def resume(self, earlier: Resumed, tokens: Sequence[int]) -> None:
        """Continue a sample of another instance.

        That instance may have sent more than was reported, so text that is generated again is not
        sent again.
        """
        self.open, self._told_before = not earlier.closed, earlier.told
        self._tell_silently()
        for place, token in enumerate(tokens, 1):
            if not self.over:
                self.add([token], earlier.over if place == len(tokens) else "", [])

    def _tell_silently(self) -> None:
        """Skip pending text that another instance has sent."""
        known = min(len(self.pending), self._told_before - self.told)
        if known > 0:
            if known == len(self.pending):
                self.tokens, self.logprobs = [], []
            self.pending = self.pending[known:]
            self.told += known

    def add(self, tokens: Sequence[int], over: str, told: Sequence[TokenLogprobs]) -> bool:
        """Append tokens; return whether a stop string has ended the sample.

        Args:
            tokens: The tokens.
            over: The finish reason if the last token ends the sample, else "".
            told: The log probabilities of the tokens, if they are wanted.
        """
        for place, token in enumerate(tokens):
            self.count += 1
            self.tokens.append(token)
            self.logprobs += told[place : place + 1]
            last = over if place == len(tokens) - 1 else ""
            found = self._text(token, last)
            self._tell_silently()
            if found:
                self.over = "stop"
                return not last
        self.over = over
        return False

    def _text(self, token: int, over: str) -> bool:
        """Append the text of a token; return whether it completes a stop string."""
        parameters = self._prompt.parameters
        # The text excludes end tokens.
        ends = token in self._prompt.ends or token in parameters.stop_token_ids
        silent = ends and not parameters.include_stop_str_in_output
        text = "" if silent else self._detokenizer.add(token)
        if over:
            text += self._detokenizer.flush()
        if self.count <= parameters.min_tokens and not over:
            self.pending += text
            return False
        text, found = self._stops.add(text)
        self.pending += text
        if over and not found:
            self.pending += self._stops.flush()
        return found

    def take(self) -> tuple[str, list[int], list[TokenLogprobs]]:
        """Return and clear the pending text, tokens and log probabilities."""
        taken = self.pending, self.tokens, self.logprobs
        self.told += len(self.pending)
        self.pending, self.tokens, self.logprobs = "", [], []
        return taken


def _likelihood(sample: SampleText) -> float:
    return sum(each.logprob for each in sample.logprobs) / max(len(sample.logprobs), 1)


class Answer:
    """The samples of one request, and the responses with them."""

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Tokenizer,
        stream: ResponseStream,
        link: InstanceLink,
        echo: str,
    ) -> None:
        self.prompt = prompt
        self.stream = stream
        self._tokenizer = tokenizer
        self._link = link
        self._echo = echo
        parameters = prompt.parameters
        self.samples = [
            SampleText(prompt, tokenizer, index, echo) for index in range(parameters.samples)
        ]
        self._wanted = {output.name for output in stream.request.schema.outputs}
        self._wanted = self._wanted or {"text_output"}

    @property
    def over(self) -> bool:
        """Return whether all samples have ended."""
        return bool(self.samples) and all(sample.over for sample in self.samples)

    def choose(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Take the hypotheses of a beam search as samples."""
        for index, found in enumerate(hypotheses[: self.prompt.parameters.n]):
            tokens = np.frombuffer(found.tokens, np.int32).tolist()
            sample = SampleText(self.prompt, self._tokenizer, index, self._echo)
            sample.add(tokens, found.over, [])
            self.samples.append(sample)

    def respond(self) -> bool:
        """Send what the client has credit for; return whether that ended the request."""
        if not self.prompt.parameters.stream:
            return self.over and self._send(self._best(), True)
        for sample in self.samples:
            news = sample.pending or sample.over
            if sample.open and news and not self._send([sample], self._is_last(sample)):
                return False
        return not any(sample.open for sample in self.samples)

    def _best(self) -> list[SampleText]:
        """Return the likeliest samples per token, if more were generated than are wanted."""
        most = self.prompt.parameters.n
        if len(self.samples) <= most:
            return self.samples
        best = sorted(self.samples, key=_likelihood, reverse=True)[:most]
        for index, sample in enumerate(best):
            sample.index = index
        return best

    def _is_last(self, sample: SampleText) -> bool:
        others = (each for each in self.samples if each is not sample)
        return bool(sample.over) and not any(each.open for each in others)

    def _send(self, samples: list[SampleText], final: bool) -> bool:
        """Send one response; return False if the client has no credit."""
        with self._link.lock:
            if not self.stream.may_send:
                return False
            response = Response(self._outputs(samples, final))
            for sample in samples:
                sample.open = not sample.over
                if not final:
                    told = Told(self.prompt.key, sample.index, sample.told, not sample.open)
                    self._link.post(told)
            self.stream.send(response, final)
        return True

    def _outputs(self, samples: list[SampleText], final: bool) -> list[Output]:
        taken = [sample.take() for sample in samples]
        tokens = [token for _, each, _ in taken for token in each]
        made: dict[str, tuple[str, Any]] = {
            "text_output": ("BYTES", [text.encode() for text, _, _ in taken]),
            "index": ("INT32", [sample.index for sample in samples]),
            "token_ids": ("INT32", tokens),
            "finish_reason": ("BYTES", [sample.over.encode() for sample in samples]),
        }
        if "logprobs" in self._wanted:
            told = zip(samples, taken, strict=True)
            texts = [self._logprobs(sample, logprobs) for sample, (_, _, logprobs) in told]
            made["logprobs"] = ("BYTES", texts)
        if "usage" in self._wanted:
            made["usage"] = ("BYTES", [self._usage() if final else b""])
        kinds = {"BYTES": np.object_, "INT32": np.int32}
        return [
            Output(name, datatype, np.array(values, kinds[datatype]))
            for name, (datatype, values) in made.items()
            if name in self._wanted
        ]

    def _usage(self) -> bytes:
        counts = [sample.count for sample in self.samples]
        prompt = self.prompt
        return json.dumps(
            {
                "prompt_tokens": len(prompt.tokens),
                "completion_tokens": sum(counts),
                "cached_tokens": max(prompt.cached, 0),
                "samples": counts,
            }
        ).encode()

    def _logprobs(self, sample: SampleText, told: list[TokenLogprobs]) -> bytes:
        """Return the log probabilities of a response as JSON, first those of the prompt."""
        found: dict[str, Any] = {"content": [self._logprob(each) for each in told]}
        parameters = self.prompt.parameters
        if parameters.prompt_logprobs >= 0 and sample.count == len(told):
            known = self.prompt.known
            found["prompt"] = [
                self._logprob(known[place]) if place in known else None
                for place in range(len(self.prompt.tokens))
            ]
        return json.dumps(found).encode()

    def _logprob(self, told: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in told.top]
        return {**self._token(told.token, told.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        raw = list(text.encode())
        return {"token_id": token, "token": text, "logprob": max(logprob, -9999.0), "bytes": raw}
