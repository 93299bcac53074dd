"""Chat templates: template variables of a request are either used or rejected."""

import json
from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.workers.backends.llm.chat_template import ChatTemplate, parse_conversation
from shmserve.workers.backends.llm.tools import take_tools

ROLES = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def render(source: str, **variables: Any) -> str:
    request = {"messages": [{"role": "user", "content": "Hi"}], **variables}
    return ChatTemplate({"default": source}, {}).render(request)


@pytest.mark.parametrize(
    ("source", "role"),
    [
        (ROLES, "system"),
        ("{% if messages[0].role == 'developer' %}{% endif %}" + ROLES, "developer"),
        ('{%- set roles = ["system", "developer"] -%}' + ROLES, "developer"),
    ],
)
def test_developer_becomes_system_if_the_template_lacks_it(source: str, role: str) -> None:
    assert render(source, messages=[{"role": "developer", "content": "x"}]) == f"{role}:x;"


PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }};{% endfor %}"


@pytest.mark.parametrize("source", [ROLES, PARTS + "{% endfor %}"])
def test_developers_and_system_messages_become_one_at_the_beginning(source: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "developer", "content": [{"type": "text", "text": text} for text in "cd"]},
        {"role": "developer", "content": ""},
    ]
    assert render(source, messages=messages) == "system:a\n\nc\nd;user:b;"
    assert render(source, messages=[{**messages[1], "role": "system"}, *messages[:2]]) == (
        "system:b;system:a;user:b;"
    )


@pytest.mark.parametrize("kind", ["refusal", "thinking", "input_text", "output_text"])
def test_parts_of_other_types_are_texts_as_in_vllm(kind: str) -> None:
    parts = [{"type": kind, kind.rpartition("_")[2]: "no"}, "a"]
    messages = [{"role": "assistant", "content": parts}]
    assert render(ROLES, messages=messages) == "assistant:no\na;"
    assert render(PARTS + "{% endfor %}", messages=messages) == "assistant:no;a;"
    with pytest.raises(InvalidArgument, match="the text None of a part is not a string"):
        render(ROLES, messages=[{"role": "assistant", "content": [{"type": kind}]}])


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "3", "null"])
def test_arguments_that_are_no_object_do_not_end_a_conversation(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    function = "messages[0].tool_calls[0].function"
    assert render("{%% for k in %s.arguments | items %%}{%% endfor %%}" % function,  # noqa: UP031
                  messages=messages) == ""  # fmt: skip
    assert render(f"{{{{ {function}.arguments }}}}", messages=messages) == arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"id": "c"}, "is not an object with a function and its name"),
        ({"id": ["c"], "function": {"name": "f"}}, r"the call id \['c'\] is not a string"),
        ({"type": "code", "function": {"name": "f"}}, "type 'code' of a tool call is not 'fun"),
    ],
)
def test_a_malformed_call_is_refused(call: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        render(ROLES, messages=[{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("reasoning_effort", "none", [None, "minimal", "medium", "high"]),
        ("documents", [{"text": "x"}], [None, []]),
    ],
)
def test_a_variable_that_a_template_does_not_use_is_refused(
    name: str, value: Any, allowed: list[Any]
) -> None:
    assert render("{{ %s | string | length > 0 }}" % name, **{name: value}) == "True"  # noqa: UP031
    with pytest.raises(InvalidArgument, match=f"{name}: the model's chat template does not use"):
        render(f"{ROLES}</think>", **{name: value})
    for each in allowed:
        assert render(f"{ROLES}</think>", **{name: each}) == "user:Hi;</think>"
    assert render(ROLES, reasoning_effort="none") == "user:Hi;"


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True), ("medium", True)])
def test_an_effort_enables_thinking_as_in_vllm(effort: str, thinks: bool) -> None:
    source = "{{ enable_thinking }}"
    assert render(source, reasoning_effort=effort) == str(thinks)
    kwargs = {"enable_thinking": not thinks}
    assert render(source, reasoning_effort=effort, chat_template_kwargs=kwargs) == str(not thinks)


def test_members_of_chat_template_kwargs_are_variables() -> None:
    source = "{{ enable_thinking is defined and not enable_thinking }}"
    assert render(source, chat_template_kwargs={"enable_thinking": False}) == "True"
    assert render(source) == "False"


def test_a_message_without_content_and_calls_is_empty() -> None:
    source = (
        "{% for m in messages %}{% if m['content'] is defined %}{{ '[' + m['content'] + ']' }}"
        "{% else %}<{{ m.tool_calls[0].id }}>{% endif %}{% endfor %}"
    )
    c, d, e = ([{"id": text, "function": {"name": "f"}}] for text in "cde")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": None},
        {"role": "assistant", "refusal": None, "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": c},
        {"role": "assistant", "tool_calls": d},
        {"role": "assistant", "content": "", "tool_calls": e},
    ]
    assert render(source, messages=messages) == "[][]<c><d>[]"


