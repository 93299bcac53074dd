"""Whether memory on a CUDA device can be shared: this process opens what another one exports.

`python -m shmserve.supervisor.checks.cuda_probe`: exit status 0, or else the reason, in one line.
"""

from __future__ import annotations

import subprocess
import sys

from shmserve.errors import ShmserveError
from shmserve.ipc.memory.cuda_ipc import CudaError, DeviceAllocation, Driver

_PATTERN = bytes(range(256)) * 16
_EXPORT = [sys.executable, "-m", "shmserve.supervisor.checks.cuda_probe", "export"]


def export() -> None:
    """Print the handle of memory with the pattern in it, which lasts as long as standard input."""
    cuda = Driver()
    memory = DeviceAllocation(cuda, 0, len(_PATTERN))
    cuda.write(memory.pointer, memoryview(bytearray(_PATTERN)), 0)
    print(memory.handle.raw.hex(), flush=True)
    sys.stdin.read()


def read(handle: bytes) -> bytes:
    """What is in the memory that a handle means."""
    cuda = Driver()
    pointer = cuda.open(handle, 0)
    found = bytearray(len(_PATTERN))
    cuda.read(pointer, memoryview(found), 0)
    cuda.close(pointer, 0)
    return bytes(found)


def main() -> str | None:
    """Why it could not be shared, for `sys.exit`."""
    pipe = subprocess.PIPE
    with subprocess.Popen(_EXPORT, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        line = other.stdout.readline().strip()
        try:
            shared = bool(line) and read(bytes.fromhex(line)) == _PATTERN
        except (ShmserveError, CudaError) as error:
            return str(error)
    return None if shared else "what was read is not what was written" if line else ""


if __name__ == "__main__":
    if sys.argv[1:]:
        export()
    else:
        sys.exit(main())
