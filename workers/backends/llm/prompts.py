"""Prompts: the validated inputs and parameters of requests, converted to tokens."""

from __future__ import annotations

import codecs
import itertools
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Thread, get_native_id
from typing import Any, NamedTuple

import numpy as np
import orjson
from tokenizers import Encoding

from shmserve.errors import InvalidArgument, clip
from shmserve.ipc.engine_settings import EngineSettings, prompt_too_long_text
from shmserve.ipc.messages.generation import Resumed
from shmserve.workers.backends import Output, Request, Response
from shmserve.workers.backends.llm.chat_template import (
    NICE,
    ChatTemplate,
    check_surrogates,
    decode,
    parse_conversation,
    render_in_process,
)
from shmserve.workers.backends.llm.grammars import Grammars
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.parameters import GenerationParameters, as_flag, parse
from shmserve.workers.backends.llm.token_texts import BadWords, TokenTexts, parse_json, with_pauses
from shmserve.workers.backends.llm.tools import MessageFormats, ToolRequest, take_tools
from shmserve.workers.backends.llm.worker_engine import Prompt

MAX_OBJECTS = 4096  # number of objects of a conversation that is rendered in 20 ms
_OBJECT_START = b'{"'  # begins an object in JSON without spaces, and cannot occur in a string
UNLIMITED = 1 << 24  # `max_tokens` of chats that set no limit
_INPUTS = ("text_input", "input_ids", "messages")
_TASK_INPUTS = {"tokenize": ("text_input", "messages"), "detokenize": ("input_ids",)}
LONG = 1 << 12  # number of characters that are tokenized in less than 10 ms
# The prefixes of a long text that are tokenized first, in characters per allowed token.
_PREFIX_CHARACTERS = (1, 3, 6)
_PART_CHARACTERS = 12  # length of the part of a truncated text, per remaining token
_BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")
_MAX_CUT_TOKENS = 64  # number of tokens next to a cut that may differ from those of the whole text
_MAX_CHARACTER_BYTES, _MAX_TOKEN_BYTES = 4, 64
_MIN_MAX_BYTES = 1 << 20  # minimum of `PromptReader.max_bytes`
_MAX_TOKENIZED = 1 << 20  # maximum number of tokens of /tokenize, unless the model allows more
_SLICE_BYTES = 1 << 17  # number of bytes that are decoded at a time, with the GIL held


def read_inputs(
    request: Request, max_bytes: int, max_objects: int = MAX_OBJECTS, max_tokens: int = 0
) -> dict[str, Any]:
    """Return copies of the inputs of a request, except that a long text is a view of its memory.

    Args:
        request: The request.
        max_bytes: The maximum size of a prompt that is not truncated. Texts are copied with the
            GIL held, which delays all streams of the model.
        max_objects: The number of objects above which a conversation counts as long.
        max_tokens: The model's maximum context length, for errors.

    Raises:
        InvalidArgument: A text is not UTF-8, or too long.
    """
    inputs: dict[str, Any] = {}
    settings_input = request.inputs.get("sampling_parameters")
    settings_json = b"" if settings_input is None else settings_input.numpy().ravel().tolist()[0]
    parameters = request.schema.parameters
    truncates = "truncate_prompt_tokens" in parameters or b"truncate_prompt_tok" in settings_json
    for name, tensor in request.inputs.items():
        data = memoryview(tensor.raw)
        size = data.nbytes
        is_long = name in _INPUTS and size > max_bytes
        is_view = is_long and truncates and name != "input_ids"
        if name == "messages" and not is_long and size > max_objects:
            is_view = bytes(data).count(_OBJECT_START) > max_objects
        if is_view and tensor.is_text():
            inputs[name] = data[4:]
            continue
        if is_long and not truncates:
            text = prompt_too_long_text(max_tokens, f"{size} bytes exceed the limit of {max_bytes}")
            raise InvalidArgument(f"{name}: {text}")
        if name == "input_ids":
            inputs[name] = tensor.numpy().ravel().copy()
            continue
        values = tensor.numpy().ravel().tolist()
        if tensor.datatype == "BYTES":
            inputs[name] = decode(name, values[0])
        else:
            inputs[name] = values[0]
    return inputs


