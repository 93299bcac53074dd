"""Runs a small TorchScript program until it is optimised: what the compiler sets up at first use
takes as long as loading a model. For a zygote whose workers load some, or for the worker."""

import contextlib
import warnings

import torch


def _run() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        program = torch.jit.script(module)
    with torch.inference_mode():
        for _ in range(3):  # watched, optimised, and as it is then
            program(torch.zeros(1, 4))


with contextlib.suppress(RuntimeError):
    _run()
