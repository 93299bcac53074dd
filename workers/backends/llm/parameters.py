"""Parameters of a generation, with the names of OpenAI's API and of vLLM, validated together."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.errors import InvalidArgument, clip
from shmserve.ipc.engine_settings import IGNORED_PARAMETERS, UNSUPPORTED_PARAMETERS
from shmserve.logs import warn_once
from shmserve.workers.backends.llm.grammars import quote_text
from shmserve.workers.backends.llm.token_texts import parse_json, with_pauses

logger = logging.getLogger(__name__)

_MAX_STOP_STRINGS = 64
_MAX_WORD_LENGTH = 256  # maximum number of characters of a bad word
_ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
# Parameters of OpenAI's and vLLM's APIs that would change a text, and their values without effect.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(UNSUPPORTED_PARAMETERS, ({}, [])),
    "suffix": ("",),
    "detokenize": (True,),
    "watermarking": (False,),
    "cache_salt": (),
    "lora_name": ("",),
    "prompt_embeds": (),
}
# Members of a conversation, which are supported in the input `messages` only.
_CONVERSATION_MEMBERS = (
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "documents", "reasoning_effort"),
    "include_reasoning",
)
_NO_GRAMMAR = ("", "")  # (kind, text)
_OBJECT_SCHEMA = {"type": "object"}
_MAX_CHOICES = 10_000
# Parameters that a beam search does not support.
_NOT_WITH_BEAM_SEARCH = (
    "min_tokens repetition_penalty presence_penalty frequency_penalty logit_bias "
    "bad_words allowed_token_ids response_format structured_outputs json_schema regex choice "
    "grammar"
)
# Parameters that are read elsewhere, or have no effect on a text.
# Triton, too, sends the id of a request of `generate` to the model.
_IGNORED_NAMES = (
    *("model", "exclude_input_in_output", "timeout", "explain", "id"),
    *IGNORED_PARAMETERS,
)
# The parameters that generation_config.json or config.json may set for all requests.
_PRESETS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def _number(default: float, minimum: float, maximum: float) -> Any:
    """Return a dataclass field for a number in a range; integer bounds mean an integer."""
    return field(default=default, metadata={"range": (minimum, maximum)})


@dataclass(frozen=True)
class GenerationParameters:
    """The parameters of one request.

    Attributes:
        logprobs: The number of likeliest tokens to report; -1: no log probabilities.
        prompt_logprobs: The number of likeliest tokens to report for each token of the prompt; -1:
            no log probabilities.
        top_k: The number of likeliest tokens to sample from; 0: unlimited.
        best_of: The width of the beam search, or the number of samples of which the `n` likeliest
            are returned, if larger than `n`.
        truncate_prompt_tokens: The number of prompt tokens to use; 0: all; -1: as many as fit into
            the model's maximum length.
        truncation_side: The side on which a prompt is cut, "left" or "right". "" is the left side
            without the tokens that the tokenizer adds there.
        thinking_token_budget: The maximum number of reasoning tokens; -1: unlimited.
        allowed_token_ids: The tokens that may be generated; empty: all.
        forbidden_after: Returns the tokens that are forbidden after generated tokens: those that
            would complete one of `bad_words` or exceed `thinking_token_budget`.
        grammar: (kind, text) with the kind "json_schema", "regex" or "grammar" (Lark or GBNF), or
            ("", "").
        grammar_name: The parameter with the grammar, for error texts; "tools" if none has it.
    """

    max_tokens: int = _number(16, 0, 1 << 24)
    min_tokens: int = _number(0, 0, 1 << 24)
    n: int = _number(1, 1, 128)  # number of samples to return
    best_of: int = _number(0, 0, 128)
    temperature: float = _number(1.0, 0.0, 100.0)
    top_p: float = _number(1.0, 0.0, 1.0)
    top_k: int = _number(0, -1, 1 << 24)
    min_p: float = _number(0.0, 0.0, 1.0)
    repetition_penalty: float = _number(1.0, 0.01, 100.0)
    presence_penalty: float = _number(0.0, -2.0, 2.0)
    frequency_penalty: float = _number(0.0, -2.0, 2.0)
    seed: int = _number(0, -(1 << 63), (1 << 63) - 1)
    truncate_prompt_tokens: int = _number(0, -1, 1 << 24)
    logprobs: int = _number(-1, 0, 20)
    prompt_logprobs: int = _number(-1, 0, 20)
    priority: int = _number(0, -(1 << 31), (1 << 31) - 1)
    thinking_token_budget: int = _number(-1, -1, 1 << 24)
    length_penalty: float = _number(1.0, -10.0, 10.0)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    use_beam_search: bool = False
    stream: bool = False
    echo: bool = False  # whether the text begins with the prompt
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    early_stopping: str = "false"  # "true", "false" or "never"
    truncation_side: str = ""
    stop: tuple[str, ...] = ()  # stop strings
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # number to add, by token
    bad_words: tuple[str, ...] = ()
    forbidden_after: Callable[[Sequence[int]], NDArray[np.int64]] | None = None
    allowed_token_ids: tuple[int, ...] = ()
    grammar: tuple[str, str] = _NO_GRAMMAR
    grammar_name: str = "tools"

    @cached_property
    def is_penalised(self) -> bool:
        """Return whether tokens that occur repeatedly are penalised."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @cached_property
    def is_restricted(self) -> bool:
        """Return whether some tokens are forbidden, or their logits are biased."""
        return bool(self.logit_bias or self.forbidden_after or self.allowed_token_ids)

    @cached_property
    def bias_arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the tokens of `logit_bias`, and the numbers to add to their logits."""
        biases, count = self.logit_bias, len(self.logit_bias)
        tokens = np.fromiter(biases.keys(), np.int64, count)
        return tokens, np.fromiter(biases.values(), np.float32, count)

    @cached_property
    def allowed_array(self) -> NDArray[np.int64]:
        """Return `allowed_token_ids` as an array."""
        return np.array(self.allowed_token_ids, np.int64)

    @property
    def samples(self) -> int:
        """Return the number of samples to generate; 0 for a beam search."""
        return 0 if self.use_beam_search else max(self.n, self.best_of)

    @cached_property
    def beams(self) -> int:
        """Return the width of the beam search; 0: no beam search."""
        return max(self.n, self.best_of) if self.use_beam_search else 0

    def check_min_tokens(self, end_tokens: Sequence[int], vocab_size: int) -> None:
        """Check that `min_tokens` leaves a token that may be generated.

        Raises:
            InvalidArgument: All allowed tokens end the text.
        """
        allowed_tokens, ends = self.allowed_token_ids or range(vocab_size), {*end_tokens}
        if self.min_tokens and all(token in ends for token in allowed_tokens):
            name = "allowed_token_ids" if self.allowed_token_ids else "stop_token_ids"
            text = f"{self.min_tokens} requires tokens that do not end the text"
            raise InvalidArgument(f"min_tokens: {text}, but {name} leaves only end tokens")


def parse(
    request: Mapping[str, Any],
    defaults: Mapping[str, Any],
    vocab_size: int,
    defaults_file: str = "generation_config.json",
) -> GenerationParameters:
    """Return the parameters of a request.

    Unknown parameters are ignored, and logged once for each name.

    Args:
        request: The parameters of the request.
        defaults: The content of the file with the defaults.
        vocab_size: The number of tokens of the model.
        defaults_file: The name of that file.

    Raises:
        InvalidArgument: Parameters are invalid. The message names each parameter, the value found
            and the values allowed.
    """
    problems: list[str] = []
    grammars: dict[str, tuple[str, str]] = {}
    request = {name: value for name, value in request.items() if value is not None}
    presets = {name: defaults[name] for name in _PRESETS if defaults.get(name) is not None}
    request_names = {
        **{_ALIASES.get(name, name): f"{defaults_file}: {name}" for name in presets},
        **{_ALIASES.get(name, name): name for name in request},
    }
    values: dict[str, Any] = {}
    for name, value in {**_resolve_aliases(presets), **_resolve_aliases(request)}.items():
        parser = _PARSERS.get(name)
        if parser is not None:
            try:
                values |= parser(name, value)
            except ValueError as error:
                problems.append(f"{name}: {clip(repr(value))} is not {error}")
        elif name in _IGNORED_NAMES:
            continue
        elif name in _CONVERSATION_MEMBERS:
            problems.append(f"{name}: only supported as a member of the input messages")
        elif name not in _UNSUPPORTED:
            warn_once(logger, "the unknown parameter '%s' of a generation is ignored", clip(name))
        elif value not in _UNSUPPORTED[name]:
            problems.append(f"{name}: {clip(repr(value))} is not supported")
        if values.get("grammar", _NO_GRAMMAR) != _NO_GRAMMAR:
            grammars[name] = values.pop("grammar")
    if len(set(grammars.values())) > 1:
        names = " and ".join(request_names.get(name, name) for name in grammars)
        problems.append(f"{names}: at most one grammar is allowed")
    values = _combine(values, grammars)
    values["grammar_name"] = next((request_names.get(name, name) for name in grammars), "tools")
    problems += _find_contradictions(values, vocab_size)
    if values.get("use_beam_search"):
        problems += _find_unsupported({**_resolve_aliases(request), **grammars})
    if problems:
        parts = (problem.partition(": ") for problem in problems)
        texts = (f"{request_names.get(name, name)}: {text}" for name, _, text in parts)
        raise InvalidArgument("; ".join(texts))
    return GenerationParameters(**values)


def _resolve_aliases(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {_ALIASES.get(name, name): value for name, value in settings.items()}


def _combine(values: dict[str, Any], grammars: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Combine parameters that determine the same field; return the values of fields by name."""
    values["top_k"] = max(values.get("top_k", 0), 0)
    if values.get("seed", -1) == -1:  # -1 is a random seed, as in vLLM
        values["seed"] = secrets.randbits(63)
    has_logprobs, top_logprobs = values.pop("has_logprobs", True), values.pop("top_logprobs", None)
    if not has_logprobs:
        values["logprobs"] = -1
    elif top_logprobs is not None:
        values["logprobs"] = top_logprobs
    values["grammar"] = next(iter(grammars.values()), _NO_GRAMMAR)
    pattern = values.pop("whitespace_pattern", None)
    if pattern is not None and values["grammar"][0] == "json_schema":
        values["grammar"] = _with_options(values["grammar"][1], {"whitespace_pattern": pattern})
    return values


