"""Checkpoints: Hugging Face folders with their weights, tokenizer and defaults, checked together.

The page checkpoints.md of the guide lists the files and fields of a folder, with their effects.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from shmserve.errors import InvalidArgument, clip
from shmserve.workers.backends.llm.model.architecture import DEFAULTS, Architecture
from shmserve.workers.backends.llm.model.quantised import Quantisation, StoredTensor
from shmserve.workers.backends.llm.model.tokenizer import (
    SPECIAL_TOKEN_NAMES,
    load_tokenizer,
    special_tokens_of,
)

logger = logging.getLogger(__name__)

_INDEX_FILE, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_ADAPTER_FILE = "adapter_config.json"
# Settings of generation_config.json that neither this server nor vLLM supports.
_IGNORED_DEFAULTS = (
    "bad_words_ids begin_suppress_tokens constraints dola_layers encoder_no_repeat_ngram_size "
    "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
    "force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale max_length max_time "
    "min_length min_new_tokens no_repeat_ngram_size num_beams num_return_sequences penalty_alpha "
    "sequence_bias stop_strings suppress_tokens token_healing top_h typical_p watermarking_config"
)
_NEUTRAL_AT_ONE = (
    "encoder_repetition_penalty guidance_scale num_beams num_return_sequences top_h typical_p"
)
_LFS_POINTER_START = b"version https://git-lfs"  # in place of a file's content
_MAX_NAMED_WEIGHTS = 8  # maximum number of weights that one message names
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Types that a field of a JSON file may have, and their description for errors.
_BOOLEAN, _OBJECT, _LIST = ((bool,), "a boolean"), ((dict,), "an object"), ((list,), "a list")
_INTEGER, _TEXT = ((int,), "an integer"), ((str,), "a string")
_TOKENS_FIELD = ((list, dict), "a list or an object")
_TOKEN = ((str, dict), "a string or an object")
_IDS = ((int, list), "an integer or a list of integers")
_TEMPLATES = ((str, list, dict), "a string, a list or an object")
# The types of the fields of each file, and of `quantization_config`, with a description. A null
# means an absent field.
_FIELD_TYPES: Mapping[str, Mapping[tuple[tuple[type, ...], str], str]] = {
    "config.json": {
        _BOOLEAN: "attention_bias mlp_bias tie_word_embeddings use_sliding_window",
        _INTEGER: "sliding_window max_window_layers",
        ((int, float), "a number"): "rms_norm_eps rope_theta original_max_position_embeddings",
        _IDS: "eos_token_id",
        _LIST: "architectures layer_types",
        _OBJECT: "rope_scaling rope_parameters quantization_config compression_config",
        _TEXT: "model_type",
    },
    "quantization_config": {
        _OBJECT: "meta sparsity_config transform_config",
        _TEXT: "quant_method",
    },
    "tokenizer_config.json": {
        _BOOLEAN: "add_prefix_space fix_mistral_regex legacy split_special_tokens",
        _OBJECT: "added_tokens_decoder model_specific_special_tokens",
        _LIST: "additional_special_tokens",
        _TOKENS_FIELD: "extra_special_tokens",
        _TEXT: "tokenizer_class",
        _TOKEN: SPECIAL_TOKEN_NAMES,
        _TEMPLATES: "chat_template",
    },
    "special_tokens_map.json": {
        _LIST: "additional_special_tokens",
        _TOKENS_FIELD: "extra_special_tokens",
        _TOKEN: SPECIAL_TOKEN_NAMES,
    },
    "generation_config.json": {_IDS: "eos_token_id", _INTEGER: "max_new_tokens"},
    "chat_template.json": {_TEMPLATES: "chat_template"},
    _INDEX_FILE: {_OBJECT: "weight_map"},
}
# Patterns of files that other programs read instead of a required file.
_ALTERNATIVES = {
    "config.json": ("adapter_config.json", "params.json", "*.gguf", "snapshots/*/config.json"),
    "tokenizer.json": ("*.model", "vocab.*", "tekken.json"),
    _SINGLE_FILE: ("*.safetensors", "*.bin", "*.gguf", "*.pth"),
}
# Files of older folders whose config.json has no quantization_config.
_QUANTISATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True)
class Checkpoint:
    """An opened Hugging Face folder.

    Attributes:
        architecture: The architecture.
        tokenizer: The tokenizer.
        stored_tensors: The descriptions of the tensors in the files, by name.
        quantisation: The quantisation of the weights.
        end_tokens: The tokens that end a text.
        eos: The tokenizer's end token; -1 if it has none.
        defaults: The defaults of requests' parameters: the content of generation_config.json or,
            in older folders, of config.json.
        defaults_file: The name of the file with the defaults.
        templates: The chat templates by name; the name of an unnamed template is "default".
        special_tokens: The texts of special tokens by their names in templates ("eos_token").
    """

    architecture: Architecture
    tokenizer: Tokenizer
    stored_tensors: dict[str, StoredTensor]
    quantisation: Quantisation
    end_tokens: tuple[int, ...]
    eos: int
    defaults: dict[str, Any] = field(default_factory=dict)
    defaults_file: str = "generation_config.json"
    templates: dict[str, str] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the checkpoint in a folder. Raises InvalidArgument with all problems."""
        problems: list[str] = []
        config = read_json(path / "config.json", problems)
        architecture = Architecture.of(config, problems) if config or not problems else None
        settings = read_json(path / "tokenizer_config.json", problems, is_optional=True)
        tokenizer = _read_tokenizer(path, settings, config, problems)
        stored_tensors = _read_headers(path, problems)
        problem_count = len(problems)
        quantisation = Quantisation.of(_quantisation_config(path, config, problems), problems)
        if architecture is not None and len(problems) == problem_count:
            _check_weights(architecture, quantisation, stored_tensors, problems)
        defaults, defaults_file = config, "config.json"
        family_defaults = DEFAULTS[architecture.family] if architecture else {}
        if os.path.lexists(path / "generation_config.json"):
            defaults_file, family_defaults = "generation_config.json", {}
            defaults = read_json(path / defaults_file, problems)
        end_tokens = _token_ids({**family_defaults, **config, **defaults}.get("eos_token_id"))
        templates = _read_templates(path, settings, problems)
        if problems:
            _add_pointers(path, problems)
            raise InvalidArgument(f"the model's folder is invalid: {'; '.join(problems)}")
        assert architecture is not None and tokenizer is not None
        special_tokens = special_tokens_of(settings)
        eos = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        # The tokenizer may have more tokens than the model.
        known_ends = (end for end in end_tokens + _token_ids(eos) if end < architecture.vocab_size)
        end_tokens = tuple(dict.fromkeys(known_ends))
        _warn_ineffective(defaults, defaults_file)
        _warn_unused_weights(architecture, quantisation, stored_tensors)
        if "attn_factor" in (config.get("rope_scaling") or config.get("rope_parameters") or {}):
            logger.warning("config.json: attn_factor has no effect, as in transformers")
        if (path / _ADAPTER_FILE).exists():
            logger.warning("%s has no effect; the folder's own weights are used", _ADAPTER_FILE)
        parts = architecture, tokenizer, stored_tensors, quantisation, end_tokens
        eos = -1 if eos is None else eos
        return cls(*parts, eos, defaults, defaults_file, templates, special_tokens)

    def has(self, name: str) -> bool:
        """Return whether the checkpoint's files contain the weight with this name."""
        return "values" in self.quantisation.parts(name, self.stored_tensors)

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight with this name, dequantised, as float32."""
        parts = self.quantisation.parts(name, self.stored_tensors)
        tensors = {role: self._open(p.path).get_tensor(p.name) for role, p in parts.items()}
        if "scales" not in tensors:
            weight: torch.Tensor = tensors["values"].float()
            return weight
        shapes = self.architecture.weights()
        # A head that is tied to the embedding has no entry in `shapes`.
        return self.quantisation.dequantise(name, shapes.get(name) or shapes[_EMBEDDING], tensors)

    @cached_property
    def _handles(self) -> dict[Path, Any]:
        return {}

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = safe_open(path, "pt")
        return self._handles[path]

    def close(self) -> None:
        """Close the files of weights."""
        self._handles.clear()


def read_json(path: Path, problems: list[str], is_optional: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file, without invalid fields; add problems to `problems`.

    The object is empty if the file cannot be read. A file that `is_optional` may be missing.
    """
    if not path.exists():
        if not is_optional or path.is_symlink():
            problems.append(_describe_missing(path))
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return {}
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is not JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    _remove_invalid(value, path.name, problems)
    return value