def find_prompt_input(inputs: Mapping[str, Any]) -> str:
    """Return the name of the input with the prompt.

    Raises:
        InvalidArgument: The request has several prompts, or none.
    """
    names = [name for name in _INPUTS if name in inputs]
    if len(names) != 1:
        found_names = " and ".join(names) or "none"
        raise InvalidArgument(f"exactly one of {', '.join(_INPUTS)} is required, got {found_names}")
    return names[0]


def task_input(task: Any, inputs: Mapping[str, Any]) -> str:
    """Return the name of the input of a task, such as "tokenize"; tasks generate no text.

    Raises:
        InvalidArgument: The task is unknown, or its input is missing.
    """
    for name in _TASK_INPUTS.get(task, ()) if isinstance(task, str) else ():
        if name in inputs:
            return name
    raise InvalidArgument(
        f"task: {clip(repr(task))} is not possible with these inputs (allowed: 'tokenize' with "
        "text_input or messages, 'detokenize' with input_ids)"
    )


def read_ending(name: str, text: str | memoryview, max_characters: int) -> tuple[str, int]:
    """Return at most `max_characters` last characters of a text, and the whole text's length.

    A long text in the memory of a request is decoded in slices. Decoding it as a whole would
    hold the GIL, which delays all streams of the model.

    Raises:
        InvalidArgument: The text is not UTF-8.
    """
    if isinstance(text, str):
        return text[-max_characters:], len(text)
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces: list[str] = []
    length = 0
    try:
        for begin in range(0, len(text), _SLICE_BYTES):
            data = bytes(text[begin : begin + _SLICE_BYTES])
            pieces.append(decoder.decode(data, final=begin + _SLICE_BYTES >= len(text)))
            length += len(pieces[-1])
            # A slice has at least a quarter as many characters as bytes: the last slices suffice.
            del pieces[: -(4 * max_characters // _SLICE_BYTES + 2)]
            time.sleep(0)  # releases the GIL
    except UnicodeDecodeError:
        first_text = clip(repr(bytes(text[:LONG])))
        raise InvalidArgument(f"{name}: {first_text} is not UTF-8") from None
    return "".join(pieces)[-max_characters:], length


def read_whole(name: str, text: str | memoryview) -> str:
    """Return a text that may be UTF-8 in the memory of a request; raise as `read_ending` does."""
    return read_ending(name, text, len(text))[0]


class PromptText(NamedTuple):
    """The tokens of a prompt, and its text if responses repeat it.

    Attributes:
        offsets: The index in the text at which each token begins; empty unless it is required.
    """

    tokens: list[int]
    text: str = ""
    offsets: Sequence[int] = ()


class RenderedChat(NamedTuple):
    """A rendered conversation.

    Attributes:
        tools: The tools of the conversation.
        hides_reasoning: Whether its reasoning is hidden.
        continues_message: Whether the prompt ends inside of the last message.
        text: The text of the prompt.
    """

    tools: ToolRequest | None
    hides_reasoning: bool
    continues_message: bool
    text: str | memoryview


def _take_options(chat: dict[str, Any]) -> tuple[ToolRequest | None, bool, bool]:
    hides_reasoning = chat.pop("include_reasoning", None) is False
    return take_tools(chat), hides_reasoning, bool(chat.get("continue_final_message"))


class PromptReader:
    """A reader of requests for one model; safe to use in any thread.

    Attributes:
        max_bytes: The limit of a prompt in bytes: `max_length` times the size of the longest token.
        max_length: The maximum context length in tokens.
    """

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings, texts: TokenTexts) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer
        encoding = self._tokenizer.encode("a")
        added_count = (*encoding.special_tokens_mask, 0).index(0)
        self._leading_tokens = encoding.ids[:added_count]  # such as a beginning-of-text token
        self._token_texts = texts
        self.max_length = settings.max_model_len
        self._chat_template = ChatTemplate(checkpoint.templates, checkpoint.special_tokens)
        self._vocab_size = checkpoint.architecture.vocab_size
        added_tokens = self._tokenizer.get_added_tokens_decoder().items()
        self._special_tokens = {text.content: token for token, text in added_tokens if text.special}
        pieces = self._tokenizer.get_vocab()
        # Tokenizers may have more tokens than the model.
        vocab_size = max(self._vocab_size, 1 + max(pieces.values(), default=0))
        Thread(target=self._start_threads).start()
        self._grammars = Grammars(texts, vocab_size, checkpoint.end_tokens)
        names = settings.tool_parser, settings.reasoning_parser
        self._message_formats = MessageFormats(*names, self._tokenizer)
        longest_piece = max(map(len, pieces), default=1)
        # The limit has a minimum, because normalisers may shorten a text, and the JSON of a
        # conversation contains more than its texts.
        max_token_bytes = min(_MAX_CHARACTER_BYTES * longest_piece, _MAX_TOKEN_BYTES)
        self.max_bytes = max(max_token_bytes * self.max_length, _MIN_MAX_BYTES)

    def _start_threads(self) -> None:
        """Start the tokenizer's threads, which inherit the low priority of this thread."""
        os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)
        self._tokenizer.encode_batch_fast(["", ""])

    def read(
        self, request: Request, inputs: Mapping[str, Any], resumed: list[Resumed]
    ) -> tuple[Prompt, str]:
        """Return the prompt of a request, and the text with which its response begins.

        A prompt with `needs_compilation` is not complete; see `compile`.

        Raises:
            InvalidArgument: An input or a parameter is wrong.
        """
        settings, echoes = merged_parameters(request, inputs)
        parameters = parse(settings, self._checkpoint.defaults, self._vocab_size)
        scores_prompt = echoes and parameters.logprobs >= 0 and "messages" not in inputs
        message_format, message_grammar = None, ""
        if "messages" in inputs:
            tools, hides_reasoning, continues_message, prompt_text = self._render(
                inputs["messages"]
            )
            inputs = {**inputs, "messages": prompt_text}
            ending, _ = read_ending("messages", prompt_text, LONG)
            has_grammar = bool(parameters.grammar[0])
            message_format = self._message_formats.make_format(
                tools, ending, hides_reasoning, has_grammar, continues_message
            )
            if message_format is not None:
                message_grammar = self._message_formats.grammar(tools, message_format, has_grammar)
        if (budget := parameters.thinking_token_budget) >= 0:
            if "messages" not in inputs:
                raise InvalidArgument("thinking_token_budget: only supported by chats")
            limit = self._message_formats.limit_reasoning(message_format, budget, self._vocab_size)
            parameters = replace(parameters, forbidden_after=limit)
        tokens, text, offsets = self._prompt_text(inputs, parameters, scores_prompt)
        max_tokens = parameters.max_tokens
        if max_tokens == UNLIMITED:
            max_tokens = self._checkpoint.defaults.get("max_new_tokens") or max_tokens
        max_tokens = min(max_tokens, self.max_length - len(tokens))
        parameters = replace(
            parameters,
            max_tokens=max_tokens,
            # The best samples are selected by their log probabilities.
            logprobs=max(parameters.logprobs, 0 if parameters.samples > parameters.n else -1),
        )
        if parameters.is_restricted:  # a step of the engine would otherwise build the arrays
            _ = parameters.bias_arrays, parameters.allowed_array
        # A sample with a grammar ends with an end token, even if `ignore_eos` is set.
        ignores_end = parameters.ignore_eos and not (parameters.grammar[0] or message_grammar)
        stop_tokens = (*parameters.stop_token_ids, *self._special_stops(parameters.stop))
        end_tokens = stop_tokens if ignores_end else (*self._checkpoint.end_tokens, *stop_tokens)
        if not (parameters.grammar[0] or message_grammar):  # a grammar may end the text earlier
            parameters.check_min_tokens(end_tokens, self._vocab_size)
        earlier_tokens = {r.sample: np.frombuffer(r.tokens, np.int32).tolist() for r in resumed}
        prompt = Prompt(request.work.key, tokens, parameters, end_tokens)
        prompt.message_format, prompt.message_grammar = message_format, message_grammar
        prompt.eos = -1 if ignores_end else self._checkpoint.eos
        echo_logprobs = parameters.logprobs if scores_prompt else -1
        prompt.top_logprobs = max(parameters.prompt_logprobs, echo_logprobs)
        if max(prompt.top_logprobs, parameters.logprobs) >= 0:
            prompt.replayed_tokens = earlier_tokens
        else:
            prompt.resumed_tokens = earlier_tokens
        prompt.offsets = offsets
        return prompt, text

    def convert(self, request: Request, inputs: Mapping[str, Any]) -> Response | None:
        """Return the response to a request that generates nothing, or None for other requests.

        Requests that generate nothing have the parameter `task`:

        - "tokenize": `token_ids` of the prompt, and the JSON array of their strings as
          `text_output`.
        - "detokenize": the text of `input_ids` as `text_output`.

        Raises:
            InvalidArgument: The task or an input is wrong.
        """
        task = request.schema.parameters.get("task")
        if task is None:
            return None
        name = task_input(task, inputs)
        outputs: dict[str, tuple[str, Any]] = {}  # (datatype, elements) by name
        names = {item.name for item in request.schema.outputs} or {"text_output", "token_ids"}
        if name == "input_ids":
            tokens = inputs["input_ids"]
            invalid_ids = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
            if invalid_ids.size:
                last_token = self._vocab_size - 1
                problem = f"tokens: {invalid_ids[0]} is not a token; allowed are 0 to {last_token}"
                raise InvalidArgument(problem)
            # `decode_batch` releases the GIL, unlike `decode`.
            texts = self._tokenizer.decode_batch([tokens.tolist()], skip_special_tokens=False)
            outputs["text_output"] = "BYTES", [piece.encode() for piece in texts]
        else:
            settings, _ = merged_parameters(request, inputs)
            settings = {"add_special_tokens": settings.get("add_special_tokens")}
            adds_special = parse(settings, {}, self._vocab_size).add_special_tokens
            text = self._render(inputs[name]).text if name == "messages" else inputs[name]
            text = read_whole("prompt", text)
            self._check_length("prompt", text, max(self.max_length, _MAX_TOKENIZED))
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)[0].ids
            outputs["token_ids"] = "INT32", ids
            if "text_output" in names:
                pieces = [self._tokenizer.id_to_token(i) or "" for i in with_pauses(ids)]
                parts = (pieces[begin : begin + LONG] for begin in range(0, len(pieces), LONG))
                encoded_pieces = b",".join(orjson.dumps(part)[1:-1] for part in parts)
                outputs["text_output"] = "BYTES", [b"[%b]" % encoded_pieces]
        return Response(Output.select(outputs, names))

    def compile(self, prompt: Prompt) -> None:
        """Set the grammar and the forbidden tokens of a prompt, which may take seconds.

        Raises:
            InvalidArgument: The grammar is invalid, or allows no text.
        """
        parameters = prompt.parameters
        if parameters.bad_words:
            bad_words = BadWords(parameters.bad_words, self._token_texts, self._vocab_size)
            prompt.parameters = replace(parameters, forbidden_after=bad_words.forbidden_after)
            _ = prompt.parameters.bias_arrays, prompt.parameters.allowed_array
        if parameters.grammar[0] or prompt.message_grammar:
            grammar = parameters.grammar, prompt.message_grammar, parameters.grammar_name
            prompt.grammar = self._grammars.matcher(*grammar)

    def _render(self, text: str | memoryview) -> RenderedChat:
        """Render a conversation, in a separate process if it is long."""
        if isinstance(text, memoryview):
            options, prompt = render_in_process(self._chat_template, text, _take_options)
            tools, hides_reasoning, continues_message = options
            return RenderedChat(tools, hides_reasoning, continues_message, prompt)
        chat = parse_conversation(text)
        return RenderedChat(*_take_options(chat), self._chat_template.render(chat))

    def _special_stops(self, stops: tuple[str, ...]) -> list[int]:
        """Return the special tokens among stop strings, which decoded texts may omit."""
        tokens = [self._special_tokens[text] for text in stops if text in self._special_tokens]
        return [token for token in tokens if token < self._vocab_size]

    def _prompt_text(
        self, inputs: Mapping[str, Any], parameters: GenerationParameters, has_offsets: bool
    ) -> PromptText:
        """Return the prompt, with the offsets of its tokens if `has_offsets`."""
        name, truncation_side = find_prompt_input(inputs), parameters.truncation_side
        if name == "input_ids":
            count = self._count_tokens(name, len(inputs[name]), parameters)
            ids = inputs[name][:count] if truncation_side == "right" else inputs[name][-count:]
            tokens: list[int] = ids.tolist()
            self._check_tokens(name, tokens)
            return self._decode(tokens, parameters, has_offsets)
        is_chat = name == "messages"
        text = inputs[name]
        adds_special = parameters.add_special_tokens
        if not parameters.truncate_prompt_tokens:
            text = read_whole(name, text)
            self._check_length(name, text, self.max_length)
            encoding = self._encode(text, adds_special, has_offsets)
        else:
            encoding = self._encode_part(name, text, has_offsets, parameters)
        count = self._count_tokens(name, len(encoding), parameters)
        is_cut = count < len(encoding)
        kept_tokens: list[int] = []
        if is_cut:
            if adds_special and not truncation_side:  # as in vLLM
                kept_tokens = self._leading_tokens[:count]
            encoding.truncate(count - len(kept_tokens), direction=truncation_side or "left")
        tokens = kept_tokens + encoding.ids
        self._check_tokens(name, tokens)
        if is_chat or not parameters.echo:
            return PromptText(tokens)
        if is_cut:
            return self._decode(tokens, parameters, has_offsets)
        text = read_whole(name, text)
        token_starts = (begin for begin, _ in encoding.offsets) if has_offsets else ()
        return PromptText(tokens, text, list(itertools.accumulate(token_starts, max)))

    def _check_length(self, name: str, text: str, max_tokens: int) -> None:
        """Raise InvalidArgument if a prefix of a text has more than `max_tokens` tokens.

        Tokens of the whole text would be converted, and released, with the GIL held.
        """
        if len(text) <= _PREFIX_CHARACTERS[-1] * max_tokens:
            return
        for characters in _PREFIX_CHARACTERS:
            count = len(self._encode(text[: characters * max_tokens], False, False))
            if count > max_tokens + _MAX_CUT_TOKENS:
                raise InvalidArgument(f"{name}: {_too_long(count, max_tokens)}")

    def _encode_part(
        self, name: str, text: str | memoryview, has_offsets: bool, parameters: GenerationParameters
    ) -> Encoding:
        """Return the tokens of a text, or of a part with all tokens that the truncation keeps.

        The text is cut between two words, where tokenizers divide a text.
        """
        max_tokens, adds_special = parameters.truncate_prompt_tokens, parameters.add_special_tokens
        max_tokens = self.max_length if max_tokens < 0 else min(max_tokens, self.max_length)
        size = _PART_CHARACTERS * max_tokens + LONG
        keeps_beginning = parameters.truncation_side == "right"
        if keeps_beginning:
            part = text = read_whole(name, text)
            word_gap = _BETWEEN_WORDS.search(text, size, size + LONG)
        else:
            part, count = read_ending(name, text, size + 1)
            word_gap = _BETWEEN_WORDS.search(part, 1, 1 + LONG) if count - size > LONG else None
        if word_gap is not None:
            cut_index = word_gap.start()
            part = part[:cut_index] if keeps_beginning else part[cut_index:]
            encoding = self._encode(part, adds_special, has_offsets)
            if len(encoding) > max_tokens + _MAX_CUT_TOKENS:
                return encoding
        return self._encode(read_whole(name, text), adds_special, has_offsets)

    def _encode(self, text: str, adds_special: bool, has_offsets: bool) -> Encoding:
        """Return the tokens of a text, and their offsets if `has_offsets`.

        The GIL is released for long texts; `encode_batch` and its threads would delay short texts.
        """
        if len(text) <= LONG:
            return self._tokenizer.encode(text, add_special_tokens=adds_special)
        encode = self._tokenizer.encode_batch if has_offsets else self._tokenizer.encode_batch_fast
        (encoding,) = encode([text], add_special_tokens=adds_special)
        return encoding

    def _decode(
        self, tokens: list[int], parameters: GenerationParameters, has_offsets: bool
    ) -> PromptText:
        """Return a prompt whose text is the decoding of its tokens."""
        if not parameters.echo:
            return PromptText(tokens)
        skip = parameters.skip_special_tokens
        text = self._token_texts.decode(tokens[: self._token_texts.count_complete(tokens)], skip)
        offsets = self._token_texts.offsets(tokens, text, skip) if has_offsets else ()
        return PromptText(tokens, text, offsets)

    def _count_tokens(self, name: str, count: int, parameters: GenerationParameters) -> int:
        """Return how many of the `count` tokens of a prompt are used."""
        limit = parameters.truncate_prompt_tokens
        if limit:
            count = min(count, limit if limit > 0 else max(self.max_length - 1, 1))
        if not count:
            raise InvalidArgument(f"{name}: the prompt is empty; at least one token is required")
        if count + min(parameters.max_tokens, 1) > self.max_length:
            raise InvalidArgument(f"{name}: {_too_long(count, self.max_length)}")
        return count

    def _check_tokens(self, name: str, tokens: list[int]) -> None:
        last_id = self._vocab_size - 1
        token = next((token for token in tokens if not 0 <= token <= last_id), None)
        if token is None:
            return
        if name == "input_ids":
            raise InvalidArgument(f"input_ids: {token} is not a token; allowed are 0 to {last_id}")
        text = clip(repr(self._tokenizer.id_to_token(token)))
        raise InvalidArgument(
            f"{name}: the token {text} has the id {token}, but the model's largest token is "
            f"{last_id} (config.json: vocab_size)"
        )


