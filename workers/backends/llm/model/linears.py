"""Linear layers: packed for oneDNN, int8 or plain on CPUs; plain with 32 or 16 bits elsewhere.

Packed weights are twice as fast as plain ones for 2 to 32 rows. They also give each row the same
bits, whatever rows are computed with it, as long as it is not alone: a single row has its own
kernel. The kernel for four to six rows is the fastest, so fewer rows are padded. The underlying
operators are not part of torch's public interface, so each is tested before use.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

FEWEST_ROWS = 4
_PACKED_FOR_ROWS = 16
_SMALLEST = 1e-8  # the minimum of a scale
MOST_ROWS = 256  # in one call; kernels for more rows give other bits

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
        found, few = layer(rows), layer(rows[:FEWEST_ROWS])
    except Exception:  # the operator is missing, or has other arguments
        return False
    expected = functional.linear(rows, weight, weight[:, 0])
    close = torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    return close and torch.equal(found[:FEWEST_ROWS], few)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    operators: Any = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
    multiply = operators._linear_pointwise.default

    def layer(rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]  # `len` is slower
        if count <= MOST_ROWS:
            product: torch.Tensor = multiply(rows, packed, bias, "none", [], "")
            return product
        return torch.cat([layer(part) for part in rows.tensor_split(-(-count // MOST_ROWS))])

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
    more = None if bias is None else bias.bfloat16()
    return lambda rows: functional.linear(rows.bfloat16(), halves, more).float()


def _int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Return a layer with 8-bit weights, scaled per row, and dynamically quantised rows.

    The operator has one scale for all rows of a call. Each row is therefore divided by its own
    largest value before the call and multiplied after it, so that large rows do not coarsen the
    others.
    """
    # FBGEMM is preferred: for up to 8 rows it is three times as fast as oneDNN.
    known = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = "fbgemm" if "fbgemm" in known else "onednn"
    narrow = _saturates()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation of torch's quantised tensors
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
