"""Imports and warm-up of torch that a zygote does once, so that no forked worker pays for them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings

import torch
from torch.nn import functional

# These modules are not public. If a version of torch lacks one, the worker imports what it needs.
_EXPORT_MODULES = (
    "torch._export.serde.serialize",
    "torch.export.pt2_archive._package",
    "torch.export.passes",
    "torch._inductor.codecache",
    "torch._functorch.aot_autograd",
)


def exported() -> None:
    """Import the modules that exported programs need (a second, 90 MB)."""
    for name in _EXPORT_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def operations() -> None:
    """Run operations of torch once on the CPU.

    At their first use libraries set up code for this processor, tables and lazy imports. One thread
    runs them, because a pool of threads would not survive the fork.
    """
    image, kernels = torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3)
    rows, weights = torch.zeros(2, 64), torch.zeros(64, 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # A build of torch may lack an operation.
    with contextlib.suppress(RuntimeError), torch.inference_mode():
        functional.linear(rows, weights)
        torch.matmul(weights[None], weights[None])
        functional.conv2d(image, kernels)
        functional.avg_pool2d(image, 3)
        functional.gelu(rows)
        functional.layer_norm(rows, (64,))
        torch.softmax(rows, 1)
        (rows * 2 + 1).sum()
    torch.set_num_threads(threads)


@functools.cache
def scripted() -> None:
    """Run a small TorchScript program until it is optimised.

    The compiler's initialisation at its first use takes as long as loading a model. A process whose
    zygote has called this function skips it.
    """
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    with contextlib.suppress(RuntimeError):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            program = torch.jit.script(module)
        with torch.inference_mode():
            for _ in range(3):  # profiled, optimised, and run as optimised
                program(torch.zeros(1, 4))
