"""Fields of OpenAI's API: carried out, refused or without effect, and never ignored in silence."""

import logging
from typing import Any

import pytest

from shmserve import logs
from shmserve.errors import InvalidArgument
from shmserve.gateway.http.openai import fields
from shmserve.gateway.http.openai.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    EMBEDDING_FIELDS,
    RESPONSE_FIELDS,
    select_supported_fields,
)
from shmserve.ipc.engine_settings import IGNORED_PARAMETERS, UNSUPPORTED_PARAMETERS
from shmserve.workers.backends.llm.parameters import parse


def select(body: dict[str, Any], known: frozenset[str] = CHAT_FIELDS, refuse: bool = False) -> Any:
    return select_supported_fields(body, known, refuse)


def refusal(body: dict[str, Any], known: frozenset[str] = CHAT_FIELDS, refuse: bool = False) -> str:
    with pytest.raises(InvalidArgument) as caught:
        select_supported_fields(body, known, refuse)
    return caught.value.message


# The fields of requests to any of the three routes.
NAMES = (
    "model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed "
    "stop stream stream_options suffix temperature top_p user use_beam_search top_k min_p "
    "repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncation_side "
    "truncate_prompt_tokens allowed_token_ids prompt_logprobs logprob_token_ids bad_words "
    "prompt_embeds add_special_tokens response_format structured_outputs priority request_id "
    "session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start "
    "return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params "
    "ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval "
    "messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort "
    "include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents "
    "chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text "
    "background include input instructions max_output_tokens max_tool_calls metadata "
    "previous_response_id reasoning service_tier store text truncation prompt_cache_key "
    "enable_response_messages previous_input_messages "
    # Further fields of OpenAI's API, and of vLLM's sampling parameters.
    "store metadata modalities audio prediction verbosity web_search_options moderation "
    "safety_identifier prompt_cache_retention prompt_cache_options functions function_call "
    "context_management access_programs background_options conversation best_of "
    "prompt_logprob_token_ids prompt_logprob_start flat_logprobs output_kind skip_clone "
    "extra_args skip_reading_prefix_cache trace_decode_token_ids detokenize client_metadata image "
    "personality"
)
# The fields of each route in vLLM and in OpenAI's API. Routes without an entry have `NAMES`.
EMBEDDING_NAMES = (
    "add_special_tokens padding encoding_format embed_dtype endianness dimensions use_activation "
    "input model user truncate_prompt_tokens truncation_side request_id priority cache_salt "
    "mm_processor_kwargs add_generation_prompt continue_final_message chat_template messages "
    "chat_template_kwargs media_io_kwargs"
)
TOKENIZE_NAMES = (
    "model prompt add_special_tokens return_token_strs messages add_generation_prompt tools "
    "continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs"
)


def test_each_field_is_known() -> None:
    known_fields = (
        COMPLETION_FIELDS
        | CHAT_FIELDS
        | RESPONSE_FIELDS
        | set().union(*fields._REFUSED_BY_ROUTE.values())
        | fields._IGNORED_FIELDS
    )
    assert not set(NAMES.split()) - known_fields


@pytest.mark.parametrize(
    ("names", "supported"),
    [
        (EMBEDDING_NAMES, EMBEDDING_FIELDS),
        (TOKENIZE_NAMES, fields.TOKENIZE_FIELDS),
        ("model tokens", fields.DETOKENIZE_FIELDS),
    ],
)
def test_each_field_of_a_route_is_known(names: str, supported: frozenset[str]) -> None:
    refused = fields._REFUSED_BY_ROUTE.get(supported, fields._REFUSED_FIELDS)
    assert not set(names.split()) - supported - refused.keys() - fields._IGNORED_FIELDS


def test_each_field_of_chats_and_completions_is_a_known_parameter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = (COMPLETION_FIELDS | CHAT_FIELDS) - {"messages", "prompt", "stream_options"}
    names |= {*UNSUPPORTED_PARAMETERS, *IGNORED_PARAMETERS, "watermarking"}
    with pytest.raises(InvalidArgument):
        parse(dict.fromkeys(names, "?"), {}, 10)
    assert not caplog.records


def test_null_is_absent_for_every_field() -> None:
    names = (
        COMPLETION_FIELDS
        | CHAT_FIELDS
        | set().union(*fields._REFUSED_BY_ROUTE.values())
        | fields._IGNORED_FIELDS
        | {"nobody_knows"}
    )
    assert select(dict.fromkeys(names), refuse=True) == {}


@pytest.mark.parametrize(
    ("body", "known_fields"),
    [
        ({"chat_template_kwargs": {"a": 1}, "tools": [{}], "top_logprobs": 2}, CHAT_FIELDS),
        (
            {"prompt": "x", "echo": True, "best_of": 3, "return_tokens_as_token_ids": True},
            COMPLETION_FIELDS,
        ),
        ({"input": "x", "encoding_format": "float", "dimensions": 2}, EMBEDDING_FIELDS),
        ({"structured_outputs": {"choice": ["a"]}, "bad_words": ["x"]}, COMPLETION_FIELDS),
    ],
)
def test_supported_fields_are_returned(body: dict[str, Any], known_fields: frozenset[str]) -> None:
    assert select(body, known_fields, refuse=True) == body


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto"},
        {"store": False, "suffix": "", "modalities": ["text"], "verbosity": "low"},
        {"logits_processors": [], "mm_processor_kwargs": {}, "detokenize": True},
    ],
)
def test_fields_without_effect_are_dropped(body: dict[str, Any]) -> None:
    assert select(body, refuse=True) == {}


