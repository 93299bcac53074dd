"""Quantised weights of checkpoints, dequantised to float32 when they are loaded.

A quantised linear layer has integers or 8-bit floats q, scales s and, if it is asymmetric, zero
points z. Its weight is (q - z) * s, computed in float32. The tensors in the file determine which
layers are quantised, the number of bits, and the groups that share a scale. Activation scales have
no effect, because activations are not quantised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from shmserve.errors import InvalidArgument

_PLAIN = ("F64", "F32", "F16", "BF16")
_FLOATS = ("F8_E4M3", "F8_E5M2")
_BITS = (2, 4, 8)


class Stored(NamedTuple):
    """The description of a tensor in a file, from the file's header."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class Method(NamedTuple):
    """The tensors of a quantisation method, by the ends of their names, and its settings.

    Attributes:
        values: The data types of q by name.
        roles: The possible names of "scales", "zeros" and "groups", the group of each column.
        settings: The supported values of settings.
    """

    values: Mapping[str, tuple[str, ...]]
    roles: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, tuple[Any, ...]] = {}


_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_PACKED = {"qweight": ("I32",)}
_QROLES = {"scales": ("scales",), "zeros": ("qzeros",)}
_METHODS = {
    "fp8": Method({"weight": _FLOATS}, {"scales": ("weight_scale_inv", "weight_scale")}),
    "compressed-tensors": Method(
        {"weight_packed": ("I32",), "weight": ("I8", *_FLOATS)},
        {
            "scales": ("weight_scale",),
            "zeros": ("weight_zero_point",),
            "groups": ("weight_g_idx",),
        },
        {"format": (*_FORMATS, "mixed-precision", "dense")},
    ),
    "gptq": Method(
        _PACKED,
        {**_QROLES, "groups": ("g_idx",)},
        dict.fromkeys(("checkpoint_format", "format"), ("gptq", "gptq_v2")),
    ),
    "awq": Method(
        _PACKED, _QROLES, dict.fromkeys(("version", "checkpoint_format", "format"), ("gemm",))
    ),
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation of a checkpoint.

    Attributes:
        method: Its `quant_method`, or "".
        offset: The number that must be added to stored zero points.
        steps: The sizes of groups and blocks; shapes do not determine the size of partial blocks.
        required: The roles of tensors without which values have another meaning.
        interleaved: Whether AWQ stores the even values of a word before its odd ones. GPTQModel
            does so for 4 bits only.
    """

    method: str = ""
    offset: int = 0
    steps: tuple[int, ...] = ()
    required: tuple[str, ...] = ("scales",)
    interleaved: bool = True

    @classmethod
    def of(cls, config: Mapping[str, Any], problems: list[str]) -> Self:
        """Return the quantisation in config.json's quantization_config."""
        bits = config.get("load_in_8bit") or config.get("load_in_4bit")
        name = config.get("quant_method") or ("bitsandbytes" if bits else "")
        checks: list[tuple[str, Any, tuple[Any, ...]]] = []
        if config and name not in _METHODS:
            checks.append(("quant_method", name, tuple(_METHODS)))
        else:
            for part in _sections(config):
                permitted = _METHODS[name].settings if config else {}
                checks += [
                    (field, part[field], allowed)
                    for field, allowed in permitted.items()
                    if part.get(field) is not None and str(part[field]).lower() not in allowed
                ]
        sparsity = config.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            checks.append(("sparsity_config.format", sparsity["format"], ("dense",)))
        if (config.get("transform_config") or {}).get("config_groups"):
            checks.append(("transform_config", config["transform_config"], (None,)))
        for field, value, allowed in checks:
            supported = ", ".join(map(str, allowed))
            problems.append(
                f"config.json: quantization_config: {field}: {value!r} is not supported, "
                f"supported: {supported}"
            )
        version = config.get("checkpoint_format") or config.get("format")
        offset = 1 if name == "gptq" and version != "gptq_v2" else 0
        required = ("scales", *_required(config))
        interleaved = "gptqmodel" not in str((config.get("meta") or {}).get("quantizer"))
        method = name if name in _METHODS else ""
        return cls(method, offset, tuple(_steps(config)), required, interleaved)

    def parts(self, name: str, stored: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return the tensors of a weight by role: "values" and, if quantised, "scales" and more."""
        prefix, end = name[: -len("weight")], name[-len("weight") :]
        by_role: dict[str, Stored] = {}
        if name in stored:
            by_role["values"] = stored[name]
        if end == "weight" and self.method:
            method = _METHODS[self.method]
            for role, ends in {"values": tuple(method.values), **method.roles}.items():
                for each in ends:
                    if prefix + each in stored:
                        by_role.setdefault(role, stored[prefix + each])
        return by_role

    def problem(self, name: str, shape: tuple[int, ...], stored: Mapping[str, Stored]) -> str:
        """Return what is wrong with a weight in the files, or ""."""
        parts = self.parts(name, stored)
        values = parts["values"]
        if values.dtype in _PLAIN and "scales" not in parts:
            fits = values.shape == shape
            return (
                ("")
                if fits
                else f"{name} has the shape {list(values.shape)}, expected {list(shape)}"
            )
        if not self.method:
            return f"{name} is {values.dtype} without a quantization_config in config.json"
        method = _METHODS[self.method]
        allowed = method.values.get(values.name.rpartition(".")[2], ())
        if values.dtype not in allowed:
            supported = ", ".join(allowed)
            return f"{values.name} is {values.dtype}, but {self.method} supports {supported}"
        lacks = [
            " or ".join(ends)
            for role, ends in method.roles.items()
            if role in self.required and role not in parts
        ]
        return f"{values.name} has no {' and no '.join(lacks)}" if lacks else ""

    def dequantised(
        self, name: str, shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return a weight, float32 [rows, columns].

        Raises:
            InvalidArgument: The tensors do not fit the shape.
        """
        try:
            return self._dequantised(shape, **parts)
        except (ValueError, IndexError, RuntimeError):
            sizes = ", ".join(f"{role} {list(each.shape)}" for role, each in parts.items())
            raise InvalidArgument(
                f"the model's folder is invalid: {name}: {self.method} tensors do not make "
                f"{list(shape)}: {sizes}; supported are {', '.join(map(str, _BITS))} bits"
            ) from None

    def _dequantised(
        self,
        shape: tuple[int, ...],
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        groups: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, columns = shape
        bits = 0
        if self.method == "gptq":  # q is packed along columns, s and z have a row for each group
            bits = _bits(values.shape[0], columns)
            values, scales = _unpacked(values.t(), bits), scales.t()
            zeros = None if zeros is None else _unpacked(zeros, bits).t() + self.offset
        elif self.method == "awq":  # q and z are packed along rows
            bits = _bits(values.shape[1], rows)
            interleaved = self.interleaved or bits == 4
            values, scales = _unpacked(values, bits, interleaved).t(), scales.t()
            zeros = None if zeros is None else _unpacked(zeros, bits, interleaved).t()
        elif values.dtype == torch.int32:
            bits = _bits(values.shape[1], columns)
            values = _unpacked(values, bits)[:, :columns]
            if zeros is not None and zeros.dtype == torch.int32:
                zeros = _unpacked(zeros.t(), bits).t()[:rows]
            elif zeros is not None:
                zeros = zeros + (1 << bits - 1)
        if zeros is None and bits:
            zeros = torch.tensor([1 << bits - 1])
        if scales.dtype == torch.uint8:  # scales of this type are exponents
            scales = (scales.float() - 127).exp2()
        # Negative groups mark tensors of groups that are not used.
        if groups is not None and groups.min() < 0:
            groups = None
        weight = values.float()
        if weight.shape != shape:
            raise ValueError
        if zeros is not None:
            weight = weight - self._spread(zeros.float(), shape, groups)
        return weight * self._spread(scales.float(), shape, groups)

    def _spread(
        self, factors: torch.Tensor, shape: tuple[int, ...], groups: torch.Tensor | None
    ) -> torch.Tensor:
        """Return scales or zero points in a shape that broadcasts to the weight's."""
        if factors.numel() == 1:
            return factors.reshape(1, 1)
        if factors.dim() == 1:
            factors = factors.unsqueeze(1)
        for axis, size in enumerate(shape):
            count = factors.shape[axis]
            if axis == 1 and groups is not None:
                factors = factors.index_select(1, groups)
            elif count not in (1, size):
                factors = factors.index_select(axis, torch.arange(size) // self._step(size, count))
        return factors

    def _step(self, size: int, count: int) -> int:
        """Return the size of each of `count` groups or blocks along a dimension of `size`."""
        matching = (step for step in self.steps if -(-size // step) == count)
        step = next(matching, 0 if size % count else size // count)
        if not step:
            raise ValueError
        return step


def _sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the sections of a quantization_config: itself, and those of compressed-tensors."""
    return [config, *(config.get("config_groups") or {}).values()]


def _required(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the roles of tensors that asymmetric quantisation and act-order need."""
    weights = [each.get("weights") or {} for each in _sections(config)[1:]] or [config]
    asymmetric = all(each.get("symmetric", each.get("sym")) is False for each in weights)
    if asymmetric or config.get("zero_point") is True:
        yield "zeros"
    if config.get("desc_act") or all(each.get("actorder") in ("group", True) for each in weights):
        yield "groups"


def _steps(config: Mapping[str, Any]) -> Iterator[int]:
    for part in [config, *(section.get("weights") or {} for section in _sections(config)[1:])]:
        for field in ("weight_block_size", "block_structure", "group_size", "q_group_size"):
            value = part.get(field)
            for step in value if isinstance(value, list) else [value]:
                if isinstance(step, int) and step > 0:
                    yield step


def _bits(words: int, count: int) -> int:
    """Return the number of bits of `count` values in `words` words of 32 bits."""
    return next(bits for bits in (*_BITS, 0) if not bits or math.ceil(count * bits / 32) == words)


def _unpacked(words: torch.Tensor, bits: int, interleaved: bool = False) -> torch.Tensor:
    """Return the unsigned values in 32-bit words [rows, words], int32 [rows, values].

    With `interleaved`, the first half of a word's bits has its even values, as AWQ stores them.
    """
    if not bits:
        raise ValueError
    shifts = torch.arange(32 // bits, dtype=torch.int32)
    if interleaved:
        shifts = shifts.view(2, -1).t().reshape(-1)
    fields = words.unsqueeze(-1) >> shifts * bits
    return fields.bitwise_and_((1 << bits) - 1).flatten(1)
