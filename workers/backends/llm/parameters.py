"""Parameters of a generation, with the names of OpenAI's API and of vLLM, validated together."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shmserve.errors import InvalidArgument, clip

_MOST_STOPS = 64
# The range of each number; integer bounds mean an integer.
_RANGES: Mapping[str, tuple[float, float]] = {
    "max_tokens": (0, 1 << 24),
    "min_tokens": (0, 1 << 24),
    "n": (1, 128),
    "best_of": (0, 128),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 24),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "truncate_prompt_tokens": (0, 1 << 24),
    "logprobs": (-1, 20),
    "prompt_logprobs": (-1, 20),
    "priority": (-(1 << 31), (1 << 31) - 1),
    "length_penalty": (-10.0, 10.0),
}
_ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "stop_words": "stop",
    "guided_json": "json_schema",
    "guided_regex": "regex",
}
# The parameters that generation_config.json may set for all requests.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class GenerationParameters:
    """The parameters of one request.

    Attributes:
        logprobs: The number of likeliest tokens to report; -1: no log probabilities.
        prompt_logprobs: The same for the prompt.
        top_k: The number of likeliest tokens to sample from; 0: unlimited.
        best_of: The width of the beam search, if larger than `n`.
        truncate_prompt_tokens: The number of last prompt tokens to use; 0: all.
        grammar: (kind, text) with the kind "json_schema" or "regex", or ("", "").
    """

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    best_of: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    truncate_prompt_tokens: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1
    priority: int = 0
    length_penalty: float = 1.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    use_beam_search: bool = False
    stream: bool = False
    echo: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    early_stopping: str = "false"
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: tuple[str, str] = ("", "")

    @property
    def penalised(self) -> bool:
        """Return whether repeated tokens are penalised."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def beams(self) -> int:
        """Return the width of the beam search; 0: no beam search."""
        return max(self.n, self.best_of) if self.use_beam_search else 0


def parse(
    given: Mapping[str, Any], defaults: Mapping[str, Any], vocabulary: int
) -> GenerationParameters:
    """Return the parameters of a request, over those of generation_config.json.

    Unknown parameters are ignored.

    Raises:
        InvalidArgument: Parameters are invalid. The message names each one, the value found and the
            values allowed.
    """
    problems: list[str] = []
    preset = {name: defaults[name] for name in _DEFAULTS if defaults.get(name) is not None}
    values: dict[str, Any] = {"seed": secrets.randbits(63)}
    for name, value in {**_named(preset), **_named(given)}.items():
        parser = _PARSERS.get(name)
        if parser is not None and value is not None:
            try:
                values |= parser(name, value)
            except ValueError as error:
                problems.append(f"{name}: {clip(repr(value))} is not {error}")
    values = _settled(values)
    problems += _contradictions(values, vocabulary)
    if problems:
        raise InvalidArgument("; ".join(problems))
    return GenerationParameters(**values)


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    return {_ALIASES.get(name, name): value for name, value in given.items()}


def _settled(values: dict[str, Any]) -> dict[str, Any]:
    """Combine parameters that are given by two names."""
    values["top_k"] = max(values.get("top_k", 0), 0)
    asked, top = values.pop("wants_logprobs", True), values.pop("top_logprobs", None)
    if not asked:
        values["logprobs"] = -1
    elif top is not None:
        values["logprobs"] = top
    if values.get("grammar") == ("", ""):
        del values["grammar"]
    return values


def _contradictions(values: Mapping[str, Any], vocabulary: int) -> list[str]:
    found: list[str] = []
    for name in ("stop_token_ids", "logit_bias"):
        beyond = [token for token in values.get(name, ()) if not 0 <= token < vocabulary]
        if beyond:
            found.append(f"{name}: {beyond[0]} is not a token, these are 0 to {vocabulary - 1}")
    least, most = values.get("min_tokens", 0), values.get("max_tokens", 16)
    if least > most:
        found.append(f"min_tokens: {least} is more than max_tokens {most}")
    if not most and not (values.get("echo") or values.get("prompt_logprobs", -1) >= 0):
        found.append("max_tokens: 0 generates nothing; it needs echo or prompt_logprobs")
    if not values.get("top_p", 1.0):
        found.append("top_p: 0.0 is not a number above 0, up to 1")
    if values.get("use_beam_search") and values.get("stream"):
        found.append("stream: a beam search has its texts at its end, stream has to be false")
    if values.get("use_beam_search") and values.get("logprobs", -1) >= 0:
        found.append("logprobs: a beam search has none")
    if values.get("use_beam_search") and not most:
        found.append("max_tokens: 0 is too small for a beam search")
    width = max(values.get("n", 1), values.get("best_of", 0))
    if values.get("use_beam_search") and width < 2:
        found.append(f"n: {width} is not the width of a beam search, which is 2 to 128")
    return found


