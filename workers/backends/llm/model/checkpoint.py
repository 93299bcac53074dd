"""Checkpoints: Hugging Face folders with their weights, tokenizer and defaults, checked together.

config.json  model.safetensors (or shards and an index)  tokenizer.json
generation_config.json  chat template (of its own, or in tokenizer_config.json)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from shmserve.errors import InvalidArgument
from shmserve.workers.backends.llm.model.architecture import Architecture

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_NAMED = 8  # weights in one message


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face folder.

    Attributes:
        path: The folder.
        architecture: The architecture.
        tokenizer: The tokenizer.
        files: The file of each weight.
        ends: The tokens that end a text.
        defaults: The content of generation_config.json.
        template: The chat template, or "".
        special: The texts of special tokens, for the template.
    """

    path: Path
    architecture: Architecture
    tokenizer: Tokenizer
    files: dict[str, Path]
    ends: tuple[int, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    template: str = ""
    special: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the checkpoint in a folder. Raises InvalidArgument with all problems."""
        problems: list[str] = []
        config = _json(path / "config.json", problems)
        architecture = Architecture.of(config, problems) if config else None
        tokenizer = _tokenizer(path / "tokenizer.json", problems)
        files = _weight_files(path, problems)
        if architecture is not None:
            _check_weights(architecture, files, problems)
            if tokenizer is not None:
                _check_vocabulary(architecture, tokenizer, problems)
        defaults = _json(path / "generation_config.json", problems, optional=True)
        said = _json(path / "tokenizer_config.json", problems, optional=True)
        ends = _token_ids(defaults.get("eos_token_id", config.get("eos_token_id")))
        if architecture is not None and any(end >= architecture.vocabulary for end in ends):
            problems.append(f"eos_token_id: {ends} is not within the vocabulary")
        if problems:
            raise InvalidArgument(f"the folder of the model is wrong: {'; '.join(problems)}")
        assert architecture is not None and tokenizer is not None
        template, special = _template(path, said), _special(said)
        return cls(path, architecture, tokenizer, files, ends, defaults, template, special)

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight as float32."""
        found: torch.Tensor = self._opened(self.files[name]).get_tensor(name)
        return found.float()

    @cached_property
    def _handles(self) -> dict[Path, Any]:
        return {}

    def _opened(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = safe_open(path, "pt")
        return self._handles[path]

    def close(self) -> None:
        """Close the files of weights."""
        self._handles.clear()


def _json(path: Path, problems: list[str], optional: bool = False) -> dict[str, Any]:
    if not path.exists():
        if not optional:
            problems.append(f"{path.name} is missing")
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        problems.append(f"{path.name} is not JSON: {error}")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    return found


def _tokenizer(path: Path, problems: list[str]) -> Tokenizer | None:
    if not path.exists():
        problems.append(f"{path.name} is missing")
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        problems.append(f"{path.name} cannot be read: {error}")
        return None


def _weight_files(path: Path, problems: list[str]) -> dict[str, Path]:
    """Return the file of each weight."""
    if (path / _INDEX).exists():
        mapped = _json(path / _INDEX, problems).get("weight_map", {})
        shards = sorted({str(shard) for shard in mapped.values()})
    elif (path / _SINGLE).exists():
        shards = [_SINGLE]
    else:
        problems.append(f"{_SINGLE} is missing")
        return {}
    found: dict[str, Path] = {}
    for shard in shards:
        try:
            with safe_open(path / Path(shard).name, "pt") as file:
                found |= dict.fromkeys(file.keys(), path / Path(shard).name)
        except (OSError, SafetensorError) as error:
            problems.append(f"{shard} cannot be read: {error}")
    return found


def _check_weights(architecture: Architecture, files: dict[str, Path], problems: list[str]) -> None:
    """Add missing and misshapen weights to `problems`."""
    expected = architecture.weights()
    missing = [name for name in expected if name not in files]
    if files and missing:
        problems.append(f"weights are missing: {_some(missing)}")
    misshapen: list[str] = []
    for path in sorted(set(files.values())):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                shape = tuple(file.get_slice(name).get_shape())
                if name in expected and shape != expected[name]:
                    misshapen.append(f"{name} has {list(shape)}, not {list(expected[name])}")
    if misshapen:
        problems.append(f"weights do not fit config.json: {_some(misshapen)}")


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _check_vocabulary(
    architecture: Architecture, tokenizer: Tokenizer, problems: list[str]
) -> None:
    """Add a problem if token ids exceed the embedding; a larger embedding is padding."""
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= architecture.vocabulary:
        problems.append(
            f"tokenizer.json has tokens up to {largest}, but config.json a vocab_size of "
            f"{architecture.vocabulary}"
        )


def _token_ids(given: Any) -> tuple[int, ...]:
    ids = given if isinstance(given, list) else [given]
    return tuple(each for each in ids if isinstance(each, int))


def _template(path: Path, said: dict[str, Any]) -> str:
    """Return the chat template; if there are several, the one named "default"."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = said.get("chat_template") or ""
    if isinstance(found, list):
        named = {each.get("name"): each.get("template", "") for each in found}
        found = named.get("default", "")
    return str(found)


def _special(said: dict[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens in tokenizer_config.json."""
    found: dict[str, str] = {}
    for name, value in said.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
