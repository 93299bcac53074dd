"""The decoder of Llama, Qwen2 and Qwen3 in plain torch: one flat batch of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from shmserve.workers.backends.llm.model.architecture import Architecture
from shmserve.workers.backends.llm.model.attention import Attention, KvCache, Pass
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.linears import FEWEST_ROWS, Linear, make_linear


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; q, k and v are one linear, and so are gate and up."""

    before: torch.Tensor
    qkv: Linear
    head_norms: torch.Tensor | None  # [heads + KV heads, head size]
    output: Linear
    after: torch.Tensor
    gate_up: Linear
    down: Linear


class Transformer:
    """A model's weights on a device, and the pass of rows through them."""

    def __init__(self, checkpoint: Checkpoint, kind: str = "fp32", device: str = "cpu") -> None:
        self.architecture = checkpoint.architecture
        self.device = device
        self._checkpoint = checkpoint
        self._kind = kind
        self._embedding = self._weight("model.embed_tokens.weight")
        self.layers = [self._layer(number) for number in range(self.architecture.layers)]
        self._norm = self._weight("model.norm.weight")
        tied = self.architecture.tied
        self.head = make_linear(
            self._embedding if tied else self._weight("lm_head.weight"), None, kind
        )
        self._angles = _angles(self.architecture, device)
        checkpoint.close()

    @torch.inference_mode()
    def forward(
        self, rows: Pass, cache: KvCache, attention: Attention, wanted: list[int]
    ) -> torch.Tensor:
        """The logits of the `wanted` rows, float32 [wanted, vocabulary]; keys and values of all
        rows are in the cache then."""
        rows.pad(FEWEST_ROWS)
        tokens, positions, slots = rows.tensors()
        states = functional.embedding(tokens, self._embedding)
        cosines, sines = (table[positions].unsqueeze(1) for table in self._angles)
        for number, layer in enumerate(self.layers):
            queries = self._project(layer, number, states, cosines, sines, slots, cache)
            states = states + layer.output(attention.attend(queries, number, rows))
            inner = layer.gate_up(self._normed(states, layer.after))
            gate, up = inner.chunk(2, -1)
            states = states + layer.down(functional.silu(gate) * up)
        if not wanted:
            return states.new_empty(0, self.architecture.vocabulary)
        padded = wanted * FEWEST_ROWS if len(wanted) < FEWEST_ROWS else wanted
        logits = self.head(self._normed(states[padded], self._norm))
        return logits[: len(wanted)]

    def _project(
        self,
        layer: Layer,
        number: int,
        states: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        slots: torch.Tensor,
        cache: KvCache,
    ) -> torch.Tensor:
        """Queries [rows, heads, head size]; the keys and values go to the cache."""
        made = self.architecture
        both = made.heads + made.kv_heads
        projected = layer.qkv(self._normed(states, layer.before))
        projected = projected.view(len(states), -1, made.head_dim)
        turned, values = projected[:, :both], projected[:, both:]
        if layer.head_norms is not None:
            norm = functional.rms_norm(turned, (made.head_dim,), None, made.epsilon)
            turned = layer.head_norms * norm
        left, right = turned.chunk(2, -1)
        turned = torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)
        cache.write(number, turned[:, made.heads :], values, slots)
        return turned[:, : made.heads]

    def _normed(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states, weight.shape, weight, self.architecture.epsilon)

    # --- weights

    def _weight(self, name: str) -> torch.Tensor:
        return self._checkpoint.weight(name).to(self.device)

    def _linear(self, prefix: str, *names: str) -> Linear:
        weights = [self._weight(f"{prefix}.{name}.weight") for name in names]
        biased = f"{prefix}.{names[0]}.bias" in self.architecture.weights()
        bias = (
            torch.cat([self._weight(f"{prefix}.{name}.bias") for name in names]) if biased else None
        )
        return make_linear(torch.cat(weights), bias, self._kind)

    def _layer(self, number: int) -> Layer:
        made, prefix = self.architecture, f"model.layers.{number}"
        attention, inner = f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = None
        if made.head_norms:
            norms = torch.cat(
                [
                    self._weight(f"{attention}.q_norm.weight").expand(made.heads, -1),
                    self._weight(f"{attention}.k_norm.weight").expand(made.kv_heads, -1),
                ]
            )
        return Layer(
            self._weight(f"{prefix}.input_layernorm.weight"),
            self._linear(attention, "q_proj", "k_proj", "v_proj"),
            norms,
            self._linear(attention, "o_proj"),
            self._weight(f"{prefix}.post_attention_layernorm.weight"),
            self._linear(inner, "gate_proj", "up_proj"),
            self._linear(inner, "down_proj"),
        )


def _angles(made: Architecture, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, float32 [positions, head size / 2]."""
    positions = torch.arange(made.positions).float()
    angles = torch.outer(positions, made.rope.frequencies(made.head_dim))
    return angles.cos().to(device), angles.sin().to(device)
