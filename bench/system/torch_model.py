"""A program that writes a small TorchScript network: `python -m bench.system.torch_model DIR`.

A process that has loaded torch shares its pages with the server under test, which reduces the
server's proportional memory. The program is therefore separate from the benchmark.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_CONFIG = """\
name: "torch"
backend: "pytorch"
max_batch_size: 8
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 1, 8, 8 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 10 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""


def write(folder: Path) -> None:
    """Write the model `torch`: FP32 [n, 1, 8, 8] to FP32 [n, 10] by two convolutions."""
    import torch
    from torch import nn

    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_CONFIG)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted_module = torch.jit.script(network.eval())
        torch.jit.save(scripted_module, str(folder / "1" / "model.pt"))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
