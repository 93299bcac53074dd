"""Model folders: all errors are reported together, missing settings completed."""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shmserve.errors import InvalidArgument
from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.model_spec import InstanceGroup, ModelSpec
from shmserve.workers.backends.llm import LlmBackend, engine_file
from shmserve.workers.backends.llm.chat_template import ChatTemplate
from shmserve.workers.backends.llm.engine_file import max_instances_per_device, with_default_sizes
from shmserve.workers.backends.llm.model.architecture import Architecture
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.parameters import parse
from tests.rigs.worker_rig import rig
from tests.support import users
from tests.support.hf_folders import config, save_weights, weights, write_folder

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("vocab_size", "max_position_embeddings", "num_key_value_heads", "head_dim"),
)
TRAINED_LENGTH = "original_max_position_embeddings"

Folder = Callable[..., Path]


def edit(path: Path, name: str, **fields: Any) -> None:
    """Change a JSON file of a folder."""
    file = path / name
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**settings, **fields}))


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("tokenizer_config.json", {"eos_token": ["x"]}, "eos_token: ['x'] is not a string or an"),
        ("tokenizer_config.json", {"additional_special_tokens": "<x>"}, "'<x>' is not a list"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "decoder: [] is not an object"),
        ("tokenizer_config.json", {"chat_template": ["x"]}, "an item of the list is not an object"),
        *(
            (name, {"chat_template": template}, text)
            for template, text in (
                (1, "chat_template: 1 is not a string, a list"),
                ([{"name": "default"}], "a name or a template is not a string"),
                ([{"template": "x"}], "a name or a template is not a string"),
                ({"default": 1}, "a name or a template is not a string"),
            )
            for name in ("tokenizer_config.json", "chat_template.json")
        ),
        ("special_tokens_map.json", {"pad_token": 5}, "pad_token: 5 is not a string or an object"),
        ("special_tokens_map.json", {"extra_special_tokens": 5}, "5 is not a list or an object"),
        ("generation_config.json", {"eos_token_id": "2"}, "'2' is not an integer or a list"),
        ("generation_config.json", {"eos_token_id": [0, "2"]}, "[0, '2'] is not an integer or a"),
        ("generation_config.json", {"max_new_tokens": "5"}, "max_new_tokens: '5' is not an int"),
    ],
)
def test_a_field_of_another_type_is_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], text: str
) -> None:
    path = write_folder(tmp_path / "m")
    if name == "chat_template.json":  # used only if tokenizer_config.json has no template
        edit(path, "tokenizer_config.json", chat_template=None)
    edit(path, name, **fields)
    with pytest.raises(InvalidArgument) as caught:
        Checkpoint.open(path)
    assert f"{name}: {next(iter(fields))}: " in caught.value.message
    assert text in caught.value.message


