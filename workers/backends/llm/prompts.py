"""Prompts: a request's validated inputs and parameters, converted to the tokens to continue."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shmserve.errors import InvalidArgument, clip
from shmserve.ipc.engine_settings import PROMPT_TOO_LONG
from shmserve.ipc.messages.generation import Resumed
from shmserve.workers.backends import Request
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.parameters import GenerationParameters, parse
from shmserve.workers.backends.llm.sampler import Grammars
from shmserve.workers.backends.llm.sequences import Prompt

_INPUTS = ("text_input", "input_ids", "messages")


def given_inputs(request: Request) -> dict[str, Any]:
    """Return the inputs of a request as values of Python that do not refer to its memory.

    Raises:
        InvalidArgument: A text is not UTF-8.
    """
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


class PromptReader:
    """A reader of requests for one model."""

    def __init__(self, checkpoint: Checkpoint, max_model_len: int) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer
        self._longest = max_model_len
        self._chat = ChatTemplate(checkpoint.template, checkpoint.special)
        self._vocabulary = checkpoint.architecture.vocabulary
        self._grammars = Grammars(self._tokenizer.to_str(), self._vocabulary, checkpoint.ends)

    def read(
        self, request: Request, given: Mapping[str, Any], resumed: list[Resumed]
    ) -> tuple[Prompt, str]:
        """Return the prompt of a request, and the text that its response repeats.

        Raises:
            InvalidArgument: An input or a parameter is wrong.
        """
        settings = _settings(request, given)
        parameters = parse(settings, self._checkpoint.defaults, self._vocabulary)
        tokens, text = self._tokens(given, parameters)
        most = min(parameters.max_tokens, self._longest - len(tokens))
        parameters = replace(
            parameters,
            max_tokens=most,
            banned=self._banned(parameters.bad_words),
            # The best samples are found by their probabilities.
            logprobs=max(parameters.logprobs, 0 if parameters.samples > parameters.n else -1),
        )
        ends = () if parameters.ignore_eos else self._checkpoint.ends
        grammar = self._grammars.matcher(parameters.grammar) if parameters.grammar[0] else None
        before = {each.sample: np.frombuffer(each.tokens, np.int32).tolist() for each in resumed}
        prompt = Prompt(request.work.key, tokens, parameters, ends, grammar, before)
        return prompt, text if parameters.echo and "messages" not in given else ""

    def _banned(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of forbidden words, without and with a space before each.

        The rule is that of vLLM: the second form counts if the space is part of its first token.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            plain, spaced = (
                tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
                for text in (word.lstrip(), " " + word.lstrip())
            )
            found[plain] = None
            if spaced[:1] != plain[:1] and len(spaced) == len(plain):
                found[spaced] = None
        return tuple(each for each in found if each)

    def _tokens(
        self, given: Mapping[str, Any], parameters: GenerationParameters
    ) -> tuple[list[int], str]:
        """Return the tokens and the text of the prompt."""
        named = [name for name in _INPUTS if name in given]
        if len(named) != 1:
            found = " and ".join(named) or "none"
            raise InvalidArgument(f"the prompt is one of {', '.join(_INPUTS)}: {found} is given")
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
            special = parameters.add_special_tokens
            tokens = self._tokenizer.encode(text, add_special_tokens=special).ids
        if parameters.truncate_prompt_tokens:
            most = parameters.truncate_prompt_tokens
            tokens = tokens[-(most if most > 0 else max(self._longest - 1, 1)) :]
        if not tokens:
            raise InvalidArgument(f"{named[0]}: the prompt is empty, it needs a token")
        if len(tokens) >= self._longest:
            raise InvalidArgument(
                f"{named[0]}: {PROMPT_TOO_LONG}: {len(tokens)} tokens and one more are above "
                f"{self._longest}"
            )
        return tokens, text


def _settings(request: Request, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the parameters of a request, of its `sampling_parameters`, and of its inputs."""
    found = {**request.schema.parameters}
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
    if "messages" in given:
        found.setdefault("add_special_tokens", False)  # the template writes them
    if found.get("exclude_input_in_output") is not None:
        found["echo"] = not found["exclude_input_in_output"]
    elif "echo" not in found:
        # Like Triton's vLLM backend: a single response begins with its prompt, a stream does not.
        found["echo"] = not found.get("stream", False)
    return found


class ChatTemplate:
    """The chat template of a model; `special` has the texts of tokens that it may name."""

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
        """Render a JSON list of messages, or an object of `messages` and other template variables.

        Raises:
            InvalidArgument: The text is not valid, or the template rejects it.
        """
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
    """Join the text parts of a message's content."""
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