# --- parsers of one parameter to fields; the text of a ValueError is the allowed values


def _number(name: str, value: Any) -> dict[str, Any]:
    least, most = _RANGES[name]
    whole = isinstance(least, int)
    allowed = f"a {'whole number' if whole else 'number'} from {least} to {most}"
    try:
        found = float(value)
        exact = int(value) if whole else found
    except (TypeError, ValueError, OverflowError):
        raise ValueError(allowed) from None
    inside = math.isfinite(found) and least <= exact <= most
    if isinstance(value, bool) or not inside or (whole and found != float(exact)):
        raise ValueError(allowed)
    return {name: exact}


def _flag(name: str, value: Any) -> dict[str, Any]:
    texts = {"true": True, "false": False}
    found = texts.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise ValueError("true or false")
    return {name: found}


def _logprobs(name: str, value: Any) -> dict[str, Any]:
    """Return the fields of a number of tokens or, with `top_logprobs`, of a flag."""
    if value in ("true", "false") or isinstance(value, bool):
        wanted = value in (True, "true")
        return {"wants_logprobs": wanted, "logprobs": 0 if wanted else -1}
    return _number(name, value)


def _top_logprobs(name: str, value: Any) -> dict[str, Any]:
    return {name: _number("logprobs", value)["logprobs"]}


def _decoded(value: Any, allowed: str) -> Any:
    """Decode a value that may be JSON, since parameters may be strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError(allowed) from None


def _stop(name: str, value: Any) -> dict[str, Any]:
    allowed = f"a text or a list of up to {_MOST_STOPS} texts, none of them empty"
    found = [value] if isinstance(value, str) else value
    if isinstance(value, str) and value.startswith("["):
        try:
            found = json.loads(value)
        except ValueError:
            found = [value]
    texts = isinstance(found, list) and all(isinstance(each, str) and each for each in found)
    if not texts or len(found) > _MOST_STOPS:
        raise ValueError(allowed)
    return {name: tuple(found)}


def _tokens(name: str, value: Any) -> dict[str, Any]:
    allowed = "a list of tokens (whole numbers)"
    found = _decoded(value, allowed)
    if not (isinstance(found, list) and all(type(each) is int for each in found)):
        raise ValueError(allowed)
    return {name: tuple(found)}


def _bias(name: str, value: Any) -> dict[str, Any]:
    allowed = "an object of tokens with numbers from -100 to 100"
    found = _decoded(value, allowed)
    if not isinstance(found, dict):
        raise ValueError(allowed)
    try:
        biases = {int(token): float(each) for token, each in found.items()}
    except (TypeError, ValueError):
        raise ValueError(allowed) from None
    if not all(-100 <= each <= 100 for each in biases.values()):
        raise ValueError(allowed)
    return {name: biases}


def _early_stopping(name: str, value: Any) -> dict[str, Any]:
    found = str(value).lower()
    if found not in ("true", "false", "never"):
        raise ValueError("one of true, false, 'never'")
    return {name: found}


def _response_format(name: str, value: Any) -> dict[str, Any]:
    allowed = "an object with a type of text, json_object, json_schema or regex, and its content"
    found = _decoded(value, allowed)
    kind = found.get("type") if isinstance(found, dict) else None
    if kind == "text":
        return {"grammar": ("", "")}
    if kind == "json_object":
        return _schema(name, {"type": "object"})
    if kind == "json_schema":
        content = found.get("json_schema")
        return _schema(name, content.get("schema") if isinstance(content, dict) else None)
    if kind == "regex":
        return _regex(name, found.get("regex", found.get("pattern")))
    raise ValueError(allowed)


def _schema(name: str, value: Any) -> dict[str, Any]:
    allowed = "a JSON schema"
    found = _decoded(value, allowed)
    if not isinstance(found, (dict, bool)):
        raise ValueError(allowed)
    return {"grammar": ("json_schema", json.dumps(found))}


def _regex(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not value:
        raise ValueError("a regular expression")
    return {"grammar": ("regex", value)}


_PARSERS = {
    **dict.fromkeys(_RANGES, _number),
    **{each.name: _flag for each in fields(GenerationParameters) if each.type == "bool"},
    "logprobs": _logprobs,
    "top_logprobs": _top_logprobs,
    "stop": _stop,
    "stop_token_ids": _tokens,
    "logit_bias": _bias,
    "early_stopping": _early_stopping,
    "response_format": _response_format,
    "json_schema": _schema,
    "regex": _regex,
}