def _remove_invalid(fields: dict[str, Any], document: str, problems: list[str]) -> None:
    """Remove the fields that do not have the types of `_FIELD_TYPES[document]`; report them."""
    for (types, allowed_text), names in _FIELD_TYPES.get(document, {}).items():
        for name in names.split():
            items = fields[name] if types is _IDS[0] and type(fields.get(name)) is list else ()
            is_valid = fields.get(name) is None or type(fields[name]) in types
            if not is_valid or any(type(item) is not int for item in items):
                value_text = clip(repr(fields.pop(name)))
                problems.append(f"{document}: {name}: {value_text} is not {allowed_text}")


def _describe_missing(path: Path) -> str:
    """Return the problem of a missing file, with the files that other programs read instead."""
    if path.is_symlink():
        return f"{path.name} is a symbolic link to a missing file"
    folder, patterns = path.parent, _ALTERNATIVES.get(path.name, ())
    files = {file for pattern in patterns for file in folder.glob(pattern)}
    names = sorted(str(file.relative_to(folder)) for file in files)
    found_text = f" (found instead: {_list_names(names)})" if names else ""
    return f"{path.name} is missing{found_text}"


def _add_pointers(path: Path, problems: list[str]) -> None:
    """Add a problem for the unreadable files that are Git LFS pointers."""
    files = [file for file in path.iterdir() if any(p.startswith(file.name) for p in problems)]
    pointer_names = [file.name for file in files if file.is_file() and _is_pointer(file)]
    if pointer_names:
        names = _list_names(sorted(pointer_names))
        problems.insert(0, f"Git LFS has not downloaded {names}; run git lfs pull")


