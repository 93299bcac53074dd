"""Quantised checkpoints: weights are bit-identical to a reference, or the folder is rejected."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shmserve.errors import InvalidArgument
from shmserve.workers.backends.llm.model.checkpoint import Checkpoint
from shmserve.workers.backends.llm.model.transformer import Transformer
from tests.support.hf_folders import config, weights, write_folder
from tests.unit.workers.backends.llm.test_checkpoint import edit

Tensors = dict[str, torch.Tensor]
QuantisedLayer = tuple[Tensors, torch.Tensor]  # the tensors of a layer, and its weight in float32
# The order of the values in a packed word, by bits per value.
AWQ_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
GROUP = 16


def pack_bits(values: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack rows of unsigned values into rows of 32-bit words, the lowest bits first."""
    count = 32 // bits
    order = order or tuple(range(count))
    rows, columns = values.shape
    packed_words = torch.zeros(rows, math.ceil(columns / count), dtype=torch.int64)
    for word in range(packed_words.shape[1]):
        for position, index in enumerate(order):
            column = word * count + index
            if column < columns:
                packed_words[:, word] |= values[:, column].long() << (bits * position)
    return torch.where(packed_words >= 1 << 31, packed_words - (1 << 32), packed_words).int()


def spread_scales(scales: torch.Tensor, shape: torch.Size, rows: int, width: int) -> torch.Tensor:
    """Return a scale for each weight, given one for each block of `rows` x `columns` weights."""
    return scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(width, 1)[:, : shape[1]]


def draw_ints(rows: int, columns: int, limit: int, seed: int = 0, lowest: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + 31 * columns + seed)
    return torch.randint(lowest, limit, (rows, columns), generator=generator)


def draw_scales(rows: int, columns: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return ((draw_ints(rows, columns, 1000, 7) + 1) / 3000).to(kind)


def fp8(
    weight: torch.Tensor,
    block: tuple[int, int],
    scale: str = "weight_scale_inv",
    kind: torch.dtype = torch.float32,
) -> QuantisedLayer:
    rows, columns = weight.shape
    counts = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    scales = draw_scales(*counts, kind)
    values = (weight * 300).to(torch.float8_e4m3fn)
    exact_weight = values.float() * spread_scales(scales.float(), weight.shape, *block)
    return {"weight": values, scale: scales}, exact_weight


def fp8_tensor(weight: torch.Tensor) -> QuantisedLayer:
    q, exact = fp8(weight, (1 << 20, 1 << 20), "weight_scale")
    return q | {"weight_scale": q["weight_scale"][0, 0], "input_scale": torch.ones(1)}, exact


def exponents(weight: torch.Tensor) -> QuantisedLayer:
    quantised, _ = fp8(weight, (16, 16))
    rows, columns = quantised["weight_scale_inv"].shape
    powers = draw_ints(rows, columns, 130, lowest=124).byte()
    scales = 2.0 ** (powers.float() - 127)
    exact_weight = quantised["weight"].float() * spread_scales(scales, weight.shape, 16, 16)
    return quantised | {"weight_scale_inv": powers}, exact_weight


def plain_ints(
    weight: torch.Tensor, block: tuple[int, int], symmetric: bool, bits: int = 8
) -> QuantisedLayer:
    rows, columns = weight.shape
    counts = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    half_range = 1 << bits - 1
    values = draw_ints(rows, columns, half_range, lowest=-half_range)
    zero_points = draw_ints(*counts, half_range, 3, -half_range) * (not symmetric)
    scales = draw_scales(*counts, torch.bfloat16)
    exact = (values - spread_scales(zero_points, weight.shape, *block)).float()
    exact = exact * spread_scales(scales.float(), weight.shape, *block)
    tensors = {"weight": values.to(torch.int8), "weight_scale": scales}
    return tensors | ({} if symmetric else {"weight_zero_point": zero_points.to(torch.int8)}), exact


def packed_ints(weight: torch.Tensor, bits: int, columns: int, symmetric: bool) -> QuantisedLayer:
    block = (1, columns)
    quantised, exact_weight = plain_ints(weight, block, symmetric, bits)
    half_range = 1 << bits - 1
    tensors = {
        "weight_packed": pack_bits(quantised["weight"].int() + half_range, bits),
        "weight_scale": quantised["weight_scale"],
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": torch.full((weight.shape[1],), -1, dtype=torch.int32),
    }
    if not symmetric:
        zero_points = pack_bits((quantised["weight_zero_point"].int() + half_range).t(), bits)
        tensors["weight_zero_point"] = zero_points.t().contiguous()
    return tensors, exact_weight


def ordered_ints(weight: torch.Tensor) -> QuantisedLayer:
    quantised, _ = packed_ints(weight, 4, GROUP, False)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1)) // GROUP
    plain, _ = plain_ints(weight, (1, GROUP), False, 4)
    exact = (plain["weight"].int() - plain["weight_zero_point"].int()[:, order]).float()
    exact = exact * plain["weight_scale"].float()[:, order]
    return quantised | {"weight_g_idx": order.int()}, exact


