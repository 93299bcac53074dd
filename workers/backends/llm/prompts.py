"""Prompts: a request's validated inputs and parameters, converted to the tokens to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument, clip
from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import Resumed
from shmserve.workers.backends import Request
from shmserve.workers.backends.llm.chat_template import ChatTemplate, conversation
from shmserve.workers.backends.llm.message_parsers import MessageFormat
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.parameters import GenerationParameters, parse
from shmserve.workers.backends.llm.sampler import Grammars
from shmserve.workers.backends.llm.sequences import Prompt
from shmserve.workers.backends.llm.tools import MessageFormats, ToolRequest, take

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

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer
        self._longest = settings.max_model_len
        self._chat = ChatTemplate(checkpoint.templates, checkpoint.special)
        self._vocabulary = checkpoint.architecture.vocabulary
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._special = {each.content: token for token, each in added if each.special}
        self._grammars = Grammars(self._tokenizer.to_str(), self._vocabulary, checkpoint.ends)
        names = settings.tool_parser, settings.reasoning_parser
        self._formats = MessageFormats(*names, self._tokenizer)

    def read(
        self, request: Request, given: Mapping[str, Any], resumed: list[Resumed]
    ) -> tuple[Prompt, str]:
        """Return the prompt of a request, and the text that its response repeats.

        Raises:
            InvalidArgument: An input or a parameter is wrong.
        """
        settings = _settings(request, given)
        parameters = parse(settings, self._checkpoint.defaults, self._vocabulary)
        chat = conversation(given["messages"]) if "messages" in given else None
        tools = take(chat) if chat is not None else None
        tokens, text = self._tokens(given, chat, parameters)
        most = min(parameters.max_tokens, self._longest - len(tokens))
        stops = (*parameters.stop_token_ids, *self._special_stops(parameters.stop))
        parameters = replace(parameters, max_tokens=most, stop_token_ids=stops)
        ends = () if parameters.ignore_eos else self._checkpoint.ends
        message = self._formats.format(tools, text) if chat is not None else None
        grammar = self._grammar(parameters, tools, message)
        before = {each.sample: np.frombuffer(each.tokens, np.int32).tolist() for each in resumed}
        prompt = Prompt(
            request.work.key, tokens, parameters, ends, grammar, before, message=message
        )
        return prompt, text if parameters.echo and "messages" not in given else ""

    def _special_stops(self, stops: tuple[str, ...]) -> list[int]:
        """Return the tokens of stop strings that are special tokens, which texts lack."""
        found = [self._special[stop] for stop in stops if stop in self._special]
        return [token for token in found if token < self._vocabulary]

    def _grammar(
        self,
        parameters: GenerationParameters,
        tools: ToolRequest | None,
        message: MessageFormat | None,
    ) -> Any:
        """Return the matcher of a request's grammar, for its content and its calls."""
        content = bool(parameters.grammar[0])
        frame = self._formats.grammar(tools, message, content) if message is not None else ""
        return self._grammars.matcher(parameters.grammar, frame) if content or frame else None

    def _tokens(
        self,
        given: Mapping[str, Any],
        chat: Mapping[str, Any] | None,
        parameters: GenerationParameters,
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
            text = self._chat.render(chat) if chat is not None else source
            special = parameters.add_special_tokens and chat is None
            tokens = self._tokenizer.encode(text, add_special_tokens=special).ids
            most = max(tokens, default=0)
            if most >= self._vocabulary:
                token = clip(repr(self._tokenizer.id_to_token(most)))
                raise InvalidArgument(
                    f"{named[0]}: the token {token} is {most}, and the model has tokens up to "
                    f"{self._vocabulary - 1} (config.json: vocab_size)"
                )
        if parameters.truncate_prompt_tokens:
            tokens = tokens[-parameters.truncate_prompt_tokens :]
        if not tokens:
            raise InvalidArgument(f"{named[0]}: the prompt is empty, it needs a token")
        if len(tokens) >= self._longest:
            raise InvalidArgument(
                f"{named[0]}: the prompt has {len(tokens)} tokens, and with one more the model "
                f"takes up to {self._longest}"
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
    if found.get("exclude_input_in_output") is not None:
        found["echo"] = not found["exclude_input_in_output"]
    elif "echo" not in found:
        # Like Triton's vLLM backend: a single response begins with its prompt, a stream does not.
        found["echo"] = not found.get("stream", False)
    return found
