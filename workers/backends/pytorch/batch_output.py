"""An output of a whole batch, and each request's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from shmserve.ipc.tensors.datatypes import element_count
from shmserve.workers.batch.request import Output, Request


class BatchOutput(NamedTuple):
    """An output of a whole batch: in host memory (if someone wants it there), on the device."""

    name: str
    datatype: str
    host: Any
    device: torch.Tensor | None

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole batch."""
        whole: Sequence[int] = (self.host if self.device is None else self.device).shape
        return whole

    def whole(self, request: Request) -> Output:
        """As the only request of the batch gets it."""
        return Output(self.name, self.datatype, self._for(request))

    def rows(
        self, requests: Sequence[Request], where: Sequence[slice[int, int, None]]
    ) -> list[Output]:
        """As requests get it that have these rows."""
        return [
            Output(self.name, self.datatype, self._for(request)[rows])
            for request, rows in zip(requests, where, strict=True)
        ]

    def pieces(
        self, requests: Sequence[Request], shapes: Sequence[tuple[int, ...]]
    ) -> list[Output]:
        """As requests get it whose parts, one after the other, have these shapes."""
        ends = accumulate(map(element_count, shapes), initial=0)
        return [
            Output(
                self.name,
                self.datatype,
                self._for(request).reshape(-1)[slice(*pair)].reshape(shape),
            )
            for request, shape, pair in zip(requests, shapes, pairwise(ends), strict=True)
        ]

    def _for(self, request: Request) -> Any:
        if self.device is not None and (self.host is None or to_device(request, self.name)):
            return self.device
        return self.host


def to_device(request: Request, name: str) -> bool:
    """Whether a request wants an output in device memory."""
    wanted = request.requested.get(name)
    return wanted is not None and wanted.place is not None and wanted.place.memory.cuda is not None