def test_all_mistakes_are_one_error(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m")
    drawn_weights = weights(config())
    del drawn_weights["model.norm.weight"]
    drawn_weights["lm_head.weight"] = torch.zeros(320, 31)
    save_weights(path, drawn_weights)
    (path / "tokenizer_config.json").write_text("{")
    (path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(InvalidArgument) as caught:
        Checkpoint.open(path)
    for part in (
        "weights are missing: model.norm.weight",
        "lm_head.weight has the shape [320, 31], expected [320, 32]",
        "tokenizer_config.json is not JSON",
        "generation_config.json is not JSON",
    ):
        assert part in caught.value.message
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]},
         "GPT2LMHeadModel is not supported (supported: LlamaForCausalLM"),
        ({"hidden_size": "x"}, "hidden_size: 'x' is not a positive integer"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads: '2' is not a positive integer"),
        ({"head_dim": 0}, "head_dim: 0 is not a positive integer"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is not a boolean"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: '1e-5' is not a number"),
        ({"rope_scaling": [1]}, "rope_scaling: [1] is not an object"),
        ({"architectures": "Llama"}, "architectures: 'Llama' is not a list"),
        ({"architectures": [{}]}, "architectures: {} is not supported (supported: Llama"),
        ({"rope_scaling": {"type": ["a"]}}, "rope_scaling: \"['a']\" is not supported"),
        ({"eos_token_id": "2"}, "eos_token_id: '2' is not an integer or a list"),
        ({"quantization_config": "gptq"}, "quantization_config: 'gptq' is not an object"),
        ({"quantization_config": {"quant_method": ["fp8"]}},
         "quantization_config: quant_method: ['fp8'] is not a string"),
        *(({"quantization_config": {"quant_method": "gptq", name: ["x"]}},
           f"quantization_config: {name}: ['x'] is not an object")
          for name in ("meta", "sparsity_config", "transform_config")),
        ({"architectures": None, "model_type": ["llama"]}, "model_type: ['llama'] is not a string"),
        ({"rope_parameters": {"rope_theta": "1"}}, "rope_theta: '1' is not a positive number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}},
         "rope_parameters: full_attention: parameters of layer types are not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 0}},
         "rope_scaling: factor: 0 is not a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": "32"}},
         "rope_scaling: beta_fast: '32' is not a positive number"),
        *(({name: 10**30}, f"{name}: {10**30} exceeds {2**31 - 1}") for name in SIZES),
        *(({name: True}, f"{name}: True is not a positive integer") for name in SIZES),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is more than the number of"),
        ({"max_position_embeddings": 10**9}, "the model has 1000000000 positions, more than"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: -1 is not a number >= 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: nan is not a number >= 0"),
        ({"rope_theta": 10**400}, "rope_theta: 1000000000"),
        ({"rope_scaling": {"type": "yarn", "factor": math.inf}}, "factor: inf is not a positive"),
        ({"rope_scaling": {"type": "linear", "factor": 1e30}}, "positions, more than 16777216"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}},
         "rope_theta: 1 is not a number above 1"),
        ({"rope_scaling": {"type": "yarn", "factor": None, TRAINED_LENGTH: "x"}},
         "rope_scaling: yarn needs factor"),
        ({"head_dim": 7}, "head_dim: 7 is not an even number"),
        ({"num_key_value_heads": 3},
         "num_key_value_heads: 3 does not divide num_attention_heads, 4"),
        ({"rope_scaling": {"type": "longrope"}},
         "rope_scaling: 'longrope' is not supported (supported: default"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: yarn needs factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: linear needs factor"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not 'silu'"),
        ({"is_causal": False}, "is_causal: False is not True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not 1.0"),
        ({"architectures": None, "model_type": "gpt2"},
         "model_type: gpt2 is not supported (supported: llama, mist"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types: sliding_attention is not supp"),
        ({"layer_types": ["\ud800\n"]}, r"layer_types: \ud800\n is not supported"),
        ({"architectures": ["\ud800\n"]}, r"architectures: \ud800\n is not supported"),
        ({"architectures": None, "model_type": "\ud800"}, r"model_type: \ud800 is not supported"),
    ],
)  # fmt: skip
def test_odd_checkpoints_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = write_folder(tmp_path / "m")
    edit(path, "config.json", **fields)
    with pytest.raises(InvalidArgument) as caught:
        Checkpoint.open(path)
    assert message in caught.value.message


