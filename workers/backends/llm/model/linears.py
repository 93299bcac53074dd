"""Linear layers: for a CPU packed for oneDNN, int8, or plain where neither can be trusted; for
other devices plain, of 32 or 16 bits.

Packed weights are twice as fast as plain ones for 2 to 32 rows, and give each row the same bits
whatever is computed beside it, as long as it is never alone: one row has a kernel of its own. The
operators behind this are not part of torch's interface, so that each is tried before it is used.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

FEWEST_ROWS = 2
_PACKED_FOR_ROWS = 16
_SMALLEST = 1e-8  # of a scale
_MOST_ROWS = 256  # in one call: above, other kernels give other bits

Linear = Callable[[torch.Tensor], torch.Tensor]


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, kind: str = "fp32") -> Linear:
    """The best linear layer for a float32 weight [out, in], where that is: rows [M, in] ->
    [M, out]."""
    if kind == "bf16":
        return _half(weight, bias)
    if weight.device.type != "cpu":
        return functools.partial(functional.linear, weight=weight, bias=bias)
    if kind == "int8":
        return _int8(weight, bias)
    return _packed(weight, bias) if can_pack() else _plain(weight, bias)


@functools.cache
def can_pack() -> bool:
    """Whether packed weights work here: their results are those of the plain ones, and rows do not
    depend on their neighbours."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    rows = torch.randn(19, 64, generator=generator)
    try:
        layer = _packed(weight, weight[:, 0].contiguous())
        found, few = layer(rows), layer(rows[:FEWEST_ROWS])
    except Exception:  # no such operator, or one that has other arguments
        return False
    expected = functional.linear(rows, weight, weight[:, 0])
    close = torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    return close and torch.equal(found[:FEWEST_ROWS], few)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    operators: Any = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
    multiply = operators._linear_pointwise.default

    def layer(rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]  # `len` takes longer
        if count <= _MOST_ROWS:
            product: torch.Tensor = multiply(rows, packed, bias, "none", [], "")
            return product
        return torch.cat([layer(part) for part in rows.tensor_split(-(-count // _MOST_ROWS))])

    return layer


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    columns = weight.t().contiguous()

    def layer(rows: torch.Tensor) -> torch.Tensor:
        product = rows @ columns
        return product if bias is None else product + bias

    return layer


def _half(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Weights and rows of 16 bits, whose products are summed in 32."""
    halves = weight.bfloat16()
    more = None if bias is None else bias.bfloat16()
    return lambda rows: functional.linear(rows.bfloat16(), halves, more).float()


def _int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Weights of 8 bits with a scale each row, and rows that are quantised as they come.

    The operator has one scale for all the rows of a call. So that none is as coarse as its largest
    neighbour makes it, each is divided by its own largest value before, and multiplied after.
    """
    # Where there is a choice, FBGEMM: for up to 8 rows it is three times as fast as oneDNN.
    known = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = "fbgemm" if "fbgemm" in known else "onednn"
    narrow = _saturates()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's own types of quantised tensors will go
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
    """Whether sums of 8-bit products saturate here (processors without VNNI): rows then have 7
    bits."""
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