def test_the_result_of_a_tool_is_a_text_in_any_template() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ '[' + m.content + ']' }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": text} for text in "ab"]
    messages = [{"role": "user", "content": parts}, {"role": "tool", "content": parts}]
    assert render(source, messages=messages) == "ab[a\nb]"


def test_a_continued_message_has_no_generation_prompt() -> None:
    with pytest.raises(InvalidArgument, match="continue_final_message: add_generation_prompt"):
        render(ROLES, continue_final_message=True, add_generation_prompt=True)


def test_variables_that_end_the_prompt_are_members_of_the_conversation() -> None:
    kwargs = {"continue_final_message": True, "add_generation_prompt": False, "a": 1}
    messages = [{"role": "user", "content": "x"}]
    chat: dict[str, Any] = {"messages": messages, "chat_template_kwargs": kwargs}
    parsed = parse_conversation(json.dumps(chat))
    assert parsed == {**chat, "continue_final_message": True, "add_generation_prompt": False}
    chat["chat_template_kwargs"] = {"continue_final_message": "x"}
    with pytest.raises(InvalidArgument, match=r"^continue_final_message: 'x' is not true or fal"):
        parse_conversation(json.dumps(chat))


MALFORMED_MESSAGES: dict[str, Any] = {
    "chat_template_kwargs": [3, "x", [1], True],
    "documents": [3, "x", {}, False],
    "reasoning_effort": [3, [], {}, "", "hihg"],
    "add_generation_prompt": ["yes", 1, []],
    "continue_final_message": ["yes", 1, {}],
    "include_reasoning": ["no", 0, []],
}


@pytest.mark.parametrize("name", MALFORMED_MESSAGES)
def test_a_variable_of_another_type_is_refused(name: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert name not in parse_conversation(json.dumps({"messages": messages, name: None}))
    for value in MALFORMED_MESSAGES[name]:
        with pytest.raises(InvalidArgument, match=f"^{name}: "):
            parse_conversation(json.dumps({"messages": messages, name: value}))


@pytest.mark.parametrize("text", ['[{"role": null, "content": "a"}]', "[" * 50_000])
def test_a_text_that_is_no_list_of_messages_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a JSON list of messages"):
        parse_conversation(text)


def test_the_name_of_a_template_is_a_text() -> None:
    with pytest.raises(InvalidArgument, match=r"^chat_template: \['a'\] is unknown"):
        render(ROLES, messages=[{"role": "user", "content": "a"}], chat_template=["a"])


@pytest.mark.parametrize(
    "message",
    [
        {"content": [{"type": "text"}]},
        {"content": [{"type": "text", "text": 3}]},
        {"content": 3},
        {"content": {}},
        {"name": 3},
        {"tool_call_id": [1]},
        {"reasoning_content": 3},
        {"tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
        {"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
        {"tool_calls": "x"},
        {"tool_calls": {"function": {"name": "f"}}},
        {"tool_calls": [3]},
        {"tool_calls": [{"function": "f"}]},
        {"tool_calls": [{"function": {"name": 3}}]},
    ],
    ids=str,
)
def test_malformed_members_of_a_message_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"^messages: "):
        render(ROLES, messages=[{"role": "assistant", **message}])


def test_custom_tools_are_functions_with_one_text() -> None:
    custom = {"type": "custom", "custom": {"name": "patch", "description": "d"}}
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "é\n"}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    body = {"messages": messages, "tools": [custom], "tool_choice": custom}
    chat = parse_conversation(json.dumps(body))
    function = chat["tools"][0]["function"]
    assert (function["name"], function["description"]) == ("patch", "d")
    assert function["parameters"]["required"] == ["input"]
    request = take_tools(chat)
    assert request is not None and request.required
    converted_call = chat["messages"][0]["tool_calls"][0]
    assert converted_call["function"] == {"name": "patch", "arguments": '{"input": "é\\n"}'}
    allowed = {"mode": "auto", "tools": [custom]}
    chat |= {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    assert take_tools(chat) is not None


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        ({"name": 3}, "name: 3 is not a name of letters, digits and _.:/-"),
        ({"name": "a b"}, "name: 'a b' is not a name of letters, digits and _.:/-"),
        ({"name": "x", "format": {"type": "grammar"}}, "format: only the type 'text' is supported"),
    ],
)
def test_custom_tools_that_are_refused(member: dict[str, Any], problem: str) -> None:
    chat = {"messages": [{"role": "user"}], "tools": [{"type": "custom", "custom": member}]}
    with pytest.raises(InvalidArgument, match=rf"^tools\[0\].custom.{problem}$"):
        parse_conversation(json.dumps(chat))
