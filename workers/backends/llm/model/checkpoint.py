"""Checkpoints: Hugging Face folders with their weights, tokenizer and defaults, checked together.

The page checkpoints.md of the guide lists the files and fields of a folder, with their effects.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
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

from shmserve.errors import InvalidArgument
from shmserve.workers.backends.llm.model.architecture import DEFAULTS, Architecture
from shmserve.workers.backends.llm.model.quantised import Quantisation, Stored

logger = logging.getLogger(__name__)

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# Settings of generation_config.json that neither this server nor vLLM supports.
_WITHOUT_EFFECT = (
    "bad_words_ids begin_suppress_tokens constraints encoder_no_repeat_ngram_size epsilon_cutoff "
    "eta_cutoff exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id "
    "guidance_scale min_length min_new_tokens no_repeat_ngram_size num_beams penalty_alpha "
    "sequence_bias stop_strings suppress_tokens top_h typical_p"
)
_GPT2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_SPM = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
# The classes of transformers that replace parts of any tokenizer.json, and their special tokens.
_CLASSES: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": {**_GPT2, "pad_token": "<|padding|>"},
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
    "LlamaTokenizer": _SPM,
    "CodeLlamaTokenizer": {
        **_SPM,
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
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Unsupported classes that replace parts of tokenizer.json.
_UNSUPPORTED_CLASSES = (
    "Albert Barthez Bert BigBird Blenderbot CLIP Camembert CodeGen Deberta DebertaV2 Esmc Funnel "
    "Herbert Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke MBart MBart50 MLuke MPNet MarkupLM Nllb "
    "Nougat OpenAIGPT Pegasus Qwen3_5 Reformer RemBert Roberta SeamlessM4T Siglip2 Splinter T5 "
    "Tipsv2 Udop VideoPrism Whisper XGLM XLMRoberta XLNet"
)
_SPACE = "\u2581"
_MAX_NAMED_WEIGHTS = 8  # maximum number of weights that one message names
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Files of older folders whose config.json has no quantization_config.
_QUANTISED = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True)
class Checkpoint:
    """An opened Hugging Face folder.

    Attributes:
        architecture: The architecture.
        tokenizer: The tokenizer.
        stored: The tensors in the files by name.
        quantisation: The quantisation of the weights.
        ends: The tokens that end a text.
        eos: The tokenizer's end token; -1 if it has none.
        defaults: The content of generation_config.json.
        templates: The chat templates by name; the usual one is "default".
        special: The texts of special tokens, for the templates.
    """

    architecture: Architecture
    tokenizer: Tokenizer
    stored: dict[str, Stored]
    quantisation: Quantisation
    end_tokens: tuple[int, ...]
    eos: int
    defaults: dict[str, Any] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    special: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the checkpoint in a folder. Raises InvalidArgument with all problems."""
        problems: list[str] = []
        config = _json(path / "config.json", problems)
        architecture = Architecture.of(config, problems) if config else None
        settings = _json(path / "tokenizer_config.json", problems, optional=True)
        tokenizer = _tokenizer(path, settings, config, problems)
        stored = _stored(path, problems)
        quantisation = Quantisation.of(_quantisation(path, config, problems), problems)
        defaults = _json(path / "generation_config.json", problems, optional=True)
        preset = DEFAULTS[architecture.family] if architecture and not defaults else {}
        end_tokens = _token_ids({**preset, **config, **defaults}.get("eos_token_id"))
        if architecture is not None:
            _check_weights(architecture, quantisation, stored, problems)
        templates = _templates(path, settings, problems)
        if problems:
            raise InvalidArgument(f"the model's folder is invalid: {'; '.join(problems)}")
        assert architecture is not None and tokenizer is not None
        special = _special(settings)
        eos = tokenizer.token_to_id(special.get("eos_token", ""))
        # The tokenizer may have more tokens than the model.
        known = (end for end in end_tokens + _token_ids(eos) if end < architecture.vocabulary)
        end_tokens = tuple(dict.fromkeys(known))
        _warn(defaults)
        parts = architecture, tokenizer, stored, quantisation
        return cls(*parts, end_tokens, -1 if eos is None else eos, defaults, templates, special)

    def has(self, name: str) -> bool:
        """Return whether the files have a weight."""
        return "values" in self.quantisation.parts(name, self.stored)

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight as float32."""
        parts = self.quantisation.parts(name, self.stored)
        stored = {
            role: self._opened(each.path).get_tensor(each.name) for role, each in parts.items()
        }
        if "scales" not in stored:
            plain: torch.Tensor = stored["values"].float()
            return plain
        shape = self.architecture.weights().get(name) or self.architecture.weights()[_EMBEDDING]
        return self.quantisation.dequantised(name, shape, stored)

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
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        problems.append(f"{path.name} is not JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    return value


def _tokenizer(
    path: Path, settings: dict[str, Any], config: dict[str, Any], problems: list[str]
) -> Tokenizer | None:
    """Return the tokenizer, with the tokens and the settings of the other files.

    `settings` receives the special tokens of special_tokens_map.json. As in transformers, that file
    and added_tokens.json count only if tokenizer_config.json has no `added_tokens_decoder`.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        problems.append(f"{file.name} is missing")
        return None
    extra = [
        {} if "added_tokens_decoder" in settings else _json(path / name, problems, optional=True)
        for name in ("special_tokens_map.json", "added_tokens.json")
    ]
    settings |= extra[0]
    try:
        tokenizer = Tokenizer.from_file(str(file))
        if tokenizer.padding:
            settings.setdefault("pad_token", tokenizer.padding["pad_token"])
        tokenizer.no_truncation()
        tokenizer.no_padding()
        kind = _tokenizer_class(settings, config)
        if problem := _class_problem(tokenizer, kind):
            problems.append(problem)
        elif kind in _CLASSES and not (kind == "LlamaTokenizer" and _is_byte_level(tokenizer)):
            _as_class(tokenizer, settings, kind)
        _add_tokens(tokenizer, settings, extra[1])
    except Exception as error:  # the library raises a bare Exception
        problems.append(f"{file.name} cannot be read: {error}")
        return None
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
    return tokenizer


