"""Chat templates: a conversation as the text that its model was trained on."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shmserve.errors import InvalidArgument, clip


class ChatTemplate:
    """One model's template; `special` are the texts of tokens that it may name."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source = source
        self._special = special

    @functools.cached_property
    def _compiled(self) -> Any:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        environment.filters["tojson"] = _to_json
        return environment.from_string(self._source)

    def render(self, text: str) -> str:
        """The prompt for a JSON list of messages, or an object with `messages` and what else the
        template takes. Raises InvalidArgument."""
        if not self._source:
            raise InvalidArgument("messages: the model has no chat template, only text_input")
        given = _conversation(text)
        try:
            made: str = self._compiled.render(
                **{"add_generation_prompt": True, **self._special, **given}
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"messages: the model's chat template does not take them: {clip(str(error), 200)}"
            ) from None
        return made


def _conversation(text: str) -> dict[str, Any]:
    allowed = "a JSON list of messages, each with a role and a content"
    try:
        found = json.loads(text)
    except ValueError:
        raise InvalidArgument(f"messages: {clip(repr(text))} is not {allowed}") from None
    given: dict[str, Any] = found if isinstance(found, dict) else {"messages": found}
    messages = given.get("messages")
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise InvalidArgument(f"messages: {clip(repr(messages))} is not {allowed}")
    return {**given, "messages": [_flat(each) for each in messages]}


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and "role" in given


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one text: parts of text are joined."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidArgument(f"messages: content of type {clip(repr(kind))} is not 'text'")
    return {**message, "content": "\n".join(str(part.get("text", "")) for part in content)}


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