def _too_long(count: int, limit: int) -> str:
    return prompt_too_long_text(limit, f"{count} tokens and one generated token exceed this limit")


def merged_parameters(request: Request, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Merge the parameters of a request, of its `sampling_parameters`, and of its inputs.

    Returns:
        The parameters, and whether log probabilities include the prompt's: only if the request sets
        `echo`. If `echo` follows from `exclude_input_in_output` or the default, only the text
        includes the prompt.
    """
    merged_values = {**request.schema.parameters}
    text = inputs.get("sampling_parameters") or merged_values.pop("sampling_parameters", None)
    if text:
        try:
            settings = parse_json(text)
            merged_values |= {name: value for name, value in settings.items() if value is not None}
        except (AttributeError, TypeError, ValueError):
            problem = f"sampling_parameters: {clip(repr(text))} is not a JSON object"
            raise InvalidArgument(problem) from None
        check_surrogates(text, settings)
    for name in ("stream", "exclude_input_in_output"):
        if name in inputs:
            merged_values[name] = inputs[name]
    if "messages" in inputs:
        # A chat template writes the special tokens itself.
        merged_values.setdefault("add_special_tokens", False)
    flags = ("stream", "echo", "exclude_input_in_output")
    merged_values |= {name: as_flag(merged_values[name]) for name in flags if name in merged_values}
    echoes = merged_values.get("echo") is True
    if (excludes_input := merged_values.get("exclude_input_in_output")) is not None:
        if not isinstance(excludes_input, bool):
            problem = f"{clip(repr(excludes_input))} is not true or false"
            raise InvalidArgument(f"exclude_input_in_output: {problem}")
        echoes, merged_values["echo"] = False, not excludes_input
    elif merged_values.get("echo") is None:
        # Like Triton's vLLM backend: a single response begins with its prompt, a stream does not.
        merged_values["echo"] = not merged_values.get("stream", False)
    return merged_values, echoes
