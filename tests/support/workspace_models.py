"""Models that use the shared workspace and report whether another process has changed it."""

from pathlib import Path

import numpy as np

from tests.support import repositories
from tests.support.wire.raw_http import json_input

PYTHON = repositories.python_model('''
    def one(self, request):
        """Fill a workspace; return the bytes of it that were not the model's own afterwards.

        -9: die with it; -2: ask for a second one; 1000 and more is asked for as it is.
        """
        x = int(self.input(request, "X").flat[0])
        with pb_utils.workspace(SIZE if x < 1000 else x) as buffer:
            buffer[:] = x % 251
            if x == -9:
                os.kill(os.getpid(), 9)
            if x == -2:
                with pb_utils.workspace(1):
                    pass
            time.sleep(0.002)
            wrong = int((buffer != x % 251).sum())
        return self.response(WRONG=np.array([wrong], np.int64))
''')
CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_INT64 dims: [ 1 ] }} ]
output [ {{ name: "WRONG" data_type: TYPE_INT64 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 2 }} ]
"""


def add(repository: Path, name: str, size: int) -> None:
    source = PYTHON.replace("SIZE", str(size))
    repositories.write(repository, name, CONFIG.format(name=name), source)


def request_body(value: int) -> dict:
    return {"inputs": [json_input("X", np.array([value], np.int64))]}
