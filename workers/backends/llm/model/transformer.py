"""The decoder of Llama, Mistral, Qwen2 and Qwen3 in plain torch: one flat batch of rows.

On CPUs, the weights of linear layers are packed for oneDNN, int8 or plain; on other devices they
are plain, with 32 or 16 bits. Packed weights are twice as fast as plain weights for 2 to 32 rows.
Packed weights also give each row the same bits in any batch of at least two rows; a single row uses
another kernel. The kernel for four to six rows is the fastest, so smaller batches are padded. The
operators for packed weights are not part of torch's public interface, so they are tested before
use.

`Passes` runs the forward passes of a model with its KV cache, by CUDA graphs if the device supports
them. A graph computes a decode pass, with one row per sequence, in one launch instead of hundreds.
A graph that was captured for a number of rows and of blocks per row computes any smaller pass. The
keys and values of a sequence are gathered from its blocks; the keys after its end are masked.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shmserve.workers.backends.llm.model.architecture import Architecture
from shmserve.workers.backends.llm.model.attention import (
    Attend,
    Attention,
    KvCache,
    Pass,
    make_attention,
)
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint, moved_to_huge_pages

MIN_ROWS = 4  # number of rows to which smaller batches are padded
_PACK_ROWS = 16  # number of rows for which oneDNN packs weights
_MIN_SCALE = 1e-8  # prevents division by zero
MAX_ROWS = 256  # maximum number of rows of one call; kernels for more rows give other bits

Linear = Callable[[Tensor], Tensor]


def make_linear(weight: Tensor, bias: Tensor | None, dtype: str = "fp32") -> Linear:
    """Return the fastest linear layer for a float32 weight [out, in] on its device.

    The layer maps rows, float32 [rows, in], to float32 [rows, out].
    """
    if dtype == "bf16":
        return _make_bf16(weight, bias)
    if weight.device.type != "cpu":
        return functools.partial(functional.linear, weight=weight, bias=bias)
    if dtype == "int8":
        return _make_int8(weight, bias)
    return _make_packed(weight, bias) if can_pack() else _make_plain(weight, bias)


@functools.cache
def can_pack() -> bool:
    """Return whether packed weights work on this host.

    Their results must be close to the results of plain weights, and independent of other rows.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    rows = torch.randn(19, 64, generator=generator)
    try:
        layer = _make_packed(weight, weight[:, 0].contiguous())
        output, first_rows = layer(rows), layer(rows[:MIN_ROWS])
    except Exception:  # the operator is missing, or has other arguments
        return False
    expected_output = functional.linear(rows, weight, weight[:, 0])
    is_close = torch.allclose(output, expected_output, rtol=1e-4, atol=1e-4)
    return is_close and torch.equal(output[:MIN_ROWS], first_rows)