def _find_contradictions(values: Mapping[str, Any], vocab_size: int) -> list[str]:
    problems: list[str] = []
    max_token = vocab_size - 1
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        tokens = with_pauses(values.get(name, ()))
        invalid_token = next((token for token in tokens if not 0 <= token <= max_token), None)
        if invalid_token is not None:
            problems.append(f"{name}: {invalid_token} is not a token; allowed are 0 to {max_token}")
    min_tokens, max_tokens = values.get("min_tokens", 0), values.get("max_tokens", 16)
    if min_tokens > max_tokens:
        problems.append(f"min_tokens: {min_tokens} is more than max_tokens {max_tokens}")
    if not max_tokens and not (values.get("echo") or values.get("prompt_logprobs", -1) >= 0):
        problems.append("max_tokens: 0 generates nothing; it needs echo or prompt_logprobs")
    if values.get("truncate_prompt_tokens") == 0:
        problems.append("truncate_prompt_tokens: 0 is not -1 or an integer above 0")
    if values.get("thinking_token_budget", -1) >= 0:
        names = ("bad_words", "allowed_token_ids", "use_beam_search")
        prefix = "thinking_token_budget: not supported with"
        problems += [f"{prefix} {name}" for name in names if values.get(name)]
    if not values.get("top_p", 1.0):
        problems.append("top_p: 0.0 is not a number above 0, up to 1")
    n, best_of = values.get("n", 1), values.get("best_of", 0)
    if best_of and best_of < n:
        problems.append(f"best_of: {best_of} is less than n {n}")
    if not values.get("use_beam_search"):
        if best_of > n and values.get("stream"):
            text = "the best samples are known only when all are complete"
            problems.append(f"stream: it must be false with best_of {best_of}, because {text}")
        return problems
    if values.get("stream"):
        problems.append("stream: it must be false, because a beam search returns texts at the end")
    if values.get("logprobs", -1) >= 0:
        problems.append("logprobs: a beam search does not return them")
    if not max_tokens:
        problems.append("max_tokens: a beam search requires at least 1")
    if max(n, best_of) < 2:
        problems.append(f"n: {n} is not a beam width (allowed: 2 to 128)")
    return problems


