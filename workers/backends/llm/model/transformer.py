"""The decoder of Llama, Mistral, Qwen2 and Qwen3 in plain torch: one flat batch of rows.

Its linear layers are packed for oneDNN, int8 or plain on CPUs, and plain with 32 or 16 bits
elsewhere. Packed weights are twice as fast as plain ones for 2 to 32 rows. They also give each row
the same bits, whatever rows are computed with it, as long as it is not alone: a single row has its
own kernel. The kernel for four to six rows is the fastest, so fewer rows are padded. The underlying
operators are not part of torch's public interface, so each is tested before use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from shmserve.workers.backends.llm.model.architecture import Architecture
from shmserve.workers.backends.llm.model.attention import Attend, Attention, KvCache, Pass
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint

FEWEST_ROWS = 4
_PACKED_FOR_ROWS = 16
_SMALLEST = 1e-8  # the minimum of a scale
MAX_ROWS = 256  # maximum rows of one call; kernels for more rows give other bits

Linear = Callable[[torch.Tensor], torch.Tensor]


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, kind: str = "fp32") -> Linear:
    """Return the fastest linear layer for a float32 weight [out, in] on its device.

    The layer maps rows [M, in] to [M, out].
    """
    if kind == "bf16":
        return _half(weight, bias)
    if weight.device.type != "cpu":
        return functools.partial(functional.linear, weight=weight, bias=bias)
    if kind == "int8":
        return _int8(weight, bias)
    return _packed(weight, bias) if can_pack() else _plain(weight, bias)


@functools.cache
def can_pack() -> bool:
    """Check whether packed weights work on this host.

    Their results must equal those of plain weights, and rows must not depend on their neighbours.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    rows = torch.randn(19, 64, generator=generator)
    try:
        layer = _packed(weight, weight[:, 0].contiguous())
        output, few = layer(rows), layer(rows[:FEWEST_ROWS])
    except Exception:  # the operator is missing, or has other arguments
        return False
    expected = functional.linear(rows, weight, weight[:, 0])
    close = torch.allclose(output, expected, rtol=1e-4, atol=1e-4)
    return close and torch.equal(output[:FEWEST_ROWS], few)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    operators: Any = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
    multiply = operators._linear_pointwise.default

    def layer(rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]  # `rows.shape[0]`, because `len` is slower
        if count <= MAX_ROWS:
            product: torch.Tensor = multiply(rows, packed, bias, "none", [], "")
            return product
        return torch.cat([layer(part) for part in rows.tensor_split(-(-count // MAX_ROWS))])

    return layer


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    columns = weight.t().contiguous()

    def layer(rows: torch.Tensor) -> torch.Tensor:
        product = rows @ columns
        return product if bias is None else product + bias

    return layer


def _half(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Return a layer with weights and rows of 16 bits, whose products are summed in 32 bits."""
    halves = weight.bfloat16()
    half_bias = None if bias is None else bias.bfloat16()
    return lambda rows: functional.linear(rows.bfloat16(), halves, half_bias).float()


def _int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Return a layer with 8-bit weights, scaled per row, and dynamically quantised rows.

    The operator has one scale for all rows of a call. Each row is therefore divided by its own
    largest value before the call and multiplied after it, so that large rows do not coarsen the
    others.
    """
    # FBGEMM is preferred: for up to 8 rows it is three times as fast as oneDNN.
    engines = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = "fbgemm" if "fbgemm" in engines else "onednn"
    narrow = _saturates()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its quantised tensors
        packed = _quantised(weight)
    multiply = torch.ops.quantized.linear_dynamic
    largest = torch.linalg.vector_norm

    def layer(rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] == 1:
            product: torch.Tensor = multiply(rows, packed, narrow)
        else:
            scales = largest(rows, math.inf, 1, True).clamp_min_(_SMALLEST)
            product = multiply(rows / scales, packed, narrow).mul_(scales)
        return product if bias is None else product.add_(bias)

    return layer


def _quantised(weight: torch.Tensor) -> object:
    scales = weight.abs().amax(1).clamp_min(_SMALLEST) / 127
    zeros = torch.zeros(len(weight), dtype=torch.long)
    quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(quantised, None)


@functools.cache
def _saturates() -> bool:
    """Check whether sums of 8-bit products saturate (CPUs without VNNI); rows then have 7 bits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    rows = torch.randn(16, 256, generator=generator)
    expected = functional.linear(rows, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = _quantised(weight)
    multiply = torch.ops.quantized.linear_dynamic
    wide, narrow = (
        (multiply(rows, packed, reduced) - expected).square().sum() for reduced in (False, True)
    )
    return bool(narrow < wide)


# Weights whose rows are rotated by a token's position.
_TURNED = ("q_proj", "k_proj", "q_norm", "k_norm")
_WIDER = 16  # extra columns of the states, which hold their norm


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; q, k and v are one linear layer, and so are gate and up.

    The weights of a norm are None if they are folded into the following linear layer.
    """

    before: torch.Tensor | None
    qkv: Linear
    head_norms: torch.Tensor | None  # shape [heads + KV heads, head size]
    output: Linear
    after: torch.Tensor | None
    gate_up: Linear
    down: Linear


class SelectedRows(NamedTuple):
    """A selection of rows of a pass, at indices `rows_out`, with their own attention."""

    rows_out: list[int]
    attend: Attend


class Transformer:
    """A model's weights on a device, and its forward pass.

    The pass consists of few operators, because the overhead of an operator equals its work for few
    rows.
    """

    def __init__(self, checkpoint: Checkpoint, kind: str = "fp32", device: str = "cpu") -> None:
        model = self.architecture = checkpoint.architecture
        self.device = device
        self._checkpoint = checkpoint
        self._kind = kind
        self._turned = model.heads + model.kv_heads
        with moved_to_huge_pages() if device == "cpu" else contextlib.nullcontext():
            # With this column, the norm of a row is its root mean square up to a factor.
            table = self._weight("model.embed_tokens.weight")
            embedding = self._embedding = functional.pad(table, (0, _WIDER))
            embedding[:, model.hidden] = math.sqrt(model.epsilon * model.hidden)
            self.layers = [self._layer(number) for number in range(model.layers)]
            self._norm = self._gain("model.norm")
            head = embedding[:, : model.hidden]
            if checkpoint.has("lm_head.weight"):
                own = self._weight("lm_head.weight")
                head = head if model.tied and torch.equal(own, table) else own
            self.head = make_linear(head, None, kind)
        self._turns = _turns(model, device)
        checkpoint.close()

    @torch.inference_mode()
    def forward(
        self, rows: Pass, cache: KvCache, attention: Attention, logit_rows: list[int]
    ) -> torch.Tensor:
        """Return the logits of the `logit_rows` rows, float32 [logit rows, vocabulary].

        The `logit_rows` rows are the last ones of their spans. The keys and values of all rows are
        stored in the cache.
        """
        count = len(rows.tokens)
        rows.pad(FEWEST_ROWS)
        attend = attention.for_rows(rows)
        picked = None
        if len(logit_rows) < count:
            few = rows.only(logit_rows)
            few.pad(FEWEST_ROWS)
            rows_out = logit_rows + logit_rows[-1:] * (len(few.tokens) - len(logit_rows))
            picked = SelectedRows(rows_out, attention.for_rows(few) if logit_rows else attend)
        wide = self.states(*rows.tensors(), cache, attend, picked)
        if not logit_rows:
            return wide.new_empty(0, self.architecture.vocabulary)
        return self.logits(wide)[: len(logit_rows)]

    def states(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: KvCache,
        attend: Attend,
        picked: SelectedRows | None = None,
    ) -> torch.Tensor:
        """Return the states after the last layer of all rows, or of `picked`.

        The result is float32 [rows, hidden and more]: the states within a wider tensor with the
        norm of the states.
        """
        model = self.architecture
        wide = functional.embedding(tokens, self._embedding)
        states = wide[:, : model.hidden]
        turns = self._turns[positions].unsqueeze(1)
        for number, layer in enumerate(self.layers, 1):
            projected = layer.qkv(_normed(states, wide, layer.before))
            heads = self._turn(layer, projected, turns)
            cache.write(number - 1, heads[:, model.heads :], slots)
            if picked is not None and number == model.layers:
                # The states of other rows are not needed any more.
                if not picked.rows_out:
                    break
                wide, heads, attend = wide[picked.rows_out], heads[picked.rows_out], picked.attend
                states = wide[:, : model.hidden]
            states += layer.output(attend(heads, number - 1))
            self._feed(layer, wide)
        return wide

    def _feed(self, layer: Layer, wide: torch.Tensor) -> None:
        """Add the feed-forward part of a layer to each row, in parts that fit into caches."""
        count = wide.shape[0]
        if count > MAX_ROWS:
            for part in wide.tensor_split(-(-count // MAX_ROWS)):
                self._feed(layer, part)
            return
        states = wide[:, : self.architecture.hidden]
        gate, up = layer.gate_up(_normed(states, wide, layer.after)).chunk(2, -1)
        states += layer.down(functional.silu(gate).mul_(up))

    def logits(self, wide: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows of `states`, float32 [rows, vocabulary]."""
        return self.head(_normed(wide[:, : self.architecture.hidden], wide, self._norm))

    def _turn(self, layer: Layer, projected: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Rotate queries and keys by their positions, in place.

        The result is [rows, heads of queries, keys and values, head size].
        """
        model = self.architecture
        heads = projected.view(projected.shape[0], -1, model.head_dim)
        turned = heads[:, : self._turned]
        if layer.head_norms is not None:
            norm = functional.rms_norm(turned, (model.head_dim,), None, model.epsilon)
            torch.mul(layer.head_norms, norm, out=turned)
        turned.view(torch.complex64).mul_(turns)
        return heads

    # --- weights

    def _weight(self, name: str) -> torch.Tensor:
        weight = self._checkpoint.weight(name).to(self.device)
        turned = name.split(".")[-2] in _TURNED
        return _paired(weight, self.architecture.head_dim) if turned else weight

    def _gain(self, name: str) -> torch.Tensor:
        return self._weight(f"{name}.weight") * math.sqrt(self.architecture.hidden)

    def _linear(self, prefix: str, *names: str, gain: torch.Tensor | None = None) -> Linear:
        weights = [self._weight(f"{prefix}.{name}.weight") for name in names]
        biased = f"{prefix}.{names[0]}.bias" in self.architecture.weights()
        bias = (
            torch.cat([self._weight(f"{prefix}.{name}.bias") for name in names]) if biased else None
        )
        weight = torch.cat(weights)
        return make_linear(weight if gain is None else weight * gain, bias, self._kind)

    def _layer(self, number: int) -> Layer:
        model, prefix = self.architecture, f"model.layers.{number}"
        attention, inner = f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = None
        if model.head_norms:
            norms = torch.cat(
                [
                    self._weight(f"{attention}.q_norm.weight").expand(model.heads, -1),
                    self._weight(f"{attention}.k_norm.weight").expand(model.kv_heads, -1),
                ]
            )
        before = self._gain(f"{prefix}.input_layernorm")
        after = self._gain(f"{prefix}.post_attention_layernorm")
        # The gains of quantised weights stay separate: large gains would coarsen all weights.
        is_half = self._kind != "fp32"
        return Layer(
            before if is_half else None,
            self._linear(attention, "q_proj", "k_proj", "v_proj", gain=None if is_half else before),
            norms,
            self._linear(attention, "o_proj"),
            after if is_half else None,
            self._linear(inner, "gate_proj", "up_proj", gain=None if is_half else after),
            self._linear(inner, "down_proj"),
        )


def _normed(states: torch.Tensor, wide: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the states divided by their root mean square.

    This is the norm of `wide` up to a factor, which the weights contain.
    """
    normed: torch.Tensor = states / torch.linalg.vector_norm(wide, 2.0, -1, True)
    return normed if weight is None else normed.mul_(weight)


def _paired(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rows of a weight with the two rows of a rotated pair adjacent.

    In files they are half a head apart.
    """
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _turns(model: Architecture, device: str) -> torch.Tensor:
    """Return the rotation of each pair at every position, complex [positions, head size / 2]."""
    positions = torch.arange(model.positions).float()
    angles = torch.outer(positions, model.rope.frequencies(model.head_dim))
    return torch.polar(torch.full_like(angles, model.rope.amplitude), angles).to(device)


_ASK, _MOVE = 14, 25  # the values of MADV_HUGEPAGE and MADV_COLLAPSE
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPPED = Path("/proc/self/maps")
_c = ctypes.CDLL(None)

Range = tuple[int, int]  # the first address, and the address after the last


@contextmanager
def moved_to_huge_pages() -> Iterator[None]:
    """Move memory that the block allocates and keeps to huge pages, as far as available.

    Weights on huge pages are read at twice the speed. Linux grants huge pages on request
    (madvise(2)), which torch does not make.
    """
    before = _private_memory()
    yield
    for begin, end in without(_private_memory(), before):
        _move(begin, end)


def without(ranges: Iterable[Range], excluded: Iterable[Range]) -> Iterator[Range]:
    """Yield the parts of `ranges` outside of the `excluded` ranges, which are sorted."""
    exclusions = list(excluded)
    for begin, end in ranges:
        for first, last in exclusions:
            if begin < last and first < end:
                if begin < first:
                    yield begin, first
                begin = last
        if begin < end:
            yield begin, end


def _private_memory() -> list[Range]:
    """Return the address ranges of this process that are not mapped from a file."""
    ranges: list[Range] = []
    if _SIZE.exists():
        for line in _MAPPED.read_text(encoding="utf-8", errors="replace").splitlines():
            addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
            if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                begin, end = addresses.split("-")
                ranges.append((int(begin, 16), int(end, 16)))
    return ranges


def _move(begin: int, end: int) -> None:
    """Move a range to huge pages, including later allocations in it.

    A kernel without support refuses the calls, and the pages are unchanged.
    """
    size = int(_SIZE.read_text(encoding="ascii"))
    begin, end = -(-begin // size) * size, end // size * size
    if begin < end:
        for advice in (_ASK, _MOVE):
            _c.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
