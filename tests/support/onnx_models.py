"""Small ONNX models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

Tensor = tuple[str, int, Sequence[Any] | None]
FLOAT = int(TensorProto.FLOAT)


def save(
    folder: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    initializers: Sequence[Any] = (),
) -> None:
    """Write `model.onnx`; a node is (operator, inputs, outputs[, attributes])."""
    onnx_model = [
        helper.make_node(kind, input_names.split(), output_names.split(), **dict(*attributes))
        for kind, input_names, output_names, *attributes in nodes
    ]
    graph = helper.make_graph(
        onnx_model,
        "graph",
        [helper.make_tensor_value_info(*tensor) for tensor in inputs],
        [helper.make_tensor_value_info(*tensor) for tensor in outputs],
        list(initializers),
    )
    # An older opset and IR version, which older packages can read.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