def _find_unsupported(settings: Mapping[str, Any]) -> list[str]:
    """Return a problem for each parameter that a beam search does not support."""
    neutral_values: tuple[Any, ...] = (None, 0, "", [], {}, (), {"type": "text"})
    return [
        f"{name}: not supported with use_beam_search"
        for name, value in settings.items()
        if name in _NOT_WITH_BEAM_SEARCH.split()
        and value not in neutral_values
        and (name, value) != ("repetition_penalty", 1)
    ]


# --- parsers of single parameters. `parse` reports their errors as "NAME: VALUE is not ALLOWED".


def _check(is_valid: bool, allowed_text: str) -> None:
    if not is_valid:
        raise ValueError(allowed_text)


def _parse_number(name: str, value: Any) -> dict[str, Any]:
    minimum, maximum = _NUMBER_RANGES[name]
    is_integer = isinstance(minimum, int)
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        exact_number = int(value) if is_integer else number
        is_exact = not is_integer or number == float(exact_number)
        if is_exact and minimum <= exact_number <= maximum and not isinstance(value, bool):
            return {name: exact_number}
    kind = "an integer" if is_integer else "a number"
    raise ValueError(f"{kind} from {minimum} to {maximum}")


def as_flag(value: Any) -> Any:
    """Convert the texts "true" and "false" to a boolean; return any other value unchanged."""
    booleans_by_text = {"true": True, "false": False}
    return booleans_by_text.get(value.lower(), value) if isinstance(value, str) else value


