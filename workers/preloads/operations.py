"""Runs operations of torch once on the CPU, for a zygote: what their libraries set up at first use
(code for this processor, tables, lazy imports) is there before any model's first request.

One thread: a pool of threads would not live on in the processes that are forked.
"""

import contextlib

import torch
from torch.nn import functional

_IMAGE = torch.zeros(1, 3, 8, 8)
_ROWS = torch.zeros(2, 64)
_KERNELS = torch.zeros(4, 3, 3, 3)
_WEIGHTS = torch.zeros(64, 64)


def _run() -> None:
    with torch.inference_mode():
        functional.linear(_ROWS, _WEIGHTS)
        torch.matmul(_WEIGHTS[None], _WEIGHTS[None])
        functional.conv2d(_IMAGE, _KERNELS)
        functional.avg_pool2d(_IMAGE, 3)
        functional.gelu(_ROWS)
        functional.layer_norm(_ROWS, (64,))
        torch.softmax(_ROWS, 1)
        (_ROWS * 2 + 1).sum()


_threads = torch.get_num_threads()
torch.set_num_threads(1)
with contextlib.suppress(RuntimeError):  # a build of torch that lacks one: its first use pays
    _run()
torch.set_num_threads(_threads)
