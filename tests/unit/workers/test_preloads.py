"""The torch code of zygotes before a fork: no thread remains, children compute."""

import subprocess
import sys

import pytest

_SCRIPT = """
import os, pkgutil, sys, time
import torch

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
before = threads()
loaded = pkgutil.resolve_name(sys.argv[1])
if callable(loaded):
    loaded()
assert threads() == before, (before, threads())
assert torch.get_num_threads() == 2
child = os.fork()
if not child:
    big = torch.ones(512, 512)
    program = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(512, 8)))
    for _ in range(3):
        assert (big @ big)[0, 0] == 512 and program(big).shape == (512, 8)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

# Behaves like a worker that was forked from a zygote without torch, and whose model imports torch.
_WITHOUT_TORCH = """
import sys
from shmserve.workers import main

assert "torch" not in sys.modules
main._limit_threads(1)
import torch

assert torch.get_num_threads() == 1
main._limit_threads(2)
assert torch.get_num_threads() == 2
"""


@pytest.mark.parametrize(
    "module", ["device:preload_operations", "device:preload_scripted", "device:preload_text"]
)
def test_a_forked_process_computes_with_several_threads(module: str) -> None:
    command = [sys.executable, "-c", _SCRIPT, f"shmserve.workers.{module}"]
    subprocess.run(command, check=True, timeout=60)


def test_a_worker_imports_no_torch_by_itself_and_bounds_the_threads_of_its_models() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], check=True, timeout=60)
