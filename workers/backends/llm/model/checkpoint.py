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
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from shmserve.errors import InvalidArgument, clip
from shmserve.workers.backends.llm.model.architecture import DEFAULTS, Architecture
from shmserve.workers.backends.llm.model.quantised import Quantisation, StoredTensor

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
_GPT2_TOKENS = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_SENTENCEPIECE_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
# The supported classes of transformers that replace parts of tokenizer.json, with their special
# tokens.
_SPECIAL_TOKENS: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": _GPT2_TOKENS,
    "GPTNeoXTokenizer": {**_GPT2_TOKENS, "pad_token": "<|padding|>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "CohereTokenizer": {
        "unk_token": "<UNK>",
        "bos_token": "<BOS_TOKEN>",
        "pad_token": "<PAD>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "mask_token": "<MASK_TOKEN>",
        "cls_token": "<CLS>",
        "sep_token": "<SEP>",
    },
    "LlamaTokenizer": _SENTENCEPIECE_TOKENS,
    "CodeLlamaTokenizer": {
        **_SENTENCEPIECE_TOKENS,
        "prefix_token": "\u2581<PRE>",
        "middle_token": "\u2581<MID>",
        "suffix_token": "\u2581<SUF>",
        "eot_token": "\u2581<EOT>",
        "fill_token": "<FILL_ME>",
    },
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The pattern by which `fix_mistral_regex` replaces the wrong one of older Mistral folders.
_MISTRAL_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MIN_MISTRAL_TOKENS = 100_000  # transformers does not change smaller tokenizers
# Classes of transformers that replace parts of tokenizer.json, and are not supported.
_UNSUPPORTED_CLASSES = (
    "Albert Barthez Bert BigBird Blenderbot CLIP Camembert CodeGen Deberta DebertaV2 Esmc Funnel "
    "Herbert Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke MBart MBart50 MLuke MPNet MarkupLM Nllb "
    "Nougat OpenAIGPT Pegasus Qwen3_5 Reformer RemBert Roberta SeamlessM4T Siglip2 Splinter T5 "
    "Tipsv2 Udop VideoPrism Whisper XGLM XLMRoberta XLNet"
)
_SPACE_SYMBOL = "\u2581"
_LFS_POINTER_START = b"version https://git-lfs"  # in place of a file's content
_MAX_NAMED_WEIGHTS = 8  # maximum number of weights that one message names
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# The special tokens, in the order in which transformers adds them to a tokenizer.
_SPECIAL_TOKEN_NAMES = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token"
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
        _TOKEN: _SPECIAL_TOKEN_NAMES,
        _TEMPLATES: "chat_template",
    },
    "special_tokens_map.json": {
        _LIST: "additional_special_tokens",
        _TOKENS_FIELD: "extra_special_tokens",
        _TOKEN: _SPECIAL_TOKEN_NAMES,
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
        stored: The descriptions of the tensors in the files, by name.
        quantisation: The quantisation of the weights.
        end_tokens: The tokens that end a text.
        eos: The tokenizer's end token; -1 if it has none.
        defaults: The content of generation_config.json or, in older folders, of config.json.
        defaults_file: The name of the file with the defaults.
        templates: The chat templates by name; the name of an unnamed template is "default".
        special_tokens: The texts of special tokens by their names in templates ("eos_token").
    """

    architecture: Architecture
    tokenizer: Tokenizer
    stored: dict[str, StoredTensor]  # tensors in the files by name
    quantisation: Quantisation
    end_tokens: tuple[int, ...]  # tokens that end a text
    eos: int  # token; -1: none
    defaults: dict[str, Any] = field(default_factory=dict)  # of requests' parameters
    defaults_file: str = "generation_config.json"
    templates: dict[str, str] = field(default_factory=dict)  # chat templates by name
    special_tokens: dict[str, str] = field(default_factory=dict)  # texts by name ("eos_token")

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
        special_tokens = _special_tokens(settings)
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
        return "values" in self.quantisation.parts(name, self.stored)

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight with this name, dequantised, as float32."""
        parts = self.quantisation.parts(name, self.stored)
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
    """Return the tokenizer, with the tokens and the settings of the other files, or None.

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
    listed_tokens = _merge_special_tokens(settings, special_tokens_map)
    try:
        tokenizer = Tokenizer.from_file(str(file))
        if tokenizer.padding:
            settings.setdefault("pad_token", tokenizer.padding["pad_token"])
        tokenizer.no_truncation()
        tokenizer.no_padding()
        kind = _tokenizer_class(settings, config)
        if problem := _class_problem(tokenizer, kind):
            problems.append(problem)
        elif kind == "LlamaTokenizer" and _is_byte_level(tokenizer):
            pass  # transformers uses such a tokenizer.json unchanged
        elif kind in _SPECIAL_TOKENS:
            if settings.get("added_tokens_decoder"):  # replaces the tokens of tokenizer.json, too
                post_processor = tokenizer.post_processor
                tokenizer = Tokenizer(tokenizer.model)
                tokenizer.post_processor = post_processor
            _replace_parts(tokenizer, settings, kind)
        _add_tokens(tokenizer, settings, added_tokens, listed_tokens, kind)
        if settings.get("fix_mistral_regex") and config.get("model_type") == "mistral":
            _fix_mistral_pattern(tokenizer, str(config.get("transformers_version") or ""))
    except Exception as error:  # the library raises a bare Exception
        problems.append(f"{file.name} cannot be read: {error}")
        return None
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
    return tokenizer


def _merge_special_tokens(settings: dict[str, Any], special_map: dict[str, Any]) -> list[Any]:
    """Merge the special tokens of special_tokens_map.json into tokenizer_config.json's settings.

    Named tokens of special_tokens_map.json have precedence. The list `additional_special_tokens`,
    the older name of `extra_special_tokens`, is used if no file has a list by the present name.

    Returns:
        The unnamed special tokens that are also special in added_tokens.json, as in transformers.
    """
    older_tokens = settings.pop("additional_special_tokens", None)
    older_map_tokens = special_map.pop("additional_special_tokens", None)
    special_tokens = settings.pop("extra_special_tokens", None) or older_tokens
    map_tokens = special_map.pop("extra_special_tokens", None)
    settings |= special_map
    texts: list[Any] = []
    for tokens in (special_tokens, map_tokens):
        if isinstance(tokens, dict):
            settings |= tokens
        else:
            texts += tokens or []
    listed_tokens = texts
    if not isinstance(special_tokens, list) and not isinstance(map_tokens, list):
        texts = older_map_tokens or older_tokens or []
    settings |= settings.get("model_specific_special_tokens") or {}
    settings["extra_special_tokens"] = texts
    return listed_tokens


def _tokenizer_class(settings: dict[str, Any], config: dict[str, Any]) -> str:
    """Return the name of the transformers class that would load a tokenizer."""
    family = config.get("model_type")
    class_name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if family == "mistral":
        return ""
    if family == "qwen2" or (family == "qwen3" and not class_name):
        return "Qwen2Tokenizer"
    return str(class_name).removesuffix("Fast")


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return "ByteLevel" in f"{tokenizer.decoder!r}{tokenizer.pre_tokenizer!r}"


def _class_problem(tokenizer: Tokenizer, kind: str) -> str:
    """Return why a tokenizer that transformers loads as class `kind` is not supported, or ""."""
    if kind in (f"{name}Tokenizer" for name in _UNSUPPORTED_CLASSES.split()):
        allowed_classes = f"{', '.join(_SPECIAL_TOKENS)}, PreTrainedTokenizerFast and unknown names"
        class_name = repr(kind)
    elif kind in _SPECIAL_TOKENS and not isinstance(tokenizer.model, models.BPE):
        allowed_classes = "PreTrainedTokenizerFast"
        class_name = f"{kind!r} with a tokenizer.json of {type(tokenizer.model).__name__}"
    else:
        return ""
    return (
        f"tokenizer_class: {class_name} is not supported, because that class replaces parts of "
        f"tokenizer.json (supported: {allowed_classes})"
    )


def _replace_parts(tokenizer: Tokenizer, settings: dict[str, Any], kind: str) -> None:
    """Replace the parts of a tokenizer that the class `kind` of transformers replaces."""
    for name, text in _SPECIAL_TOKENS[kind].items():
        settings.setdefault(name, text)
    model, add_prefix = tokenizer.model, settings.get("add_prefix_space")
    is_spm = kind in ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
    model.ignore_merges, model.fuse_unk, model.byte_fallback = False, is_spm, is_spm
    model.continuing_subword_prefix = model.end_of_word_suffix = ""
    unk_token = _token_content(settings["unk_token"])
    unknown_id = kind in ("CodeLlamaTokenizer", "GemmaTokenizer") and model.token_to_id(unk_token)
    model.unk_token = None if unknown_id in (None, False) else unk_token
    tokenizer.normalizer = None
    if not is_spm:
        uses_regex = kind != "Qwen2Tokenizer"
        byte_level = pre_tokenizers.ByteLevel(add_prefix is True, use_regex=uses_regex)
        splits: list[Any] = []
        if kind == "Qwen2Tokenizer":
            splits = [pre_tokenizers.Split(Regex(_QWEN2_PATTERN), "isolated")]
        elif kind == "CohereTokenizer":
            splits = [pre_tokenizers.Digits(individual_digits=True)]
        if kind != "GPT2Tokenizer":
            tokenizer.normalizer = normalizers.NFC()
        if kind == "GPTNeoXTokenizer":
            tokenizer.post_processor = processors.TemplateProcessing("$A", "$A $B:1", [])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        return
    decoder_steps = [decoders.Replace(_SPACE_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "GemmaTokenizer":
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE_SYMBOL)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        is_legacy = settings.get("legacy") and kind == "LlamaTokenizer"
        prepend = ("always" if is_legacy else "first") if add_prefix is not False else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE_SYMBOL, prepend, split=False)
        if add_prefix is not False or kind == "CodeLlamaTokenizer":
            decoder_steps.append(decoders.Strip(" ", 1))
        bos = _token_content(settings["bos_token"])
        token = tokenizer.token_to_id(bos)
        if token is not None and kind == "CodeLlamaTokenizer":
            tokenizer.post_processor = processors.TemplateProcessing(
                f"{bos} $A", f"{bos} $A {bos}:1 $B:1", [(bos, token)]
            )
    tokenizer.decoder = decoders.Sequence(decoder_steps)


def _fix_mistral_pattern(tokenizer: Tokenizer, version: str) -> None:
    """Replace the pattern that divides a text into words.

    Folders that transformers 5 (`version`) or later has written have the right pattern.
    """
    splitter, is_old = tokenizer.pre_tokenizer, version.partition(".")[0] in "01234"
    if not is_old or splitter is None or tokenizer.get_vocab_size() <= _MIN_MISTRAL_TOKENS:
        return
    split = pre_tokenizers.Split(Regex(_MISTRAL_PATTERN), "isolated")
    if isinstance(splitter, pre_tokenizers.Sequence):
        splitter[0] = split
        return
    if isinstance(splitter, pre_tokenizers.Metaspace):
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, splitter])


def _add_tokens(
    tokenizer: Tokenizer,
    settings: dict[str, Any],
    added_tokens: dict[str, int],
    listed_tokens: list[Any],
    kind: str,
) -> None:
    """Add the tokens of tokenizer_config.json and of added_tokens.json."""
    named_tokens = [settings[name] for name in _special_tokens(settings)]
    extra = settings["extra_special_tokens"]
    texts = [_token_content(token) for token in (*named_tokens, *extra)]
    known_tokens = tokenizer.get_added_tokens_decoder()
    special_texts = {_token_content(token) for token in (*named_tokens, *listed_tokens)}
    declared_tokens: dict[Any, Any] = settings.get("added_tokens_decoder") or {
        number: {"content": text, "special": text in special_texts}
        for text, number in added_tokens.items()
        if number not in known_tokens
    }
    tokens = {int(number): _added_token(token) for number, token in declared_tokens.items()}
    tokenizer.add_tokens([tokens[number] for number in sorted(tokens)])
    if kind == "Qwen2Tokenizer":  # the class resets the properties of special tokens
        tokenizer.add_special_tokens([_added_token(text) for text in texts])
        return
    tokens_by_text = {t.content: t for t in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens(
        [tokens_by_text.get(_token_content(token)) or _added_token(token) for token in named_tokens]
        + [_added_token(token) for token in extra if _token_content(token) not in tokens_by_text]
    )


def _token_content(token: Any) -> str:
    return str(token.get("content") if isinstance(token, dict) else token)


def _added_token(token: Any) -> AddedToken:
    if not isinstance(token, dict):
        return AddedToken(str(token), normalized=False, special=True)
    return AddedToken(**{name: value for name, value in token.items() if name != "__type"})


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
    omitted = len(names) - _MAX_NAMED_WEIGHTS
    return ", ".join(names[:_MAX_NAMED_WEIGHTS]) + (f" and {omitted} more" if omitted > 0 else "")


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

    They are in .jinja files, else in tokenizer_config.json, else in chat_template.json.
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


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens in tokenizer_config.json by their names ("eos_token")."""
    tokens: dict[str, str] = {}
    for name in dict.fromkeys((*_SPECIAL_TOKEN_NAMES.split(), *settings)):
        value = settings.get(name)
        if name.endswith("_token") and isinstance(value, (str, dict)):
            tokens[name] = _token_content(value)
    return tokens


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


def subtract_ranges(ranges: Iterable[Range], excluded: Iterable[Range]) -> Iterator[Range]:
    """Yield the parts of `ranges` that are not in `excluded`, whose ranges are sorted."""
    exclusions = list(excluded)
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
