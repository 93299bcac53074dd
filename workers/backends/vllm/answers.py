"""The outputs of a response, from an output of vLLM's engine."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shmserve.errors import Internal
from shmserve.workers.backends import Output
from shmserve.workers.backends.vllm.engine import Call, Parser

FLAGS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
_KINDS: Mapping[str, Any] = {
    "BYTES": np.object_,
    "INT32": np.int32,
    "UINT32": np.uint32,
    "FP32": np.float32,
}
_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Answer:
    """The responses to one request.

    In stream mode a response has the new text of one sample, and otherwise the whole text of all.

    Args:
        call: The request.
        wanted: The names of the outputs; empty: the text.
        flags: The names of `FLAGS` that are requested in the form of Triton's vllm_backend.
        stream: Whether the request has several responses.
    """

    def __init__(
        self, call: Call, wanted: Collection[str], flags: Collection[str], stream: bool
    ) -> None:
        self._call = call
        self._wanted = {*(wanted or ("text_output",)), *flags}
        self._flags = flags
        self._stream = stream
        self._prompt: list[int] | None = None
        self._cached = 0
        self._counts: dict[int, int] = {}  # the number of tokens by sample
        self._offsets: dict[int, int] = {}  # the number of characters of tokens by sample
        self._parsers: dict[int, Parser] = {}

    def outputs(self, found: Any) -> list[Output]:
        """Return the requested outputs.

        Raises:
            Internal: The engine has failed to generate a sample.
        """
        if found.prompt_token_ids is not None and self._prompt is None:
            self._prompt = list(found.prompt_token_ids)
        self._cached = self._cached or found.num_cached_tokens or 0
        samples = found.outputs
        if any(each.finish_reason == "error" for each in samples):
            raise Internal("the engine has failed to generate the text")
        first = [each for each in samples if each.index not in self._counts]
        tokens = [[] if self._call.only_prompt else list(each.token_ids) for each in samples]
        echoed = [self._call.text if each in first else "" for each in samples]
        ends = ["length" if self._call.only_prompt else each.finish_reason for each in samples]
        made: dict[str, tuple[str, Any]] = {
            "text_output": (
                "BYTES",
                [
                    (echo + ("" if self._call.only_prompt else each.text)).encode()
                    for echo, each in zip(echoed, samples, strict=True)
                ],
            ),
            "index": ("INT32", [each.index for each in samples]),
            "token_ids": ("INT32", [token for each in tokens for token in each]),
            "prompt_token_ids": ("INT32", (self._prompt or []) if first else []),
            "num_input_tokens": ("UINT32", [len(self._prompt or ())]),
            "num_output_tokens": ("UINT32", list(map(len, tokens))),
            "cumulative_logprob": ("FP32", [each.cumulative_logprob or 0.0 for each in samples]),
        }
        plain = map(str, ends) if "finish_reason" in self._flags else (end or "" for end in ends)
        made["finish_reason"] = "BYTES", [end.encode() for end in plain]
        if "logprobs" in self._flags:
            made["logprobs"] = "BYTES", [_plain_logprobs(each.logprobs) for each in samples]
        elif "logprobs" in self._wanted:
            texts = [self._logprobs(found, each, each in first) for each in samples]
            made["logprobs"] = "BYTES", texts
        if "message" in self._wanted:
            made["message"] = "BYTES", [self._message(each) for each in samples]
        for each, new in zip(samples, tokens, strict=True):
            self._counts[each.index] = self._counts.get(each.index, 0) + len(new)
        made["usage"] = "BYTES", [self._usage() if found.finished else b""]
        return [
            Output(name, datatype, np.array(values, _KINDS[datatype]))
            for name, (datatype, values) in made.items()
            if name in self._wanted
        ]

    def _usage(self) -> bytes:
        counts = [count for _, count in sorted(self._counts.items())]
        usage = {
            "prompt_tokens": len(self._prompt or ()),
            "completion_tokens": sum(counts),
            "cached_tokens": self._cached,
            "samples": counts,
        }
        return json.dumps(usage).encode()

    def _message(self, sample: Any) -> bytes:
        if self._call.make_parser is None:
            return json.dumps({"content": sample.text}).encode()
        index = sample.index
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._call.make_parser()
        ended = sample.finish_reason is not None
        parts = sample.text, list(sample.token_ids), self._prompt
        return json.dumps(parser.parse(*parts, self._stream, ended)).encode()

    # --- log probabilities

    def _logprobs(self, found: Any, sample: Any, first: bool) -> bytes:
        """Return the log probabilities in the form that the OpenAI doors read."""
        call = self._call
        prompt = _listed(self._prompt, found.prompt_logprobs) if first else []
        pairs = [] if call.only_prompt else _listed(sample.token_ids, sample.logprobs)
        pairs = prompt + pairs if call.text else pairs
        content = [_scored(token, step, call.top) for token, step in pairs]
        for each in content:
            offset = each["text_offset"] = self._offsets.get(sample.index, 0)
            self._offsets[sample.index] = offset + len(each["token"])
        told: dict[str, Any] = {"content": content}
        if call.prompt_top >= 0 and first:
            told["prompt"] = [each[1] and _scored(*each, call.prompt_top) for each in prompt]
        return json.dumps(told).encode()


def _listed(
    tokens: Sequence[int] | None, steps: Iterable[Any] | None
) -> list[tuple[int, Mapping[int, Any] | None]]:
    return list(zip(tokens or (), steps, strict=False)) if steps is not None else []


def _scored(token: int, step: Mapping[int, Any] | None, top: int) -> dict[str, Any]:
    """Return the log probability of a token, and those of the likeliest tokens in its place."""
    if step is None:  # the first token of a prompt
        return {**_token(token, None), "logprob": None, "top_logprobs": None}
    ranked = sorted(step.items(), key=lambda pair: pair[1].rank or 0)
    likeliest = [_token(*pair) for pair in ranked if 0 < (pair[1].rank or 0) <= top]
    rank = step[token].rank if token in step else None
    return {**_token(token, step.get(token)), "rank": rank, "top_logprobs": likeliest}


def _token(token: int, found: Any) -> dict[str, Any]:
    text = (found and found.decoded_token) or ""
    value = max(found.logprob, _LEAST_LOGPROB) if found else _LEAST_LOGPROB
    return {"token_id": token, "token": text, "logprob": value, "bytes": list(text.encode())}


def _plain_logprobs(steps: Iterable[Mapping[int, Any]] | None) -> bytes:
    """Return log probabilities in the form of Triton's vllm_backend."""
    if steps is None:
        return b"null"
    names = ("logprob", "rank", "decoded_token")
    told = [
        {token: {name: getattr(each, name) for name in names} for token, each in step.items()}
        for step in steps
    ]
    return json.dumps(told).encode()
