"""Request parameters: the error names each invalid one, its value and the allowed values."""

from typing import Any

import pytest

from shmserve.errors import InvalidArgument
from shmserve.workers.backends.llm.parameters import GenerationParameters, parse


def settings(**fields: Any) -> GenerationParameters:
    return parse(fields, {}, 100)


@pytest.mark.parametrize(
    ("parameters", "field", "value"),
    [
        ({"temperature": "0.5"}, "temperature", 0.5),
        ({"max_completion_tokens": 7}, "max_tokens", 7),
        ({"max_tokens": 7.0}, "max_tokens", 7),
        ({"top_k": -1}, "top_k", 0),
        ({"stop": "END"}, "stop", ("END",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop_words": '["a", "b"]'}, "stop", ("a", "b")),
        ({"stop_words": "[" * 100_000}, "stop", ("[" * 100_000,)),
        ({"stop": "[INST]"}, "stop", ("[INST]",)),
        ({"stop_token_ids": "[3, 4]"}, "stop_token_ids", (3, 4)),
        ({"logit_bias": {"5": -1}}, "logit_bias", {5: -1.0}),
        ({"logprobs": True, "top_logprobs": 3}, "logprobs", 3),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": "True"}, "logprobs", 0),
        ({"logprobs": False, "top_logprobs": 3}, "logprobs", -1),
        ({"logprobs": 4}, "logprobs", 4),
        ({"stream": "true"}, "stream", True),
        ({"early_stopping": True}, "early_stopping", "true"),
        ({"response_format": {"type": "text"}}, "grammar", ("", "")),
        ({"guided_regex": "a+"}, "grammar", ("regex", "a+")),
        ({"response_format": {"type": "json_object"}}, "grammar",
         ("json_schema", '{"type": "object"}')),
        ({"stop": '["x"]'}, "stop", ('["x"]',)),
        ({"bad_words": ["a", "b"]}, "bad_words", ("a", "b")),
        ({"allowed_token_ids": [3, 4]}, "allowed_token_ids", (3, 4)),
        ({"guided_choice": ["yes", "no"]}, "grammar", ("grammar", 'start: "yes" | "no"')),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", ("grammar", 'root ::= "a"')),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "grammar", ("regex", "a+")),
        ({"structured_outputs": {"regex": "a+", "disable_additional_properties": False}}, "grammar",
         ("regex", "a+")),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, "grammar",
         ("json_schema", '{"type": "object", "x-guidance": {"whitespace_flexible": false}}')),
        ({"structured_outputs": {"json": {}}, "guided_whitespace_pattern": " ?"}, "grammar",
         ("json_schema", '{"x-guidance": {"whitespace_pattern": " ?"}}')),
        ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, "grammar",
         ("json_schema", '{"a": 1}')),
        ({"response_format": {"type": "json", "value": {"a": 1}}}, "grammar",
         ("json_schema", '{"a": 1}')),
        ({"response_format": {"type": "text"}, "regex": "a"}, "grammar", ("regex", "a")),
        ({"n": 2, "best_of": 5}, "samples", 5),
        ({"suffix": ""}, "n", 1),
        ({"seed": None}, "n", 1),
        ({"nobody_knows": 1}, "n", 1),
    ],
)  # fmt: skip
def test_valid_parameters_are_accepted(parameters: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(settings(**parameters), field) == value


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": "hot"}, "temperature: 'hot' is not a number from 0.0 to 100.0"),
        ({"temperature": float("nan")}, "temperature: nan is not a number"),
        ({"max_tokens": 0}, "max_tokens: 0 generates nothing"),
        ({"logprobs": -1}, "logprobs: -1 is not an integer from 0 to 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs: -1 is not an integer from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: -1 is not an integer from 0 to 20"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: 0 is not -1 or an integer above"),
        ({"truncation_side": "LEFT"}, "truncation_side: 'LEFT' is not 'left' or 'right'"),
        ({"max_tokens": 1.5}, "max_tokens: 1.5 is not an integer"),
        ({"max_completion_tokens": -1}, "max_completion_tokens: -1 is not an integer"),
        ({"max_new_tokens": 0, "min_tokens": 0}, "max_new_tokens: 0 generates nothing"),
        ({"allowed_token_ids": []}, "allowed_token_ids: [] is not a non-empty list of tokens"),
        ({"n": True}, "n: True is not an integer from 1 to 128"),
        ({"top_p": 0}, "top_p: 0.0 is not a number above 0"),
        ({"stop": [""]}, "stop: [''] is not a string or a list"),
        ({"stop_token_ids": [100]}, "stop_token_ids: 100 is not a token; allowed are 0 to 99"),
        ({"logit_bias": {"x": 1}}, "logit_bias: {'x': 1} is not an object of tokens"),
        ({"logit_bias": {"1": 101}}, "numbers from -100 to 100"),
        ({"min_tokens": 20}, "min_tokens: 20 is more than max_tokens 16"),
        ({"echo": 3}, "echo: 3 is not true or false"),
        ({"response_format": {"type": "xml"}}, "response_format: {'type': 'xml'} is not an object"),
        ({"response_format": {"type": "json_schema"}}, "is not a JSON schema"),
        ({"structured_outputs": {}}, "an object with one of json, regex, choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "an object with one of json"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": "x"}}, "is true or false"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 3}}, "a regular expression"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "b"}}, "and optionally disable"),
        ({"thinking_token_budget": -2}, "thinking_token_budget: -2 is not an integer from -1"),
        ({"thinking_token_budget": 0, "bad_words": ["x"]}, "budget: not supported with bad_words"),
        ({"thinking_token_budget": 0, "allowed_token_ids": [5]},
         "thinking_token_budget: not supported with allowed_token_ids"),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, "optionally"),
        ({"structured_outputs": {"json": {}, "regex": 0}}, "an object with one of json, regex"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": []}}, "a regular expression"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}},
         "is not a format in which json_schema.name is a string"),
        ({"guided_choice": []}, "guided_choice: [] is not a list of 1 to 10000 strings"),
        ({"regex": "a", "guided_json": {}}, "regex and guided_json: at most one grammar"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}},
         "guided_regex and structured_outputs: at most one grammar"),
        ({"bad_words": [""]}, "bad_words: [''] is not a string or a list"),
        ({"allowed_token_ids": [100]}, "allowed_token_ids: 100 is not a token"),
        ({"suffix": "!"}, "suffix: '!' is not supported"),
        ({"logprob_token_ids": [3]}, "logprob_token_ids: [3] is not supported"),
        ({"tools": [{}]}, "tools: only supported as a member of the input messages"),
        ({"n": 3, "best_of": 2}, "best_of: 2 is less than n 3"),
        ({"best_of": 2, "stream": True}, "stream: it must be false with best_of 2, because"),
        ({"use_beam_search": True, "n": 2, "logit_bias": {"3": 1}},
         "logit_bias: not supported with use_beam_search"),
        ({"use_beam_search": True, "n": 2, "response_format": {"type": "json_object"}},
         "response_format: not supported with use_beam_search"),
        ({"use_beam_search": True}, "n: 1 is not a beam width"),
        ({"top_p": 2, "top_k": -5}, "top_p: 2 is not a number from 0.0 to 1.0; top_k: -5 is not"),
    ],
)  # fmt: skip
def test_invalid_parameters_are_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        settings(**parameters)
    assert message in caught.value.message


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_a_constraint_may_be_given_by_both_of_its_names(kind: str) -> None:
    """Clients for several versions of vLLM send both."""
    constraint = {"json": {"type": "object"}, "choice": ["a", "b"]}.get(kind, "a")
    both_names = {f"guided_{kind}": constraint, "structured_outputs": {kind: constraint}}
    expected = settings(structured_outputs={kind: constraint}).grammar
    assert settings(**both_names).grammar == expected != ("", "")


def test_a_model_has_defaults_and_seeds_differ() -> None:
    defaults = {"temperature": 0.3, "top_k": 5, "max_new_tokens": 9, "eos_token_id": 3}
    parameters = parse({"top_k": 2}, defaults, 100)
    assert (parameters.temperature, parameters.top_k, parameters.max_tokens) == (0.3, 2, 9)
    with pytest.raises(InvalidArgument, match=r"^generation_config\.json: max_new_tokens: -1 is"):
        parse({}, {"max_new_tokens": -1}, 100)
    nulls = {"max_tokens": 7, "temperature": None, "max_completion_tokens": None}
    parameters = parse(nulls, defaults, 100)
    assert (parameters.temperature, parameters.max_tokens) == (0.3, 7)
    assert settings().seed != settings().seed
    assert settings(seed=-1).seed != settings(seed=-1).seed


def test_parameters_of_the_server_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    parse({"explain": True, "timeout": 1, "user": "a", "id": "x1"}, {}, 10)
    assert caplog.text == ""
    parse({"explains": True}, {}, 10)
    assert "unknown parameter 'explains'" in caplog.text