def _parse_flag(name: str, value: Any) -> dict[str, Any]:
    flag = as_flag(value)
    _check(isinstance(flag, bool), "true or false")
    return {name: flag}


def _parse_logprobs(name: str, value: Any) -> dict[str, Any]:
    """Return the fields for `logprobs`, which is a number of tokens or, in chats, a flag."""
    flag = as_flag(value)
    if isinstance(flag, bool):
        return {"has_logprobs": flag, "logprobs": 0 if flag else -1}
    return _parse_number(name, value)


def _parse_top_logprobs(name: str, value: Any) -> dict[str, Any]:
    return {name: _parse_number("logprobs", value)["logprobs"]}


def _decode_json(value: Any, allowed_text: str) -> Any:
    """Decode a value that may be JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        raise ValueError(allowed_text) from None


def _parse_stop(name: str, value: Any) -> dict[str, Any]:
    allowed_text = f"a string or a list of up to {_MAX_STOP_STRINGS} strings, none of them empty"
    stops = [value] if isinstance(value, str) else value
    _check(_are_texts(stops) and len(stops) <= _MAX_STOP_STRINGS, allowed_text)
    return {name: tuple(stops)}


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) and text for text in value)


def _parse_stop_words(name: str, value: Any) -> dict[str, Any]:
    """Return the fields for `stop_words`, a list that may be JSON in a string."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError):
            value = parse_json(value)
    return _parse_stop("stop", value)


