"""Streaming parsers of messages: content, reasoning and tool calls, from the text that is sent.

Each family of models writes its tool calls in a format of its own. A parser is one generator
function, which reads the text as it arrives and passes on each character as soon as its meaning is
certain. The result depends on the text alone, and not on the chunks in which the text arrives.
A call that is not valid becomes content. A stream keeps the arguments that it has sent already.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
# A function that yields whenever it needs more text.
Reading = Generator[None, None, T]
Emit = Callable[[str], Any]

_JSON_PLAIN = frozenset(string.digits + string.whitespace + "+-.,:eE" + "truefalsn")
CLOSING = {"{": "}", "[": "]", "(": ")"}
NAME = re.compile(r"[\w.:/-]+")


class MalformedCall(Exception):
    """The error for a text that is not a valid tool call."""


class ToolSyntax(NamedTuple):
    """The format in which a family of models writes tool calls.

    Attributes:
        parse: The parser of a message.
        calls: Returns the rules of a grammar for calls of tools, see `tools.Lark`.
        markers: The texts that mark calls, which may be special tokens.
        hint: A regular expression that chat templates of the family contain.
        between: The characters that separate calls.
        id_length: The length of ids without a prefix; 0: ids are long, and have a prefix.
    """

    parse: Callable[[MessageParser], Reading[Any]]
    calls: Callable[..., Any]
    markers: tuple[str, ...]
    hint: str
    between: str = string.whitespace
    id_length: int = 0

    def new_id(self) -> str:
        """Return an id for a call."""
        letters = string.ascii_letters + string.digits
        characters = "".join(secrets.choice(letters) for _ in range(self.id_length or 24))
        return characters if self.id_length else f"call_{characters}"


@dataclass(frozen=True, eq=False)
class MessageFormat:
    """The format of the messages of one request.

    Attributes:
        family: The format of tool calls.
        tools: The parameter schema of each tool; empty: the message has no calls.
        reasoning: The tags around reasoning; empty: all text is content.
        thinking: Whether the prompt has opened the reasoning.
        hidden: Whether reasoning is left out.
        parallel: Whether a message may have several calls.
        kept: The special tokens that mark calls and reasoning. They are a part of the text.
    """

    family: ToolSyntax
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasoning: tuple[str, ...] = ()
    thinking: bool = False
    parallel: bool = True
    hidden: bool = False
    kept: frozenset[int] = frozenset()


@dataclass(eq=False)
class MessageParser:
    """The parser of one sample's text.

    Attributes:
        format: The formats of tool calls and of reasoning.
        stream: Whether arguments are passed on before the end of their call.
        thinking: Whether the text is reasoning now.
    """

    format: MessageFormat
    stream: bool
    thinking: bool = False
    _buffer: str = ""  # text that was not read yet
    _raw: str = ""  # text that was read, but not passed on
    _ended: bool = False
    _parts: dict[str, str] = field(default_factory=dict)
    _calls: list[dict[str, Any]] = field(default_factory=list)
    _count: int = 0  # number of calls so far
    _held: str = ""  # white space at the beginning of content, which is dropped beside a call
    _blank: bool = True  # whether the content since the last call is white space
    _last: str = ""  # the last two characters of content
    _call: _Call | None = None

    def __post_init__(self) -> None:
        self.thinking = self.format.thinking
        self._reading = self._message()

    def feed(self, text: str, ended: bool = False) -> None:
        """Parse more text; `ended` if it is the last."""
        self._buffer += text
        self._ended = self._ended or ended
        with suppress(StopIteration):
            next(self._reading)

    @property
    def has_news(self) -> bool:
        """Return whether `take` has parts to return."""
        return bool(self._parts or self._calls)

    def take(self) -> dict[str, Any]:
        """Return and clear the parts of the message that have become known.

        These are `content`, `reasoning` and `tool_calls`, with the index of each call. A call has
        its `id` and `name` in its first part only.
        """
        members: dict[str, Any] = {
            **self._parts,
            **({"tool_calls": self._calls} if self._calls else {}),
        }
        self._parts, self._calls = {}, []
        return members

    def _message(self) -> Reading[None]:
        tags = self.format.reasoning
        if tags:
            yield from self._think(*tags)
        yield from self.format.family.parse(self) if self.format.tools else self.content_until()
        if self._held and not self._count:
            self._add("content", self._held)

    def _think(self, begin: str, end: str) -> Reading[None]:
        """Pass on the text up to the end tag as reasoning, if the text is reasoning."""
        while begin.startswith(self._buffer.lstrip()) and not self._ended:
            if self._buffer.lstrip() == begin:
                break
            yield
        if self._buffer.lstrip().startswith(begin):
            self._buffer = self._buffer.lstrip()[len(begin) :]
            self.thinking = True
        if not self.thinking:
            return
        trailing = ""

        def emit(text: str) -> None:
            nonlocal trailing
            text = trailing + text if "reasoning" in started else text.lstrip("\n")
            stripped = text.rstrip("\n")
            trailing = text[len(stripped) :]
            if stripped and not self.format.hidden:
                started.add("reasoning")
                self._add("reasoning", stripped)

        started: set[str] = set()
        yield from self.until(emit, end)
        self.thinking = False
        yield from self.skip("\n")
        self._raw = ""

    # --- results

    def _add(self, part: str, text: str) -> None:
        self._parts[part] = self._parts.get(part, "") + text

    def add_content(self, text: str) -> None:
        """Pass on content. White space alone beside a call is left out."""
        text, self._held = self._held + text, ""
        shown = text.strip(self.format.family.between)
        if self._blank and not shown:
            self._held = text
        elif text:
            self._blank, self._last = False, (self._last + shown)[-2:]
            self._add("content", text)

    def discard_read(self) -> None:
        """Leave out the text that was read, and white space before and after it."""
        self._raw = self._held = ""
        self._blank = True

    @property
    def inside_json(self) -> bool:
        """Return whether the content so far ends with the key of a JSON object."""
        return self._last == '":'

    def name(self, name: str) -> None:
        """Set the name of the call, which is passed on with the first of its arguments."""
        call = self.call
        if not NAME.fullmatch(name) or call.name:
            raise MalformedCall
        call.name = name
        if call.arguments:
            self._announce(call)

    def arguments(self, text: str) -> None:
        """Pass on a part of the call's arguments."""
        call = self.call
        call.arguments += text
        self._announce(call)

    @property
    def call(self) -> _Call:
        """Return the call that is being read."""
        assert self._call is not None
        return self._call

    def _announce(self, call: _Call, complete: bool = False) -> None:
        """Pass on the parts of a call that are known and were not passed on yet."""
        if not call.name or not (self.stream or complete):
            return
        if self._count and not self.format.parallel and call.index < 0:
            return
        part: dict[str, Any] = {}
        if call.index < 0:
            call.index, self._count = self._count, self._count + 1
            call.id = call.id or self.format.family.new_id()
            part = {"id": call.id, "name": call.name}
            self._held = ""
        elif call.sent == len(call.arguments):
            return
        fresh, call.sent = call.arguments[call.sent :], len(call.arguments)
        last = self._calls[-1] if self._calls else {}
        if last.get("index") == call.index:
            last["arguments"] += fresh
        else:
            self._calls.append({"index": call.index, **part, "arguments": fresh})

    def attempt(self, body: Reading[None], end: str = "") -> Reading[bool]:
        """Read a call, up to its end tag; return False if the text is no valid call.

        The text of an invalid call is content. If a part of the call was passed on, the content
        is the rest of the text.
        """
        call = self._call = _Call()
        try:
            yield from body
            if not (self.stream and call.index >= 0) and not _is_object(call.arguments):
                raise MalformedCall
            yield from self.until(ignore, end) if end else ()
        except MalformedCall:
            raw, self._raw = self._raw, ""
            if call.index < 0:
                self.add_content(raw)
            return False
        self._announce(call, complete=True)
        self.discard_read()
        return True

    # --- reading

    def peek(self) -> Reading[str]:
        """Return the next character; "" at the end."""
        while not self._buffer:
            if self._ended:
                return ""
            yield
        return self._buffer[0]

    def pull(self, count: int) -> str:
        """Read `count` characters of the buffer."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        self._raw += text
        return text

    def unread(self, text: str) -> None:
        """Return characters to the buffer."""
        self._buffer = text + self._buffer
        self._raw = self._raw[: len(self._raw) - len(text)]

    def skip(self, characters: str = string.whitespace) -> Reading[str]:
        """Skip characters, and return the one after them."""
        while True:
            character = yield from self.peek()
            if not character or character not in characters:
                return character
            self.pull(1)

    def expect(self, text: str) -> Reading[None]:
        """Read white space and a text.

        Raises:
            MalformedCall: Another text follows.
        """
        yield from self.skip()
        for expected in text:
            if (yield from self.peek()) != expected:
                raise MalformedCall
            self.pull(1)

    def until(self, emit: Emit, *tags: str) -> Reading[str]:
        """Pass text to `emit` up to the first of the tags; return the tag, or "" at the end."""
        while True:
            text = self._buffer
            matches = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
            if matches:
                at, _, tag = min(matches)
                emit(self.pull(at))
                self.pull(len(tag))
                return tag
            partial = 0 if self._ended else max((overlap(text, tag) for tag in tags), default=0)
            emit(self.pull(len(text) - partial))
            if self._ended:
                return ""
            yield

    def content_until(self, *tags: str) -> Reading[str]:
        """Pass on text as content up to the first of the tags; return the tag."""

        def emit(text: str) -> None:
            self.add_content(text)
            self._raw = ""

        tag = yield from self.until(emit, *tags)
        return tag

    def text_until(self, *tags: str) -> Reading[tuple[str, str]]:
        """Return the text before the first of the tags, and the tag.

        Raises:
            MalformedCall: The text ends before.
        """
        parts: list[str] = []
        tag = yield from self.until(parts.append, *tags)
        if not tag:
            raise MalformedCall
        return "".join(parts), tag

    def json(self, emit: Emit) -> Reading[None]:
        """Pass the text of a JSON value to `emit` as it arrives.

        Raises:
            MalformedCall: The text is no JSON value. Literals are not checked.
        """
        yield from self.skip()
        scan = _JsonScan()
        while not scan.complete:
            if not (yield from self.peek()):
                raise MalformedCall
            size, valid = scan.advance(self._buffer)
            emit(self.pull(size))
            if not valid:
                raise MalformedCall

    def json_string(self) -> Reading[str]:
        """Read and return a JSON string; raise MalformedCall for another value."""
        yield from self.skip()
        parts: list[str] = []
        yield from self.json(parts.append)
        value = _loads("".join(parts))
        if not isinstance(value, str):
            raise MalformedCall
        return value

    def json_arguments(self) -> Reading[None]:
        """Read and pass on the arguments of a call: an object, an object as a string, or null."""
        if (yield from self.skip()) == "{":
            yield from self.json(self.arguments)
            return
        parts: list[str] = []
        yield from self.json(parts.append)
        value = _loads("".join(parts))
        text = "{}" if value is None else value
        if not (isinstance(text, str) and _is_object(text)):
            raise MalformedCall
        self.arguments(text)


@dataclass(eq=False, slots=True)
class _Call:
    """A tool call that is being read; `sent` characters of its arguments were passed on."""

    name: str = ""
    arguments: str = ""
    id: str = ""
    index: int = -1
    sent: int = 0


class _JsonScan:
    """A scan for the end of a JSON value."""

    def __init__(self) -> None:
        self.complete = False
        self._stack: list[str] = []
        self._quoted = self._escaped = self._scalar = False

    def advance(self, text: str) -> tuple[int, bool]:
        """Return the number of characters that belong to the value, and whether they are JSON."""
        for at, char in enumerate(text):
            if self._quoted:
                if char < " ":
                    return at, False
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
                self.complete = not self._quoted and not self._stack
            elif char == '"' and not self._scalar:
                self._quoted = True
            elif char in "{[" and not self._scalar:
                self._stack.append(CLOSING[char])
            elif self._stack and char == self._stack[-1]:
                self._stack.pop()
                self.complete = not self._stack
            elif not self._stack and (char in ",}]" or char.isspace()):
                self.complete = True
                return at, self._scalar
            elif char not in _JSON_PLAIN:
                return at, False
            else:
                self._scalar = not self._stack
            if self.complete:
                return at + 1, True
        return len(text), True


def ignore(_: str) -> None:
    """Discard a part of a text that is neither content nor a call."""


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of a text that begins a tag."""
    most = min(len(text), len(tag) - 1)
    return next((size for size in range(most, 0, -1) if tag.startswith(text[-size:])), 0)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise MalformedCall from None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
