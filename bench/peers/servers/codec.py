"""The two models without a server, and the conversion between HTTP bodies and arrays.

`MODEL` in the environment is "simple" or "image", `NETWORK` the file of the network for images.
"""

import json
import os

import numpy as np

PORT = int(os.environ["PORT"])
MAX_BATCH_SIZE = 8


def add(pairs):
    """Return the sums and differences of pairs of arrays, int32 (n, 2, 16) in and out."""
    return np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)


def load():
    """Return the function that computes a batch."""
    if os.environ["MODEL"] == "simple":
        return add
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(os.environ["NETWORK"], options)
    return lambda images: session.run(None, {"image": images})[0]


def from_json(body):
    """Return the two arrays of a JSON body as int32 (2, 16)."""
    document = json.loads(body)
    return np.array([document["a"], document["b"]], np.int32)


def to_json(row):
    """Return the JSON body of a response from one row of `add`."""
    return json.dumps({"sum": row[0].tolist(), "difference": row[1].tolist()}).encode()


def from_bytes(body):
    """Return the image of a body, FP32 (3, 224, 224)."""
    return np.frombuffer(body, np.float32).reshape(3, 224, 224)


def to_bytes(row):
    """Return the body of a response: the bytes of its 10 FP32 scores."""
    return row.tobytes()


decode, encode = (from_json, to_json) if os.environ["MODEL"] == "simple" else (from_bytes, to_bytes)
