"""Processes as the kernel and malloc have them."""

from __future__ import annotations

import subprocess
import sys

from tests.support.servers import ROOT

# Halves of frames come over several connections at a time, and each has small things beside it.
_FRAMES = """
from pathlib import Path
from shmserve.ipc import processes

def resident():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10

processes.keep_no_large_memory()
chunk, small, before = bytes(1 << 20), [], resident()
for _ in range(3):
    frames = [bytearray() for _ in range(12)]
    for _ in range(8):
        for frame in frames:
            frame += chunk
            small.append(bytes(600))
    held = resident() - before
    del frames, frame
print(held, resident() - before)
"""


def test_large_memory_is_given_back_when_it_is_freed() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FRAMES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    held, kept = map(int, ran.stdout.split())
    assert held >= 12 * 8 << 20
    assert kept < 4 << 20