def drop_tensors(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def gptq(
    weight: torch.Tensor,
    bits: int = 4,
    group: int = GROUP,
    offset: int = 1,
    ordered: bool = False,
    zeros: bool = True,
) -> QuantisedLayer:
    rows, columns = weight.shape
    group = group if group > 0 else columns
    values, max_point = draw_ints(columns, rows, 1 << bits), (1 << bits) - offset
    points = draw_ints(columns // group, rows, max_point, 3) if zeros else (1 << bits - 1) - offset
    scales = draw_scales(columns // group, rows, torch.float16)
    groups = torch.arange(columns) // group
    if ordered:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    points = torch.as_tensor(points).expand(columns // group, rows)
    exact_weight = ((values - (points[groups] + offset)).float() * scales.float()[groups]).t()
    tensors = {
        "qweight": pack_bits(values.t(), bits).t().contiguous(),
        "qzeros": pack_bits(points, bits),
        "scales": scales,
        "g_idx": groups.int(),
        "bias": torch.zeros(rows, dtype=torch.float16),
    }
    return tensors if zeros else drop_tensors(tensors, "qzeros"), exact_weight


def gptq_with_carry(weight: torch.Tensor, bits: int) -> QuantisedLayer:
    """Return a layer as of GPTQModel, which subtracts 1 from whole words of zero points."""
    rows, columns = weight.shape
    values, groups = draw_ints(columns, rows, 1 << bits), torch.arange(columns) // GROUP
    points = draw_ints(columns // GROUP, rows, 3)
    scales = draw_scales(columns // GROUP, rows, torch.float16)
    exact = ((values - points[groups]).float() * scales.float()[groups]).t()
    offsets = torch.tensor(sum(1 << shift for shift in range(0, 32, bits)), dtype=torch.int32)
    tensors = {
        "qweight": pack_bits(values.t(), bits).t().contiguous(),
        "qzeros": pack_bits(points, bits) - offsets,
        "scales": scales,
    }
    return tensors, exact


def awq(
    weight: torch.Tensor,
    bits: int = 4,
    group: int = GROUP,
    zeros: bool = True,
    order: tuple[int, ...] = (),
) -> QuantisedLayer:
    rows, columns = weight.shape
    values = draw_ints(columns, rows, 1 << bits)
    points = draw_ints(columns // group, rows, 1 << bits, 3) * zeros + (1 << bits - 1) * (not zeros)
    scales = draw_scales(columns // group, rows, torch.float16)
    groups = torch.arange(columns) // group
    exact_weight = ((values - points[groups]).float() * scales.float()[groups]).t()
    tensors = {
        "qweight": pack_bits(values, bits, order or AWQ_ORDER[bits]),
        "scales": scales,
        "qzeros": pack_bits(points, bits, order or AWQ_ORDER[bits]),
    }
    return tensors if zeros else drop_tensors(tensors, "qzeros"), exact_weight


def write_quantised(
    path: Path, quantise: Callable[[torch.Tensor], QuantisedLayer], fields: dict[str, Any]
) -> Tensors:
    """Write a folder with quantised layers; return their dequantised weights."""
    write_folder(path)
    edit(path, "config.json", quantization_config=fields)
    stored: Tensors = {}
    exact_weights: Tensors = {}
    for name, weight in weights(config()).items():
        stored[name] = exact_weights[name] = weight
        # This layer is not quantised.
        if name.endswith("_proj.weight") and "layers.1.mlp.up" not in name:
            quantised, exact_weights[name] = quantise(weight)
            del stored[name]
            prefix = name.removesuffix("weight")
            stored |= {prefix + part: tensor.contiguous() for part, tensor in quantised.items()}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return exact_weights


def compression_config(kind: str, group: int | None = None, **fields: Any) -> dict[str, Any]:
    arguments = {"num_bits": 8, "group_size": group, **fields}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
        "ignore": ["lm_head", "re:.*up_proj"],
    }


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}
ROW_BLOCK, WHOLE_BLOCK = (1, 1 << 20), (1 << 20, 1 << 20)
INT, PACK_QUANTIZED = compression_config("int-quantized"), compression_config("pack-quantized")
QUANTISATIONS: dict[str, tuple[Callable[[torch.Tensor], QuantisedLayer], dict[str, Any]]] = {
    "fp8 tensor": (fp8_tensor, FP8),
    "fp8 blocks": (lambda w: fp8(w, (16, 16)), {**FP8, "weight_block_size": [16, 16]}),
    "fp8 partial blocks": (lambda w: fp8(w, (24, 24), kind=torch.bfloat16),
        {**FP8, "weight_block_size": [24, 24]}),
    "fp8 partial blocks of two sizes": (lambda w: fp8(w, (24, 20)),
        {**FP8, "weight_block_size": [24, 20]}),
    "fp8 large blocks": (lambda w: fp8(w, (128, 128)),
        {**FP8, "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}),
    "fp8 exponents": (exponents, {**FP8, "weight_block_size": [16, 16]}),
    "float channel": (lambda w: fp8(w, ROW_BLOCK, "weight_scale"),
        compression_config("float-quantized")),
    "float block": (lambda w: fp8(w, (24, 24), "weight_scale"),
        compression_config("float-quantized", block_structure=[24, 24])),
    "int8 tensor": (lambda w: plain_ints(w, WHOLE_BLOCK, True), INT),
    "int8 tensor asymmetric": (lambda w: plain_ints(w, WHOLE_BLOCK, False), INT),
    "int8 channel": (lambda w: plain_ints(w, ROW_BLOCK, True), INT),
    "int8 channel of a preset": (lambda w: plain_ints(w, ROW_BLOCK, True),
        {**INT, "config_groups": {"W8A8": ["Linear"]}}),
    "int8 channel asymmetric": (lambda w: plain_ints(w, ROW_BLOCK, False), INT),
    "int8 group": (lambda w: plain_ints(w, (1, 16), False),
        compression_config("naive-quantized", 16)),
    "pack 4 channel": (lambda w: packed_ints(w, 4, 1 << 20, True), PACK_QUANTIZED),
    "pack 4 channel asymmetric": (lambda w: packed_ints(w, 4, 1 << 20, False), PACK_QUANTIZED),
    "pack 4 group": (lambda w: packed_ints(w, 4, 16, True),
        compression_config("pack-quantized", 16)),
    "pack 4 group asymmetric": (lambda w: packed_ints(w, 4, 16, False),
        compression_config("pack-quantized", 16)),
    "pack 8 group asymmetric": (lambda w: packed_ints(w, 8, 16, False),
        compression_config("pack-quantized", 16)),
    "pack 7 group asymmetric": (lambda w: packed_ints(w, 7, 16, False),
        compression_config("pack-quantized", 16, num_bits=7)),
    "pack 3 channel": (lambda w: packed_ints(w, 3, 1 << 20, True),
        compression_config("pack-quantized", num_bits=3)),
    "pack 8 with unpacked zero points": (lambda w: (packed_ints(w, 8, 16, True)[0]
        | drop_tensors(plain_ints(w, (1, 16), False)[0], "weight", "weight_scale"),
        plain_ints(w, (1, 16), False)[1]), compression_config("pack-quantized", 16)),
    "pack 4 act-order": (ordered_ints, compression_config("pack-quantized", 16, actorder="group")),
    "gptq 4": (gptq, GPTQ),
    "gptq 8": (lambda w: gptq(w, 8), {**GPTQ, "bits": 8}),
    "gptq 4 with carry": (lambda w: gptq_with_carry(w, 4), {**GPTQ, "sym": False}),
    "gptq 8 with carry": (lambda w: gptq_with_carry(w, 8), {**GPTQ, "bits": 8, "sym": False}),
    "gptq no g_idx": (lambda w: (drop_tensors(gptq(w)[0], "g_idx"), gptq(w)[1]), GPTQ),
    "gptq one group": (lambda w: gptq(w, group=-1), {**GPTQ, "group_size": -1}),
    "gptq v2": (lambda w: gptq(w, offset=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq act-order": (lambda w: gptq(w, ordered=True), {**GPTQ, "desc_act": True, "sym": False}),
    "gptq no zero points": (lambda w: gptq(w, zeros=False), GPTQ),
    "awq 4": (awq, AWQ),
    "awq 8": (lambda w: awq(w, 8), {**AWQ, "bits": 8}),
    "awq 4 of GPTQModel": (awq, {**AWQ, **GPTQMODEL}),
    "awq 8 of GPTQModel": (lambda w: awq(w, 8, order=(0, 1, 2, 3)), {**AWQ, **GPTQMODEL}),
    "awq no zero points": (lambda w: awq(w, zeros=False), {**AWQ, "zero_point": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_weights_equal_a_reference_to_the_last_bit(tmp_path: Path, name: str) -> None:
    exact_weights = write_quantised(tmp_path / "m", *QUANTISATIONS[name])
    checkpoint = Checkpoint.open(tmp_path / "m")
    for tensor_name, weight in exact_weights.items():
        dequantised = checkpoint.weight(tensor_name)
        assert dequantised.dtype == torch.float32 and torch.equal(dequantised, weight), tensor_name


@pytest.mark.parametrize(
    ("file", "quantise"), [("quantize_config.json", gptq), ("quant_config.json", awq)]
)
def test_older_folders_have_a_file_of_their_own(
    tmp_path: Path, file: str, quantise: Callable[[torch.Tensor], QuantisedLayer]
) -> None:
    exact_weights = write_quantised(tmp_path / "m", quantise, {})
    edit(tmp_path / "m", file, q_group_size=GROUP, w_bit=4, version="GEMM")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(Checkpoint.open(tmp_path / "m").weight(name), exact_weights[name])


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SUPPORTED = "supported: fp8, compressed-tensors, gptq, awq"


@pytest.mark.parametrize(
    ("quantise", "fields", "message"),
    [
        (gptq, NF4, f"quant_method: 'bitsandbytes' is not supported, {SUPPORTED}"),
        (gptq, {"load_in_8bit": True}, "quant_method: 'bitsandbytes' is not supported"),
        (gptq, {"quant_method": "mxfp4"}, "quant_method: 'mxfp4' is not supported"),
        (gptq, {**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supp"),
        (gptq, {**GPTQ, "is_marlin_format": True}, "is_marlin_format: True is not supported, sup"),
        (awq, {**AWQ, "version": "gemv"}, "version: 'gemv' is not supported, supported: gemm"),
        (gptq, compression_config("nvfp4-pack-quantized"),
         "format: 'nvfp4-pack-quantized' is not suppor"),
        (gptq, {**INT, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format: 'sp"),
        (gptq, {}, "weights are missing: model.layers.0.self_attn.q_proj.weight"),
        (awq, FP8, "weights are missing: model.layers.0.self_attn.q_proj.weight"),
        (fp8_tensor, {}, "q_proj.weight is F8_E4M3 without a quantization_config"),
        (lambda w: plain_ints(w, ROW_BLOCK, True), FP8,
         "q_proj.weight is I8, but fp8 supports F8_E4M3, F8_E5M2"),
        (lambda w: ({"weight": fp8_tensor(w)[0]["weight"]}, w), FP8,
         "q_proj.weight has no weight_scale_inv or weight_scale"),
        (lambda w: ({"qweight": gptq(w)[0]["qweight"]}, w), GPTQ, "q_proj.qweight has no scales"),
        (lambda w: gptq(w, zeros=False), {**GPTQ, "sym": False}, "q_proj.qweight has no qzeros"),
        (lambda w: awq(w, zeros=False), AWQ, "q_proj.qweight has no qzeros"),
        (lambda w: plain_ints(w, ROW_BLOCK, True),
         compression_config("int-quantized", symmetric=False),
         "q_proj.weight has no weight_zero_point"),
        (lambda w: plain_ints(w, ROW_BLOCK, True),
         compression_config("int-quantized", actorder="group"),
         "q_proj.weight has no weight_g_idx"),
        (lambda w: (drop_tensors(packed_ints(w, 4, 16, True)[0], "weight_g_idx"), w),
         compression_config("pack-quantized", 16, actorder="dynamic"),
         "q_proj.weight_packed has no weight_g_idx"),
        (lambda w: (drop_tensors(gptq(w)[0], "g_idx", "qzeros"), w),
         {**GPTQ, "desc_act": True, "sym": False}, "q_proj.qweight has no qzeros and no g_idx"),
        (lambda w: ({"weight": w, "weight_scale": w[:, :1]}, w), FP8, "q_proj.weight is F32, but"),
    ],
)  # fmt: skip
def test_unknown_quantisations_are_refused(
    tmp_path: Path,
    quantise: Callable[[torch.Tensor], QuantisedLayer],
    fields: dict[str, Any],
    message: str,
) -> None:
    write_quantised(tmp_path / "m", quantise, fields)
    with pytest.raises(InvalidArgument) as caught:
        Checkpoint.open(tmp_path / "m")
    found = caught.value.message
    assert message in found
    assert ("quantization_config: " in found) != ("weights" in found), "only the cause is reported"


@pytest.mark.parametrize(
    ("quantise", "fields"),
    [
        (lambda w: gptq(w[:, :16]), GPTQ),
        (lambda w: (gptq(w)[0] | {"g_idx": torch.full((w.shape[1],), 99)}, w), GPTQ),
        (lambda w: (awq(w)[0] | {"scales": torch.ones(3, w.shape[0])}, w), AWQ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, quantise: Callable[[torch.Tensor], QuantisedLayer], fields: dict[str, Any]
) -> None:
    write_quantised(tmp_path / "m", quantise, fields)
    checkpoint = Checkpoint.open(tmp_path / "m")
    with pytest.raises(InvalidArgument, match=r"q_proj.weight: .* tensors .* do not fit"):
        Transformer(checkpoint)
