"""The files of a model folder: tokens, texts and prompts equal those of transformers."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from shmserve.errors import InvalidArgument
from shmserve.workers.backends.llm.chat_template import ChatTemplate
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from tests.rigs.llm_rig import llm_rig
from tests.support import hf_folders
from tests.support.hf_folders import (
    END,
    config,
    save_weights,
    tokenizer_text,
    weights,
    write_folder,
)
from tests.support.pages import GUIDE
from tests.unit.workers.backends.llm.conftest import generate
from tests.unit.workers.backends.llm.test_checkpoint import edit

Folder = Callable[..., Path]
SETTINGS = "tokenizer_config.json"
SIZE = 320  # number of tokens of the tokenizer
MESSAGES = [{"role": "user", "content": "the fox"}, {"role": "model", "content": "é"}]


def token(content: str, **fields: Any) -> dict[str, Any]:
    flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return {"content": content, **dict.fromkeys(flags, False), **fields}


def edited_folder(tmp_path: Path, files: dict[str, dict[str, Any]]) -> Path:
    """Write a folder whose files have these fields besides their own."""
    path = write_folder(tmp_path / "m")
    for name, fields in files.items():
        edit(path, name, **fields)
    return path


def render(template: str, messages: Sequence[Any], **variables: Any) -> str:
    return ChatTemplate({"default": template}, {}).render({"messages": messages, **variables})


def spaced_tokenizer() -> str:
    """Return a tokenizer.json that represents spaces by U+2581, like that of Llama 2."""
    pieces = ["<unk>", "<s>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"thefox", "th", "the", "▁the", "fo", "fox", "▁fox"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x"), ("▁", "fox")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    normalized = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(normalized)
    replaced = [decoders.Replace("▁", " "), decoders.ByteFallback()]
    made.decoder = decoders.Sequence([*replaced, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<unk>", "<s>", END])
    return str(made.to_str())


TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PAD = {
    "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": END,
}  # fmt: skip
DIGITS = {
    "tokenizer.json": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                 "use_regex": True},
            ],
        }
    }
}  # fmt: skip
EXTRA_PROPERTIES = {
    SETTINGS: {
        "added_tokens_decoder": {
            "0": token(END, special=True),
            "1": token("<|user|>", special=True),
            "320": token("<think>", lstrip=True, rstrip=True),
        },
        "additional_special_tokens": ["<think>"],
    }
}
THINK_TOKENS = {"<think>": SIZE, "</think>": SIZE + 1}
FILES: dict[str, dict[str, dict[str, Any]]] = {
    "truncation": {"tokenizer.json": {"truncation": TRUNCATION}},
    "padding": {"tokenizer.json": {"padding": PAD}},
    "named token": {SETTINGS: {"pad_token": "[PAD]", "sep_token": "the"}},
    "null token": {SETTINGS: {"bos_token": None, "eos_token": None}},
    "extra tokens": {SETTINGS: {"additional_special_tokens": ["<x>", "<|user|>", "fox"]}},
    "extra tokens of transformers 5": {SETTINGS: {"extra_special_tokens": ["<x>", "fox"]}},
    "extra named tokens": {SETTINGS: {"extra_special_tokens": {"image_token": "<img>"}}},
    "named tokens in another order": {SETTINGS: {"pad_token": "<x>", "eos_token": "<y>",
        "bos_token": "[PAD]"}},
    "extra tokens of two files": {SETTINGS: {"additional_special_tokens": ["<x>"]},
        "special_tokens_map.json": {"additional_special_tokens": ["<y>"]}},
    "extra tokens of two files of transformers 5": {SETTINGS: {"extra_special_tokens": ["<x>"]},
        "special_tokens_map.json": {"extra_special_tokens": ["<y>"]}},
    "extra tokens beside named ones": {SETTINGS: {"extra_special_tokens": {"image_token": "<img>"},
        "additional_special_tokens": ["<x>"]},
        "special_tokens_map.json": {"additional_special_tokens": ["<y>"]}},
    "properties of an extra token": EXTRA_PROPERTIES,
    "properties of an extra token of Qwen2": {"config.json": {"model_type": "qwen2"},
        **EXTRA_PROPERTIES},
    "named tokens of a model": {
        SETTINGS: {"model_specific_special_tokens": {"image_token": "<img>"}}
    },
    "own named token": {SETTINGS: {"image_token": "<img>"}},
    "added_tokens_decoder": {SETTINGS: {"added_tokens_decoder": {"0": token(END, lstrip=True,
        rstrip=True), "320": token("<think>"), "321": token("</think>", special=True)}},
        "special_tokens_map.json": {"pad_token": "[PAD]"}, "added_tokens.json": {"<y>": 322}},
    "special_tokens_map.json": {"special_tokens_map.json": {"eos_token": "<|user|>",
        "pad_token": {"content": "[PAD]", "lstrip": True}}},
    "added_tokens.json": {"added_tokens.json": THINK_TOKENS,
        "special_tokens_map.json": {"pad_token": "<think>"}},
    "added_tokens.json beside an older list": {"added_tokens.json": {"<x>": SIZE, "<y>": SIZE + 1},
        "special_tokens_map.json": {"additional_special_tokens": ["<x>"], "bos_token": "<y>"}},
    "split_special_tokens": {SETTINGS: {"split_special_tokens": True}},
    "no effect": {SETTINGS: {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True,
        "clean_up_tokenization_spaces": True, "model_max_length": 3, "padding_side": "left",
        "truncation_side": "left"}},
    "LlamaTokenizer of bytes": {SETTINGS: {"tokenizer_class": "LlamaTokenizer"}},
    "GPT2Tokenizer": {SETTINGS: {"tokenizer_class": "GPT2TokenizerFast"}, **DIGITS},
    "GPTNeoXTokenizer": {SETTINGS: {"tokenizer_class": "GPTNeoXTokenizer"}, **DIGITS},
    "GPTNeoXTokenizer adds no tokens": {SETTINGS: {"tokenizer_class": "GPTNeoXTokenizerFast"},
        "tokenizer.json": {"post_processor": {"type": "BertProcessing", "sep": [END, 0],
        "cls": ["<|user|>", 1]}}},
    "the tokens of a class are in one list": {SETTINGS: {"tokenizer_class": "GPT2Tokenizer",
        "added_tokens_decoder": {"0": token(END), "2": token("<|model|>", special=True)}}},
    "GPT2Tokenizer has no padding token": {SETTINGS: {"tokenizer_class": "GPT2Tokenizer"},
        "tokenizer.json": {"padding": {**PAD, "pad_token": "[PAD]"}}},
    "GPT2Tokenizer ignores merges": {SETTINGS: {"tokenizer_class": "GPT2Tokenizer"},
        "tokenizer.json": {"model": {**json.loads(tokenizer_text())["model"],
        "ignore_merges": True}}},
    "GPT2Tokenizer has no suffix of words": {SETTINGS: {"tokenizer_class": "GPT2Tokenizer"},
        "tokenizer.json": {"model": {**json.loads(tokenizer_text())["model"],
        "end_of_word_suffix": "</w>"}}},
    "CohereTokenizer": {SETTINGS: {"tokenizer_class": "CohereTokenizerFast"}},
    "a class of config.json": {"config.json": {"tokenizer_class": "CohereTokenizer"}},
    "an unknown class": {SETTINGS: {"tokenizer_class": "OwnTokenizerFast"}},
    "Qwen2Tokenizer": {SETTINGS: {"tokenizer_class": "Qwen2Tokenizer"}},
    "a class has a padding token": {"tokenizer.json": {"padding": {**PAD, "pad_token": "[PAD]"}},
        "config.json": {"model_type": "qwen2"}},
    "Qwen2Tokenizer of a family": {"config.json": {"model_type": "qwen2"}, **DIGITS},
    "Qwen3 without a class": {"config.json": {"model_type": "qwen3"},
        SETTINGS: {"tokenizer_class": None, "add_prefix_space": True}},
    "Qwen3 with a class": {"config.json": {"model_type": "qwen3"}, **DIGITS},
}  # fmt: skip
MISTRAL = {
    "config.json": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": None,
    }
}
FIXED_MISTRAL: dict[str, dict[str, Any]] = {
    "config.json": {**MISTRAL["config.json"], "transformers_version": "4.57.0"},
    SETTINGS: {"fix_mistral_regex": True}}  # fmt: skip
MANY_TOKENS = {f"[{number}]": number for number in range(SIZE, 100_001)}
SPLITTERS: dict[str, dict[str, Any]] = {"bytes": {}, "Sequence": DIGITS["tokenizer.json"]}
for row, pre_tokenizer in SPLITTERS.items():
    model = json.loads(tokenizer_text())["model"]
    model["vocab"] |= MANY_TOKENS
    FILES[f"Mistral's fixed pattern: {row}"] = {
        **FIXED_MISTRAL, "tokenizer.json": {"model": model, **pre_tokenizer}
    }  # fmt: skip
    FILES[f"no fixed pattern: {row}"] = {**FIXED_MISTRAL, "tokenizer.json": pre_tokenizer}
SPACED_FILES: dict[str, dict[str, dict[str, Any]]] = {
    "as it is": {},
    "LlamaTokenizer": {SETTINGS: {"tokenizer_class": "LlamaTokenizer"}},
    "CodeLlamaTokenizer": {SETTINGS: {"tokenizer_class": "CodeLlamaTokenizer"}},
    "CodeLlamaTokenizer without prefix": {
        SETTINGS: {"tokenizer_class": "CodeLlamaTokenizer", "add_prefix_space": False}
    },
    "GemmaTokenizer": {SETTINGS: {"tokenizer_class": "GemmaTokenizerFast"}},
    "CohereTokenizer of spaces": {SETTINGS: {"tokenizer_class": "CohereTokenizer"}},
    "GPT2Tokenizer of spaces": {SETTINGS: {"tokenizer_class": "GPT2Tokenizer"}},
    "Qwen2 of spaces": {SETTINGS: {"tokenizer_class": "Qwen2Tokenizer"}},
    "legacy": {SETTINGS: {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}},
    "without prefix": {SETTINGS: {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}},
    "Mistral": {SETTINGS: {"tokenizer_class": "LlamaTokenizer", "legacy": False}, **MISTRAL},
}
TEXTS = (
    f" the fox , it 's{END}  the <think> x </think> [PAD] <x><y><img> fox",
    f"<|user|>the fox{END}\n",
    "it was 1234 times,\n\nnai\u0308ve  IT'S 😀",
)
NAMES = ("bos_token", "eos_token", "pad_token", "image_token", "additional_special_tokens")
TOKEN_TEMPLATE = "".join(f"{{{{ {name} is defined and {name} }}}} " for name in NAMES)


@pytest.mark.parametrize(
    ("spaces", "files"),
    [*((False, file) for file in FILES), *((True, file) for file in SPACED_FILES)],
)
def test_tokens_equal_those_of_transformers(tmp_path: Path, spaces: bool, files: str) -> None:
    path = write_folder(tmp_path / "m")
    if spaces:
        (path / "tokenizer.json").write_text(spaced_tokenizer())
    for name, fields in (SPACED_FILES if spaces else FILES)[files].items():
        edit(path, name, **fields)
    reference, own = AutoTokenizer.from_pretrained(path), Checkpoint.open(path)
    for text in TEXTS:
        for special in (False, True):
            ids = reference.encode(text, add_special_tokens=special)
            assert own.tokenizer.encode(text, add_special_tokens=special).ids == ids
            decoded_text = reference.decode(ids, skip_special_tokens=special)
            assert own.tokenizer.decode(ids, skip_special_tokens=special) == decoded_text
    reference.chat_template = TOKEN_TEMPLATE
    expected = reference.apply_chat_template(MESSAGES, tokenize=False)
    template = ChatTemplate({"default": TOKEN_TEMPLATE}, own.special_tokens)
    assert template.render({"messages": MESSAGES}) == expected


def unigram_tokenizer() -> str:
    """Return the tokenizer.json of a Unigram model, like that of T5."""
    pieces = [("<unk>", 0.0), ("▁the", -1.0), ("▁fox", -1.0), *((c, -5.0) for c in "▁thefox")]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return str(tokenizer.to_str())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("PreTrainedTokenizerFast", ""),
        ("LlamaTokenizer", "'LlamaTokenizer' with a tokenizer.json of Unigram is not supported"),
        ("GemmaTokenizerFast", "'GemmaTokenizer' with a tokenizer.json of Unigram is not"),
        ("T5Tokenizer", "'T5Tokenizer' is not supported, because that class replaces parts of"),
    ],
)
def test_classes_replacing_other_parts_are_refused(tmp_path: Path, name: str, problem: str) -> None:
    path = edited_folder(tmp_path, {SETTINGS: {"tokenizer_class": name}})
    (path / "tokenizer.json").write_text(unigram_tokenizer())
    if problem:
        with pytest.raises(InvalidArgument, match=f"tokenizer_class: {problem}"):
            Checkpoint.open(path)
    else:
        assert Checkpoint.open(path).tokenizer.encode("the fox").tokens == ["▁the", "▁fox"]


def test_each_field_in_the_guide_is_tested() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (GUIDE / "checkpoints.md").read_text(), re.MULTILINE)
    fields = {field for row in rows for field in re.findall(r"`([a-z_]+)`", row)}
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    tests += Path(hf_folders.__file__).read_text()
    assert {"quantization_config", "added_tokens_decoder"} <= fields
    assert not {field for field in fields if field not in tests}


@pytest.mark.parametrize(
    ("files", "end_tokens"),
    [
        ({}, (0,)),
        ({"generation_config.json": {"eos_token_id": [2, 1]}}, (2, 1, 0)),
        ({"generation_config.json": {"eos_token_id": [400, -1, 2, 2]}}, (2, 0)),
        ({"generation_config.json": {"eos_token_id": None}}, (0,)),
        ({SETTINGS: {"eos_token": "<|user|>"}}, (0, 1)),
        ({SETTINGS: {"eos_token": {"__type": "AddedToken", "content": "<|user|>"}}}, (0, 1)),
        ({SETTINGS: {"eos_token": None}}, (0,)),
        ({"special_tokens_map.json": {"eos_token": "<|model|>"}}, (0, 2)),
        ({SETTINGS: {"eos_token": "[new]"}}, (0,)),  # the model lacks this token
    ],
)
def test_end_tokens_come_from_the_model_and_the_tokenizer(
    tmp_path: Path, files: dict[str, dict[str, Any]], end_tokens: tuple[int, ...]
) -> None:
    assert Checkpoint.open(edited_folder(tmp_path, files)).end_tokens == end_tokens


def test_settings_of_no_effect_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_folder(tmp_path / "m")
    (path / "adapter_config.json").write_text("{}")
    ignored = {
        "forced_bos_token_id": 0, "max_length": 20, "min_new_tokens": 1, "no_repeat_ngram_size": 1,
        "num_return_sequences": 2, "stop_strings": ["sea"], "suppress_tokens": [7],
        "token_healing": True,
    }  # fmt: skip
    edit(path, "generation_config.json", num_beams=1, min_length=0, top_k=5, **ignored)
    edit(path, "config.json", rope_parameters={"rope_type": "default", "attn_factor": 1.2})
    unused = {"model.layers.0.mlp.up_proj.bias": torch.ones(1), "score.weight": torch.ones(1)}
    save_weights(path, weights(config()) | unused)
    Checkpoint.open(path)
    assert [record.getMessage() for record in caplog.records] == [
        *(f"generation_config.json: {name} has no effect, as in vLLM" for name in ignored),
        f"the architecture does not use the weights {', '.join(unused)}",
        "config.json: attn_factor has no effect, as in transformers",
        "adapter_config.json has no effect; the folder's own weights are used",
    ]


def test_max_new_tokens_limits_chats_that_set_no_limit(tmp_path: Path) -> None:
    path = edited_folder(tmp_path, {"generation_config.json": {"max_new_tokens": 3}})
    with llm_rig(tmp_path / "rig", path) as scheduler:
        limits: tuple[dict[str, Any], ...] = ({}, {"max_tokens": 1 << 24}, {"max_tokens": 5})
        for key, options in enumerate(limits):
            scheduler.prepare(key, text_input="the", **options)
            assert scheduler.prepared[key].max_tokens == (3, 3, 5)[key]


def test_a_special_token_is_a_stop_string(folder: Folder, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m")
    prompt = [9, 8, 7]
    expected = generate(folder(), prompt, max_new_tokens=30)
    stop_token = expected[12]
    stop_index = expected.index(stop_token)
    text = Tokenizer.from_str(tokenizer_text()).id_to_token(stop_token)
    edit(path, SETTINGS, additional_special_tokens=[text])
    with llm_rig(tmp_path / "rig", path) as scheduler:
        scheduler.add(1, input_ids=prompt, temperature=0, max_tokens=30, stop=[text])
        scheduler.generate(2, text_input=f"a{text}", temperature=0, max_tokens=2, stop="[none]")
        assert scheduler.responses[1][-1]["token_ids"] == expected[: stop_index + 1]
        assert scheduler.responses[1][-1]["finish_reason"] == ["stop"]
        assert text not in scheduler.responses[1][-1]["text_output"][0]
        assert scheduler.responses[2][-1]["finish_reason"] == ["length"]


def test_a_tokenizer_may_have_more_tokens_than_the_model(tmp_path: Path) -> None:
    path = edited_folder(tmp_path, {SETTINGS: {"pad_token": "[PAD]"}})
    with llm_rig(tmp_path / "rig", path) as scheduler:
        regex = {"type": "regex", "regex": "a{3}"}
        scheduler.add(1, text_input="the", temperature=0, max_tokens=9, response_format=regex)
        scheduler.prepare(2, text_input="the [PAD]", max_tokens=2)
        scheduler.run()
        assert scheduler.responses[1][-1]["text_output"] == ["aaa"]
        error = "'[PAD]' has the id 320, but the model's largest token is 319"
        assert error in scheduler.errors[2][1]


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kind", ["", "spaces", "begins"])
def test_a_part_of_a_long_text_has_the_same_tokens(
    tmp_path: Path, kind: str, side: str | None
) -> None:
    path = write_folder(tmp_path / "m")
    if kind == "spaces":
        (path / "tokenizer.json").write_text(spaced_tokenizer())
    if kind == "begins":
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(f"{END} $A", None, [(END, 0)])
        tokenizer.save(str(path / "tokenizer.json"))
    reference = AutoTokenizer.from_pretrained(path, truncation_side="left")
    words, solid = "the fox, it was 12 times " * 2000, "the" * 20_000
    with llm_rig(tmp_path / "rig", path) as scheduler:
        for key, text in enumerate((words, solid, f"{words}{solid}", f"{solid} {words}")):
            count = (50, 50, 2, 1)[key]
            limits: dict[str, Any] = {"truncate_prompt_tokens": count, "truncation_side": side}
            scheduler.prepare(key, text_input=text, max_tokens=2, **limits)
            expected = reference.encode(text, truncation=side is None, max_length=count)
            expected = expected[:count] if side == "right" else expected[-count:]
            assert np.frombuffer(scheduler.prepared[key].prompt, np.int32).tolist() == expected


ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TAGGED_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'model' %}{%- generation -%}{% set a = m.content %}"
    "{{ a }}{% endgeneration %}{% elif not loop.first %}{% continue %}{% else %}{{ m.content }}"
    "{% endif %}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{{ a is defined }}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "é<'>"}}}]
TEMPLATES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "roles": (ROLES, MESSAGES, {}),
    "tags": (TAGGED_TEMPLATE, MESSAGES, {}),
    "tojson": (
        "{{ tools | tojson }}{{ tools | tojson(indent=4) }}{{ tools | tojson(ensure_ascii=True) }}"
        "{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}"
        "{{ tools | tojson(indent='\\t') }}{{ tools | tojson(true, 2, (', ', ':'), true) }}",
        MESSAGES,
        {"tools": TOOLS},
    ),
    "filters": (
        "{{ messages | map(attribute='role') | join(',') | upper }}{{ ['b','a'] | sort | first }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a b' | title }}"
        "{{ {'a': 1} | items | list }}{{ ' x ' | trim }}{{ '%s' | format('y') }}{{ 3.7 | int }}"
        "{{ 'abc'[::-1] }}{{ 'a-b'.split('-')[1] }}{{ 'x'.startswith('x') }}{{ dict(a=2).a }}",
        MESSAGES,
        {},
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}"
        "{% endfor %}{{ ns.n }}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}"
        "{{ range(3) | list }}",
        MESSAGES,
        {},
    ),
    "absent": (
        "{{ tools is defined }}{{ tools is none }}{{ documents is none }}{{ messages[0].name is "
        "defined }}{{ messages[0].tool_calls is defined }}{{ add_generation_prompt }}",
        [{"role": "user", "content": "a", "tool_calls": None, "name": None}],
        {},
    ),
    "variables": ("{{ documents[0].text }}{{ enable_thinking }}{{ eos_token }}", MESSAGES,
        {"documents": [{"title": "t", "text": "d"}], "enable_thinking": False}),
    "reasoning": ("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}",
        [{"role": "assistant", "content": "a", "reasoning": "why"}], {}),
    "parts": ("{% for p in messages[0].content %}({{ p.text }}){% endfor %}",
        [{"role": "user", "content": [{"type": "text", "text": x} for x in "ab"]}], {}),
    "a text or parts": (
        "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}"
        "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}",
        [*MESSAGES, {"role": "user", "content": [{"type": "text", "text": x} for x in "ab"]}],
        {},
    ),
    "whitespace": ("  {% if true %}\n a\n  {% endif %}\n\n b \n", MESSAGES, {}),
    "continued": (ROLES + "<end>", MESSAGES, {"continue_final_message": True}),
    "continued and trimmed": ("{% for m in messages %}{{ m.content | trim }}.{% endfor %}",
        [*MESSAGES, {"role": "model", "content": "to be  "}], {"continue_final_message": True}),
    "an empty text continued": (ROLES, [{"role": "user", "content": ""}],
        {"continue_final_message": True}),
    "the last text of parts continued": (
        "{% for p in messages[0].content %}({{ p.text }}){% endfor %}",
        [{"role": "user", "content": [{"type": "text", "text": x} for x in "ab"]}],
        {"continue_final_message": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_those_of_transformers(folder: Folder, name: str) -> None:
    template, messages, options = TEMPLATES[name]
    reference, checkpoint = AutoTokenizer.from_pretrained(folder()), Checkpoint.open(folder())
    prompted = not options.get("continue_final_message")
    expected = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=prompted, **options
    )
    chat = ChatTemplate({"default": template}, checkpoint.special_tokens)
    assert chat.render({"messages": messages, **options}) == expected
    assert chat.render({"messages": messages, "chat_template_kwargs": options}) == expected


def test_a_text_becomes_a_part_if_a_template_takes_only_parts() -> None:
    parts = "{% for p in m['content'] %}{{ p.text }}{% endfor %}"
    assert render(f"{{% for m in messages %}}{parts}{{% endfor %}}", MESSAGES) == "the foxé"


WRITTEN = "{{ messages[0].tool_calls[0].function.arguments"
ARGUMENTS = "{% set a = messages[0].tool_calls[0]['function']['arguments'] %}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (WRITTEN + " }}", '{"a":  "é"}'),
        (WRITTEN + " + '|' }}", '{"a":  "é"}|'),
        (WRITTEN + " ~ '|' }}", '{"a":  "é"}|'),
        (ARGUMENTS + "{{ a }}", '{"a":  "é"}'),
        (WRITTEN + " | tojson }}", '{"a": "é"}'),
        (WRITTEN + ".a }}", "é"),
        (ARGUMENTS + "{{ a if a is string else a | tojson }}", '{"a": "é"}'),
        ("{% for k, v in messages[0].tool_calls[0].function.arguments | items %}{{ k }}{{ v }}"
         "{% endfor %}", "aé"),
        ("{{ '-' if messages[0].content is none else messages[0].content }}", "-"),
        ("{{ 'content' in messages[0] }}{{ messages[0].content is none }}", "FalseFalse"),
        # As in vLLM, a missing content beside calls is empty.
        ("{% for m in messages %}{{ m['content'] + '|' }}{% endfor %}", "|"),
        ("{% for p in messages[0].content %}({{ p.text }}){% endfor %}|", "|"),
    ],
)  # fmt: skip
def test_calls_have_the_form_that_a_template_requires(template: str, text: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":  "é"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render(template, [message]) == text


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_missing_arguments_are_an_empty_object(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    for template in (WRITTEN + " }}", WRITTEN + " | tojson }}"):
        assert render(template, [message]) == "{}"


NAME = "{% if m.role == 'tool' %}{{ m.name }}{% endif %}"
REJECTS = "{%- if not m.name is defined %}{{- raise_exception('no name') }}{%- endif %}"


@pytest.mark.parametrize(
    ("template", "tool_call_id", "text"),
    [(NAME, "b", ""), (REJECTS + NAME, "b", "g"), (REJECTS + NAME, "a", "f")],
)
def test_tools_are_named_if_a_template_rejects_messages_without_a_name(
    template: str, tool_call_id: str, text: str
) -> None:
    """Templates of Hermes require names, which clients of OpenAI's API do not send."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for call_id, name in (("a", "f"), ("b", "g"))
    ]
    messages = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": tool_call_id, "content": "1"},
    ]
    loop = f"{{% for m in messages[1:] %}}{template}{{% endfor %}}"
    assert render(loop, messages) == text


