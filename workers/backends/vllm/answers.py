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
        stream: Whether a response has the new text of one sample, or the whole text of all.
    """

    def __init__(
        self, call: VllmCall, requested: Collection[str], flags: Collection[str], stream: bool
    ) -> None:
        self._call = call
        self._requested = {*(requested or ("text_output",)), *flags}
        self._flags = flags
        self._stream = stream
        self._prompt: list[int] = []
        self._cached = 0
        self._counts = Counter[int]()  # the number of tokens by sample
        self._offsets = Counter[int]()  # the number of characters of tokens by sample
        self._parsers = defaultdict[int, Parser](call.make_parser)

    def responses(self, result: Any) -> list[list[Output]]:
        """Return the outputs of each response.

        Raises:
            Internal: The engine has failed to generate a sample.
        """
        self._prompt = self._prompt or list(result.prompt_token_ids or ())
        self._cached = self._cached or result.num_cached_tokens or 0
        for each in result.outputs:
            if each.finish_reason == "error":
                raise Internal("the engine has failed to generate the text")
            if self._call.only_prompt:
                each.text, each.token_ids, each.logprobs = "", [], []
                each.finish_reason = "length"
        groups = [[each] for each in result.outputs] if self._stream else [result.outputs]
        last = len(groups) if result.finished else 0
        return [self._outputs(result, each, n == last) for n, each in enumerate(groups, 1)]

    def _outputs(self, result: Any, samples: Sequence[Any], ends: bool) -> list[Output]:
        first = {each.index for each in samples} - self._counts.keys()
        for each in samples:
            self._counts[each.index] += len(each.token_ids)
        texts = [(self._call.text if each.index in first else "") + each.text for each in samples]
        none = "None" if "finish_reason" in self._flags else ""
        values: dict[str, tuple[str, Iterable[Any]]] = {
            "text_output": ("BYTES", map(str.encode, texts)),
            "index": ("INT32", [each.index for each in samples]),
            "token_ids": ("INT32", [token for each in samples for token in each.token_ids]),
            "prompt_token_ids": ("INT32", self._prompt if first else ()),
            "finish_reason": ("BYTES", [(each.finish_reason or none).encode() for each in samples]),
            "stop_reason": ("BYTES", [orjson.dumps(each.stop_reason) for each in samples]),
            "cumulative_logprob": ("FP32", [each.cumulative_logprob or 0.0 for each in samples]),
            "num_input_tokens": ("UINT32", [len(self._prompt)]),
            "num_output_tokens": ("UINT32", [len(each.token_ids) for each in samples]),
            "usage": ("BYTES", [self._usage() if ends else b""]),
        }
        if "logprobs" in self._flags:
            # As in Triton's vllm_backend.
            encoded = [each.logprobs and list(each.logprobs) for each in samples]
            values["logprobs"] = "BYTES", [json.dumps(each, default=vars) for each in encoded]
        elif "logprobs" in self._requested:
            logprobs = [self._logprobs(result, each, each.index in first) for each in samples]
            values["logprobs"] = "BYTES", logprobs
        if "message" in self._requested:
            values["message"] = "BYTES", map(self._message, samples)
        return [Output.of_values(name, *values[name]) for name in values if name in self._requested]

    def _usage(self) -> bytes:
        usage = {
            "prompt_tokens": len(self._prompt),
            "completion_tokens": self._counts.total(),
            "samples": [count for _, count in sorted(self._counts.items())],
            "cached_tokens": self._cached,
        }
        return orjson.dumps(usage)

    def _message(self, sample: Any) -> bytes:
        parts = {"content": sample.text}
        if self._call.make_parser is not None:
            parts = self._parsers[sample.index].parse(sample, self._prompt, self._stream)
        return json.dumps(parts).encode()

    def _logprobs(self, result: Any, sample: Any, first: bool) -> bytes:
        """Return the log probabilities in the form that the OpenAI API's handlers read."""
        call = self._call
        prompt = _listed(self._prompt, result.prompt_logprobs) if first else []
        echoed = prompt if call.first is not None else []
        new = _listed(sample.token_ids, sample.logprobs)
        content = [_scored(*each, call.top) for each in echoed + new]
        if echoed and call.first:  # vLLM does not decode this token
            content[0] |= {"token": call.first, "bytes": list(call.first.encode())}
        for each in content:
            each["text_offset"] = self._offsets[sample.index]
            self._offsets[sample.index] += len(each["token"])
        encoded: dict[str, Any] = {"content": content}
        if call.prompt_top >= 0 and first:
            encoded["prompt"] = [each[1] and _scored(*each, call.prompt_top) for each in prompt]
        return orjson.dumps(encoded)


Step = Mapping[int, Any]  # the log probabilities of tokens at one position


def _listed(tokens: Sequence[int], steps: Iterable[Any] | None) -> list[tuple[int, Step | None]]:
    return list(zip(tokens, steps or (), strict=False))


def _scored(token: int, step: Step | None, top: int) -> dict[str, Any]:
    """Return the log probability of a token, and those of the likeliest tokens at its position."""
    if step is None:  # the first token of a prompt has no log probability
        return {**_token(token, None), "logprob": None, "top_logprobs": None}
    ranked = sorted(step.items(), key=lambda pair: pair[1].rank or 0)
    likeliest = [_token(*pair) for pair in ranked if 0 < (pair[1].rank or 0) <= top]
    rank = step[token].rank if token in step else None
    return {**_token(token, step.get(token)), "rank": rank, "top_logprobs": likeliest}


def _token(token: int, score: Any) -> dict[str, Any]:
    text = (score and score.decoded_token) or ""
    value = score.logprob if score else MIN_LOGPROB
    return token_entry(token, text, value, list(text.encode()))
