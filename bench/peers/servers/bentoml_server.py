"""The BentoML server: one worker, adaptive batching."""

import os
from pathlib import Path

import bentoml
import numpy as np
from codec import MAX_BATCH_SIZE, from_bytes, load


@bentoml.service(workers=1)
class Model:
    """The model named by `MODEL`, with an API of BentoML for its kind of body."""

    def __init__(self):
        self.run = load()

    if os.environ["MODEL"] == "simple":

        @bentoml.api(batchable=True, max_batch_size=MAX_BATCH_SIZE)
        def infer(self, rows: np.ndarray) -> np.ndarray:
            return self.run(rows.astype(np.int32))

    else:

        @bentoml.api(batchable=True, max_batch_size=MAX_BATCH_SIZE)
        def infer(self, files: list[Path]) -> np.ndarray:
            return self.run(np.stack([from_bytes(file.read_bytes()) for file in files]))