def _make_packed(weight: Tensor, bias: Tensor | None) -> Linear:
    operators: Any = torch.ops.mkldnn
    packed_weight = operators._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
    multiply = operators._linear_pointwise.default

    def layer(rows: Tensor) -> Tensor:
        count = rows.shape[0]  # `rows.shape[0]`, because `len` is slower
        if count <= MAX_ROWS:
            product: Tensor = multiply(rows, packed_weight, bias, "none", [], "")
            return product
        return torch.cat([layer(part) for part in rows.tensor_split(-(-count // MAX_ROWS))])

    return layer


def _make_plain(weight: Tensor, bias: Tensor | None) -> Linear:
    transposed_weight = weight.t().contiguous()

    def layer(rows: Tensor) -> Tensor:
        product = rows @ transposed_weight
        return product if bias is None else product + bias

    return layer


def _make_bf16(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return a layer with weights and rows of 16 bits, whose products are summed in 32 bits."""
    weight_bf16 = weight.bfloat16()
    bias_bf16 = None if bias is None else bias.bfloat16()
    return lambda rows: functional.linear(rows.bfloat16(), weight_bf16, bias_bf16).float()


def _make_int8(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return a layer with 8-bit weights, one scale per output, and dynamically quantised rows.

    The operator has one scale for all rows of a call. Each row is therefore divided by its largest
    absolute value before the call, and multiplied by this value afterwards. Otherwise, rows with
    large values would reduce the precision of other rows.
    """
    # FBGEMM is preferred: for up to 8 rows it is three times as fast as oneDNN.
    engines = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = "fbgemm" if "fbgemm" in engines else "onednn"
    reduce_range = _products_saturate()
    packed_weight = _pack_int8(weight)
    multiply = torch.ops.quantized.linear_dynamic
    vector_norm = torch.linalg.vector_norm

    def layer(rows: Tensor) -> Tensor:
        if rows.shape[0] == 1:
            product: Tensor = multiply(rows, packed_weight, reduce_range)
        else:
            scales = vector_norm(rows, math.inf, 1, True).clamp_min_(_MIN_SCALE)
            product = multiply(rows / scales, packed_weight, reduce_range).mul_(scales)
        return product if bias is None else product.add_(bias)

    return layer


def _pack_int8(weight: Tensor) -> object:
    scales = weight.abs().amax(1).clamp_min(_MIN_SCALE) / 127
    zeros = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its quantised tensors
        quantised_weight = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(quantised_weight, None)


@functools.cache
def _products_saturate() -> bool:
    """Return whether sums of 8-bit products saturate (CPUs without VNNI), so rows need 7 bits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    rows = torch.randn(16, 256, generator=generator)
    expected_output = functional.linear(rows, weight)
    packed_weight = _pack_int8(weight)
    multiply = torch.ops.quantized.linear_dynamic
    full_error, reduced_error = (
        (multiply(rows, packed_weight, reduce_range) - expected_output).square().sum()
        for reduce_range in (False, True)
    )
    return bool(reduced_error < full_error)


# Weights of the vectors to which the rotary embedding is applied.
_ROTARY_WEIGHTS = ("q_proj", "k_proj", "q_norm", "k_norm")
_EXTRA_COLUMNS = 16  # one column for epsilon, see `_normalise`, and padding for alignment


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer.

    Attributes:
        input_norm: The weights of the norm before the attention, float32 [hidden]; None: they are
            folded into the following linear layer.
        qkv: The projections of queries, keys and values as one layer.
        head_norms: The weights of the norms of queries and keys, float32 [heads + KV heads, head
            size], or None.
        post_attention_norm: As `input_norm`, before the feed-forward part.
        gate_up: The gate and up projections as one layer.
    """

    input_norm: Tensor | None
    qkv: Linear
    head_norms: Tensor | None
    output: Linear  # projection of the attention
    post_attention_norm: Tensor | None
    gate_up: Linear
    down: Linear  # projection of the feed-forward part


class SelectedRows(NamedTuple):
    """The indices of the rows whose logits are computed, and the function for their attention."""

    indices: list[int]
    attend: Attend


class Transformer:
    """A model's weights on a device, and its forward pass.

    The pass consists of few operators: for few rows, the overhead of an operator is as long as its
    computation.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str = "fp32", device: str = "cpu") -> None:
        model = self.architecture = checkpoint.architecture
        self.device = device
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._rotary_heads = model.heads + model.kv_heads
        with moved_to_huge_pages() if device == "cpu" else contextlib.nullcontext():
            table = self._load_weight("model.embed_tokens.weight")
            embedding = self._embedding = functional.pad(table, (0, _EXTRA_COLUMNS))
            embedding[:, model.hidden] = math.sqrt(model.epsilon * model.hidden)  # see `_normalise`
            self.layers = [self._load_layer(layer) for layer in range(model.layers)]
            self._norm = self._load_norm_gain("model.norm")
            head = embedding[:, : model.hidden]
            if checkpoint.has("lm_head.weight"):
                lm_head = self._load_weight("lm_head.weight")
                is_tied = model.tied_embeddings and torch.equal(lm_head, table)
                head = head if is_tied else lm_head
            self.head = make_linear(head, None, dtype)
        self._rotations = _make_rotations(model, device)
        checkpoint.close()

    @torch.inference_mode()
    def forward(
        self, rows: Pass, cache: KvCache, attention: Attention, logit_rows: list[int]
    ) -> Tensor:
        """Return the logits of the `logit_rows` rows, float32 [logit rows, vocabulary].

        The `logit_rows` rows are the last ones of their spans. The keys and values of all rows are
        stored in the cache.
        """
        count = len(rows.tokens)
        rows.pad(MIN_ROWS)
        attend = attention.for_rows(rows)
        selection = None
        if len(logit_rows) < count:
            selected_rows = rows.select(logit_rows)
            selected_rows.pad(MIN_ROWS)
            padding = logit_rows[-1:] * (len(selected_rows.tokens) - len(logit_rows))
            selected_attend = attention.for_rows(selected_rows) if logit_rows else attend
            selection = SelectedRows(logit_rows + padding, selected_attend)
        extended_states = self.states(*rows.tensors(), cache, attend, selection)
        if not logit_rows:
            return extended_states.new_empty(0, self.architecture.vocab_size)
        return self.logits(extended_states)[: len(logit_rows)]

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KvCache,
        attend: Attend,
        selection: SelectedRows | None = None,
    ) -> Tensor:
        """Return the hidden states after the last layer of all rows, or of `selection`.

        The result is float32 [rows, hidden + extra columns]; the extra columns are the
        embedding's, see `_normalise`.
        """
        model = self.architecture
        extended_states = functional.embedding(tokens, self._embedding)
        states = extended_states[:, : model.hidden]
        rotations = self._rotations[positions].unsqueeze(1)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(_normalise(states, extended_states, layer.input_norm))
            heads = self._rotate(layer, qkv, rotations)
            cache.write(index, heads[:, model.heads :], slots)
            if selection is not None and index == model.layers - 1:
                # After the keys of the last layer are stored, only the selected rows are computed.
                if not selection.indices:
                    break
                extended_states, heads = (
                    extended_states[selection.indices],
                    heads[selection.indices],
                )
                states, attend = extended_states[:, : model.hidden], selection.attend
            states += layer.output(attend(heads, index))
            self._feed_forward(layer, extended_states)
        return extended_states

    def _feed_forward(self, layer: Layer, extended_states: Tensor) -> None:
        """Add the feed-forward part of a layer to the states, in parts of at most MAX_ROWS rows."""
        count = extended_states.shape[0]
        if count > MAX_ROWS:
            for row_part in extended_states.tensor_split(-(-count // MAX_ROWS)):
                self._feed_forward(layer, row_part)
            return
        states = extended_states[:, : self.architecture.hidden]
        normalised_states = _normalise(states, extended_states, layer.post_attention_norm)
        gate, up = layer.gate_up(normalised_states).chunk(2, -1)
        states += layer.down(functional.silu(gate).mul_(up))

    def logits(self, extended_states: Tensor) -> Tensor:
        """Return the logits of rows of `states`, float32 [rows, vocabulary]."""
        return self.head(
            _normalise(extended_states[:, : self.architecture.hidden], extended_states, self._norm)
        )

    def _rotate(self, layer: Layer, qkv: Tensor, rotations: Tensor) -> Tensor:
        """Apply the head norms and the rotary embedding (Su et al., 2021) to queries and keys.

        Args:
            layer: The layer.
            qkv: The queries, keys and values; modified in place.
            rotations: The rotations of each row, complex64 [rows, 1, head size / 2].

        Returns:
            `qkv` as [rows, heads of queries, keys and values, head size].
        """
        model = self.architecture
        heads = qkv.view(qkv.shape[0], -1, model.head_dim)
        rotated_heads = heads[:, : self._rotary_heads]
        if layer.head_norms is not None:
            result = functional.rms_norm(rotated_heads, (model.head_dim,), None, model.epsilon)
            torch.mul(layer.head_norms, result, out=rotated_heads)
        rotated_heads.view(torch.complex64).mul_(rotations)
        return heads

    # --- weights

    def _load_weight(self, name: str) -> Tensor:
        weight = self._checkpoint.weight(name).to(self.device)
        is_rotary = name.split(".")[-2] in _ROTARY_WEIGHTS
        return _pair_rotary_rows(weight, self.architecture.head_dim) if is_rotary else weight

    def _load_norm_gain(self, name: str) -> Tensor:
        return self._load_weight(f"{name}.weight") * math.sqrt(self.architecture.hidden)

    def _create_linear(self, prefix: str, *names: str, gain: Tensor | None = None) -> Linear:
        weights = [self._load_weight(f"{prefix}.{name}.weight") for name in names]
        has_bias = f"{prefix}.{names[0]}.bias" in self.architecture.weights()
        bias = None
        if has_bias:
            bias = torch.cat([self._load_weight(f"{prefix}.{name}.bias") for name in names])
        weight = torch.cat(weights)
        return make_linear(weight if gain is None else weight * gain, bias, self._dtype)

    def _load_layer(self, layer: int) -> Layer:
        model, prefix = self.architecture, f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        head_norms = None
        if model.head_norms:
            q_norm = self._load_weight(f"{attention}.q_norm.weight").expand(model.heads, -1)
            k_norm = self._load_weight(f"{attention}.k_norm.weight").expand(model.kv_heads, -1)
            head_norms = torch.cat([q_norm, k_norm])
        input_norm = self._load_norm_gain(f"{prefix}.input_layernorm")
        post_attention_norm = self._load_norm_gain(f"{prefix}.post_attention_layernorm")
        # Gains are folded into float32 weights only, because large gains would reduce the precision
        # of weights with fewer bits.
        is_folded = self._dtype == "fp32"
        qkv_gain, mlp_gain = (input_norm, post_attention_norm) if is_folded else (None, None)
        return Layer(
            None if is_folded else input_norm,
            self._create_linear(attention, "q_proj", "k_proj", "v_proj", gain=qkv_gain),
            head_norms,
            self._create_linear(attention, "o_proj"),
            None if is_folded else post_attention_norm,
            self._create_linear(mlp, "gate_proj", "up_proj", gain=mlp_gain),
            self._create_linear(mlp, "down_proj"),
        )


def _normalise(states: Tensor, extended_states: Tensor, gain: Tensor | None) -> Tensor:
    """Return the RMS norm of states (Zhang and Sennrich, 2019), with one operator for the norm.

    The extra column sqrt(epsilon * hidden) of `extended_states` adds epsilon to the mean square.
    The gain contains the factor sqrt(hidden) between the root mean square and the Euclidean norm.

    Args:
        states: The hidden states, [rows, hidden].
        extended_states: The hidden states with their extra columns.
        gain: The gain, [hidden]; None: it is folded into the following linear layer.
    """
    normalised_states: Tensor = states / torch.linalg.vector_norm(extended_states, 2.0, -1, True)
    return normalised_states if gain is None else normalised_states.mul_(gain)


def _pair_rotary_rows(weight: Tensor, head_dim: int) -> Tensor:
    """Return a weight whose two rows of each rotated pair are adjacent.

    In the files of checkpoints they are half a head apart. Adjacent rows allow complex numbers.
    """
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _make_rotations(model: Architecture, device: str) -> Tensor:
    """Return the rotation of each pair at each position, complex64 [positions, head size / 2]."""
    positions = torch.arange(model.positions).float()
    angles = torch.outer(positions, model.rope.frequencies(model.head_dim))
    return torch.polar(torch.full_like(angles, model.rope.amplitude), angles).to(device)


_MIN_GRAPH_ROWS = 2
_MIN_GRAPH_KEYS = 256  # minimum number of keys per row of a graph
# Maximum number of keys of all rows of a graph, which has memory for its gathered keys.
_MAX_GRAPH_KEYS = 1 << 17
_ROW_COLUMNS = 3  # columns of a row before its blocks: token, position, slot


class CapturedGraph(NamedTuple):
    """A captured CUDA graph with its input and output memory."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # its memory
    logits: Tensor


class DecodeGraphs:
    """The captured CUDA graphs of one model's decode passes."""

    def __init__(self, model: Transformer, cache: KvCache) -> None:
        self._model, self._cache = model, cache
        self._captured_graphs: dict[tuple[int, int], CapturedGraph] = {}  # by (rows, blocks)

    @torch.inference_mode()
    def capture(self, max_rows: int, max_length: int) -> None:
        """Capture graphs for up to `max_rows` sequences of up to `max_length` tokens.

        The largest graph is captured first, so that the others share its memory.
        """
        pool = torch.cuda.graph_pool_handle()
        for rows, blocks in reversed(list(_graph_sizes(max_rows, max_length, self._cache))):
            shape = (rows, _ROW_COLUMNS + blocks)
            inputs = torch.zeros(shape, dtype=torch.int64, device=self._model.device)
            # Libraries allocate their memory in the first call, which must not be captured.
            decode_logits(self._model, self._cache, inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = decode_logits(self._model, self._cache, inputs)
            self._captured_graphs[rows, blocks] = CapturedGraph(graph, inputs, logits)

    @torch.inference_mode()
    def logits(self, rows: Pass) -> Tensor | None:
        """Return the logits of all rows of a pass, or None if no captured graph has its size.

        The logits are valid until the next pass.
        """
        if any(span.size > 1 for span in rows.spans):
            return None
        blocks = max(-(-span.length // rows.block_size) for span in rows.spans)
        graph_size = _graph_size(len(rows.spans), blocks, rows.block_size)
        captured_graph = self._captured_graphs.get(graph_size)
        if captured_graph is None:
            return None
        captured_graph.inputs.copy_(torch.from_numpy(decode_inputs(rows, *graph_size)))
        captured_graph.graph.replay()
        return captured_graph.logits


def decode_inputs(rows: Pass, row_count: int, block_count: int) -> np.ndarray:
    """Return the inputs of a graph for a pass, padded with copies of the last row.

    Returns:
        The token, the position, the slot and the block table of each row, int64
        [row_count, 3 + block_count].
    """
    inputs = np.zeros((row_count, _ROW_COLUMNS + block_count), np.int64)
    for index, span in enumerate(rows.spans):
        table = span.block_table[: -(-span.length // rows.block_size)]
        columns = rows.tokens[index], rows.positions[index], rows.slots[index]
        inputs[index, : _ROW_COLUMNS + len(table)] = *columns, *table
    inputs[len(rows.spans) :] = inputs[len(rows.spans) - 1]
    return inputs


def decode_logits(model: Transformer, cache: KvCache, inputs: Tensor) -> Tensor:
    """Return the logits of all rows of `decode_inputs`, and store their keys and values.

    The attention of each row is computed with all keys of its blocks. The keys after the row are
    masked.
    """
    row_count = len(inputs)
    tokens, positions, slots = inputs[:, :_ROW_COLUMNS].unbind(1)
    block_offsets = torch.arange(cache.block_size, device=inputs.device)
    key_slots = (inputs[:, _ROW_COLUMNS:, None] * cache.block_size + block_offsets).flatten(1)
    mask = torch.arange(key_slots.shape[1], device=inputs.device) <= positions.unsqueeze(1)
    mask = mask[None, :, None]

    def attend(heads: Tensor, layer: int) -> Tensor:
        # Query heads that share a key-value head are rows of one product.
        queries = heads[:, : cache.query_heads].view(row_count, cache.kv_heads, -1, heads.shape[2])
        output = functional.scaled_dot_product_attention(
            queries.transpose(0, 1),
            cache.keys[layer][:, key_slots],
            cache.values[layer][:, key_slots],
            attn_mask=mask,
        )
        return output.transpose(0, 1).reshape(row_count, -1)

    return model.logits(model.states(tokens, positions, slots, cache, attend))


def _graph_sizes(max_rows: int, max_length: int, cache: KvCache) -> Iterator[tuple[int, int]]:
    """Yield the number of rows and of blocks per row of each graph, smallest first."""
    max_blocks = min(-(-max_length // cache.block_size), cache.slot_count // cache.block_size)
    rows = _MIN_GRAPH_ROWS
    while True:
        _, blocks = _graph_size(rows, 1, cache.block_size)
        while rows * blocks * cache.block_size <= _MAX_GRAPH_KEYS:
            yield rows, blocks
            if blocks >= max_blocks:
                break
            blocks *= 2
        if rows >= max_rows:
            return
        rows *= 2


def _graph_size(rows: int, blocks: int, block_size: int) -> tuple[int, int]:
    """Return the number of rows and of blocks per row, powers of two, of the graph for a pass."""
    min_blocks = max(-(-_MIN_GRAPH_KEYS // block_size), blocks)
    return _next_power_of_two(max(rows, _MIN_GRAPH_ROWS)), _next_power_of_two(min_blocks)


def _next_power_of_two(minimum: int) -> int:
    """Return the smallest power of two that is at least `minimum`."""
    return 1 << (minimum - 1).bit_length()


class Passes:
    """The executor of a model's forward passes, with its KV cache."""

    def __init__(self, model: Transformer, cache: KvCache) -> None:
        self.cache, self.positions = cache, model.architecture.positions
        self._model = model
        self._attention = make_attention(cache, model.architecture, model.device)
        self._graphs = DecodeGraphs(model, cache)

    def capture(self, max_rows: int, max_length: int) -> None:
        """Capture CUDA graphs for decode passes, if the device supports them."""
        if self._model.device.startswith("cuda"):
            self._graphs.capture(max_rows, max_length)

    def empty(self) -> Pass:
        """Return a pass without rows, to which the caller adds rows."""
        return Pass(self.cache.block_size, self._model.device)

    def logits(self, rows: Pass, logit_rows: list[int]) -> Tensor:
        """Return the logits of the `logit_rows` rows, float32 [logit rows, vocabulary].

        The logits are valid until the next pass. The keys and values of all rows are stored in the
        cache.
        """
        graph_logits = self._graphs.logits(rows)
        if graph_logits is None:
            return self._model.forward(rows, self.cache, self._attention, logit_rows)
        if logit_rows == list(range(len(logit_rows))):
            return graph_logits[: len(logit_rows)]
        return graph_logits[logit_rows]
