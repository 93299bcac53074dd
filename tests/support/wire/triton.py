"""Requests by tritonclient, whose modules for HTTP and gRPC have the same interface."""

from typing import Any

import numpy as np
from tritonclient.utils import np_to_triton_dtype


def infer_inputs(module: Any, /, **arrays: np.ndarray) -> list[Any]:
    """Return the inputs of a request by `module`: tritonclient.http or tritonclient.grpc."""
    return [
        module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        .set_data_from_numpy(array)
        for name, array in arrays.items()
    ]  # fmt: skip
