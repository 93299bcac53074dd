"""All 14 datatypes, extreme and empty, through a model that returns its inputs."""

from typing import Any

import numpy as np
import pytest

from tests.support.repositories import DATATYPES
from tests.support.wire.raw_http import Http, join_bytes


def integer_samples(bits: int, signed: bool) -> np.ndarray:
    """Return the smallest and the largest value of a datatype, and values between them."""
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    return np.array([np.iinfo(dtype).min, 0, 1, np.iinfo(dtype).max], dtype)


VALUES: dict[str, np.ndarray] = {
    "BOOL": np.array([True, False, True]),
    **{f"UINT{bits}": integer_samples(bits, signed=False) for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": integer_samples(bits, signed=True) for bits in (8, 16, 32, 64)},
    "FP16": np.array([0, -1.5, 65504, np.inf], np.float16),
    "FP32": np.array([0, -1.5, 3.4e38, 1e-45], np.float32),
    "FP64": np.array([0, -1.5, 1.7e308, 5e-324], np.float64),
    "BF16": np.array([0x0000, 0xBFC0, 0x7F7F, 0x7F80], np.uint16),
}
WORDS = [b"", b"\x00\xff", "ü".encode(), b"long" * 100]


def raw(kind: str) -> bytes:
    return join_bytes(WORDS) if kind == "BYTES" else VALUES[kind].tobytes()


def count(kind: str) -> int:
    return len(WORDS) if kind == "BYTES" else len(VALUES[kind])


def all_inputs(filled_kind: str) -> list[tuple[str, str, list[int], bytes]]:
    """Return every input of the model: values for this datatype, and size zero for all others."""
    return [
        (
            f"INPUT_{kind}",
            kind,
            [count(kind)] if kind == filled_kind else [0],
            raw(kind) if kind == filled_kind else b"",
        )
        for kind in DATATYPES
    ]


@pytest.mark.parametrize("kind", DATATYPES)
def test_binary(http: Http, kind: str) -> None:
    outputs = [{"name": f"OUTPUT_{kind}", "parameters": {"binary_data": True}}]
    reply = http.infer_binary("types", all_inputs(kind), outputs=outputs)
    expected: Any = WORDS if kind == "BYTES" else VALUES[kind]
    output = reply.tensors()[f"OUTPUT_{kind}"]
    assert output == expected if kind == "BYTES" else output.tobytes() == expected.tobytes()