def _is_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return content.read(len(_LFS_POINTER_START)) == _LFS_POINTER_START
    except OSError:  # the problem of the file already has the reason
        return False


def _read_tokenizer(
    path: Path, settings: dict[str, Any], config: dict[str, Any], problems: list[str]
) -> Tokenizer | None:
    """Return the tokenizer of a folder, or None; add problems to `problems`.

    As in transformers, special_tokens_map.json and added_tokens.json are read only if
    tokenizer_config.json has no `added_tokens_decoder`. The special tokens are added to `settings`.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        problems.append(_describe_missing(file))
        return None
    special_tokens_map, added_tokens = {}, {}
    if "added_tokens_decoder" not in settings:
        special_tokens_map = read_json(path / "special_tokens_map.json", problems, is_optional=True)
        added_tokens = read_json(path / "added_tokens.json", problems, is_optional=True)
    try:
        return load_tokenizer(file, settings, config, special_tokens_map, added_tokens)
    except InvalidArgument as error:
        problems.append(error.message)
    except Exception as error:  # the library raises a bare Exception
        problems.append(f"{file.name} cannot be read: {error}")
    return None


def _quantisation_config(path: Path, config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the quantization_config of config.json, or of the separate file of old checkpoints."""
    settings = config.get("quantization_config") or config.get("compression_config")
    for name, method in _QUANTISATION_FILES.items():
        if not settings:
            document = read_json(path / name, problems, is_optional=True)
            settings = {"quant_method": method, **document} if document else {}
    settings = settings or {}
    _remove_invalid(settings, "quantization_config", problems)
    return settings


