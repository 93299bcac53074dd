"""The tokenizer of a Hugging Face folder, as transformers would load it.

Some classes of transformers replace parts of tokenizer.json, and all add tokens of other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

# The special tokens, in the order in which transformers adds them to a tokenizer.
SPECIAL_TOKEN_NAMES = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token"
_GPT2_TOKENS = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_SENTENCEPIECE_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
# The supported classes of transformers that replace parts of tokenizer.json, with their special
# tokens.
_SPECIAL_TOKENS: Mapping[str, Mapping[str, str | None]] = {
    "GPT2Tokenizer": {**_GPT2_TOKENS, "pad_token": None},
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


def load_tokenizer(
    file: Path,
    settings: dict[str, Any],
    config: dict[str, Any],
    special_tokens_map: dict[str, Any],
    added_tokens: dict[str, int],
) -> Tokenizer:
    """Load tokenizer.json, and apply the tokens and the settings of the other files.

    Args:
        file: The path of tokenizer.json.
        settings: The fields of tokenizer_config.json; receives the special tokens of other files.
        config: The fields of config.json.
        special_tokens_map: The fields of special_tokens_map.json.
        added_tokens: The tokens of added_tokens.json, with their numbers.

    Raises:
        InvalidArgument: The class of the tokenizer is not supported.
        Exception: The library cannot read the file, or add the tokens.
    """
    listed_tokens = _merge_special_tokens(settings, special_tokens_map)
    tokenizer = Tokenizer.from_file(str(file))
    padding = tokenizer.padding
    tokenizer.no_truncation()
    tokenizer.no_padding()
    kind = _tokenizer_class(settings, config)
    if problem := _class_problem(tokenizer, kind):
        raise InvalidArgument(problem)
    # transformers uses a byte-level tokenizer.json of a LlamaTokenizer unchanged.
    if kind in _SPECIAL_TOKENS and not (kind == "LlamaTokenizer" and _is_byte_level(tokenizer)):
        if settings.get("added_tokens_decoder"):  # replaces the tokens of tokenizer.json, too
            post_processor = tokenizer.post_processor
            tokenizer = Tokenizer(tokenizer.model)
            tokenizer.post_processor = post_processor
        _replace_parts(tokenizer, settings, kind)
    if padding:
        settings.setdefault("pad_token", padding["pad_token"])
    _add_tokens(tokenizer, settings, added_tokens, listed_tokens, kind)
    if settings.get("fix_mistral_regex") and config.get("model_type") == "mistral":
        _fix_mistral_pattern(tokenizer, str(config.get("transformers_version") or ""))
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
    return tokenizer


def special_tokens_of(settings: dict[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens in tokenizer_config.json by their names ("eos_token")."""
    tokens: dict[str, str] = {}
    for name in dict.fromkeys((*SPECIAL_TOKEN_NAMES.split(), *settings)):
        value = settings.get(name)
        if name.endswith("_token") and isinstance(value, (str, dict)):
            tokens[name] = _token_content(value)
    return tokens


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
    named_tokens = [settings[name] for name in special_tokens_of(settings)]
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
