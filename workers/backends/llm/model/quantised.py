"""Quantised weights of checkpoints, dequantised to float32 when they are loaded.

A quantised linear layer has integers or 8-bit floats q, scales s and, if it is asymmetric, zero
points z. Its weight is (q - z) * s, computed in float32. The shapes of the tensors determine which
layers are quantised, the number of bits, and the groups that share a scale. Activation scales are
ignored, because activations are not quantised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from shmserve.errors import InvalidArgument

_UNQUANTISED_TYPES = ("F64", "F32", "F16", "BF16")
_FP8_TYPES = ("F8_E4M3", "F8_E5M2")
_WIDTHS = (2, 4, 8)  # bits of packed integers, if quantization_config does not state others
_ACT_ORDERS = ("group", "dynamic", True)  # `actorder` values that require the group of each column


class StoredTensor(NamedTuple):
    """The description of a tensor in a file, from the file's header."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class Method(NamedTuple):
    """The tensors and the settings of a quantisation method.

    Attributes:
        values: The data types of q by the last part of its name.
        roles: The last parts of the names of the other tensors by role: "scales", "zeros", and
            "groups", the group of each column.
        settings: The supported values of settings.
        widths: The supported numbers of bits of packed integers.
    """

    values: Mapping[str, tuple[str, ...]]
    roles: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, tuple[Any, ...]] = {}
    widths: tuple[int, ...] = _WIDTHS