def _read_headers(path: Path, problems: list[str]) -> dict[str, StoredTensor]:
    """Return the descriptions of the tensors in the files, by their names in a causal model.

    In files of a model without a head, the names lack the prefix `model.`.
    """
    problem_count, list_name = len(problems), _SINGLE_FILE
    if (path / _SINGLE_FILE).exists():
        shards = [_SINGLE_FILE]
    elif (path / _INDEX_FILE).exists():
        list_name = _INDEX_FILE
        weight_map = read_json(path / _INDEX_FILE, problems).get("weight_map") or {}
        shards = sorted({str(shard) for shard in weight_map.values()})
    else:
        problems.append(_describe_missing(path / _SINGLE_FILE))
        return {}
    weights: dict[str, StoredTensor] = {}
    for shard in shards:
        file_path = path / shard
        is_outside = Path(shard).is_absolute() or ".." in Path(shard).parts
        is_file_name = shard.isprintable() and not os.path.isdir(file_path)
        if list_name == _INDEX_FILE and (is_outside or not is_file_name):
            name_text = f"'{clip(shard)}'"
            problems.append(f"{_INDEX_FILE}: weight_map: {name_text} is not a file in the folder")
            continue
        try:
            # `safe_open` reports every file that it cannot open as missing.
            with file_path.open("rb"), safe_open(file_path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    tensor = file.get_slice(name)
                    shape = tuple(tensor.get_shape())
                    weights[name] = StoredTensor(file_path, name, shape, str(tensor.get_dtype()))
        except (OSError, SafetensorError) as error:
            # Clients see the error, and must not see paths of the server.
            error_text = getattr(error, "strerror", "") or str(error).replace(f": {file_path}", "")
            problems.append(f"{clip(shard)} cannot be read: {error_text}")
    if not weights and len(problems) == problem_count:
        problems.append(f"{list_name}: no tensors found")
    if "norm.weight" in weights:
        weights |= {f"model.{name}": tensor for name, tensor in weights.items()}
    return weights


def _check_weights(
    architecture: Architecture,
    quantisation: Quantisation,
    stored_tensors: dict[str, StoredTensor],
    problems: list[str],
) -> None:
    """Add missing and misfitting weights to `problems`; a tied embedding or head may be missing."""
    if not stored_tensors:
        return
    if architecture.layers > len(stored_tensors):  # limits the size of `expected_shapes`
        problems.append(
            f"config.json: num_hidden_layers: {architecture.layers} is more than the number of "
            f"weights in the files, {len(stored_tensors)}"
        )
        return
    expected_shapes = architecture.weights()
    if architecture.tied_embeddings and _HEAD in stored_tensors:
        expected_shapes[_HEAD] = expected_shapes[_EMBEDDING]
        stored_tensors.setdefault(_EMBEDDING, stored_tensors[_HEAD])
    missing_names: list[str] = []
    misfit_texts: list[str] = []
    for name, shape in expected_shapes.items():
        if "values" not in quantisation.parts(name, stored_tensors):
            missing_names.append(name)
        elif problem := quantisation.problem(name, shape, stored_tensors):
            misfit_texts.append(problem)
    if missing_names:
        problems.append(f"weights are missing: {_list_names(missing_names)}")
    if misfit_texts:
        problems.append(f"weights do not fit config.json: {_list_names(misfit_texts)}")


def _warn_unused_weights(
    architecture: Architecture, quantisation: Quantisation, stored_tensors: dict[str, StoredTensor]
) -> None:
    """Warn of weights that the architecture lacks; transformers ignores them with a warning, too.

    Some quantised folders have biases of zeros for all layers.
    """
    endings = (".weight",) if quantisation.method else (".weight", ".bias")
    known_names = {*architecture.weights(), _HEAD}
    unused_names = [
        name
        for name in stored_tensors
        if name.endswith(endings) and known_names.isdisjoint((name, f"model.{name}"))
    ]
    if unused_names:
        logger.warning("the architecture does not use the weights %s", _list_names(unused_names))


def _list_names(names: list[str]) -> str:
    excess = len(names) - _MAX_NAMED_WEIGHTS
    return ", ".join(names[:_MAX_NAMED_WEIGHTS]) + (f" and {excess} more" if excess > 0 else "")


def _warn_ineffective(defaults: dict[str, Any], file: str) -> None:
    """Warn of defaults of requests that only transformers supports."""
    for name in _IGNORED_DEFAULTS.split():
        neutral_number = 1 if name in _NEUTRAL_AT_ONE.split() else -1 if name.endswith("_id") else 0
        if defaults.get(name) not in (None, neutral_number, [], {}):
            logger.warning("%s: %s has no effect, as in vLLM", file, name)


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(token for token in ids if type(token) is int and token >= 0)


def _read_templates(path: Path, settings: dict[str, Any], problems: list[str]) -> dict[str, str]:
    """Return the chat templates by name.

    The templates are in .jinja files, else in tokenizer_config.json, else in chat_template.json.
    """
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in path.glob("additional_chat_templates/*.jinja")}
    templates: dict[str, str] = {}
    for name, file in files.items():
        try:
            templates[name] = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            if file.is_symlink():
                problems.append(_describe_missing(file))
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror}")
        except ValueError:
            problems.append(f"{file.name} is not UTF-8 text")
    setting, source = settings.get("chat_template"), "tokenizer_config.json"
    if not templates and not setting:
        source = "chat_template.json"
        setting = read_json(path / source, problems, is_optional=True).get("chat_template")
    if not templates and isinstance(setting, list):
        named_templates = [template for template in setting if isinstance(template, dict)]
        if len(named_templates) < len(setting):
            problems.append(f"{source}: chat_template: an item of the list is not an object")
        setting = {template.get("name"): template.get("template") for template in named_templates}
    if not templates and isinstance(setting, dict):
        if not all(isinstance(text, str) for item in setting.items() for text in item):
            problems.append(f"{source}: chat_template: a name or a template is not a string")
        return {str(name): str(template) for name, template in setting.items()}
    return templates or ({"default": str(setting)} if setting else {})


