"""Architectures of decoder models: the validated config.json, and the weights it implies.

Llama, Mistral, Qwen2 (biases in q, k and v) and Qwen3 (a norm over each head of q and k) are one
model with options. Fields that config.json lacks have the defaults of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
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
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, None),
    "is_causal": (True, None),
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
# The required numbers of each kind of rope scaling; "dynamic" is supported up to the trained
# length.
_SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_TRAINED = "original_max_position_embeddings"
_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary position embedding: base `theta`, and the kind of scaling with its numbers."""

    theta: float
    kind: str
    numbers: Mapping[str, float]

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the angle per position of each pair of a head, float32 [head_dim / 2].

        The computation is that of transformers.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        plain = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return plain / self.numbers["factor"]
        if self.kind == "yarn":
            return self._yarn(head_dim)
        return self._llama3(plain) if self.kind == "llama3" else plain

    @property
    def amplitude(self) -> float:
        """Return the factor of rotated queries and of rotated keys."""
        numbers = self.numbers
        if self.kind != "yarn" or "attention_factor" in numbers:
            return numbers.get("attention_factor", 1.0)
        logarithm = 0.1 * math.log(max(numbers["factor"], 1.0))
        numerator, under = numbers.get("mscale", 0.0), numbers.get("mscale_all_dim", 0.0)
        if numerator and under:
            return (numerator * logarithm + 1.0) / (under * logarithm + 1.0)
        return logarithm + 1.0

    def positions(self, trained: int) -> int:
        """Return the number of positions, which a factor extends as in vLLM."""
        if self.kind not in ("linear", "yarn"):
            return trained
        return max(trained, int(self.numbers.get(_TRAINED, trained) * self.numbers["factor"]))

    def _yarn(self, size: int) -> torch.Tensor:
        """Divide frequencies with few rotations by the factor, with a ramp between."""
        numbers, half = self.numbers, size // 2
        rotations = (numbers.get("beta_fast") or 32.0, numbers.get("beta_slow") or 1.0)
        low, high = (
            size
            * math.log(numbers[_TRAINED] / (rotation * 2 * math.pi))
            / (2 * math.log(self.theta))
            for rotation in rotations
        )
        if numbers.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high += 0.001 if low == high else 0
        ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        spread = self.theta ** (torch.arange(0, size, 2).float() / size)
        keep = 1 - ramp
        return 1.0 / (numbers["factor"] * spread) * (1 - keep) + 1.0 / spread * keep

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Divide low frequencies by the factor and keep high ones, with a ramp between."""
        low, high = self.numbers["low_freq_factor"], self.numbers["high_freq_factor"]
        trained = self.numbers["original_max_position_embeddings"]
        wavelength = 2 * math.pi / plain
        divided = plain / self.numbers["factor"]
        ramp = (trained / wavelength - low) / (high - low)
        mixed = (1 - ramp) * divided + ramp * plain
        slow, fast = wavelength > trained / low, wavelength < trained / high
        return torch.where(slow, divided, torch.where(fast, plain, mixed))


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and the options of one model."""

    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    epsilon: float
    positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    inner_bias: bool
    rope: Rope

    @classmethod
    def of(cls, config: Mapping[str, Any], problems: list[str]) -> Self | None:
        """Return the architecture in config.json, or None after adding to `problems`."""
        problem_count = len(problems)
        family = _family(config, problems)
        if not family:
            return None
        config = {**DEFAULTS[family], **config}
        for name in _SIZES:
            if not isinstance(config.get(name), int) or config[name] < 1:
                size = config.get(name)
                problems.append(f"config.json: {name}: {size!r} is not a positive integer")
        for name, allowed in _SUPPORTED.items():
            if config.get(name, allowed[0]) not in allowed:
                problems.append(f"config.json: {name}: {config[name]!r} is not {allowed[0]!r}")
        if len(problems) > problem_count:
            return None
        rope = _rope(config, problems)
        positions = rope.positions(config["max_position_embeddings"])
        _check_windows(family, config, positions, problems)
        if len(problems) > problem_count:
            return None
        heads = config["num_attention_heads"]
        architecture = cls._build(family, config, heads, positions, rope)
        if heads % architecture.kv_heads:
            problems.append(
                f"config.json: num_key_value_heads: {architecture.kv_heads} does not divide "
                f"num_attention_heads, {heads}"
            )
        if architecture.head_dim % 2:
            problems.append(f"config.json: head_dim: {architecture.head_dim} is not an even number")
        return None if len(problems) > problem_count else architecture

    @classmethod
    def _build(
        cls, family: str, config: Mapping[str, Any], heads: int, positions: int, rope: Rope
    ) -> Self:
        biased = family in ("llama", "qwen3") and bool(config.get("attention_bias", False))
        return cls(
            family,
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            float(config.get("rms_norm_eps", 1e-6)),
            positions,
            bool(config.get("tie_word_embeddings", False)),
            family == "qwen2" or biased,
            family != "qwen2" and biased,
            family == "llama" and bool(config.get("mlp_bias", False)),
            rope,
        )

    @property
    def head_norms(self) -> bool:
        """Return whether each head of q and k is normalised."""
        return self.family == "qwen3"

    @property
    def kv_floats(self) -> int:
        """Return the number of floats of keys and values per token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight by its name in the files."""
        hidden = self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, hidden)
        for layer in range(self.layers):
            for name, shape in self._layer().items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        return shapes

    def _layer(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden, self.inner
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, queries, self.output_bias),
            "mlp.gate_proj": (inner, hidden, self.inner_bias),
            "mlp.up_proj": (inner, hidden, self.inner_bias),
            "mlp.down_proj": (hidden, inner, self.inner_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns, biased) in linears.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{name}.bias"] = (rows,)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if self.head_norms:
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        return shapes | {f"{name}.weight": (size,) for name, size in norms.items()}


