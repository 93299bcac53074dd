"""Streaming parsers of messages: content, reasoning and tool calls in the text of a sample.

Each family of models writes tool calls in its own format. The parser of a format is a generator
function, which reads the text as it arrives and passes on each character as soon as its meaning is
certain. The result depends on the text alone, and not on the chunks in which the text arrives.
A malformed call becomes content, except for arguments that a stream has already sent.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
# A generator that reads text, yields whenever it needs more text, and returns a T.
Reading = Generator[None, None, T]
Emit = Callable[[str], Any]  # receives text as soon as it was read

# The characters of JSON outside of strings, except brackets and quotes.
_JSON_CHARACTERS = frozenset(string.digits + string.whitespace + "+-.,:eE" + "truefalsn")
_MEMBERS = ("reasoning", "content", "tool_calls")  # of a message, in their usual order
CLOSING = {"{": "}", "[": "]", "(": ")"}  # closing brackets by opening bracket
NAME = re.compile(r"[\w.:/-]+")  # of a tool


class MalformedCall(Exception):
    """The error for a text that is not a valid tool call."""


class ToolSyntax(NamedTuple):
    """The format in which a family of models writes tool calls.

    Attributes:
        parse: Reads a message.
        call_grammar: Adds the rules of tools to a grammar (`Lark`); returns their `CallGrammar`.
        markers: The texts that mark calls; they may be special tokens.
        template_pattern: A regular expression that matches a part of the family's chat templates.
        separators: The characters that separate calls.
        id_length: The length of a call's id; 0: 24 characters after the prefix "call_".
    """

    parse: Callable[[MessageParser], Reading[Any]]
    call_grammar: Callable[..., Any]
    markers: tuple[str, ...]
    template_pattern: str
    separators: str = string.whitespace
    id_length: int = 0

    def new_id(self) -> str:
        """Return a random id for a tool call, in the format of this family of models."""
        letters = string.ascii_letters + string.digits
        characters = "".join(secrets.choice(letters) for _ in range(self.id_length or 24))
        return characters if self.id_length else f"call_{characters}"


@dataclass(frozen=True, eq=False)
class MessageFormat:
    """The format of the messages of one request.

    Attributes:
        family: The format of tool calls.
        tools: The JSON schema of each tool's parameters by name; empty: the message has no calls.
        reasoning: The opening and closing tags of reasoning; empty: all text is content.
        starts_reasoning: Whether the message begins inside of reasoning that the prompt has opened.
        hides_reasoning: Whether reasoning is left out of the message.
        allows_parallel_calls: Whether a message may have several calls.
        kept_tokens: The special tokens that mark calls and reasoning; the parser needs their text.
        has_call_grammar: Whether a grammar restricts the calls.
        calls_end_reasoning: Whether a call may end the reasoning in place of the closing tag.
        has_only_calls: Whether a grammar allows only calls as content. Other content is then the
            beginning of a call that the limit of tokens has cut off, and is discarded.
    """

    family: ToolSyntax
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasoning: tuple[str, ...] = ()
    starts_reasoning: bool = False
    allows_parallel_calls: bool = True
    hides_reasoning: bool = False
    kept_tokens: frozenset[int] = frozenset()
    has_call_grammar: bool = False
    calls_end_reasoning: bool = True
    has_only_calls: bool = False


@dataclass(eq=False)
class MessageParser:
    """The parser of one sample's text.

    Attributes:
        stream: Whether arguments are passed on before the end of their call.
        is_reasoning: Whether the parser is inside of reasoning.
        call_count: The number of calls of which a part was passed on.
    """

    format: MessageFormat
    stream: bool
    is_reasoning: bool = False
    call_count: int = 0
    _buffer: str = ""  # text that was not read yet
    _read_text: str = ""  # text that was read, but not passed on
    _is_ended: bool = False  # whether the text is complete
    _parts: list[dict[str, Any]] = field(default_factory=list)  # messages with one member, in order
    _leading_space: str = ""  # white space before content; discarded if a call follows
    _is_blank: bool = True  # whether the content since the last call is white space
    _last_characters: str = ""  # the last two characters of content or reasoning
    _call: _Call | None = None  # the call that is being read
    _closing_tags: tuple[str, ...] = ()  # the tag that ends the reasoning, until it was read
    _has_reasoning: bool = False  # whether reasoning was passed on
    _line_breaks: str = ""  # line breaks at the end of the reasoning

    def __post_init__(self) -> None:
        self.is_reasoning = self.format.starts_reasoning
        self._message_reading = self._read_message()

    def feed(self, text: str, is_end: bool = False) -> None:
        """Parse more text, the last if `is_end`."""
        self._buffer += text
        self._is_ended = self._is_ended or is_end
        with suppress(StopIteration):
            next(self._message_reading)

    @property
    def has_parts(self) -> bool:
        """Return whether parts of the message wait for `take`."""
        return bool(self._parts)

    def take(self) -> dict[str, Any]:
        """Return and clear the parts of the message that were passed on.

        The members are `reasoning`, `content` and `tool_calls`. Each call has its `index`; only its
        first part has its `id` and `name`. If the parts were passed on in a different order, the
        member `parts` is the list of parts in that order.
        """
        parts, self._parts = self._parts, []
        names = [name for part in parts for name in part]
        message: dict[str, Any] = {}
        for name in _MEMBERS:
            values = [part[name] for part in parts if name in part]
            if values:
                is_text = name != "tool_calls"
                message[name] = "".join(values) if is_text else list(itertools.chain(*values))
        return message if names == [*message] else {**message, "parts": parts}

    def _read_message(self) -> Reading[None]:
        if self.format.reasoning:
            yield from self._read_opening_tag(*self.format.reasoning)
        yield from self.format.family.parse(self) if self.format.tools else self.read_content()
        if self._leading_space and not self.call_count:
            self._add_text("content", self._leading_space)

    def _read_opening_tag(self, begin: str, end: str) -> Reading[None]:
        """Read the tag that begins reasoning, if the message begins with it; `end` closes it."""
        while begin.startswith(self._buffer.lstrip()) and not self._is_ended:
            if self._buffer.lstrip() == begin:
                break
            yield
        if self._buffer.lstrip().startswith(begin):
            self._buffer = self._buffer.lstrip()[len(begin) :]
            self.is_reasoning = True
        if self.is_reasoning:
            self._closing_tags = (end,)

    # --- results

    def _add_text(self, member: str, text: str) -> None:
        self._last_part(member, "")[member] += text

    def _last_part(self, member: str, empty_value: Any) -> dict[str, Any]:
        """Return the last part if it has this member, or else add and return a new part."""
        if not self._parts or member not in self._parts[-1]:
            self._parts.append({member: empty_value})
        return self._parts[-1]

    def _add_reasoning(self, text: str) -> None:
        """Pass on reasoning without the line breaks at its beginning and its end."""
        text = self._line_breaks + text if self._has_reasoning else text.lstrip("\n")
        stripped_text = text.rstrip("\n")
        self._line_breaks = text[len(stripped_text) :]
        if stripped_text and not self.format.hides_reasoning:
            self._has_reasoning = True
            self._add_text("reasoning", stripped_text)

    def add_content(self, text: str) -> None:
        """Pass on content. Content of white space only is discarded if there are tool calls, too.

        Inside of reasoning, the text is passed on as reasoning.
        """
        content = text.strip(self.format.family.separators)
        self._last_characters = (self._last_characters + content)[-2:]
        if self.is_reasoning:
            self._add_reasoning(text)
            return
        if self.format.has_only_calls:
            return
        text, self._leading_space = self._leading_space + text, ""
        if self._is_blank and not content:
            self._leading_space = text
        elif text:
            self._is_blank = False
            self._add_text("content", text)

    def discard_read(self) -> None:
        """Discard the text that was read, and white space before and after it."""
        self._read_text = self._leading_space = ""
        self._is_blank = True

    @property
    def ends_with_json_key(self) -> bool:
        """Return whether the content or the reasoning ends with the key of a JSON object."""
        return self._last_characters == '":'

    def set_name(self, name: str) -> None:
        """Set the name of the call, which is passed on with the first part of the arguments."""
        call = self.current_call
        if not NAME.fullmatch(name) or call.name:
            raise MalformedCall
        call.name = name
        if call.arguments:
            self._pass_on_call(call)

    def add_arguments(self, text: str) -> None:
        """Pass on a part of the call's arguments."""
        call = self.current_call
        # A Python literal may contain half of a surrogate pair, which is escaped as in JSON.
        call.arguments += text.encode(errors="backslashreplace").decode()
        self._pass_on_call(call)

    @property
    def is_reading_call(self) -> bool:
        """Return whether the parser has read the beginning of a text that may be a call."""
        return self._call is not None

    @property
    def current_call(self) -> _Call:
        """Return the call that is being read."""
        assert self._call is not None
        return self._call

    def _pass_on_call(self, call: _Call, is_complete: bool = False) -> None:
        """Pass on the parts of a call that were read and not passed on yet."""
        if not call.name or not (self.stream or is_complete):
            return
        if self.call_count and not self.format.allows_parallel_calls and call.index < 0:
            return
        call_header: dict[str, Any] = {}
        if call.index < 0:
            call.index, self.call_count = self.call_count, self.call_count + 1
            call.id = call.id or self.format.family.new_id()
            call_header = {"id": call.id, "name": call.name}
            self._leading_space = ""
            self.is_reasoning = False  # models may omit the tag that ends the reasoning
        elif call.sent_length == len(call.arguments):
            return
        new_arguments, call.sent_length = call.arguments[call.sent_length :], len(call.arguments)
        calls = self._last_part("tool_calls", [])["tool_calls"]
        if calls and calls[-1]["index"] == call.index:
            calls[-1]["arguments"] += new_arguments
        else:
            calls.append({"index": call.index, **call_header, "arguments": new_arguments})

    def read_call(self, call_body: Reading[None]) -> Reading[bool]:
        """Read a call with `call_body`; return False if it is malformed.

        The text of a malformed call becomes content, unless a part of the call was passed on.
        Inside of reasoning, the text is read again, because it may contain the closing tag.
        """
        call = self._call = _Call()
        try:
            yield from call_body
            if not (self.stream and call.index >= 0) and not _is_object(call.arguments):
                raise MalformedCall
        except MalformedCall:
            text, self._read_text = self._read_text, ""
            if call.index < 0:
                size = 1 if self.is_reasoning else len(text)
                self.add_content(text[:size])
                self._buffer = text[size:] + self._buffer
            return False
        finally:
            self._call = None
        self._pass_on_call(call, is_complete=True)
        self.discard_read()
        return True

    # --- reading

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while not self._buffer:
            if self._is_ended:
                return ""
            yield
        return self._buffer[0]

    def pull(self, count: int) -> str:
        """Read and return `count` characters of the buffer."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        self._read_text += text
        return text

    def unread(self, text: str) -> None:
        """Put characters that were read back into the buffer."""
        self._buffer = text + self._buffer
        self._read_text = self._read_text[: len(self._read_text) - len(text)]

    def skip(self, characters: str = string.whitespace) -> Reading[str]:
        """Read characters while they are in `characters`; return the next character, unread."""
        while True:
            character = yield from self.peek()
            if not character or character not in characters:
                return character
            self.pull(1)

    def expect(self, text: str, may_be_cut: bool = False) -> Reading[None]:
        """Read white space and then `text`.

        Args:
            text: The expected text.
            may_be_cut: Whether the message may end inside of `text`.

        Raises:
            MalformedCall: The text differs.
        """
        yield from self.skip()
        for expected_character in text:
            character = yield from self.peek()
            if character != expected_character and (character or not may_be_cut):
                raise MalformedCall
            self.pull(1)

    def read_until(self, emit: Emit, *tags: str) -> Reading[str]:
        """Read text up to the first of the tags, and pass it to `emit`; return the tag, or ""."""
        while True:
            text = self._buffer
            matches = [(index, -len(tag), tag) for tag in tags if (index := text.find(tag)) >= 0]
            if matches:
                index, _, tag = min(matches)
                emit(self.pull(index))
                self.pull(len(tag))
                return tag
            overlap_length = (
                0 if self._is_ended else max((overlap(text, tag) for tag in tags), default=0)
            )
            emit(self.pull(len(text) - overlap_length))
            if self._is_ended:
                return ""
            yield

    def read_content(self, *tags: str) -> Reading[str]:
        """Read text up to the first of the tags, and pass it on as content; return the tag.

        The text up to the end of the reasoning is passed on as reasoning. As in vLLM, a call inside
        of the reasoning ends the reasoning, unless a grammar forbids calls there.
        """

        def emit(text: str) -> None:
            self.add_content(text)
            self._read_text = ""

        while True:
            markers = self.format.family.markers if self.format.calls_end_reasoning else ()
            active_tags = tuple(tag for tag in tags if not self.is_reasoning or tag in markers)
            tag = yield from self.read_until(emit, *active_tags, *self._closing_tags)
            if not tag or tag not in self._closing_tags:
                return tag
            self.is_reasoning, self._closing_tags = False, ()
            yield from self.skip("\n")
            self._read_text = ""

    def read_text_until(self, *tags: str) -> Reading[tuple[str, str]]:
        """Read up to the first of the tags; return the text before it, and the tag.

        Raises:
            MalformedCall: The text ends without a tag.
        """
        parts: list[str] = []
        tag = yield from self.read_until(parts.append, *tags)
        if not tag:
            raise MalformedCall
        return "".join(parts), tag

    def read_json(self, emit: Emit) -> Reading[None]:
        """Read a JSON value, and pass its text to `emit` as it arrives.

        Raises:
            MalformedCall: The text is not a JSON value. Numbers and literals are not checked.
        """
        yield from self.skip()
        json_scan = _JsonScan()
        while not json_scan.is_complete:
            if not (yield from self.peek()):
                raise MalformedCall
            value_length, is_valid = json_scan.advance(self._buffer)
            emit(self.pull(value_length))
            if not is_valid:
                raise MalformedCall

    def read_json_string(self) -> Reading[str]:
        """Read and return a JSON string; raise MalformedCall for another value."""
        if (yield from self.skip()) != '"':
            raise MalformedCall
        parts: list[str] = []
        yield from self.read_json(parts.append)
        return str(_parse_json("".join(parts)))

    def read_json_arguments(self) -> Reading[None]:
        """Read the arguments of a call: a JSON object, its text (maybe empty), or null."""
        if (yield from self.skip()) == "{":
            yield from self.read_json(self.add_arguments)
            return
        parts: list[str] = []
        yield from self.read_json(parts.append)
        value = _parse_json("".join(parts))
        text = "{}" if value is None or value == "" else value
        if not (isinstance(text, str) and _is_object(text)):
            raise MalformedCall
        self.add_arguments(text)


@dataclass(eq=False, slots=True)
class _Call:
    """A tool call that is being read.

    Attributes:
        index: The index of the call in the message; -1: no part was passed on.
        sent_length: The number of characters of its arguments that were passed on.
    """

    name: str = ""
    arguments: str = ""
    id: str = ""
    index: int = -1
    sent_length: int = 0


class _JsonScan:
    """An incremental search for the end of a JSON value."""

    def __init__(self) -> None:
        self.is_complete = False  # whether the value has ended
        self._stack: list[str] = []  # the closing brackets that are missing
        self._in_string = self._is_escaped = self._in_scalar = False

    def advance(self, text: str) -> tuple[int, bool]:
        """Scan more text; return the number of characters of the value, and whether it is valid."""
        for index, character in enumerate(text):
            if self._in_string:
                if character < " ":
                    return index, False
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
                self.is_complete = not self._in_string and not self._stack
            elif character == '"' and not self._in_scalar:
                self._in_string = True
            elif character in "{[" and not self._in_scalar:
                self._stack.append(CLOSING[character])
            elif self._stack and character == self._stack[-1]:
                self._stack.pop()
                self.is_complete = not self._stack
            elif not self._stack and (character in ",}]" or character.isspace()):
                self.is_complete = True
                return index, self._in_scalar
            elif character not in _JSON_CHARACTERS:
                return index, False
            else:
                self._in_scalar = not self._stack
            if self.is_complete:
                return index + 1, True
        return len(text), True


def ignore(_: str) -> None:
    """Do nothing: the text that was read is not used."""


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    max_length = min(len(text), len(tag) - 1)
    return next((size for size in range(max_length, 0, -1) if tag.startswith(text[-size:])), 0)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedCall from None


def _is_object(text: str) -> bool:
    with suppress(MalformedCall):
        return isinstance(_parse_json(text), dict)
    return False