def _parse_bad_words(name: str, value: Any) -> dict[str, Any]:
    words: tuple[str, ...] = _parse_stop("stop", value)["stop"]
    is_short = all(len(word) <= _MAX_WORD_LENGTH for word in words)
    _check(is_short, f"a list of strings of up to {_MAX_WORD_LENGTH} characters")
    return {name: words}


def _parse_tokens(name: str, value: Any) -> dict[str, Any]:
    allowed_text = "a list of tokens (integers)"
    tokens = _decode_json(value, allowed_text)
    _check(isinstance(tokens, list) and all(type(token) is int for token in tokens), allowed_text)
    _check(bool(tokens) or name != "allowed_token_ids", "a non-empty list of tokens")
    return {name: tuple(tokens)}


def _parse_bias(name: str, value: Any) -> dict[str, Any]:
    allowed_text = "an object of tokens with numbers from -100 to 100"
    json_value = _decode_json(value, allowed_text)
    with suppress(AttributeError, TypeError, ValueError):
        biases = {int(token): float(bias) for token, bias in with_pauses(json_value.items())}
        if all(-100 <= bias <= 100 for bias in with_pauses(biases.values())):
            return {name: biases}
    raise ValueError(allowed_text)


def _parse_early_stopping(name: str, value: Any) -> dict[str, Any]:
    text = str(value).lower()
    _check(text in ("true", "false", "never"), "one of true, false, 'never'")
    return {name: text}


def _parse_side(name: str, value: Any) -> dict[str, Any]:
    _check(value in ("left", "right"), "'left' or 'right'")
    return {name: value}


def _parse_response_format(name: str, value: Any) -> dict[str, Any]:
    allowed_text = (
        "an object with a type of text, json_object, json_schema, regex or grammar, and its content"
    )
    spec = _decode_json(value, allowed_text)
    kind = spec.get("type") if isinstance(spec, dict) else None
    match kind:
        case "text":
            return {"grammar": _NO_GRAMMAR}
        case "json_object" | "json":
            schemas = (spec[key] for key in ("schema", "value") if spec.get(key) is not None)
            return _parse_schema(name, next(schemas, _OBJECT_SCHEMA))
        case "json_schema":
            json_schema = spec.get("json_schema")
            json_schema = json_schema if isinstance(json_schema, dict) else {}
            for member, kind in (("name", str), ("description", str), ("strict", bool)):
                type_text = "a string" if kind is str else "true or false"
                is_valid = isinstance(json_schema.get(member), kind | None)
                _check(is_valid, f"a format in which json_schema.{member} is {type_text}")
            return _parse_schema(name, json_schema.get("schema"))
        case "regex":
            return _parse_regex(name, spec.get("regex", spec.get("pattern", spec.get("value"))))
        case "grammar":
            return _parse_grammar(name, spec.get("grammar"))
    raise ValueError(allowed_text)


def _parse_structured_outputs(name: str, value: Any) -> dict[str, Any]:
    """Return the field `grammar` for `structured_outputs`, one constraint and its options."""
    allowed_text = f"an object with one of {', '.join(_CONSTRAINTS)}"
    members = _decode_json(value, allowed_text)
    _check(isinstance(members, dict), allowed_text)
    members = {k: v for k, v in members.items() if v is not None}
    enabled = {k: v for k, v in members.items() if k not in _BOOLEANS or v is not False}
    constraint_names = [key for key in enabled if key in _CONSTRAINTS]
    unknown_names = [key for key in enabled if key not in _CONSTRAINTS and key not in _OPTION_NAMES]
    options_text = f"{allowed_text}, and optionally {', '.join(_OPTION_NAMES)}"
    _check(len(constraint_names) == 1 and not unknown_names, options_text)
    kind = constraint_names[0]
    grammar: tuple[str, str] = _CONSTRAINTS[kind](name, enabled[kind])["grammar"]
    for key in _BOOLEANS:
        is_boolean = isinstance(members.get(key, True), bool)
        _check(is_boolean, f"an object in which {key} is true or false")
    options: dict[str, Any] = {}
    if enabled.get("disable_any_whitespace"):
        options["whitespace_flexible"] = False
    if enabled.get("whitespace_pattern", "") != "":
        options |= _parse_text("whitespace_pattern", enabled["whitespace_pattern"])
    if options and grammar[0] == "json_schema":
        grammar = _with_options(grammar[1], options)
    return {"grammar": grammar}