@users.needs_users
def test_files_of_other_users_are_named() -> None:
    names = "config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"

    def error_of_opening() -> str:
        with pytest.raises(InvalidArgument) as caught:
            Checkpoint.open(path)
        return caught.value.message

    with tempfile.TemporaryDirectory() as folder:  # unlike `tmp_path`, other users may enter it
        path = write_folder(Path(folder))
        path.chmod(0o755)
        (path / "chat_template.jinja").write_text("x")
        for name in names:
            (path / name).chmod(0)
        message = users.as_user(users.ALICE, error_of_opening)
    for name in names:
        assert f"{name} cannot be read: Permission denied" in message
    assert folder not in message


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("llama", {"max_position_embeddings": ...}, {"positions": 2048}),
        ("qwen2", {"max_position_embeddings": ...}, {"positions": 32768}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, {"positions": 1024}),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4}}, {"positions": 2048}),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4, TRAINED_LENGTH: 128}},
         {"positions": 512}),
        ("llama", {TRAINED_LENGTH: 256, "rope_scaling": {"type": "yarn", "factor": 4}},
         {"positions": 1024}),
        ("qwen3", {"head_dim": ...}, {"head_dim": 128}),
        ("qwen3", {"head_dim": None}, {"head_dim": 8}),
        ("llama", {"num_key_value_heads": None}, {"kv_heads": 4}),
        ("mistral", {"sliding_window": 512}, {"window": 0}),
        ("mistral", {"sliding_window": 64}, {"window": 64}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
         {"window": 64}),
        ("llama", {"sliding_window": 4, "use_sliding_window": True}, {"window": 0}),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": False}, {"window": 0}),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True}, {"window": 0}),
        ("mistral", {"attention_bias": True, "sliding_window": None}, {"qkv_bias": False}),
        ("llama", {"hidden_act": "swish"}, {"family": "llama"}),
        ("llama", {"rms_norm_eps": None}, {"epsilon": 1e-6}),
    ],
)  # fmt: skip
def test_fields_have_the_effects_and_defaults_of_transformers(
    family: str, overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    fields = {key: value for key, value in config(family, **overrides).items() if value is not ...}
    problems: list[str] = []
    architecture = Architecture.of(fields, problems)
    assert architecture is not None, problems
    assert {key: getattr(architecture, key) for key in expected} == expected


def test_an_empty_configuration_is_refused(tmp_path: Path) -> None:
    (write_folder(tmp_path / "m") / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="json: architectures: nothing is not"):
        Checkpoint.open(tmp_path / "m")


def test_the_error_of_an_empty_folder_names_the_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Checkpoint.open(tmp_path)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert f"{name} is missing;" in f"{caught.value.message};"
    for name in ("adapter_model.safetensors", "tokenizer.model", "config.json/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tokenizer_config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    for name in ("generation_config.json", "chat_template.jinja"):
        (tmp_path / name).symlink_to("blob")
    with pytest.raises(InvalidArgument) as caught:
        Checkpoint.open(tmp_path)
    for problem in (
        "invalid: Git LFS has not downloaded tokenizer_config.json; run git lfs pull; config.json",
        "config.json cannot be read: Is a directory",
        "generation_config.json is a symbolic link to a missing file",
        "chat_template.jinja is a symbolic link to a missing file",
        "tokenizer.json is missing (found instead: tokenizer.model)",
        "model.safetensors is missing (found instead: adapter_model.safetensors)",
    ):
        assert problem in caught.value.message


def test_which_file_sets_the_template_and_the_end_tokens(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m")
    edit(path, "generation_config.json", eos_token_id=[0, 2], temperature=0.5)
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.end_tokens, checkpoint.defaults["temperature"]) == ((0, 2), 0.5)
    chat_request = {"messages": [{"role": "user", "content": "ä"}]}
    template = ChatTemplate(checkpoint.templates, checkpoint.special_tokens)
    assert template.render(chat_request) == "<|user|>ä<|end|><|model|>"
    (path / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}")
    own_checkpoint = Checkpoint.open(path)
    assert ChatTemplate(own_checkpoint.templates, {}).render(chat_request) == '"ä"'
    template = ChatTemplate({"default": "{{ ''.__class__.__mro__ }}"}, {})
    with pytest.raises(InvalidArgument, match="chat template rejects them"):
        template.render(chat_request)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_one_file_has_the_defaults_of_requests(tmp_path: Path, name: str) -> None:
    """As in transformers, config.json has them if there is no generation_config.json."""
    path = write_folder(tmp_path / "m")
    if name == "config.json":
        (path / "generation_config.json").unlink()
    edit(path, name, eos_token_id=[1], max_new_tokens=3, top_p="x")
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.end_tokens, checkpoint.defaults["max_new_tokens"]) == ((1, 0), 3)
    with pytest.raises(InvalidArgument, match=f"^{name}: top_p: 'x' is "):
        parse({}, checkpoint.defaults, 320, checkpoint.defaults_file)


def test_a_configuration_is_completed(folder: Folder, tmp_path: Path) -> None:
    with rig(tmp_path) as model_rig:
        model_rig.context.version_dir.rmdir()
        model_rig.context.version_dir.symlink_to(folder())
        settings = {"max_batch_size": 2, "block_size": 8, "swap_space_gb": 0.001}
        (model_rig.context.model_dir / "engine.yaml").write_text(yaml.safe_dump(settings))
        completed = LlmBackend(model_rig.context).complete_config({"name": "m", "backend": "llm"})
        spec = ModelSpec.of(completed)
        assert spec.decoupled and spec.max_batch_size == 0
        assert {tensor.name for tensor in spec.input if not tensor.optional} == set()
        found_settings = EngineSettings.read(spec.parameters["engine"])
        assert (found_settings.kv_cache_blocks, found_settings.max_model_len) == (2 * 64, 512)
        # Tokens * (keys and values) * layers * heads * head size * bytes per element.
        block_bytes = 8 * 2 * 2 * 2 * 8 * 4
        assert found_settings.swap_blocks == 1_000_000 // block_bytes
        completed_again = LlmBackend(model_rig.context).complete_config(completed)
        assert completed_again["parameters"] == completed["parameters"]
        (model_rig.context.model_dir / "engine.yaml").write_text("[1")
        with pytest.raises(InvalidArgument, match=r"engine.yaml:1:3: invalid YAML"):
            LlmBackend(model_rig.context).complete_config({"name": "m", "backend": "llm"})


def test_sizes_that_contradict_are_refused(folder: Folder) -> None:
    def max_model_len(architecture: Architecture, **settings: Any) -> int:
        return with_default_sizes(EngineSettings(**settings), architecture, "cpu", 1).max_model_len

    architecture = Checkpoint.open(folder()).architecture
    with pytest.raises(InvalidArgument, match="max_model_len: 513 is more than the 512"):
        max_model_len(architecture, max_model_len=513)
    assert max_model_len(architecture, kv_cache_blocks=3) == 48
    windowed = replace(architecture, window=64)
    with pytest.raises(InvalidArgument, match=r"_len: 512 is .* sliding_window .* most 64"):
        max_model_len(windowed)
    assert max_model_len(windowed, max_model_len=64) == 64


def test_instances_on_a_device_share_it(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = Checkpoint.open(folder()).architecture
    size = sum(math.prod(shape) for shape in architecture.weights().values()) * 4
    # Tokens * (keys and values) * layers * heads * head size * bytes per element.
    block = 16 * 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(engine_file, "_available_bytes", lambda _: 3 * size + 6 * 100 * block)
    gpus = InstanceGroup(kind="KIND_GPU", count=2, gpus=(0, 1))
    groups = (InstanceGroup(count=2), InstanceGroup(), gpus)
    assert max_instances_per_device(groups) == 3
    assert with_default_sizes(EngineSettings(), architecture, "cpu", 3).kv_cache_blocks == 100
    assert max_instances_per_device(groups[2:]) == 2
    assert max_instances_per_device([]) == 1


@pytest.mark.parametrize(
    ("engine", "fields", "message"),
    [
        ({}, {"max_batch_size": 4}, "max_batch_size: 4 is not 0"),
        ({"draft_model": "nothing"}, {}, "'nothing' is neither a model in the repository nor"),
        ({"draft_model": "other"}, {}, "'other' has a different vocabulary"),
    ],
)
def test_the_error_names_a_checkpoint_that_cannot_be_loaded(
    folder: Folder, tmp_path: Path, engine: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    write_folder(tmp_path / "other" / "2", vocab_size=330)
    with rig(tmp_path) as model_rig:
        model_rig.context.version_dir.rmdir()
        model_rig.context.version_dir.symlink_to(folder())
        if engine:
            engine = {"speculative_decoding": {"enabled": True, "method": "draft", **engine}}
        (model_rig.context.model_dir / "engine.yaml").write_text(yaml.safe_dump(engine))
        backend = LlmBackend(model_rig.context)
        completed = backend.complete_config({"name": "m", "backend": "llm", **fields})
        with pytest.raises(InvalidArgument) as caught:
            backend.load(ModelSpec.of(completed))
        assert message in caught.value.message
