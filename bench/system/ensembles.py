"""Ensembles of small Python models for the benchmark.

chain      three steps with 64 bytes between them
diamond    fork -> left, right -> join, with 64 KiB between them
naps       three steps of 64 bytes that each sleep for 2 ms
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

_CODE = """\
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = [pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in {inputs}]
        {body}
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, y) for n in {outputs}])
"""
_SMALL, _MEDIUM = 16, 16_384
_SUM = "y = sum(x) + np.float32(1)"
_NAP = f"time.sleep(0.002); {_SUM}"

Maps = Iterable[tuple[str, Mapping[str, str], Mapping[str, str]]]

CHAIN = ("chain", ("chain_a", "chain_b", "chain_c"))
DIAMOND = ("diamond", ("fork", "left", "right", "join"))
NAPS = ("naps", ("nap_a", "nap_b", "nap_c"))


def write(folder: Path) -> None:
    """Write all ensembles and their steps' models into `folder`."""
    for (name, steps), body in ((CHAIN, _SUM), (NAPS, _NAP)):
        tensors = ["INPUT0", "first", "second", "OUTPUT0"]
        for step in steps:
            _model(folder, step, ["X"], ["Y"], _SMALL, body)
        pairs = zip(steps, tensors, tensors[1:], strict=False)
        _ensemble(folder, name, _SMALL, [(s, {"X": a}, {"Y": b}) for s, a, b in pairs])
    name, (fork, left, right, join) = DIAMOND
    _model(folder, fork, ["X"], ["L", "R"], _MEDIUM, _SUM)
    for side in (left, right):
        _model(folder, side, ["X"], ["Y"], _MEDIUM, _SUM)
    _model(folder, join, ["L", "R"], ["Y"], _MEDIUM, _SUM)
    diamond_steps = [
        (fork, {"X": "INPUT0"}, {"L": "l", "R": "r"}),
        (left, {"X": "l"}, {"Y": "l2"}),
        (right, {"X": "r"}, {"Y": "r2"}),
        (join, {"L": "l2", "R": "r2"}, {"Y": "OUTPUT0"}),
    ]
    _ensemble(folder, name, _MEDIUM, diamond_steps)


def _tensors(names: Iterable[str], elements: int) -> str:
    tensor = '{ name: "%s" data_type: TYPE_FP32 dims: [ %d ] }'
    return ", ".join(tensor % (name, elements) for name in names)


def _model(
    folder: Path, name: str, inputs: list[str], outputs: list[str], elements: int, body: str
) -> None:
    (folder / name / "1").mkdir(parents=True)
    code = _CODE.format(inputs=inputs, outputs=outputs, body=body)
    (folder / name / "1" / "model.py").write_text(code)
    (folder / name / "config.pbtxt").write_text(
        f'name: "{name}" backend: "python" max_batch_size: 0\n'
        f"input [ {_tensors(inputs, elements)} ]\noutput [ {_tensors(outputs, elements)} ]\n"
        "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
    )


def _ensemble(folder: Path, name: str, elements: int, steps: Maps) -> None:
    (folder / name / "1").mkdir(parents=True)
    step_texts = []
    for model, inputs, outputs in steps:
        maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
        maps += [
            f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()
        ]
        step_texts.append(f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}')
    (folder / name / "config.pbtxt").write_text(
        f'name: "{name}" platform: "ensemble" max_batch_size: 0\n'
        f"input [ {_tensors(['INPUT0'], elements)} ]\n"
        f"output [ {_tensors(['OUTPUT0'], elements)} ]\n"
        f"ensemble_scheduling {{ step [ {', '.join(step_texts)} ] }}\n"
    )