def _tokenizer_class(settings: dict[str, Any], config: dict[str, Any]) -> str:
    """Return the name of the transformers class that would load a tokenizer."""
    family = config.get("model_type")
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if family == "mistral":
        return ""
    if family == "qwen2" or (family == "qwen3" and not named):
        return "Qwen2Tokenizer"
    return str(named).removesuffix("Fast")


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return "ByteLevel" in f"{tokenizer.decoder!r}{tokenizer.pre_tokenizer!r}"


def _class_problem(tokenizer: Tokenizer, kind: str) -> str:
    """Return why a tokenizer of a class cannot be used, or ""."""
    if kind in (f"{name}Tokenizer" for name in _UNSUPPORTED_CLASSES.split()):
        allowed = f"{', '.join(_CLASSES)}, PreTrainedTokenizerFast and unknown names"
        named = repr(kind)
    elif kind in _CLASSES and not isinstance(tokenizer.model, models.BPE):
        allowed = "PreTrainedTokenizerFast"
        named = f"{kind!r} with a tokenizer.json of {type(tokenizer.model).__name__}"
    else:
        return ""
    return (
        f"tokenizer_class: {named} is not supported, because that class replaces parts of "
        f"tokenizer.json (supported: {allowed})"
    )


def _as_class(tokenizer: Tokenizer, settings: dict[str, Any], kind: str) -> None:
    """Replace the parts that a class of transformers replaces in any tokenizer.json."""
    for name, text in _CLASSES[kind].items():
        settings.setdefault(name, text)
    model, prefixed = tokenizer.model, settings.get("add_prefix_space")
    spaces = kind in ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
    model.ignore_merges, model.fuse_unk, model.byte_fallback = False, spaces, spaces
    unknown = _content(settings["unk_token"])
    named = kind in ("CodeLlamaTokenizer", "GemmaTokenizer") and model.token_to_id(unknown)
    model.unk_token = None if named in (None, False) else unknown
    tokenizer.normalizer = None
    if not spaces:
        words = pre_tokenizers.ByteLevel(prefixed is True, use_regex=kind != "Qwen2Tokenizer")
        before: list[Any] = []
        if kind == "Qwen2Tokenizer":
            before = [pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated")]
        elif kind == "CohereTokenizer":
            before = [pre_tokenizers.Digits(individual_digits=True)]
        if kind != "GPT2Tokenizer":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, words])
        tokenizer.decoder = decoders.ByteLevel()
        return
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "GemmaTokenizer":
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        legacy = settings.get("legacy") and kind == "LlamaTokenizer"
        scheme = ("always" if legacy else "first") if prefixed is not False else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=False)
        if prefixed is not False or kind == "CodeLlamaTokenizer":
            parts.append(decoders.Strip(" ", 1))
        begin = _content(settings["bos_token"])
        number = tokenizer.token_to_id(begin)
        if number is not None and kind == "CodeLlamaTokenizer":
            tokenizer.post_processor = processors.TemplateProcessing(
                f"{begin} $A", f"{begin} $A {begin}:1 $B:1", [(begin, number)]
            )
    tokenizer.decoder = decoders.Sequence(parts)


