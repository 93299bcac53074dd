"""Padded batches with a real server; models wait until three requests are queued."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import shmserve.client
from tests.support import repositories
from tests.support.servers import Server, Start
from tests.support.wire.triton import infer_inputs

SIZES = (224, 336, 224)
IMAGE = {
    "value": 0,
    "buckets": [[3, 224, 224], [3, 336, 336]],
    "lengths": "IMAGE_LENGTHS",
    "mask": "IMAGE_MASK",
}
MODEL = """
import torch
class Net(torch.nn.Module):
    def forward(self, IMAGE, IMAGE_LENGTHS, IMAGE_MASK):
        assert IMAGE.shape == IMAGE_MASK.shape and not IMAGE[~IMAGE_MASK].any()
        assert IMAGE_LENGTHS.dtype == torch.int64 and IMAGE_LENGTHS.shape == (len(IMAGE), 3)
        true = IMAGE_MASK.sum((1, 2, 3))
        assert (true == IMAGE_LENGTHS.prod(1)).all()
        saw = torch.tensor([len(IMAGE), IMAGE.shape[-1]]).repeat(len(IMAGE), 1)
        return {"FEATURES": IMAGE + 1, "SAW": saw}
"""
CONFIG = """
backend: "pytorch" max_batch_size: 8
input { name: "IMAGE" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }
output { name: "FEATURES" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }
output { name: "SAW" data_type: TYPE_INT64 dims: [ 2 ] }
dynamic_batching { }
parameters { key: "padding" value { string_value: %s } }
"""


def add(repository: Any, name: str, **buckets: Any) -> None:
    padding = {"IMAGE": IMAGE | buckets, "FEATURES": {"like": "IMAGE"}}
    repositories.write(repository, name, CONFIG % json.dumps(json.dumps(padding)), MODEL)


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    """Start a server of a model with any padding, one with equal shapes only, one unbatched."""
    add(models, "together")
    add(models, "strict", max_waste=0.1)
    path = models / "alone" / "config.pbtxt"
    add(models, "alone")
    path.write_text(path.read_text().replace("dynamic_batching { }", ""))
    environment = {"TRITONSERVER_DELAY_SCHEDULER": str(len(SIZES))}
    return start(models, environment=environment, grpc=True)


def infer(server: Server, model: str, image: Any) -> tuple[Any, Any]:
    with triton.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, infer_inputs(triton, IMAGE=image))
        return result.as_numpy("FEATURES"), result.as_numpy("SAW")


def ask_all(server: Server, model: str) -> list[list[int]]:
    """Check that each image is returned in its own size; return the sizes that the model saw."""
    rng = np.random.default_rng(0)
    images = [rng.random((1, 3, size, size), np.float32) for size in SIZES]
    with ThreadPoolExecutor(len(images)) as threads:
        answers = list(threads.map(lambda image: infer(server, model, image), images))
    for image, (features, _) in zip(images, answers, strict=True):
        np.testing.assert_array_equal(features, image + 1)
    return [seen_shapes[0].tolist() for _, seen_shapes in answers]


def test_images_of_224_and_336_share_a_batch(server: Server) -> None:
    assert ask_all(server, "together") == [[3, 336]] * 3
    waste = {
        name: server.metric(f"shmserve_{name}_total", model="together", input="IMAGE")
        for name in ("padded_elements", "padding_elements")
    }
    total = 3 * 3 * 336 * 336
    assert waste == {"padded_elements": total, "padding_elements": 6 * (336**2 - 224**2)}


def test_the_waste_is_bounded(server: Server) -> None:
    """A batch of all three would have 37 % padding, so the large image runs alone."""
    seen_shapes = ask_all(server, "strict")
    assert seen_shapes[1] == [1, 336]
    assert seen_shapes[0] == seen_shapes[2] and seen_shapes[0] in ([1, 224], [2, 224])
    assert server.metric("shmserve_padding_elements_total", model="strict", input="IMAGE") == 0


def test_lengths_and_mask_are_no_inputs_of_clients(server: Server) -> None:
    with triton.InferenceServerClient(server.grpc_url) as client:
        assert [tensor.name for tensor in client.get_model_metadata("together").inputs] == ["IMAGE"]
    large_input = np.zeros((1, 3, 400, 8), np.float32)
    with pytest.raises(InferenceServerException, match=r"\[3,400,8\] fits no bucket"):
        infer(server, "alone", large_input)


def test_the_padding_of_an_output_in_a_region_is_removed(server: Server) -> None:
    with shmserve.client.connect(server.run_dir) as client:
        layout = ((1, 3, 200, 100), "FP32")
        region = client.allocate({"IMAGE": layout, "FEATURES": layout})
        for value in (1, 2, 3):
            region["IMAGE"][:] = value
            region["FEATURES"][:] = 0
            client.infer("alone", region)
            assert (region["FEATURES"] == value + 1).all()
