"""Architectures of decoder models: the validated config.json, and the weights it implies.

Llama, Qwen2 (biases in q, k and v) and Qwen3 (a norm over each head of q and k) are one model with
options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
# The required numbers of each kind of rope scaling; "dynamic" is supported up to the trained
# length.
_SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


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
        return self._llama3(plain) if self.kind == "llama3" else plain

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
        known = len(problems)
        names: list[str] = config.get("architectures") or []
        family: str = next((_FAMILIES[name] for name in names if name in _FAMILIES), "")
        if not family:
            found = ", ".join(map(str, names)) or "nothing"
            allowed = ", ".join(_FAMILIES)
            problems.append(f"config.json: architectures: {found} is none of {allowed}")
        for name in _SIZES:
            if not isinstance(config.get(name), int) or config[name] < 1:
                size = config.get(name)
                problems.append(f"config.json: {name}: {size!r} is not a positive whole number")
        if config.get("hidden_act", "silu") != "silu":
            problems.append(f"config.json: hidden_act: {config['hidden_act']!r} is not 'silu'")
        if config.get("use_sliding_window"):
            problems.append("config.json: use_sliding_window: true is not known, only false")
        rope = _rope(config, problems)
        if len(problems) > known:
            return None
        heads = config["num_attention_heads"]
        made = cls._made(family, config, heads, rope)
        if heads % made.kv_heads or made.head_dim % 2:
            problems.append(
                f"config.json: {heads} heads do not share {made.kv_heads} key-value heads of size "
                f"{made.head_dim}"
            )
            return None
        return made

    @classmethod
    def _made(cls, family: str, config: Mapping[str, Any], heads: int, rope: Rope) -> Self:
        biased = bool(config.get("attention_bias", False))
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
            int(config.get("max_position_embeddings", 2048)),
            bool(config.get("tie_word_embeddings", False)),
            family == "qwen2" or biased,
            family != "qwen2" and biased,
            bool(config.get("mlp_bias", False)),
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
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, hidden)
        for layer in range(self.layers):
            for name, shape in self._layer().items():
                found[f"model.layers.{layer}.{name}"] = shape
        return found

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
        found: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns, biased) in linears.items():
            found[f"{name}.weight"] = (rows, columns)
            if biased:
                found[f"{name}.bias"] = (rows,)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if self.head_norms:
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        return found | {f"{name}.weight": (size,) for name, size in norms.items()}


def _rope(config: Mapping[str, Any], problems: list[str]) -> Rope:
    """Return the rope of either form of config.json.

    The forms are `rope_parameters`, or `rope_theta` and `rope_scaling`.
    """
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(field) or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if kind not in _SCALINGS:
        allowed = ", ".join(_SCALINGS)
        problems.append(f"config.json: {field}: {kind!r} is none of {allowed}")
        return Rope(theta, "default", {})
    missing = [name for name in _SCALINGS[kind] if not isinstance(given.get(name), (int, float))]
    if missing:
        problems.append(f"config.json: {field}: {kind} needs {', '.join(missing)}")
        return Rope(theta, "default", {})
    return Rope(theta, kind, {name: float(given[name]) for name in _SCALINGS[kind]})