@pytest.mark.parametrize("known_fields", [CHAT_FIELDS, COMPLETION_FIELDS, fields.RESPONSE_FIELDS])
def test_defaults_of_other_routes_fields_are_dropped(known_fields: frozenset[str]) -> None:
    defaults = {"parallel_tool_calls": True, "include_reasoning": True, "truncation": "disabled"}
    defaults |= {"tool_choice": "auto", "truncate_prompt_tokens": 0, "input": []}
    body = {name: value for name, value in defaults.items() if name not in known_fields}
    assert select(body, known_fields, refuse=True) == {}


def test_vllms_benchmark_of_embeddings_requests_no_truncation() -> None:
    assert select({"truncate_prompt_tokens": -1}, EMBEDDING_FIELDS, refuse=True) == {}


@pytest.mark.parametrize(
    ("body", "known_fields", "message"),
    [
        ({"suffix": "!"}, COMPLETION_FIELDS, "suffix: '!' is refused: insertion before a suffix"),
        ({"store": True}, CHAT_FIELDS, "store: True is refused: only false is supported"),
        ({"store": 0}, CHAT_FIELDS, "store: 0 is refused"),
        ({"modalities": ["text", "audio"]}, CHAT_FIELDS, 'only ["text"] is supported'),
        ({"functions": [{}]}, CHAT_FIELDS, "use tools instead"),
        ({"echo": True}, CHAT_FIELDS, "echo: True is refused"),
        ({"priority": 1}, EMBEDDING_FIELDS, "priority: 1 is refused: only 0 is supported"),
        ({"personality": "friendly"}, RESPONSE_FIELDS, "personality: 'friendly' is refused: not"),
        ({"truncate_prompt_tokens": 3}, EMBEDDING_FIELDS, "3 is refused: only -1 is supported"),
        ({"embed_dtype": "float16"}, EMBEDDING_FIELDS, "only 'float32' is supported"),
        ({"tools": [{}]}, COMPLETION_FIELDS, "tools: [{}] is refused: only supported by chats"),
        ({"max_output_tokens": 5}, CHAT_FIELDS, "max_output_tokens: 5 is refused: not supported"),
        ({"tool_choice": "required"}, COMPLETION_FIELDS, "tool_choice: 'required' is refused"),
        ({"regex": "a"}, fields.RESPONSE_FIELDS, "regex: 'a' is refused: not supported by this"),
        ({"n": 2}, RESPONSE_FIELDS, "n: 2 is refused: only 1 is supported"),
        ({"previous_response_id": "r"}, RESPONSE_FIELDS, "'r' is refused: responses are"),
        ({"conversation": "c"}, RESPONSE_FIELDS, "refused: conversations are not stored"),
        ({"background": True}, RESPONSE_FIELDS, "background: True is refused: only false is"),
        ({"reasoning": {"mode": "pro"}}, RESPONSE_FIELDS, "reasoning.mode: 'pro' is refused: only"),
        ({"reasoning": {"context": "current_turn"}}, RESPONSE_FIELDS, "'current_turn' is refused"),
        ({"verbosity": 1}, CHAT_FIELDS, "verbosity: 1 is refused: use 'low', 'medium' or 'high'"),
        ({"max_tokens": 5}, RESPONSE_FIELDS, "5 is refused: use max_output_tokens instead of"),
        ({"audio": {}, "cache_salt": "s"}, CHAT_FIELDS,
         "audio: {} is refused: not supported; cache_salt: 's' is refused"),
        (
            *({"temperature": float("nan")}, COMPLETION_FIELDS),
            "temperature: nan is not a finite number",
        ),
        ({"top_p": float("inf")}, CHAT_FIELDS, "top_p: inf is not a finite number"),
        ({"user": 5}, RESPONSE_FIELDS, "user: 5 is not a string"),
        ({"metadata": []}, CHAT_FIELDS, "metadata: [] is not an object"),
    ],
)  # fmt: skip
def test_refusals_contain_the_supported_values(
    body: dict[str, Any], known_fields: frozenset[str], message: str
) -> None:
    assert message in refusal(body, known_fields)


def test_unknown_fields_are_logged_once_or_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert select({"nobody_knows": 1, "stream_options": {"odd": 1}}) == {
                "stream_options": {"odd": 1}
            }
        options = {"text": {"formatt": 1, "format": {}}, "reasoning": {"context": "all_turns"}}
        assert select(options, RESPONSE_FIELDS) == options
    names = ("nobody_knows", "stream_options.odd", "text.formatt")
    assert [r.args for r in caplog.records] == [(name,) for name in names]
    text = refusal({"text": {"formatt": 1}}, RESPONSE_FIELDS, refuse=True)
    assert text == "text.formatt: unknown field, did you mean 'text.format'?"
    text = refusal({"temprature": 1}, refuse=True)
    assert text == "temprature: unknown field, did you mean 'temperature'?"


def test_the_first_unknown_fields_are_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_warned", set())
    names = [f"field_{index}" for index in range(50)]
    with caplog.at_level(logging.WARNING):
        select(dict.fromkeys(names, 1))
    assert [record.args for record in caplog.records] == [(name,) for name in names[:16]]
    assert refusal(dict.fromkeys(names, 1), refuse=True).count("unknown field") == 16
    assert refusal(dict.fromkeys(names, float("nan"))).count("not a finite number") == 16
