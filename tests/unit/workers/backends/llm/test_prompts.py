"""Long texts of prompts: they are decoded in slices, and only their endings are kept."""

import json
import time
from functools import partial
from typing import Any, cast
from unittest.mock import MagicMock

import orjson
import pytest

from shmserve.errors import InvalidArgument
from shmserve.workers.backends.llm import _prepare, prompts
from shmserve.workers.backends.llm.chat_template import ChatTemplate, parse_conversation
from shmserve.workers.backends.llm.prompts import (
    PromptReader,
    merged_parameters,
    read_ending,
    read_inputs,
    read_whole,
)
from shmserve.workers.batch.backend_request import Input


@pytest.mark.parametrize("text", ["abc" * 50, "é" * 70, "a" + "東京" * 40, "🐙x" * 33, "a", ""])
@pytest.mark.parametrize("max_length", [1, 5, 16, 17, 1000])
@pytest.mark.parametrize("slice_size", [4, 7, 16, 1 << 17])
def test_the_ending_of_a_text(
    monkeypatch: pytest.MonkeyPatch, text: str, max_length: int, slice_size: int
) -> None:
    monkeypatch.setattr(prompts, "_SLICE_BYTES", slice_size)
    for text_input in (text, memoryview(text.encode())):
        assert read_ending("text_input", text_input, max_length) == (text[-max_length:], len(text))
        assert read_whole("text_input", text_input) == text


@pytest.mark.parametrize("raw", [b"\xff" + b"a" * 99, b"a" * 99 + b"\xff", b"a" * 99 + b"\xe6\x9d"])
def test_a_text_that_is_not_utf_8_is_refused(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(prompts, "_SLICE_BYTES", 16)
    with pytest.raises(InvalidArgument, match=r"^text_input: b'.* is not UTF-8"):
        read_ending("text_input", memoryview(raw), 1)


def test_a_text_is_decoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    text = "a" * (10 * prompts._SLICE_BYTES)
    assert read_ending("text_input", memoryview(text.encode()), 3) == ("aaa", len(text))
    assert pauses == [0] * 10


_TEMPLATE = "{{ bos }}{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{{ tools }}"


@pytest.mark.parametrize(
    ("chat", "error"),
    [
        ({"tool_choice": "none", "include_reasoning": False}, ""),
        ({"continue_final_message": True}, ""),
        ({"chat_template_kwargs": {"continue_final_message": True}}, ""),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, ""),
        ({"tool_choice": "required"}, "requires tools"),
        ({"chat_template": "other"}, "is unknown"),
        ({"messages": []}, "is not a JSON list of messages"),
    ],
)
def test_a_long_conversation_is_rendered_in_a_process(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    chat: dict[str, Any],
    error: str,
) -> None:
    templates, special_tokens = {"default": _TEMPLATE}, {"bos": "<s>"}
    reader = cast("Any", PromptReader.__new__(PromptReader))
    reader._chat_template = ChatTemplate(templates, special_tokens)
    text = json.dumps({"messages": [{"role": "user", "content": "é\U0001f419"}], **chat})
    long_text = memoryview(text.encode())
    if error:
        for conversation in (text, long_text):
            with pytest.raises(InvalidArgument, match=error):
                reader._render(conversation)
        return
    expected = reader._render(text)
    monkeypatch.setattr(ChatTemplate, "render", None)  # Only the process renders.
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    rendered = reader._render(long_text)
    assert rendered[:3] == expected[:3]
    assert read_whole("messages", rendered.text) == expected.text
    imported_modules = {line.split("|")[-1].strip() for line in capfd.readouterr().err.splitlines()}
    assert {"jinja2", "shmserve.errors"} <= imported_modules
    assert not {"torch", "numpy", "shmserve.workers"} & imported_modules


@pytest.mark.parametrize(
    ("count", "limit", "is_view"), [(4096, 4096, False), (4097, 4096, True), (4097, 9999, False)]
)
def test_a_conversation_with_many_objects_is_a_view_of_the_request(
    count: int, limit: int, is_view: bool
) -> None:
    text = orjson.dumps([{"role": "user", "content": '{"a": 1}'}] * count)
    raw = len(text).to_bytes(4, "little") + text
    request = MagicMock(inputs={"messages": Input("messages", "BYTES", (1,), memoryview(raw))})
    conversation = read_inputs(request, 1 << 30, limit)["messages"]
    assert isinstance(conversation, memoryview if is_view else str)
    assert read_whole("messages", conversation) == text.decode()


@pytest.mark.parametrize("door", ["sampling_parameters", "messages"])
def test_half_of_a_surrogate_pair_is_refused_by_the_name_of_its_field(door: str) -> None:
    for name in ("stop", "bad_words", "tools", "\ud83d"):
        messages = [{"role": "user", "content": "\ud83d\ude00 \\ud83d"}]
        text = json.dumps({name: ["\ud83d"], "messages": messages})
        request = MagicMock(schema=MagicMock(parameters={}))
        parse: Any = parse_conversation
        if door != "messages":
            parse = partial(merged_parameters, request)
        with pytest.raises(InvalidArgument) as caught:
            parse(text if door == "messages" else {door: text})
        shown = name.encode("ascii", "backslashreplace").decode()
        assert caught.value.message.startswith(f"{shown}: '\\ud83d' is a half of a surrogate pair")


def test_a_prompt_is_read_without_a_copy_of_its_text() -> None:
    texts, writer, unpacker, open_request, message = (MagicMock() for _ in range(5))
    texts.reader.max_bytes = 1
    unpacker.request.return_value.inputs = {}
    _prepare(texts, writer, unpacker, open_request, message)
    unpacker.request.assert_called_once_with(open_request.work, copies_text=False)
    writer.refuse.assert_not_called()