_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_PAGE_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPS_FILE = Path("/proc/self/maps")
_libc = ctypes.CDLL(None)

Range = tuple[int, int]  # the first address, and the address after the last


@contextmanager
def moved_to_huge_pages() -> Iterator[None]:
    """Move the memory that the `with` block has allocated to huge pages, as far as available.

    Weights on huge pages are read at twice the speed. Linux provides huge pages to programs that
    request them (madvise(2)); torch does not.
    """
    ranges_before = _private_memory()
    yield
    for begin, end in subtract_ranges(_private_memory(), ranges_before):
        _move_range(begin, end)


def subtract_ranges(ranges: Iterable[Range], excluded_ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield the parts of `ranges` that are not in `excluded_ranges`, whose ranges are sorted."""
    exclusions = list(excluded_ranges)
    for begin, end in ranges:
        for excluded_begin, excluded_end in exclusions:
            if begin < excluded_end and excluded_begin < end:
                if begin < excluded_begin:
                    yield begin, excluded_begin
                begin = excluded_end
        if begin < end:
            yield begin, end


def _private_memory() -> list[Range]:
    """Return the writable anonymous address ranges of this process."""
    ranges: list[Range] = []
    if _HUGE_PAGE_SIZE_FILE.exists():
        for line in _MAPS_FILE.read_text(encoding="utf-8", errors="replace").splitlines():
            addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
            if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                begin, end = addresses.split("-")
                ranges.append((int(begin, 16), int(end, 16)))
    return ranges


def _move_range(begin: int, end: int) -> None:
    """Move a range to huge pages, including later allocations in it.

    A kernel without support rejects the calls, and the pages are unchanged.
    """
    size = int(_HUGE_PAGE_SIZE_FILE.read_text(encoding="ascii"))
    begin, end = -(-begin // size) * size, end // size * size
    if begin < end:
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
