"""The fields of requests to OpenAI's API: which are supported, refused, or without effect.

The names are from OpenAI's API and from vLLM's. A known field is never ignored if it would change
the response: it is carried out, or the request is refused. Fields that neither API has are ignored
and logged once, or refused with --openai-unknown-fields=refuse.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument, clip, suggestion
from shmserve.ipc.engine_settings import IGNORED_PARAMETERS, UNSUPPORTED_PARAMETERS
from shmserve.logs import warn_once

logger = logging.getLogger(__name__)


class AllowedValues(NamedTuple):
    """The values of an unsupported field that are permitted, because they have no effect."""

    values: tuple[Any, ...]
    explanation: str


def _split_names(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _permit(allowed_values: AllowedValues, *names: str) -> dict[str, AllowedValues]:
    """Return the entries of fields with the same permitted values; `names` are space-separated."""
    return dict.fromkeys(" ".join(names).split(), allowed_values)


# --- supported fields

_COMMON_FIELDS = frozenset({"model"})
# Options of a generation, which the model's worker validates.
_GENERATION_FIELDS = _COMMON_FIELDS | _split_names(
    "stream stream_options n best_of max_tokens min_tokens temperature top_p top_k min_p seed stop "
    "stop_token_ids include_stop_str_in_output ignore_eos repetition_penalty presence_penalty "
    "frequency_penalty logit_bias bad_words allowed_token_ids use_beam_search length_penalty "
    "early_stopping logprobs prompt_logprobs return_token_ids echo skip_special_tokens "
    "return_tokens_as_token_ids add_special_tokens truncate_prompt_tokens truncation_side priority "
    "response_format structured_outputs lora_name guided_json guided_regex guided_choice "
    "guided_grammar guided_whitespace_pattern json_schema thinking_token_budget "
    # Alternative names of fields above.
    "regex stop_words max_new_tokens max_completion_tokens"
)
# Variables of the chat template, and options of the generated message.
CONVERSATION_FIELDS = _split_names(
    "tools tool_choice parallel_tool_calls chat_template_kwargs add_generation_prompt "
    "continue_final_message documents reasoning_effort include_reasoning"
)

_MAX_REPORTED = 16  # number of wrong fields of a body that are reported

# --- ignored fields

_IGNORED_FIELDS = frozenset(IGNORED_PARAMETERS) | _split_names(
    "safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options prediction "
    "client_metadata "  # OpenAI's agent Codex sends it
    "image "  # options for images in the input of /v1/responses
    # In vLLM, these fields affect only other kinds of requests.
    "return_token_offsets return_mm_kwargs mm_payload routed_experts_prompt_start"
)

_JSON_TYPES = {str, int, float, bool, list, dict}
# The types of some ignored fields; other fields may have any value.
_IGNORED_TYPES: Mapping[str, tuple[type[Any], str]] = {
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), (str, "a string")),
    **dict.fromkeys(("request_id", "session_id", "service_tier"), (str, "a string")),
    "spaces_between_special_tokens": (bool, "true or false"),
    "stream_interval": (int, "an integer"),
    "metadata": (dict, "an object"),
}

# --- fields that are refused, unless the value has no effect

_UNSUPPORTED = AllowedValues((), "not supported")
_ONLY_FALSE = AllowedValues((False,), "only false is supported")
_ONLY_EMPTY = AllowedValues(({}, []), "not supported")
_REFUSED_FIELDS: Mapping[str, AllowedValues] = {
    "store": AllowedValues((False,), "only false is supported, because responses are not stored"),
    "suffix": AllowedValues(("",), "insertion before a suffix is not supported"),
    "modalities": AllowedValues((["text"],), 'only ["text"] is supported'),
    # As in vLLM, the verbosity has no effect.
    "verbosity": AllowedValues(("low", "medium", "high"), "use 'low', 'medium' or 'high'"),
    "functions": AllowedValues(([],), "use tools instead"),
    "function_call": AllowedValues(("none",), "use tool_choice instead"),
    "detokenize": AllowedValues((True,), "only true is supported"),
    **_permit(_ONLY_FALSE, "watermarking return_prompt_text enable_response_messages"),
    "echo": _ONLY_FALSE,  # a chat has no echo
    "chat_template": AllowedValues((), "only the model's own template is supported"),
    **_permit(_UNSUPPORTED, "audio web_search_options moderation cache_salt prompt_embeds"),
    "personality": _UNSUPPORTED,
    **_permit(_ONLY_EMPTY, *UNSUPPORTED_PARAMETERS, "previous_input_messages context_management"),
    **_permit(_ONLY_EMPTY, "access_programs background_options"),
}

COMPLETION_FIELDS = _GENERATION_FIELDS | {"prompt"}
_CHAT_ONLY_FIELDS = {"messages", "top_logprobs"}
CHAT_FIELDS = (_GENERATION_FIELDS | CONVERSATION_FIELDS | _CHAT_ONLY_FIELDS) - {"echo"}
TOKENIZE_FIELDS = CONVERSATION_FIELDS | _split_names(
    "model prompt messages add_special_tokens return_token_strs"
)
DETOKENIZE_FIELDS = _COMMON_FIELDS | {"tokens"}
_RESPONSE_ONLY_FIELDS = _split_names(
    "input instructions include max_output_tokens max_tool_calls parallel_tool_calls reasoning "
    "store stream stream_options temperature text tool_choice tools top_logprobs top_p truncation "
    "seed stop top_k min_p priority presence_penalty frequency_penalty chat_template_kwargs "
    "logit_bias include_reasoning skip_special_tokens include_stop_str_in_output ignore_eos "
    "structured_outputs repetition_penalty stop_token_ids min_tokens bad_words allowed_token_ids "
    "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern "
    "thinking_token_budget"
)
RESPONSE_FIELDS = _COMMON_FIELDS | _RESPONSE_ONLY_FIELDS
EMBEDDING_FIELDS = _COMMON_FIELDS | {"input", "encoding_format", "dimensions"}
_CHATS_ONLY = AllowedValues((False, 0, [], {}), "only supported by chats")
_OTHER_ROUTES = AllowedValues(
    (False, 0, [], {}, "", "none", "auto", "disabled"), "not supported by this route"
)
# The fields of other routes whose default is true.
_TRUE_BY_DEFAULT = _split_names("parallel_tool_calls include_reasoning add_generation_prompt")


def _fields_of_other_routes(supported: frozenset[str]) -> dict[str, AllowedValues]:
    """Return the entries of all fields that only other routes support."""
    names = CHAT_FIELDS | COMPLETION_FIELDS | RESPONSE_FIELDS | EMBEDDING_FIELDS
    names -= supported | _IGNORED_FIELDS
    values = _OTHER_ROUTES._replace(values=(*_OTHER_ROUTES.values, True))
    return {name: values if name in _TRUE_BY_DEFAULT else _OTHER_ROUTES for name in names}


# Fields of chats, and the fields of responses with the same purpose.
_NAMES_IN_RESPONSES = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    "logprobs": "top_logprobs",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_NOT_STORED = "are not stored; the input must contain the conversation"
# The fields that are refused, by route.
_REFUSED_BY_ROUTE: Mapping[frozenset[str], Mapping[str, AllowedValues]] = {
    EMBEDDING_FIELDS: {
        **_REFUSED_FIELDS,
        "truncate_prompt_tokens": AllowedValues((-1,), "only -1 is supported"),
        "truncation_side": AllowedValues(("left",), "only 'left' is supported"),
        "add_special_tokens": AllowedValues((True,), "only true is supported"),
        "padding": AllowedValues(("do_not_pad",), "only 'do_not_pad' is supported"),
        "embed_dtype": AllowedValues(("float32",), "only 'float32' is supported"),
        "endianness": AllowedValues(("native", "little"), "only 'little' is supported"),
        **_permit(_UNSUPPORTED, "additional_data use_activation messages chat_template_kwargs"),
        **_permit(_ONLY_FALSE, "add_generation_prompt continue_final_message"),
        "priority": AllowedValues((0,), "only 0 is supported"),
    },
    CHAT_FIELDS: {**_fields_of_other_routes(CHAT_FIELDS), **_REFUSED_FIELDS},
    COMPLETION_FIELDS: {
        **_fields_of_other_routes(COMPLETION_FIELDS),
        **_REFUSED_FIELDS,
        **_permit(_CHATS_ONLY, "messages tools documents chat_template_kwargs"),
        **_permit(_CHATS_ONLY, "continue_final_message reasoning_effort top_logprobs"),
    },
    RESPONSE_FIELDS: {
        **_fields_of_other_routes(RESPONSE_FIELDS),
        **_REFUSED_FIELDS,
        "background": _ONLY_FALSE,
        "reasoning.mode": AllowedValues(("standard",), "only 'standard' is supported"),
        # Chat templates receive the reasoning of all turns, so no other context is possible.
        "reasoning.context": AllowedValues(("auto", "all_turns"), "use 'auto' or 'all_turns'"),
        "conversation": AllowedValues((), f"conversations {_NOT_STORED}"),
        "previous_response_id": AllowedValues((), f"responses {_NOT_STORED}"),
        "prompt": _UNSUPPORTED,
        **_permit(AllowedValues((1,), "only 1 is supported"), "n best_of"),
        **{
            name: AllowedValues((False, 0, {"type": "text"}), f"use {new_name} instead of {name}")
            for name, new_name in _NAMES_IN_RESPONSES.items()
        },
        **_permit(_CHATS_ONLY, "documents continue_final_message prompt_logprobs"),
        **_permit(_CHATS_ONLY, "return_token_ids use_beam_search"),
    },
}

# The supported members of fields that are objects.
_OBJECT_MEMBERS = _split_names(
    "stream_options.include_usage stream_options.include_obfuscation "
    "stream_options.continuous_usage_stats reasoning.effort reasoning.summary "
    "reasoning.generate_summary text.format text.verbosity"
)
_OBJECT_FIELDS = frozenset(name.partition(".")[0] for name in _OBJECT_MEMBERS)


def select_supported_fields(
    body: Mapping[str, Any], supported: frozenset[str], refuses_unknown: bool
) -> dict[str, Any]:
    """Return the supported fields of a body whose values are not null.

    Args:
        body: The body.
        supported: The fields to carry out, such as `COMPLETION_FIELDS`.
        refuses_unknown: Whether fields that are not known are refused; otherwise they are logged
            once for each name.

    Raises:
        InvalidArgument: Fields are refused. The message names the first of them.
    """
    is_listed = supported in _REFUSED_BY_ROUTE
    refused_fields = _REFUSED_BY_ROUTE[supported] if is_listed else _REFUSED_FIELDS
    fields: dict[str, Any] = {}
    problems: list[str] = []
    unknown_names: list[str] = []
    object_members = [
        (f"{name}.{member}", value)
        for name in _OBJECT_FIELDS & supported
        if type(body.get(name)) is dict
        for member, value in body[name].items()
    ]
    for name, value in [*body.items(), *object_members]:
        if value is None or name in _OBJECT_MEMBERS:
            continue
        if type(value) is float and not math.isfinite(value):
            problems.append(f"{clip(name)}: {value} is not a finite number")
        elif name in supported:
            fields[name] = value
        elif name in refused_fields:
            problems += _check_refused(name, value, refused_fields[name])
        elif name not in _IGNORED_FIELDS:
            unknown_names.append(name)
        # Values of other types than those of JSON are unparsed parts of a large body.
        elif name in _IGNORED_TYPES and type(value) in _JSON_TYPES - {_IGNORED_TYPES[name][0]}:
            problems.append(f"{name}: {clip(repr(value))} is not {_IGNORED_TYPES[name][1]}")
    for name in unknown_names[:_MAX_REPORTED]:
        if refuses_unknown:
            known_names = supported | refused_fields.keys() | _IGNORED_FIELDS | _OBJECT_MEMBERS
            problems.append(f"{clip(name)}: unknown field{suggestion(name, known_names)}")
        else:
            warn_once(logger, "unknown field '%s' of OpenAI's API is ignored", clip(name))
    if problems:
        raise InvalidArgument("; ".join(problems[:_MAX_REPORTED]))
    return fields


def _check_refused(name: str, value: Any, values: AllowedValues) -> list[str]:
    is_neutral = any(type(value) is type(item) and value == item for item in values.values)
    return [] if is_neutral else [f"{name}: {clip(repr(value))} is refused: {values.explanation}"]