def _family(config: Mapping[str, Any], problems: list[str]) -> str:
    """Return the family by `architectures` or, if there are none, by `model_type`."""
    names: list[str] = config.get("architectures") or []
    family = next((_FAMILIES[name] for name in names if name in _FAMILIES), "")
    if not names and config.get("model_type") in DEFAULTS:
        family = config["model_type"]
    if not family:
        field, value = "architectures", ", ".join(map(str, names))
        allowed = ", ".join(_FAMILIES)
        if not names and config.get("model_type"):
            field, value, allowed = "model_type", config["model_type"], ", ".join(DEFAULTS)
        problems.append(
            f"config.json: {field}: {value or 'nothing'} is not supported (supported: {allowed})"
        )
    return family


def _check_windows(
    family: str, config: Mapping[str, Any], positions: int, problems: list[str]
) -> None:
    """Add a problem if the attention of a layer is limited to a window of positions."""
    types = config.get("layer_types") or []
    unsupported = sorted({str(each) for each in types} - {"full_attention"})
    if unsupported:
        listed = ", ".join(unsupported)
        problems.append(f"config.json: layer_types: {listed} is not supported, only full_attention")
    window = config.get("sliding_window")
    slides = family == "mistral"
    if family in ("qwen2", "qwen3") and not types:
        first = config["max_window_layers"] or 0
        slides = bool(config.get("use_sliding_window")) and first < config["num_hidden_layers"]
    if slides and window is not None and window < positions:
        problems.append(
            f"config.json: sliding_window: {window} is less than the {positions} positions of the "
            "model; supported are layers without a window (null)"
        )


def _rope(config: Mapping[str, Any], problems: list[str]) -> Rope:
    """Return the rope of either form of config.json.

    The forms are `rope_parameters`, or `rope_theta` and `rope_scaling`.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(field) or {}
    scaling = scaling.get("full_attention", scaling)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    part = scaling.get("partial_rotary_factor")
    if part not in _SUPPORTED["partial_rotary_factor"]:
        problems.append(f"config.json: {field}: partial_rotary_factor: {part!r} is not 1.0")
    if kind not in _SCALINGS:
        allowed = ", ".join(_SCALINGS)
        problems.append(f"config.json: {field}: {kind!r} is not supported (supported: {allowed})")
        return Rope(theta, "default", {})
    positions = config["max_position_embeddings"]
    trained = config.get(_TRAINED) or scaling.get(_TRAINED) or positions
    scaling = {**scaling, _TRAINED: trained}
    if kind == "yarn" and scaling.get("factor") is None and "factor" in scaling:
        scaling["factor"] = positions / trained
    required = (*_SCALINGS[kind], *([_TRAINED] if kind in ("llama3", "yarn") else []))
    missing = [name for name in required if not isinstance(scaling.get(name), (int, float))]
    if missing:
        problems.append(f"config.json: {field}: {kind} needs {', '.join(missing)}")
        return Rope(theta, "default", {})
    optional = [name for name in _OPTIONAL if kind == "yarn" and scaling.get(name) is not None]
    return Rope(theta, kind, {name: float(scaling[name]) for name in (*required, *optional)})