NAMED_TEMPLATES = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
NAMED_FILES = {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "A"}


@pytest.mark.parametrize(
    ("files", "options", "text"),
    [
        ({SETTINGS: NAMED_TEMPLATES}, {}, "D"),
        ({SETTINGS: NAMED_TEMPLATES}, {"tools": TOOLS}, "T"),
        ({SETTINGS: NAMED_TEMPLATES}, {"chat_template": "tool_use"}, "T"),
        ({SETTINGS: NAMED_TEMPLATES[1:]}, {"tools": TOOLS}, "T"),
        ({SETTINGS: {"default": "D", "tool_use": "T"}}, {"tools": TOOLS}, "T"),
        ({SETTINGS: NAMED_TEMPLATES, "chat_template.jinja": "J"}, {"tools": TOOLS}, "J"),
        (NAMED_FILES, {}, "J"),
        (NAMED_FILES, {"tools": TOOLS}, "A"),
        ({SETTINGS: None, "chat_template.json": '{"chat_template": "P"}'}, {}, "P"),
        ({SETTINGS: "S", "chat_template.json": '{"chat_template": "P"}'}, {}, "S"),
    ],
)
def test_one_of_several_templates_is_used(
    tmp_path: Path, files: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    path = write_folder(tmp_path / "m")
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        if name == SETTINGS:
            edit(path, name, chat_template=content)
        else:
            (path / name).write_text(content)
    checkpoint = Checkpoint.open(path)
    chat = ChatTemplate(checkpoint.templates, checkpoint.special_tokens)
    assert chat.render({"messages": MESSAGES, **options}) == text


@pytest.mark.parametrize(
    ("template", "messages", "variables", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, {}, "roles must alternate"),
        ("{{ 1 / 0 }}", MESSAGES, {}, "rejects them: division by zero"),
        ("{{ 1 | tojson(1, 2, none, true, 5) }}", MESSAGES, {}, "rejects them: "),
        (ROLES, [{"role": "user", "content": "\ud800"}], {},
         "messages: '\\ud800' is a half of a"),
        ("{{ messages.append(1) }}", MESSAGES, {}, "rejects them: "),
        ("{% nothing %}", MESSAGES, {}, "rejects them: Encountered unknown tag 'nothing'"),
        (ROLES, MESSAGES, {"chat_template": "x"},
         "chat_template: 'x' is unknown (allowed: default"),
        ("{# content #}", MESSAGES, {"continue_final_message": True},
         "does not render the last message"),
        ("{{ messages | tojson }}", MESSAGES, {"continue_final_message": True},
         "does not name the content"),
        (ROLES, [{"role": "user"}], {"continue_final_message": True}, "message has no content"),
        (ROLES, [{"role": "user", "content": [{"type": "image"}]}], {}, "'image' is not 'text'"),
    ],
)  # fmt: skip
def test_messages_that_a_template_refuses_are_an_error(
    template: str, messages: list[dict[str, Any]], variables: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render(template, messages, **variables)
    assert message in caught.value.message


def test_a_single_file_precedes_shards(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", shards=2)
    drawn_weights = weights(config(), seed=9)
    save_weights(path, drawn_weights)
    checkpoint = Checkpoint.open(path)
    assert torch.equal(checkpoint.weight("model.norm.weight"), drawn_weights["model.norm.weight"])


def test_shards_may_be_in_subfolders_but_not_outside(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", shards=2)
    expected = Checkpoint.open(path).weight("model.norm.weight")
    index = path / "model.safetensors.index.json"
    (path / "parts").mkdir()
    for file in path.glob("model-*"):
        file.rename(path / "parts" / file.name)
    text = index.read_text(encoding="utf-8")
    with pytest.raises(InvalidArgument) as caught:
        Checkpoint.open(path)
    assert "1.safetensors cannot be read: No such file or directory" in caught.value.message
    assert str(path) not in caught.value.message
    index.write_text(text.replace('"model-', '"parts/model-'), encoding="utf-8")
    assert torch.equal(Checkpoint.open(path).weight("model.norm.weight"), expected)
    for prefix in ("../m/parts/", f"{path}/parts/", r"\u0000", r"\ud800", r"\n"):
        index.write_text(text.replace('"model-', f'"{prefix}model-'), encoding="utf-8")
        with pytest.raises(InvalidArgument, match=r"weight_map: '.*' is not a file in the folder"):
            Checkpoint.open(path)
    for shard in ("", ".", "parts"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
        with pytest.raises(InvalidArgument, match=f"map: '{shard}' is not a file in the folder"):
            Checkpoint.open(path)


@pytest.mark.parametrize("index", [None, {}, {"weight_map": {}}, {"weight_map": None}])
def test_a_folder_without_tensors_is_refused(tmp_path: Path, index: Any) -> None:
    path = write_folder(tmp_path / "m")
    file = path / ("model.safetensors" if index is None else "model.safetensors.index.json")
    save_weights(path, {})
    if index is not None:
        (path / "model.safetensors").unlink()
        file.write_text(json.dumps(index))
    with pytest.raises(InvalidArgument, match=f"{file.name}: no tensors found"):
        Checkpoint.open(path)


def test_a_tied_model_may_have_either_weight_or_both(tmp_path: Path) -> None:
    drawn_weights = weights(config(tie_word_embeddings=True))
    embedding = drawn_weights["model.embed_tokens.weight"]
    head = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(3)) * 0.2
    cases = {
        "both": {**drawn_weights, "lm_head.weight": head},
        "head": {**drawn_weights, "lm_head.weight": embedding},
        "base": {name.removeprefix("model."): weight for name, weight in drawn_weights.items()},
    }
    del cases["head"]["model.embed_tokens.weight"]
    for name, tensors in cases.items():
        path = write_folder(tmp_path / name, tie_word_embeddings=True)
        save_weights(path, tensors)
        prompt = [5, 6, 7]
        expected = generate(path, prompt, max_new_tokens=8, eos_token_id=None)
        with llm_rig(tmp_path / f"rig-{name}", path) as scheduler:
            scheduler.generate(1, input_ids=prompt, temperature=0, max_tokens=8, ignore_eos=True)
            assert scheduler.responses[1][-1]["token_ids"] == expected, name
