"""Responses of a model as choices (pure): whole, or in the chunks of a stream; and errors, as this
interface has them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from shmserve.errors import InvalidArgument, NotFound, QueueFull, ShmserveError


class Delta(NamedTuple):
    """A part of a sample's text, as one response has it: `logprobs` of its tokens if they were
    asked for, `finish_reason` with its last, and `usage` with the last of all."""

    sample: int
    text: str
    finish_reason: str = ""
    logprobs: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None


class Form(NamedTuple):
    """The differences between completions and chats: how ids begin, what objects are called, and
    what a choice has."""

    prefix: str
    whole: str
    chunk: str
    chat: bool

    def content(self, text: str, first: bool = False, chunk: bool = False) -> dict[str, Any]:
        """The part of a choice that has its text."""
        if not self.chat:
            return {"text": text}
        message: dict[str, Any] = {"content": text} if text or not chunk or first else {}
        if first or not chunk:
            message = {"role": "assistant", **message}
        return {"delta" if chunk else "message": message}

    def logprobs(self, found: list[dict[str, Any]] | None, offset: int) -> dict[str, Any] | None:
        """The probabilities of tokens, of which the first is at this character of its text."""
        if found is None:
            return None
        if self.chat:
            return {"content": found, "refusal": None}
        offsets = []
        for each in found:
            offsets.append(offset)
            offset += len(each["token"])
        return {
            "tokens": [each["token"] for each in found],
            "token_logprobs": [each["logprob"] for each in found],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in found
            ],
            "text_offset": offsets,
        }


COMPLETION = Form("cmpl", "text_completion", "text_completion", chat=False)
CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk", chat=True)


@dataclass(slots=True)
class _Sample:
    text: str = ""
    finish_reason: str = ""
    logprobs: list[dict[str, Any]] | None = None
    begun: bool = False


@dataclass(eq=False)
class Choices:
    """The choices of one request: `samples` for each of its prompts."""

    form: Form
    model: str
    samples: int
    _found: dict[int, _Sample] = field(default_factory=dict)
    _usage: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "new": 0, "cached": 0})

    def __post_init__(self) -> None:
        self._id = f"{self.form.prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())

    def add(self, prompt: int, delta: Delta) -> dict[str, Any]:
        """Another part of a sample of a prompt; what a chunk says of it."""
        index = prompt * self.samples + delta.sample
        sample = self._found.setdefault(index, _Sample())
        content = None if delta.logprobs is None else delta.logprobs.get("content", [])
        choice = {
            "index": index,
            **self.form.content(delta.text, first=not sample.begun, chunk=True),
            "logprobs": self.form.logprobs(content, len(sample.text)),
            "finish_reason": delta.finish_reason or None,
        }
        sample.begun = True
        sample.text += delta.text
        sample.finish_reason = delta.finish_reason
        if content is not None:
            sample.logprobs = (sample.logprobs or []) + content
        if delta.usage is not None:
            self._count(delta.usage)
        return choice

    def _count(self, usage: dict[str, Any]) -> None:
        self._usage["prompt"] += usage["prompt_tokens"]
        self._usage["new"] += usage["completion_tokens"]
        self._usage["cached"] += usage.get("cached_tokens", 0)

    def whole(self) -> dict[str, Any]:
        """The response to a request that does not stream."""
        choices = [
            {
                "index": index,
                **self.form.content(sample.text),
                "logprobs": self.form.logprobs(sample.logprobs, 0),
                "finish_reason": sample.finish_reason or None,
            }
            for index, sample in sorted(self._found.items())
        ]
        return {**self._head(self.form.whole), "choices": choices, "usage": self.usage()}

    def chunk(self, choices: Iterable[dict[str, Any]]) -> bytes:
        """A chunk of a stream, as JSON."""
        return orjson.dumps({**self._head(self.form.chunk), "choices": list(choices)})

    def last(self) -> bytes:
        """The chunk that says how many tokens there were."""
        head = self._head(self.form.chunk)
        return orjson.dumps({**head, "choices": [], "usage": self.usage()})

    def usage(self) -> dict[str, Any]:
        """The numbers of tokens."""
        prompt, new, cached = self._usage.values()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}


# Texts about one field begin with its name.
_FIELD = re.compile(r"(?:\[request id: .*?\] )?([a-z][a-z_.\[\]0-9]*): ")


class TooManyRequests(QueueFull):
    """The queue of a model is full, in the words of this interface."""

    status = 429


def openai_error(error: ShmserveError) -> bytes:
    """The body of an error's response."""
    kind = "invalid_request_error" if isinstance(error, InvalidArgument) else "server_error"
    code: str | None = None
    if isinstance(error, NotFound):
        kind, code = "invalid_request_error", "model_not_found"
    elif isinstance(error, TooManyRequests):
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    field = _FIELD.match(error.message) if isinstance(error, InvalidArgument) else None
    message = error.message.encode(errors="replace").decode()
    param = None if field is None else field[1]
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
