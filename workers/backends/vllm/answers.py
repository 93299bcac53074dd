"""The outputs of responses, from the outputs of vLLM's engine."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import orjson

from shmserve.errors import Internal
from shmserve.workers.backends import Output
from shmserve.workers.backends.llm.answers import MIN_LOGPROB, token_entry
from shmserve.workers.backends.vllm.engine import Parser, VllmCall

# The outputs that clients of Triton's vllm_backend request by inputs, such as return_logprobs.
FLAGS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")


class VllmAnswer:
    """The responses to one request.

    Args:
        call: The request.
        requested: The names of the outputs; empty: the text.
        flags: The names of `FLAGS` that are requested by inputs.
        stream: Whether each response has the new text of one sample; otherwise one response has the
            whole texts of all samples.
    """

    def __init__(
        self, call: VllmCall, requested: Collection[str], flags: Collection[str], stream: bool
    ) -> None:
        self._call = call
        self._requested = {*(requested or ("text_output",)), *flags}
        self._flags = flags
        self._stream = stream
        self._prompt_tokens: list[int] = []
        self._cached_tokens = 0
        self._token_counts = Counter[int]()  # the number of tokens by sample
        self._text_lengths = Counter[int]()  # the number of characters of tokens by sample
        self._parsers = defaultdict[int, Parser](call.make_parser)

    def responses(self, result: Any) -> list[list[Output]]:
        """Return the outputs of each response to send after a result of the engine.

        Raises:
            Internal: The engine has failed to generate a sample.
        """
        self._prompt_tokens = self._prompt_tokens or list(result.prompt_token_ids or ())
        self._cached_tokens = self._cached_tokens or result.num_cached_tokens or 0
        for sample in result.outputs:
            if sample.finish_reason == "error":
                raise Internal("the engine has failed to generate the text")
            if self._call.only_prompt:
                sample.text, sample.token_ids, sample.logprobs = "", [], []
                sample.finish_reason = "length"
        groups = [[sample] for sample in result.outputs] if self._stream else [result.outputs]
        last = len(groups) if result.finished else 0
        return [self._outputs(result, group, n == last) for n, group in enumerate(groups, 1)]

    def _outputs(self, result: Any, samples: Sequence[Any], is_last: bool) -> list[Output]:
        unsent = {sample.index for sample in samples} - self._token_counts.keys()
        for sample in samples:
            self._token_counts[sample.index] += len(sample.token_ids)
        echoes = [self._call.text if sample.index in unsent else "" for sample in samples]
        texts = [echo + sample.text for echo, sample in zip(echoes, samples, strict=True)]
        no_reason = "None" if "finish_reason" in self._flags else ""
        reasons = [sample.finish_reason or no_reason for sample in samples]
        values: dict[str, tuple[str, Iterable[Any]]] = {
            "text_output": ("BYTES", map(str.encode, texts)),
            "index": ("INT32", [sample.index for sample in samples]),
            "token_ids": ("INT32", [token for sample in samples for token in sample.token_ids]),
            "prompt_token_ids": ("INT32", self._prompt_tokens if unsent else ()),
            "finish_reason": ("BYTES", [reason.encode() for reason in reasons]),
            "stop_reason": ("BYTES", [orjson.dumps(sample.stop_reason) for sample in samples]),
            "cumulative_logprob": ("FP32", [sample.cumulative_logprob or 0 for sample in samples]),
            "num_input_tokens": ("UINT32", [len(self._prompt_tokens)]),
            "num_output_tokens": ("UINT32", [len(sample.token_ids) for sample in samples]),
            "usage": ("BYTES", [self._encode_usage() if is_last else b""]),
        }
        if "logprobs" in self._flags:
            # As in Triton's vllm_backend.
            logprobs = [sample.logprobs and list(sample.logprobs) for sample in samples]
            values["logprobs"] = "BYTES", [json.dumps(part, default=vars) for part in logprobs]
        elif "logprobs" in self._requested:
            parts = [self._encode_logprobs(result, each, each.index in unsent) for each in samples]
            values["logprobs"] = "BYTES", parts
        if "message" in self._requested:
            values["message"] = "BYTES", map(self._encode_message, samples)
        return [Output.of_values(name, *values[name]) for name in values if name in self._requested]

    def _encode_usage(self) -> bytes:
        usage = {
            "prompt_tokens": len(self._prompt_tokens),
            "completion_tokens": self._token_counts.total(),
            "samples": [count for _, count in sorted(self._token_counts.items())],
            "cached_tokens": self._cached_tokens,
        }
        return orjson.dumps(usage)

    def _encode_message(self, sample: Any) -> bytes:
        parts = {"content": sample.text}
        if self._call.make_parser is not None:
            parts = self._parsers[sample.index].parse(sample, self._prompt_tokens, self._stream)
        return json.dumps(parts).encode()

    def _encode_logprobs(self, result: Any, sample: Any, is_first: bool) -> bytes:
        """Return the log probabilities in the form that the OpenAI API's handlers read."""
        call = self._call
        prompt = _pair(self._prompt_tokens, result.prompt_logprobs) if is_first else []
        echoed = prompt if call.first_token is not None else []
        generated = _pair(sample.token_ids, sample.logprobs)
        content = [_entry(*entry, call.top_logprobs) for entry in echoed + generated]
        if echoed and call.first_token:  # vLLM does not decode this token
            content[0] |= {"token": call.first_token, "bytes": list(call.first_token.encode())}
        for entry in content:
            entry["text_offset"] = self._text_lengths[sample.index]
            self._text_lengths[sample.index] += len(entry["token"])
        encoded: dict[str, Any] = {"content": content}
        if call.prompt_logprobs >= 0 and is_first:
            top = call.prompt_logprobs
            encoded["prompt"] = [pair[1] and _entry(*pair, top) for pair in prompt]
        return orjson.dumps(encoded)


Logprobs = Mapping[int, Any]  # vLLM's log probabilities of the tokens at one position


def _pair(tokens: Sequence[int], steps: Iterable[Any] | None) -> list[tuple[int, Logprobs | None]]:
    return list(zip(tokens, steps or (), strict=False))


def _entry(token: int, logprobs: Logprobs | None, top: int) -> dict[str, Any]:
    """Return the entry of a token with its log probability, and those of the likeliest tokens."""
    if logprobs is None:  # the first token of a prompt has no log probability
        return {**_token_entry(token, None), "logprob": None, "top_logprobs": None}
    ranked = sorted(logprobs.items(), key=lambda pair: pair[1].rank or 0)
    likeliest = [_token_entry(*pair) for pair in ranked if 0 < (pair[1].rank or 0) <= top]
    rank = logprobs[token].rank if token in logprobs else None
    return {**_token_entry(token, logprobs.get(token)), "rank": rank, "top_logprobs": likeliest}


def _token_entry(token: int, score: Any) -> dict[str, Any]:
    text = (score and score.decoded_token) or ""
    value = score.logprob if score else MIN_LOGPROB
    return token_entry(token, text, value, list(text.encode()))