# Formats of compressed-tensors, then data types and names of the tensors in GPTQ and AWQ files.
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_PACKED_VALUES = {"qweight": ("I32",)}
_QUANTISED_ROLES = {"scales": ("scales",), "zeros": ("qzeros",)}
_METHODS = {
    "fp8": Method({"weight": _FP8_TYPES}, {"scales": ("weight_scale_inv", "weight_scale")}),
    "compressed-tensors": Method(
        {"weight_packed": ("I32",), "weight": ("I8", *_FP8_TYPES)},
        {"scales": ("weight_scale",), "zeros": ("weight_zero_point",), "groups": ("weight_g_idx",)},
        {"format": (*_FORMATS, "mixed-precision", "dense")},
        widths=tuple(range(1, 9)),
    ),
    "gptq": Method(
        _PACKED_VALUES,
        {**_QUANTISED_ROLES, "groups": ("g_idx",)},
        {
            **dict.fromkeys(("checkpoint_format", "format"), ("gptq", "gptq_v2")),
            "is_marlin_format": ("false",),
        },
    ),
    "awq": Method(
        _PACKED_VALUES,
        _QUANTISED_ROLES,
        dict.fromkeys(("version", "checkpoint_format", "format"), ("gemm",)),
    ),
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation of a checkpoint.

    Attributes:
        method: The `quant_method` of config.json, or "".
        zero_offset: The number to add to each stored zero point. As in GPTQModel, the sum may carry
            into the next zero point of a word.
        group_sizes: The possible sizes of groups and blocks along rows and columns. Shapes do not
            determine the size if the last block is partial.
        required_roles: The roles of the tensors that each quantised weight must have.
        is_interleaved: Whether an AWQ word of 32 bits has its even values before its odd ones.
            GPTQModel interleaves 4-bit values only.
        widths: The possible numbers of bits of packed integers; the first ones are those of
            quantization_config. Shapes do not always determine the number.
    """

    method: str = ""
    zero_offset: int = 0
    group_sizes: tuple[tuple[int, int], ...] = ()
    required_roles: tuple[str, ...] = ("scales",)
    is_interleaved: bool = True
    widths: tuple[int, ...] = _WIDTHS

    @classmethod
    def of(cls, config: Mapping[str, Any], problems: list[str]) -> Self:
        """Return the quantisation that a quantization_config in config.json describes."""
        is_bitsandbytes = config.get("load_in_8bit") or config.get("load_in_4bit")
        name = config.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "")
        unsupported_fields: list[tuple[str, Any, tuple[Any, ...]]] = []  # (field, value, allowed)
        if config and name not in _METHODS:
            unsupported_fields.append(("quant_method", name, tuple(_METHODS)))
        else:
            for section in _sections(config):
                permitted_settings = _METHODS[name].settings if config else {}
                unsupported_fields += [
                    (field, section[field], allowed_values)
                    for field, allowed_values in permitted_settings.items()
                    if section.get(field) is not None
                    and str(section[field]).lower() not in allowed_values
                ]
        sparsity = config.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            unsupported_fields.append(("sparsity_config.format", sparsity["format"], ("dense",)))
        if (config.get("transform_config") or {}).get("config_groups"):
            unsupported_fields.append(("transform_config", config["transform_config"], (None,)))
        for field, value, allowed_values in unsupported_fields:
            supported_text = ", ".join(map(str, allowed_values))
            problems.append(
                f"config.json: quantization_config: {field}: {value!r} is not supported, "
                f"supported: {supported_text}"
            )
        gptq_format = config.get("checkpoint_format") or config.get("format")
        zero_offset = 1 if name == "gptq" and gptq_format != "gptq_v2" else 0
        required_roles = ("scales", *_required_roles(config))
        is_interleaved = "gptqmodel" not in str((config.get("meta") or {}).get("quantizer"))
        method = name if name in _METHODS else ""
        group_sizes = tuple(_group_sizes(config))
        supported_widths = _METHODS[method].widths if method else ()
        widths = (n for n in (*_stated_widths(config), *_WIDTHS) if n in supported_widths)
        return cls(method, zero_offset, group_sizes, required_roles, is_interleaved, (*widths,))

    def parts(self, name: str, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the tensors of a weight by role: "values" and, if quantised, "scales" and more."""
        prefix, last_part = name[: -len("weight")], name[-len("weight") :]
        by_role: dict[str, StoredTensor] = {}
        if name in tensors:
            by_role["values"] = tensors[name]
        if last_part == "weight" and self.method:
            method = _METHODS[self.method]
            for role, endings in {"values": tuple(method.values), **method.roles}.items():
                for ending in endings:
                    if prefix + ending in tensors:
                        by_role.setdefault(role, tensors[prefix + ending])
        return by_role

    def problem(
        self, name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]
    ) -> str:
        """Return the problem of a weight in the files, or ""."""
        parts = self.parts(name, tensors)
        values = parts["values"]
        if values.dtype in _UNQUANTISED_TYPES and "scales" not in parts:
            if values.shape == shape:
                return ""
            return f"{name} has the shape {list(values.shape)}, expected {list(shape)}"
        if not self.method:
            return f"{name} is {values.dtype} without a quantization_config in config.json"
        method = _METHODS[self.method]
        allowed_types = method.values.get(values.name.rpartition(".")[2], ())
        if values.dtype not in allowed_types:
            supported_text = ", ".join(allowed_types)
            return f"{values.name} is {values.dtype}, but {self.method} supports {supported_text}"
        missing_parts = [
            " or ".join(endings)
            for role, endings in method.roles.items()
            if role in self.required_roles and role not in parts
        ]
        return f"{values.name} has no {' and no '.join(missing_parts)}" if missing_parts else ""

    def dequantise(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> Tensor:
        """Return a weight, float32 [rows, columns].

        Raises:
            InvalidArgument: The tensors do not fit the shape.
        """
        try:
            return self._dequantise(shape, **parts)
        except (ValueError, IndexError, RuntimeError):
            widths = ", ".join(map(str, sorted({*self.widths})))
            sizes = ", ".join(f"{role} {list(tensor.shape)}" for role, tensor in parts.items())
            raise InvalidArgument(
                f"the model's folder is invalid: {name}: {self.method} tensors {sizes} do not fit "
                f"the shape {list(shape)} (supported: {widths} bits)"
            ) from None

    def _dequantise(
        self,
        shape: tuple[int, ...],
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Tensor:
        rows, columns = shape
        bits = 0
        # Values are packed along columns; scales and zeros have a row for each group.
        if self.method == "gptq":
            bits = self._bit_width(values.shape[0], columns)
            values, scales = _unpack(values.t(), bits), scales.t()
            if zeros is not None:
                offsets = sum(self.zero_offset << shift for shift in range(0, 32, bits or 32))
                zeros = _unpack(zeros + offsets, bits).t()
        elif self.method == "awq":  # values and zeros are packed along rows
            bits = self._bit_width(values.shape[1], rows)
            is_interleaved = self.is_interleaved or bits == 4
            values, scales = _unpack(values, bits, is_interleaved).t(), scales.t()
            zeros = None if zeros is None else _unpack(zeros, bits, is_interleaved).t()
        elif values.dtype == torch.int32:
            bits = self._bit_width(values.shape[1], columns)
            values = _unpack(values, bits)[:, :columns]
            if zeros is not None and zeros.dtype == torch.int32:
                zeros = _unpack(zeros.t(), bits).t()[:rows]
            elif zeros is not None:
                zeros = zeros.float() + (1 << bits - 1)  # int8 would overflow
        if zeros is None and bits:
            zeros = torch.tensor([1 << bits - 1])
        if scales.dtype == torch.uint8:  # scales of this type are exponents
            scales = (scales.float() - 127).exp2()
        # A negative number of a group means that the checkpoint does not use the tensor of groups.
        if groups is not None and groups.min() < 0:
            groups = None
        weight = values.float()
        if weight.shape != shape:
            raise ValueError
        if zeros is not None:
            weight = weight - self._expand(zeros.float(), shape, groups)
        return weight * self._expand(scales.float(), shape, groups)

    def _bit_width(self, words: int, count: int) -> int:
        """Return the bits of each of `count` values in `words` words of 32 bits; 0: none fits."""
        matches = (bits for bits in self.widths if math.ceil(count / (32 // bits)) == words)
        return next(matches, 0)

    def _expand(self, factors: Tensor, shape: tuple[int, ...], groups: Tensor | None) -> Tensor:
        """Return scales or zero points [groups of rows, groups of columns], expanded to a shape.

        Dimensions of size 1 remain, because they broadcast.
        """
        if factors.numel() == 1:
            return factors.reshape(1, 1)
        if factors.dim() == 1:
            factors = factors.unsqueeze(1)
        for axis, size in enumerate(shape):
            count = factors.shape[axis]
            if axis == 1 and groups is not None:
                factors = factors.index_select(1, groups)
            elif count not in (1, size):
                groups_of_axis = torch.arange(size) // self._group_size(axis, size, count)
                factors = factors.index_select(axis, groups_of_axis)
        return factors

    def _group_size(self, axis: int, size: int, count: int) -> int:
        """Return the size of each of `count` groups or blocks along an axis of `size`."""
        allowed_sizes = (sizes_of_axes[axis] for sizes_of_axes in self.group_sizes)
        matching_sizes = (group for group in allowed_sizes if -(-size // group) == count)
        group_size = next(matching_sizes, 0 if size % count else size // count)
        if not group_size:
            raise ValueError
        return group_size


def _sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the sections of a quantization_config: itself, and the groups of compressed-tensors.

    A group that is only a list of layers is omitted, because the tensors determine its settings.
    """
    groups = config.get("config_groups")
    sections = groups.values() if isinstance(groups, dict) else ()
    return [config, *(section for section in sections if isinstance(section, dict))]


def _weight_settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings of the weights in each section of compressed-tensors' configuration."""
    settings = (section.get("weights") for section in _sections(config)[1:])
    return [setting for setting in settings if isinstance(setting, dict)]


def _required_roles(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the roles of the tensors that asymmetric quantisation and act-order require."""
    parts = _weight_settings(config) or [config]
    is_asymmetric = all(part.get("symmetric", part.get("sym")) is False for part in parts)
    if is_asymmetric or config.get("zero_point", config.get("quant_method") == "awq") is True:
        yield "zeros"
    if config.get("desc_act") or all(part.get("actorder") in _ACT_ORDERS for part in parts):
        yield "groups"


def _stated_widths(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the numbers of bits that a quantization_config states; they may be unsupported."""
    for settings in [config, *_weight_settings(config)]:
        for field in ("bits", "w_bit", "num_bits"):
            if type(settings.get(field)) is int:
                yield settings[field]


def _group_sizes(config: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    for settings in [config, *_weight_settings(config)]:
        for field in ("weight_block_size", "block_structure", "group_size", "q_group_size"):
            value = settings.get(field)
            rows, columns = value if isinstance(value, list) and len(value) == 2 else (value, value)
            if isinstance(rows, int) and isinstance(columns, int) and min(rows, columns) > 0:
                yield rows, columns


def _unpack(words: Tensor, bits: int, is_interleaved: bool = False) -> Tensor:
    """Return the unsigned values in 32-bit words [rows, words], int32 [rows, values].

    If `is_interleaved`, the lower half of a word has its even values, as in AWQ.
    """
    if not bits:
        raise ValueError
    shifts = torch.arange(32 // bits, dtype=torch.int32)
    if is_interleaved:
        shifts = shifts.view(2, -1).t().reshape(-1)
    shifted_words = words.unsqueeze(-1) >> shifts * bits
    return shifted_words.bitwise_and_((1 << bits) - 1).flatten(1)
