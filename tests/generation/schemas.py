"""Structured output: a model of random tokens answers schemas of any depth with valid JSON."""

import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.rigs.llm_rig import llm_rig
from tests.support.hf_folders import write_folder

_MAX_DEPTH = 4
_CONCURRENT_REQUESTS = 20
_MAX_TOKENS = 480  # tokens of an answer: a random model takes its time
_WORDS = ("red", "green", "naïve", 'a "b"', "東京", "")
_NGRAM_SETTINGS = {"speculative_decoding": {"enabled": True, "method": "ngram"}}


def draw_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """Draw a schema whose values have at most this depth and are short."""
    kinds = [_string, _integer, _enum_schema, _plain]
    return draw.choice([_object, _object, _array, _any_of_schema] if depth else kinds)(draw, depth)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(("a", "b1", "long name", "ä"), draw.randint(1, 3))
    required = draw.sample(names, draw.randint(0, len(names)))
    properties = {name: _inner(draw, depth) for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    minimum = draw.randint(0, 2)
    sizes = {"minItems": minimum, "maxItems": minimum + draw.randint(0, 2)}
    return {"type": "array", "items": _inner(draw, depth), **sizes}


def _any_of_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_inner(draw, depth) for _ in range(2)]}


def _inner(draw: random.Random, depth: int) -> dict[str, Any]:
    return draw_schema(draw, draw.randint(0, depth - 1))


def _string(draw: random.Random, _: int) -> dict[str, Any]:
    if draw.random() < 0.3:
        return {"type": "string", "pattern": "^[a-c]{2,4}(-[0-9]{1,2})?$"}
    minimum = draw.randint(0, 3)
    return {"type": "string", "minLength": minimum, "maxLength": minimum + draw.randint(0, 6)}


def _integer(draw: random.Random, _: int) -> dict[str, Any]:
    minimum = draw.randint(-100, 100)
    return {"type": "integer", "minimum": minimum, "maximum": minimum + draw.randint(0, 1000)}


def _enum_schema(draw: random.Random, _: int) -> dict[str, Any]:
    return {"enum": draw.sample([*draw.sample(_WORDS, 2), 7, None, True], draw.randint(1, 4))}


def _plain(draw: random.Random, _: int) -> dict[str, Any]:
    return {"type": draw.choice(("boolean", "null"))}


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "boolean": (bool,),
    "null": (type(None),),
}  # fmt: skip


def problem(value: Any, schema: dict[str, Any]) -> str:
    """Return why a value does not match a schema of `draw_schema`, or ""."""
    if "anyOf" in schema:
        problems = [problem(value, option) for option in schema["anyOf"]]
        return "" if "" in problems else f"{value!r} is none of {schema['anyOf']}"
    if "enum" in schema:
        listed = any(type(value) is type(option) and value == option for option in schema["enum"])
        return "" if listed else f"{value!r} is not in {schema['enum']}"
    if type(value) not in _TYPES[schema["type"]]:
        return f"{value!r} is no {schema['type']}"
    return _CHECKS.get(schema["type"], lambda *_: "")(value, schema)


def _object_problem(value: dict[str, Any], schema: dict[str, Any]) -> str:
    properties = schema["properties"]
    names = set(schema["required"]) - value.keys() | value.keys() - properties.keys()
    if names:
        return f"{names} are missing, or too much"
    return next(filter(None, (problem(member, properties[n]) for n, member in value.items())), "")


def _array_problem(value: list[Any], schema: dict[str, Any]) -> str:
    if not schema["minItems"] <= len(value) <= schema["maxItems"]:
        return f"{len(value)} items"
    return next(filter(None, (problem(element, schema["items"]) for element in value)), "")


def _string_problem(value: str, schema: dict[str, Any]) -> str:
    if "pattern" in schema:
        return "" if re.search(schema["pattern"], value) else f"{value!r} has another pattern"
    fits = schema["minLength"] <= len(value) <= schema["maxLength"]
    return "" if fits else f"{value!r} has another length"


def _integer_problem(value: int, schema: dict[str, Any]) -> str:
    return "" if schema["minimum"] <= value <= schema["maximum"] else f"{value} is beyond"


_CHECKS: dict[str, Any] = {
    "object": _object_problem,
    "array": _array_problem,
    "string": _string_problem,
    "integer": _integer_problem,
}


def answers(
    path: Path, rig: Path, schemas: list[dict[str, Any]], speculates: bool
) -> tuple[list[str], int]:
    """Return the answer to each schema, generated concurrently, and the number of tokens."""
    engine = {"kv_cache_blocks": 128 * len(schemas), **(_NGRAM_SETTINGS if speculates else {})}
    with llm_rig(rig, path, engine, draft=3 if speculates else 0) as scheduler:
        for key, schema in enumerate(schemas, 1):
            response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
            scheduler.add(
                key,
                input_ids=[5, 9, key],
                seed=key,
                max_tokens=_MAX_TOKENS,
                response_format=response_format,
            )
        scheduler.run()
        keys = range(1, len(schemas) + 1)
        for key in keys:
            (response,) = scheduler.responses[key]
            assert response["finish_reason"] == ["stop"], (schemas[key - 1], scheduler.text(key))
        return [scheduler.text(key) for key in keys], sum(len(scheduler.tokens(k)) for k in keys)


def run(size: int, first_seed: int = 0) -> str:
    """Check this number of schemas. Raises AssertionError for an invalid answer."""
    draw = random.Random(first_seed)
    expected = [draw_schema(draw, number % (_MAX_DEPTH + 1)) for number in range(size)]
    tokens = 0
    with tempfile.TemporaryDirectory(prefix="shmserve-schemas-") as folder:
        path = write_folder(Path(folder) / "model")
        for begin in range(0, size, _CONCURRENT_REQUESTS):
            schemas = expected[begin : begin + _CONCURRENT_REQUESTS]
            rig = Path(folder) / f"rig{begin}"
            texts, count = answers(path, rig, schemas, begin // _CONCURRENT_REQUESTS % 2 == 1)
            tokens += count
            for schema, text in zip(schemas, texts, strict=True):
                violation = problem(json.loads(text), schema)
                assert not violation, f"{violation}: {text} by {schema}"
    return f"{size} schemas up to {_MAX_DEPTH} deep: all answers are valid ({tokens} tokens)"
