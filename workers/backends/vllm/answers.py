"""The conversion of the outputs of vLLM's engine to the outputs of responses."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from shmserve.errors import Internal
from shmserve.workers.backends import Output
from shmserve.workers.backends.llm.token_texts import encode_logprobs, token_entry
from shmserve.workers.backends.vllm.engine import VllmCall, parse_message

# The outputs that clients of Triton's vllm_backend request by inputs, such as return_logprobs.
FLAGS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")


def _encode_as_triton(sample: Any) -> bytes:
    """Return the log probabilities in the form of Triton's vllm_backend."""
    return json.dumps(sample.logprobs and list(sample.logprobs), default=vars).encode()


class VllmAnswer:
    """The responses to one request.

    If the request is a stream, each response has the new text of one sample. Otherwise one response
    has the whole texts of all samples.

    Args:
        call: The request.
        requested: The names of the requested outputs; if empty, the text is sent.
        flags: The names of `FLAGS` that are requested by inputs.
    """

    def __init__(self, call: VllmCall, requested: Collection[str], flags: Collection[str]) -> None:
        self._call = call
        self._requested_outputs = {*(requested or ("text_output",)), *flags}
        self._flags = flags
        self._prompt_tokens: list[int] = []
        self._cached_tokens = 0
        self._tokens = defaultdict[int, list[int]](list)  # the generated tokens by sample
        self._parsers = defaultdict[int, Any](call.make_parser)

    def responses(self, result: Any) -> Iterator[tuple[list[Output], bool]]:
        """Yield the outputs of each response to send after a result of the engine.

        Yields:
            The outputs, and whether the response is the last one.

        Raises:
            Internal: The engine has failed to generate a sample.
        """
        self._prompt_tokens = self._prompt_tokens or list(result.prompt_token_ids or ())
        self._cached_tokens = self._cached_tokens or result.num_cached_tokens or 0
        request = self._call.request
        for sample in result.outputs:
            if sample.finish_reason == "error":
                raise Internal("vLLM has failed to generate the text; see the server's log")
            if request.echo and request.max_tokens == 0:
                sample.text, sample.token_ids, sample.logprobs = "", [], []
                sample.finish_reason = "length"
        groups = [[sample] for sample in result.outputs] if request.stream else [result.outputs]
        for response_number, samples in enumerate(groups, 1):
            is_last = result.finished and response_number == len(groups)
            yield self._encode_outputs(result, samples, is_last), is_last

    def _encode_outputs(self, result: Any, samples: Sequence[Any], is_last: bool) -> list[Output]:
        is_first = samples[0].index not in self._tokens
        for sample in samples:
            self._tokens[sample.index] += sample.token_ids
        echo = self._call.text if is_first else ""
        no_reason = "None" if "finish_reason" in self._flags else ""
        prompt_scores = (result.prompt_logprobs or ()) if is_first else ()
        scored_prompt = list(zip(self._prompt_tokens, prompt_scores, strict=False))
        as_triton = "logprobs" in self._flags
        encode = _encode_as_triton if as_triton else partial(self._encode_logprobs, scored_prompt)
        values: dict[str, tuple[str, Iterable[Any]]] = {
            "text_output": ("BYTES", ((echo + sample.text).encode() for sample in samples)),
            "index": ("INT32", (sample.index for sample in samples)),
            "token_ids": ("INT32", itertools.chain(*(sample.token_ids for sample in samples))),
            "prompt_token_ids": ("INT32", self._prompt_tokens if is_first else ()),
            "finish_reason": ("BYTES", (sample.finish_reason or no_reason for sample in samples)),
            "stop_reason": ("BYTES", (orjson.dumps(sample.stop_reason) for sample in samples)),
            "logprobs": ("BYTES", map(encode, samples)),
            "message": ("BYTES", (json.dumps(self._parse_message(sample)) for sample in samples)),
            "cumulative_logprob": ("FP32", (sample.cumulative_logprob or 0 for sample in samples)),
            "num_input_tokens": ("UINT32", [len(self._prompt_tokens)]),
            "num_output_tokens": ("UINT32", (len(sample.token_ids) for sample in samples)),
            "usage": ("BYTES", [self._encode_usage() if is_last else b""]),
        }
        return Output.select(values, self._requested_outputs)

    def _encode_usage(self) -> bytes:
        counts = [len(tokens) for _, tokens in sorted(self._tokens.items())]
        usage: dict[str, Any] = {"samples": counts, "completion_tokens": sum(counts)}
        usage |= {"prompt_tokens": len(self._prompt_tokens), "cached_tokens": self._cached_tokens}
        if self._call.make_parser is not None:
            counts = [self._parsers[i].count_reasoning_tokens(t) for i, t in self._tokens.items()]
            usage["reasoning_tokens"] = sum(counts)
        return orjson.dumps(usage)

    def _parse_message(self, sample: Any) -> dict[str, Any]:
        if self._call.make_parser is None:
            return {"content": sample.text}
        parser = self._parsers[sample.index]
        message = parse_message(parser, self._call.request, sample, self._prompt_tokens)
        if "token_ids" in self._requested_outputs:  # chunks may report the numbers of tokens so far
            message["reasoning_tokens"] = parser.count_reasoning_tokens(self._tokens[sample.index])
        return message

    def _encode_logprobs(self, prompt: list[tuple[int, Any]], sample: Any) -> bytes:
        """Return the log probabilities in the form that the OpenAI API's handlers read.

        Args:
            prompt: The tokens of the prompt with their log probabilities, in the first response.
            sample: vLLM's output.
        """
        request, top = self._call.request, self._call.parameters.logprobs or 0
        generated_tokens = zip(sample.token_ids, sample.logprobs or (), strict=False)
        tokens = [*(prompt if request.echo else ()), *generated_tokens]
        members = {"content": [self._score(token, scores, top) for token, scores in tokens]}
        if prompt and request.prompt_logprobs is not None:
            top = request.prompt_logprobs
            members["prompt"] = [scores and self._score(t, scores, top) for t, scores in prompt]
        return encode_logprobs(members)

    def _score(self, token: int, scores: Mapping[int, Any] | None, top: int) -> dict[str, Any]:
        """Return a token's entry of log probabilities, with the `top` likeliest tokens.

        vLLM's `scores`, by token, are None for the first token of a prompt. If `top` is negative,
        the entry has all tokens with a score.
        """
        if scores is None:
            return {**self._token_entry(token, None), "logprob": None, "top_logprobs": None}
        entries = sorted(scores.items(), key=lambda pair: pair[1].rank)[: top if top >= 0 else None]
        likeliest_entries = [self._token_entry(*pair) for pair in entries]
        members = {"rank": scores[token].rank, "top_logprobs": likeliest_entries}
        return {**self._token_entry(token, scores[token]), **members}

    def _token_entry(self, token: int, score: Any) -> dict[str, Any]:
        text = self._call.decode(token) if score is None else score.decoded_token
        logprob = 0.0 if score is None else score.logprob
        shows_id = bool(self._call.request.return_tokens_as_token_ids)
        return token_entry(token, text, logprob, list(text.encode()), shows_id)