def _add_tokens(tokenizer: Tokenizer, settings: dict[str, Any], added: dict[str, int]) -> None:
    """Add the tokens of tokenizer_config.json, and those of added_tokens.json."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        settings |= extra
        extra = []
    settings |= settings.get("model_specific_special_tokens") or {}
    named = {_content(each): each for each in (*map(settings.get, _special(settings)), *extra)}
    listed = tokenizer.get_added_tokens_decoder()
    by_text = {each.content: each for each in listed.values()}
    declared: dict[Any, Any] = settings.get("added_tokens_decoder") or {
        number: {"content": text, "special": text in named}
        for text, number in added.items()
        if number not in listed
    }
    tokens = {int(number): _added(each) for number, each in declared.items()}
    tokenizer.add_tokens([tokens[number] for number in sorted(tokens)])
    by_text |= {each.content: each for each in tokens.values()}
    tokenizer.add_special_tokens(
        [by_text.get(text) or _added(each) for text, each in named.items()]
    )


def _content(token: Any) -> str:
    return str(token.get("content") if isinstance(token, dict) else token)


def _added(token: Any) -> AddedToken:
    if not isinstance(token, dict):
        return AddedToken(str(token), normalized=False, special=True)
    return AddedToken(**{name: value for name, value in token.items() if name != "__type"})


def _quantisation(path: Path, config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the quantization_config, or the content of the file that older folders have."""
    settings = config.get("quantization_config") or config.get("compression_config")
    for name, method in _QUANTISED.items():
        if not settings:
            document = _json(path / name, problems, optional=True)
            settings = {"quant_method": method, **document} if document else {}
    return settings or {}


def _stored(path: Path, problems: list[str]) -> dict[str, Stored]:
    """Return the tensors in the files by their names in a causal model.

    Files of the model without its head lack the prefix `model.`.
    """
    if (path / _SINGLE).exists():
        shards = [_SINGLE]
    elif (path / _INDEX).exists():
        mapped = _json(path / _INDEX, problems).get("weight_map", {})
        shards = sorted({str(shard) for shard in mapped.values()})
    else:
        problems.append(f"{_SINGLE} is missing")
        return {}
    weights: dict[str, Stored] = {}
    for shard in shards:
        each = path / Path(shard).name
        try:
            with safe_open(each, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    part = file.get_slice(name)
                    shape = tuple(part.get_shape())
                    weights[name] = Stored(each, name, shape, str(part.get_dtype()))
        except (OSError, SafetensorError) as error:
            problems.append(f"{shard} cannot be read: {error}")
    if "norm.weight" in weights:
        weights |= {f"model.{name}": each for name, each in weights.items()}
    return weights


def _check_weights(
    architecture: Architecture,
    quantisation: Quantisation,
    stored: dict[str, Stored],
    problems: list[str],
) -> None:
    """Add missing and wrong weights to `problems`; a tied model may lack either of two weights."""
    expected = architecture.weights()
    if architecture.tied and _HEAD in stored:
        expected[_HEAD] = expected[_EMBEDDING]
        stored.setdefault(_EMBEDDING, stored[_HEAD])
    missing: list[str] = []
    wrong: list[str] = []
    for name, shape in expected.items():
        if "values" not in quantisation.parts(name, stored):
            missing.append(name)
        elif problem := quantisation.problem(name, shape, stored):
            wrong.append(problem)
    if stored and missing:
        problems.append(f"weights are missing: {_some(missing)}")
    if wrong:
        problems.append(f"weights do not fit config.json: {_some(wrong)}")


def _some(names: list[str]) -> str:
    omitted = len(names) - _MAX_NAMED_WEIGHTS
    return ", ".join(names[:_MAX_NAMED_WEIGHTS]) + (f" and {omitted} more" if omitted > 0 else "")


def _warn(defaults: dict[str, Any]) -> None:
    """Log the settings of generation_config.json that change texts only in transformers."""
    for name in _WITHOUT_EFFECT.split():
        if defaults.get(name) not in (None, 0, 1, [], {}, False):
            logger.warning("generation_config.json: %s has no effect, as in vLLM", name)


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(each for each in ids if type(each) is int and each >= 0)


def _templates(path: Path, settings: dict[str, Any], problems: list[str]) -> dict[str, str]:
    """Return the chat templates by name.

    Files precede tokenizer_config.json, and chat_template.json is the last choice.
    """
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in path.glob("additional_chat_templates/*.jinja")}
    templates: dict[str, str] = {}
    for name, file in files.items():
        try:
            templates[name] = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except ValueError:
            problems.append(f"{file.name} is not UTF-8 text")
    setting = settings.get("chat_template")
    if not templates and not setting:
        setting = _json(path / "chat_template.json", problems, optional=True).get("chat_template")
    if not templates and isinstance(setting, list):
        return {str(each.get("name")): str(each.get("template")) for each in setting}
    return templates or ({"default": str(setting)} if setting else {})


def _special(settings: dict[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens in tokenizer_config.json."""
    tokens: dict[str, str] = {}
    for name, value in settings.items():
        if name.endswith("_token") and isinstance(value, (str, dict)):
            tokens[name] = _content(value)
    return tokens
