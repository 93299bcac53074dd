"""The passes of a model over its KV cache, each by the best way that its device has."""

from __future__ import annotations

import torch

from shmserve.workers.backends.llm.model.attention import make_attention
from shmserve.workers.backends.llm.model.cache import KvCache, Pass
from shmserve.workers.backends.llm.model.graphs import DecodeGraphs
from shmserve.workers.backends.llm.model.transformer import Transformer


class Passes:
    """A model, its cache, and the ways to compute passes."""

    def __init__(self, model: Transformer, cache: KvCache) -> None:
        self.cache = cache
        self._model = model
        self._attention = make_attention(cache, model.architecture, model.device)
        self._graphs = DecodeGraphs(model, cache)

    def capture(self, most_rows: int, longest: int) -> None:
        """Prepare for passes of up to so many sequences of up to so many tokens, where the device
        can: with CUDA graphs."""
        if self._model.device.startswith("cuda"):
            self._graphs.capture(most_rows, longest)

    def empty(self) -> Pass:
        """A pass without rows."""
        return Pass(self.cache.block_size, self._model.device)

    def logits(self, rows: Pass, wanted: list[int]) -> torch.Tensor:
        """The logits of the `wanted` rows, float32 [wanted, vocabulary], until the next pass; keys
        and values of all rows are in the cache then."""
        captured = self._graphs.logits(rows)
        if captured is None:
            return self._model.forward(rows, self.cache, self._attention, wanted)
        return captured[: len(wanted)] if wanted == list(range(len(wanted))) else captured[wanted]
