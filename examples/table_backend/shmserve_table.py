"""Backend `table`: a model is a file `table.npy`, and its responses are rows of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.workers.backends import Backend, Output, Request, Response


class TableBackend(Backend):
    """Looks up `INDEX` (INT64, [n]) in a table of shape [rows, width]: `ROW`, [n, width]."""

    def complete_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs and outputs, which follow from the file."""
        table = self._read()
        width = int(table.shape[1])
        return {
            **config,
            "max_batch_size": config.get("max_batch_size") or 64,
            "input": [{"name": "INDEX", "data_type": "TYPE_INT64", "dims": [-1]}],
            "output": [
                {"name": "ROW", "data_type": TO_CONFIG[_datatype(table)], "dims": [-1, width]}
            ],
        }

    def load(self, config: ModelSpec) -> None:
        """Read the file into memory."""
        self._table = np.ascontiguousarray(self._read())
        self._kind = _datatype(self._table)

    def execute(self, requests: list[Request]) -> list[Response]:
        """Return one response per request; an index out of range fails its request."""
        return [self._look_up(request) for request in requests]

    def _look_up(self, request: Request) -> Response:
        index = request.inputs["INDEX"].numpy()  # a view of the client's memory
        rows = len(self._table)
        if index.size and not (index.min() >= 0 and index.max() < rows):
            return Response(error=InvalidArgument(f"INDEX must be in 0 to {rows - 1}"))
        return Response([Output("ROW", self._kind, self._table[index])])

    def _read(self) -> np.ndarray[Any, Any]:
        path = self.context.version_dir / "table.npy"
        if not path.exists():
            raise Unavailable(f"model '{self.context.model_name}' has no {path.name}")
        table: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        if table.ndim != 2:
            raise InvalidArgument(f"{path.name} must have 2 dimensions, it has {table.ndim}")
        return table


def _datatype(table: np.ndarray[Any, Any]) -> str:
    for datatype, kind in NUMPY_DTYPES.items():
        if kind == table.dtype:
            return datatype
    raise InvalidArgument(f"no client can receive {table.dtype}")