def _with_options(schema: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the grammar, (kind, text), of a JSON schema with llguidance's white space options."""
    document = json.loads(schema)
    document = document if isinstance(document, dict) else {}
    return "json_schema", json.dumps({**document, "x-guidance": options})


def _parse_schema(name: str, value: Any) -> dict[str, Any]:
    schema = _decode_json(value, "a JSON schema")
    _check(isinstance(schema, (dict, bool)), "a JSON schema")
    return {"grammar": ("json_schema", json.dumps(schema))}


def _parse_json_object(name: str, value: Any) -> dict[str, Any]:
    _check(value is True, "true or false for json_object")
    return _parse_schema(name, _OBJECT_SCHEMA)


_TEXT_KINDS = {
    "regex": "a regular expression",
    "grammar": "a grammar in Lark's language or in GBNF",
    "whitespace_pattern": "a regular expression",
}


def _parse_text(name: str, value: Any, kind: str = "") -> dict[str, Any]:
    """Return the field for a string that is a grammar or a pattern for white space.

    Args:
        name: The parameter.
        value: The value.
        kind: The kind of the string, if it is a member of another parameter.
    """
    kind = kind or name
    _check(isinstance(value, str) and (bool(value) or kind != "grammar"), _TEXT_KINDS[kind])
    return {name: value} if kind == "whitespace_pattern" else {"grammar": (kind, value)}


_parse_regex = partial(_parse_text, kind="regex")
_parse_grammar = partial(_parse_text, kind="grammar")


def _parse_choice(name: str, value: Any) -> dict[str, Any]:
    allowed_text = f"a list of 1 to {_MAX_CHOICES} strings"
    choices = _decode_json(value, allowed_text)
    are_texts = isinstance(choices, list) and all(isinstance(text, str) for text in choices)
    _check(are_texts and 0 < len(choices) <= _MAX_CHOICES, allowed_text)
    return {"grammar": ("grammar", f"start: {' | '.join(map(quote_text, choices))}")}


_CONSTRAINTS: Mapping[str, Callable[[str, Any], dict[str, Any]]] = {
    "json": _parse_schema,
    "regex": _parse_regex,
    "choice": _parse_choice,
    "grammar": _parse_grammar,
    "json_object": _parse_json_object,
}
# The options of structured_outputs. `disable_fallback` is about vLLM's other grammar libraries.
_OPTION_NAMES = ("disable_any_whitespace", "whitespace_pattern", "disable_fallback")
_BOOLEANS = (
    *("json_object", "disable_any_whitespace", "disable_fallback"),
    "disable_additional_properties",  # only false is supported
)
_NUMBER_RANGES = {
    number.name: number.metadata["range"]
    for number in fields(GenerationParameters)
    if number.metadata
}
_PARSERS = {
    **dict.fromkeys(_NUMBER_RANGES, _parse_number),
    **{flag.name: _parse_flag for flag in fields(GenerationParameters) if flag.type == "bool"},
    "logprobs": _parse_logprobs,
    "top_logprobs": _parse_top_logprobs,
    "stop": _parse_stop,
    "stop_words": _parse_stop_words,
    "stop_token_ids": _parse_tokens,
    "logit_bias": _parse_bias,
    "bad_words": _parse_bad_words,
    "allowed_token_ids": _parse_tokens,
    "early_stopping": _parse_early_stopping,
    "truncation_side": _parse_side,
    "response_format": _parse_response_format,
    "structured_outputs": _parse_structured_outputs,
    "json_schema": _parse_schema,
    "choice": _parse_choice,
    **dict.fromkeys(_TEXT_KINDS, _parse_text),
}
