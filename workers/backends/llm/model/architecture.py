"""Architectures of decoder models: the validated config.json, and the shapes of the weights.

Llama, Mistral, Qwen2 (biases in q, k and v) and Qwen3 (a norm over each head of q and k) are one
model with options. Fields that config.json lacks have the defaults of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from shmserve.errors import clip
from shmserve.ipc.engine_settings import MAX_MODEL_LEN

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Defaults of fields that a config.json may omit, by family.
_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "max_window_layers": 28}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "qwen2": {**_QWEN, "sliding_window": 4096},
    "qwen3": {**_QWEN, "sliding_window": 4096, "head_dim": 128},
}
# The supported values of fields; the first one is the default.
_SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, None),
    "is_causal": (True, None),
}
_POSITIVE_INTEGERS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("max_position_embeddings", "num_key_value_heads", "head_dim"),
)
_OPTIONAL_FIELDS = ("num_key_value_heads", "head_dim")  # may be absent or null
_MAX_SIZE = (1 << 31) - 1
_MAX_NUMBER = 1e38  # numbers up to this one are finite as float32
# The required fields of each rope type. "dynamic" is supported up to the trained length, in which
# it equals "default".
_ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_ORIGINAL = "original_max_position_embeddings"  # before the scaling of positions
_YARN_KEYS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary position embedding: base `theta`, and the type of scaling with its parameters."""

    theta: float  # the base
    kind: str  # of scaling
    parameters: Mapping[str, float]  # of the scaling

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the rotation per position of each pair of a head, in radians.

        The result is float32 [head_dim / 2], computed as in transformers.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return frequencies / self.parameters["factor"]
        if self.kind == "yarn":
            return self._yarn_frequencies(head_dim)
        return self._llama3_frequencies(frequencies) if self.kind == "llama3" else frequencies

    @property
    def amplitude(self) -> float:
        """Return the factor that multiplies rotated queries and keys (YaRN; Peng et al., 2023)."""
        parameters = self.parameters
        if self.kind != "yarn" or "attention_factor" in parameters:
            return parameters.get("attention_factor", 1.0)
        log_factor = 0.1 * math.log(max(parameters["factor"], 1.0))
        mscale, mscale_all = parameters.get("mscale", 0.0), parameters.get("mscale_all_dim", 0.0)
        if mscale and mscale_all:
            return (mscale * log_factor + 1.0) / (mscale_all * log_factor + 1.0)
        return log_factor + 1.0

    def positions(self, original_positions: int) -> int:
        """Return the maximum number of positions, which a factor extends as in vLLM."""
        if self.kind not in ("linear", "yarn"):
            return original_positions
        length = self.parameters.get(_ORIGINAL, original_positions)
        return max(original_positions, int(length * self.parameters["factor"]))

    def _yarn_frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the frequencies of YaRN (Peng et al., 2023).

        Frequencies with few rotations in the original length are divided by the factor, frequencies
        with many rotations do not change, and the frequencies between are interpolated.
        """
        parameters, half = self.parameters, head_dim // 2
        rotations = (parameters.get("beta_fast") or 32.0, parameters.get("beta_slow") or 1.0)
        log_ratios = (math.log(parameters[_ORIGINAL] / (r * 2 * math.pi)) for r in rotations)
        low, high = (head_dim * log_ratio / (2 * math.log(self.theta)) for log_ratio in log_ratios)
        if parameters.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high += 0.001 if low == high else 0
        ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        powers = self.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        kept_share = 1 - ramp
        return 1.0 / (parameters["factor"] * powers) * (1 - kept_share) + 1.0 / powers * kept_share

    def _llama3_frequencies(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Divide low frequencies by the factor, keep high ones, and interpolate the others."""
        low, high = self.parameters["low_freq_factor"], self.parameters["high_freq_factor"]
        original_length = self.parameters["original_max_position_embeddings"]
        wavelength = 2 * math.pi / frequencies
        divided = frequencies / self.parameters["factor"]
        ramp = (original_length / wavelength - low) / (high - low)
        mixed_frequencies = (1 - ramp) * divided + ramp * frequencies
        is_low, is_high = wavelength > original_length / low, wavelength < original_length / high
        return torch.where(is_low, divided, torch.where(is_high, frequencies, mixed_frequencies))


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and the options of one model.

    Attributes:
        hidden: The size of the hidden states (`hidden_size`).
        intermediate: The size of the feed-forward part (`intermediate_size`).
        kv_heads: The number of key-value heads (`num_key_value_heads`).
        epsilon: The number added to the mean square in norms (`rms_norm_eps`).
        positions: The maximum length of a sequence.
        window: The maximum length of a sequence that no sliding window limits; 0: `positions`.
        tied_embeddings: Whether the head is the embedding (`tie_word_embeddings`).
        qkv_bias: Whether the projections of queries, keys and values have biases.
        output_bias: Whether the output projection of the attention has a bias.
        mlp_bias: Whether the feed-forward projections have biases.
    """

    family: str
    hidden: int
    intermediate: int
    layers: int  # number
    heads: int  # number
    kv_heads: int
    head_dim: int
    vocab_size: int
    epsilon: float
    positions: int
    window: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    rope: Rope

    @classmethod
    def of(cls, config: Mapping[str, Any], problems: list[str]) -> Self | None:
        """Return the architecture in config.json; None if problems were added to `problems`."""
        problem_count = len(problems)
        family = _find_family(config, problems)
        if not family:
            return None
        config = {**DEFAULTS[family], **config}
        for name in _POSITIVE_INTEGERS:
            size = config.get(name)
            is_absent = size is None and name in _OPTIONAL_FIELDS
            if not is_absent and (type(size) is not int or size < 1):
                problems.append(f"config.json: {name}: {size!r} is not a positive integer")
            elif size is not None and size > _MAX_SIZE:
                problems.append(f"config.json: {name}: {clip(repr(size))} exceeds {_MAX_SIZE}")
        epsilon = config.get("rms_norm_eps")
        if epsilon is not None and not 0 <= epsilon <= _MAX_NUMBER:
            problems.append(f"config.json: rms_norm_eps: {epsilon!r} is not a number >= 0")
        for name, values in _SUPPORTED_VALUES.items():
            if config.get(name, values[0]) not in values:
                problems.append(f"config.json: {name}: {config[name]!r} is not {values[0]!r}")
        if len(problems) > problem_count:
            return None
        rope = _read_rope(config, problems)
        positions = rope.positions(config["max_position_embeddings"])
        if positions > MAX_MODEL_LEN:
            problems.append(
                f"config.json: max_position_embeddings: the model has {positions} positions, more "
                f"than {MAX_MODEL_LEN}"
            )
        window = _get_window(family, config, positions, problems)
        if len(problems) > problem_count:
            return None
        heads = config["num_attention_heads"]
        has_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias", False))
        architecture = cls(
            family,
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            1e-6 if config.get("rms_norm_eps") is None else float(config["rms_norm_eps"]),
            positions,
            window,
            bool(config.get("tie_word_embeddings", False)),
            family == "qwen2" or has_bias,
            family != "qwen2" and has_bias,
            family == "llama" and bool(config.get("mlp_bias", False)),
            rope,
        )
        if heads % architecture.kv_heads:
            problems.append(
                f"config.json: num_key_value_heads: {architecture.kv_heads} does not divide "
                f"num_attention_heads, {heads}"
            )
        if architecture.head_dim % 2:
            problems.append(f"config.json: head_dim: {architecture.head_dim} is not an even number")
        return None if len(problems) > problem_count else architecture

    @property
    def head_norms(self) -> bool:
        """Return whether each head of q and k is normalised."""
        return self.family == "qwen3"

    @property
    def kv_floats_per_token(self) -> int:
        """Return the number of floats of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight by its name in the files."""
        hidden = self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.layers):
            for name, shape in self._layer_shapes().items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, intermediate = self.hidden, self.intermediate
        query_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (query_size, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv_size, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv_size, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, query_size, self.output_bias),
            "mlp.gate_proj": (intermediate, hidden, self.mlp_bias),
            "mlp.up_proj": (intermediate, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, intermediate, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{name}.bias"] = (rows,)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if self.head_norms:
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        return shapes | {f"{name}.weight": (size,) for name, size in norms.items()}


def _find_family(config: Mapping[str, Any], problems: list[str]) -> str:
    """Return the family named by `architectures` or, if there are none, by `model_type`."""
    names: list[str] = config.get("architectures") or []
    family = next((_FAMILIES[name] for name in map(str, names) if name in _FAMILIES), "")
    if not names and config.get("model_type") in DEFAULTS:
        family = config["model_type"]
    if not family:
        field, value = "architectures", ", ".join(map(str, names))
        allowed_names = ", ".join(_FAMILIES)
        if not names and config.get("model_type"):
            field, value, allowed_names = "model_type", config["model_type"], ", ".join(DEFAULTS)
        text = f"{clip(value) or 'nothing'} is not supported (supported: {allowed_names})"
        problems.append(f"config.json: {field}: {text}")
    return family


def _get_window(family: str, config: Mapping[str, Any], positions: int, problems: list[str]) -> int:
    """Return the size of the sliding window if it is smaller than `positions`, otherwise 0."""
    layer_types = config.get("layer_types") or []
    unsupported_types = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if unsupported_types:
        names = ", ".join(unsupported_types)
        text = f"config.json: layer_types: {clip(names)} is not supported, only full_attention"
        problems.append(text)
    window = config.get("sliding_window")
    has_window = family == "mistral"
    if family in ("qwen2", "qwen3") and not layer_types:
        is_window_used = (config["max_window_layers"] or 0) < config["num_hidden_layers"]
        has_window = bool(config.get("use_sliding_window")) and is_window_used
    if has_window and window is not None and window < positions:
        return max(int(window), 1)
    return 0


def _is_positive(number: Any) -> bool:
    return type(number) in (int, float) and 0 < number <= _MAX_NUMBER


def _read_rope(config: Mapping[str, Any], problems: list[str]) -> Rope:
    """Return the rope in `rope_parameters`, or in `rope_theta` and `rope_scaling`."""
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(field) or {}
    nested_names = ", ".join(name for name, value in scaling.items() if isinstance(value, dict))
    if nested_names:  # transformers ignores nested fields in these architectures
        text = f"config.json: {field}: {nested_names}: parameters of layer types are not supported"
        problems.append(text)
        return Rope(10_000.0, "default", {})
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0
    factor = scaling.get("partial_rotary_factor")
    if factor not in _SUPPORTED_VALUES["partial_rotary_factor"]:
        problems.append(f"config.json: {field}: partial_rotary_factor: {factor!r} is not 1.0")
    if kind not in _ROPE_FIELDS:
        allowed_names = ", ".join(_ROPE_FIELDS)
        text = f"config.json: {field}: {kind!r} is not supported (supported: {allowed_names})"
        problems.append(text)
        return Rope(10_000.0, "default", {})
    positions = config["max_position_embeddings"]
    original_length = config.get(_ORIGINAL) or scaling.get(_ORIGINAL) or positions
    scaling = {**scaling, "rope_theta": theta, _ORIGINAL: original_length}
    is_yarn = kind == "yarn"
    if is_yarn and scaling.get("factor", 0) is None and _is_positive(original_length):
        scaling["factor"] = positions / original_length
    required_fields = (*_ROPE_FIELDS[kind], *([_ORIGINAL] if is_yarn or kind == "llama3" else []))
    optional_fields = [name for name in _YARN_KEYS if is_yarn and scaling.get(name) is not None]
    fields = (*required_fields, *optional_fields)
    missing_fields = [name for name in required_fields if scaling.get(name) is None]
    if missing_fields:
        problems.append(f"config.json: {field}: {kind} needs {', '.join(missing_fields)}")
        return Rope(10_000.0, "default", {})
    for name in (*fields, "rope_theta"):
        number = scaling[name]
        is_flag = name == "truncate" and isinstance(number, bool)
        is_zero = type(number) in (int, float) and number == 0 and name in optional_fields
        if not (is_flag or is_zero or _is_positive(number)):
            text = f"{clip(repr(number))} is not a positive number"
            problems.append(f"config.json: {field}: {name}: {text}")
            return Rope(10_000.0, "default", {})
    if is_yarn and theta <= 1:
        problems.append(f"config.json: {field}: rope_theta: {theta} is not a number above 1")
    return Rope(float(theta), kind, {name: float(scaling[name]) for name in fields})
